"""What users rely on: the names, the errors, and that importing costs little."""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
import pkgutil
import subprocess
import sys
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay.backends.base import ServerError

PUBLIC = [
    "AgentWorkflow",
    "AsyncBatch",
    "AsyncBatchStream",
    "AsyncClient",
    "AsyncRewardWrapper",
    "Batch",
    "BatchStream",
    "Client",
    "CollectedRollouts",
    "EngineSettings",
    "FailureKind",
    "ForebayError",
    "ForebayWarning",
    "GenerationHyperparameters",
    "GroupOptions",
    "GroupState",
    "InferenceEngine",
    "Interaction",
    "InteractionWithTokenLogpReward",
    "ModelRequest",
    "ModelResponse",
    "NormConfig",
    "Reconciliation",
    "RejectReason",
    "RolloutGroup",
    "RolloutWorkflow",
    "Rollouts",
    "RunSettings",
    "Settings",
    "ShareOf",
    "SlotOutcome",
    "StopReason",
    "TrajBatchMeta",
    "WorkflowLike",
    "__version__",
    "concat_padded_tensors",
    "load",
    "session_context",
    "trace_session",
    "workflow_context",
]
ERRORS = {
    "BatchGoneError": LookupError,
    "CollectorUnavailableError": TimeoutError,
    "ConnectionLostError": ConnectionError,
    "ConsumerError": ValueError,
    "ContractError": ValueError,
    "EpisodeTimeoutError": TimeoutError,
    "FencedError": RuntimeError,
    "ForebayError": Exception,
    "FrameError": ValueError,
    "GenerationError": RuntimeError,
    "GroupNotDeliveredError": LookupError,
    "ImportNotAllowedError": ValueError,
    "ModelFolderError": FileNotFoundError,
    "PortInUseError": OSError,
    "QueueFullError": BlockingIOError,
    "RedisRefusedError": PermissionError,
    "RewardTimeoutError": TimeoutError,
    "RolledBackError": RuntimeError,
    "RowsMissingError": LookupError,
    "RunNotReadyError": LookupError,
    "RunStoppedError": RuntimeError,
    "ServerUnavailableError": ConnectionError,
    "SettingsError": ValueError,
    "SlotDataError": ValueError,
    "StallError": TimeoutError,
    "StoreFullError": BlockingIOError,
    "SubmitError": ValueError,
    "VersionError": ValueError,
    "WeightUpdateError": RuntimeError,
    "WorkflowContractError": ValueError,
    "WorkflowError": ValueError,
    "WorkflowTypeError": TypeError,
}


class TestNames:
    """The public names are frozen: a change here is a change for users."""

    def test_all(self) -> None:
        """``forebay.__all__`` is this list, and each name exists."""
        assert forebay.__all__ == PUBLIC
        assert all(getattr(forebay, name) is not None for name in PUBLIC)

    def test_words_on_the_wire(self) -> None:
        """The closed sets of contract 4 have these values; they are in Redis, in dumps and in metrics."""
        words = {
            kind.__name__: [member.value for member in kind]
            for kind in (
                forebay.SlotOutcome,
                forebay.FailureKind,
                forebay.GroupState,
                forebay.RejectReason,
                forebay.StopReason,
            )
        }
        assert words == {
            "SlotOutcome": ["usable", "rejected", "failed"],
            "FailureKind": ["infra", "data", "timeout", "contract"],
            "GroupState": ["queued", "running", "ready", "held", "batched", "delivered", "rejected", "evicted"],
            "RejectReason": [
                "no_usable_slot",
                "incomplete",
                "below_minimum",
                "missing_reward",
                "contract_error",
                "filtered",
                "accept_error",
                "rows_lost",
            ],
            "StopReason": ["stop", "length", "tool_calls", "abort"],
        }

    def test_generation_defaults(self) -> None:
        """Contract 7: the defaults of the sampling settings."""
        gconfig = forebay.GenerationHyperparameters()
        assert {name: getattr(gconfig, name) for name in gconfig.__slots__} == {
            "n_samples": 1,
            "max_new_tokens": 16384,
            "min_new_tokens": 0,
            "max_tokens": 32768,
            "greedy": False,
            "top_p": 1.0,
            "top_k": 100_000_000,
            "temperature": 1.0,
            "stop_token_ids": [],
            "ignore_eos": False,
            "skip_special_tokens": True,
            "stop": None,
            "frequency_penalty": 0.0,
            "seed": None,
        }

    def test_generation_copies(self) -> None:
        """Contract 7: ``new`` changes a copy; eos and pad are added once each, where the tokenizer has them."""
        gconfig = forebay.GenerationHyperparameters(stop_token_ids=[2])
        assert (gconfig.new(greedy=True).greedy, gconfig.greedy) == (True, False)
        with pytest.raises(TypeError):
            gconfig.new(temprature=1)

        def stops(eos: int | None, pad: int | None) -> list[int]:
            names: Any = type("Tokens", (), {"eos_token_id": eos, "pad_token_id": pad})
            return gconfig.new_with_stop_and_pad_token_ids(names).stop_token_ids

        assert [stops(5, 0), stops(2, 2), stops(5, 5), stops(None, None), stops(None, 0)] == [
            [2, 5, 0],
            [2],
            [2, 5],
            [2],
            [2, 0],
        ]


class TestErrors:
    """One tree, each refining a standard class, each surviving another process."""

    def test_the_module_is_complete(self) -> None:
        """Every error of the module is in its ``__all__`` and in this list."""
        defined = {name for name, value in vars(errors).items() if getattr(value, "__module__", "") == errors.__name__}
        assert sorted(defined) == errors.__all__ == sorted(ERRORS)

    @pytest.mark.parametrize("name", ERRORS)
    def test_each(self, name: str) -> None:
        """It is a ForebayError, the standard class that it refines, says its text, and can be pickled."""
        error = getattr(errors, name)("what happened; what to do")
        assert isinstance(error, errors.ForebayError)
        assert isinstance(error, ERRORS[name])
        assert str(error) == "what happened; what to do"
        error.results = {"http://a": "out"}
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.results) == (type(error), str(error), error.results)

    def test_a_servers_error_keeps_its_status(self) -> None:
        """The back-ends' own error survives too, with its status."""
        copy = pickle.loads(pickle.dumps(ServerError("HTTP 503", 503)))
        assert isinstance(copy, errors.ForebayError)
        assert (str(copy), copy.status) == ("HTTP 503", 503)

    @pytest.mark.parametrize("package", ["forebay", "forebay_workers", "forebay_collector"])
    def test_every_error_of_the_package_is_in_the_tree(self, package: str) -> None:
        """No error that the package defines stands outside the tree."""
        root = importlib.import_module(package)
        names = [found.name for found in pkgutil.walk_packages(root.__path__, f"{package}.")]
        modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
        defined = {
            value
            for module in modules
            for value in vars(module).values()
            if inspect.isclass(value)
            and issubclass(value, Exception)
            and value.__module__ == module.__name__
            and not issubclass(value, Warning)
        }
        assert modules
        assert [error for error in defined if not issubclass(error, errors.ForebayError)] == []


def test_importing_is_light() -> None:
    """Importing forebay imports no torch, arq, transformers or web server, and no service."""
    code = "import forebay, json, sys; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(json.loads(done.stdout))
    heavy = {
        "torch",
        "arq",
        "transformers",
        "prometheus_client",
        "fastapi",
        "uvicorn",
        "tokenizers",
        "pandas",
        "matplotlib",
    }
    services = {"forebay_workers", "forebay_collector", "forebay_ops"}
    assert "forebay" in loaded
    assert loaded & (heavy | services) == set()
