"""Contract, section 2: workflows, in the page's order.

Proved elsewhere, and not written twice: what ``arun_episode`` may return, an empty dict failing in every setting, a
copy of the data for each slot (``tests/unit/test_attempts.py``: TestOutcomes, TestIsolation); every kind of value that
does or does not travel (``tests/unit/test_wire_values.py``); details of naming (``tests/unit/test_workflow_naming.py``)
and of imports (``tests/unit/test_imports.py``); ``should_accept_fn`` (``tests/unit/test_accept.py``,
``tests/integration/test_pipeline.py``).
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
import transformers
from helpers import agents
from helpers import reward_functions as functions
from helpers.building import result, usable
from helpers.workflows import Checked, CheckedFurther, Configured, Frozen, Plain
from services import read, services
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from forebay import (
    AgentWorkflow,
    AsyncClient,
    EngineSettings,
    ForebayWarning,
    GenerationHyperparameters,
    Interaction,
    NormConfig,
    RolloutWorkflow,
    RunSettings,
    Settings,
    load,
)
from forebay.errors import ImportNotAllowedError, SubmitError, WorkflowContractError, WorkflowError
from forebay.generation import InferenceEngine
from forebay.options import resolve_rules
from forebay.pretrained import PretrainedCache, load_tokenizer
from forebay.reward_rules import RewardShaping
from forebay.store import Store
from forebay.wire.trajectory_format import check_keys, check_trajectory
from forebay.wire.values import pack, unpack
from forebay.workflow import NamedWorkflow, WorkflowKind, build_workflow, name_workflow
from forebay_collector.uneven_keys import UnevenKeys, uneven_keys
from forebay_workers.format_check import FormatCheck

ALLOWED = ["forebay", "forebay_workers", "helpers", __name__]
KEPT_WORKFLOW = Configured(lambda: 1.0)
"""Its argument could not travel, but its name can."""


def rebuilt(workflow: Any, kwargs: dict[str, Any] | None = None, pretrained: PretrainedCache | None = None) -> Any:
    """The workflow as a worker builds it."""
    named = name_workflow(workflow, kwargs, ALLOWED)
    return build_workflow(named.name, unpack(pack(named.kwargs)), ALLOWED, pretrained)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A real tokenizer of three words, as loaded from its folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture
async def client(redis_url: str, run_name: str) -> AsyncIterator[AsyncClient]:
    """A client of a run that nobody serves."""
    settings = Settings(REDIS_URL=redis_url, experiment_name=run_name.split("/", maxsplit=1)[0])
    rules = load(RunSettings, import_allowlist=["helpers"])
    async with AsyncClient(Store.open(settings), settings, rules, load(EngineSettings)) as made:
        yield made


class TestResults:
    """2: ``arun_episode`` returns a dict of tensors, a dict of Interactions, or None."""

    @pytest.mark.parametrize("checked", [True, False])
    async def test_interactions(self, redis_url: str, run_name: str, checked: bool) -> None:
        """2: a dict of Interactions, through the pipeline: a row for each, with its completion id and reference."""
        fields = {"input_tokens": [5], "output_logprobs": [-1.0, -0.5], "output_versions": [0, 0], "reward": 1.0}
        turns = {name: fields | {"output_tokens": [at, 9]} for at, name in enumerate(("first", "second"))}
        turns["second"]["rollout_reward"] = 3.0
        rules = {"check_trajectory_format": checked, "batch_size": 1, "import_allowlist": ["helpers"]}
        async with services(redis_url, run_name, **rules) as (_, client):
            await client.submit({"interactions": turns}, "helpers.workflows:Interacting", {})
            (batch,) = await read(client, 1)
        assert batch.groups[0].result_kind == "interactions"
        assert [one.completion for one in batch.rows] == ["first-0", "second-0", "first-1", "second-1"]
        assert batch.arrays()["input_ids"].tolist() == [[5, 0, 9], [5, 1, 9]] * 2
        assert [group.rewards for group in batch.rollout_groups] == [(3.0, 3.0)]


class TestNaming:
    """2: a workflow is named as an instance, class + kwargs, import string + kwargs, or an agent."""

    @pytest.mark.parametrize(
        ("workflow", "kwargs"),
        [
            (Frozen(scale=2.0), None),
            (Frozen, {"scale": 2.0}),
            ("helpers.workflows:Frozen", {"scale": 2.0}),
            ("helpers.workflows.Frozen", {"scale": 2.0}),
        ],
    )
    def test_every_way_of_naming_a_workflow(self, workflow: Any, kwargs: dict[str, Any] | None) -> None:
        """2: what crosses the wire is the import string and the arguments, whichever way it is named."""
        named = name_workflow(workflow, kwargs, ALLOWED)
        assert named == NamedWorkflow(WorkflowKind.ROLLOUT, "helpers.workflows:Frozen", {"scale": 2.0})
        assert rebuilt(workflow, kwargs) == Frozen(scale=2.0)

    def test_an_import_string_may_lead_to_an_instance(self) -> None:
        """2: an import string of an instance travels as that name, whatever the instance was made with."""
        assert name_workflow(f"{__name__}:KEPT_WORKFLOW", None, ALLOWED).kwargs == {}
        assert rebuilt(f"{__name__}.KEPT_WORKFLOW") is KEPT_WORKFLOW

    @pytest.mark.parametrize(
        ("agent", "kwargs", "name", "encoded"),
        [
            (agents.Agent, None, "Agent", {}),
            (agents.Agent, {"scale": 2.0}, "Agent", {"scale": 2.0}),
            ("helpers.agents:Agent", None, "Agent", {}),
            ("helpers.agents.Agent", {"scale": 2.0}, "Agent", {"scale": 2.0}),
            (agents.Static, None, "Static", {}),
            (agents.Bare(), None, "Bare", {}),
            (agents.Data(scale=2.0), None, "Data", {"scale": 2.0}),
            (agents.KEPT, None, "KEPT", {}),
            ("helpers.agents:KEPT", None, "KEPT", {}),
        ],
    )
    def test_every_way_of_naming_an_agent(
        self, agent: Any, kwargs: dict[str, Any] | None, name: str, encoded: dict[str, Any]
    ) -> None:
        """2: anything with ``async def run(data, **extra)``; class, instance or string; classes default to ``{}``."""
        assert name_workflow(agent, kwargs, ALLOWED) == NamedWorkflow(
            WorkflowKind.AGENT, f"helpers.agents:{name}", encoded
        )

    def test_an_agents_instance_that_nobody_can_make_again(self) -> None:
        """2: an instance that says not what it was made with is refused, with what to do."""
        said = r"instance of Agent does not say what it was made with.*pass the class"
        with pytest.raises(WorkflowError, match=said):
            name_workflow(agents.Agent(2.0), None, ALLOWED)  # type: ignore[arg-type]

    async def test_agents_wait_for_their_proxy(self, client: AsyncClient) -> None:
        """2 and 9: an agent is named in full, and refused by submit with what to write instead; nothing is enqueued."""
        with pytest.raises(WorkflowError, match=r"helpers\.agents:Agent is an agent.*write a RolloutWorkflow"):
            await client.submit({}, agents.Agent)
        assert (await client.status()).count("submitted") == 0


class TestArguments:
    """2: kwargs hold plain values and, tagged, settings of ours, tokenizers, processors and module-level callables."""

    @pytest.mark.parametrize(
        "value",
        [
            GenerationHyperparameters(max_new_tokens=7, stop=["x"]),
            NormConfig(mean_level="group", std_level=None),
            RewardShaping(bias=1.0, clip=3.0),
            EngineSettings(pause_mode="abort", request_timeout_s=7.0),
        ],
    )
    def test_settings_of_ours(self, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """2: each comes back equal and of its type, wherever it stands, whatever the worker's environment says."""
        monkeypatch.setenv("FOREBAY_ENGINE_CONNECT_TIMEOUT_S", "99")
        found = rebuilt(Configured, {"reward_fn": functions.half, "one": value, "many": [{"deep": value}]}).extra
        assert found == {"one": value, "many": [{"deep": value}]}
        assert type(found["one"]) is type(value)

    def test_no_class_of_the_users(self) -> None:
        """2: a subclass of such settings, and settings that may hold a password, are refused: an explicit list."""

        class More(GenerationHyperparameters): ...

        with pytest.raises(WorkflowError, match=r"\['gconfig'\]: .*More is a subclass of GenerationHyperparameters"):
            name_workflow(Configured, {"reward_fn": functions.half, "gconfig": More()}, ALLOWED)
        with pytest.raises(WorkflowError, match=r"\['s'\]: a forebay.settings.Settings cannot travel"):
            name_workflow(Configured, {"reward_fn": functions.half, "s": Settings()}, ALLOWED)

    def test_tokenizers_and_processors_by_name_or_path(self, tokenizer: Any, tmp_path: Path) -> None:
        """2: a tokenizer, and a processor, which is where its tokenizer is, are loaded from their folders."""
        images = transformers.CLIPImageProcessorPil()
        transformers.CLIPProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(tmp_path)
        processor = transformers.AutoProcessor.from_pretrained(tmp_path)
        kwargs = {"reward_fn": functions.half, "t": tokenizer, "p": processor}
        encoded = name_workflow(Configured, kwargs, ALLOWED).kwargs
        assert (encoded["t"]["path"], encoded["p"]["path"]) == (tokenizer.name_or_path, str(tmp_path))
        found = rebuilt(Configured, kwargs).extra
        assert found["t"].get_vocab() == tokenizer.get_vocab()
        assert type(found["p"]) is type(processor)

    def test_loaded_once_for_each_worker(self, tokenizer: Any, tmp_path: Path) -> None:
        """2: two workflows of a worker share a tokenizer, also one that a constructor loads by its path; bounded."""
        cache = PretrainedCache(entries=1)
        first = rebuilt(Configured, {"reward_fn": functions.half, "t": tokenizer}, cache).extra["t"]
        second = rebuilt(Loading, {"path": tokenizer.name_or_path}, cache).tokenizer
        assert first is second
        assert load_tokenizer(tokenizer.name_or_path) is not first, "outside of a worker nothing is kept"
        with pytest.raises(WorkflowError, match="the tokenizer /absent cannot be loaded here"):
            cache.get("tokenizer", "/absent")
        cache.get("tokenizer", str(shutil.copytree(tokenizer.name_or_path, tmp_path / "other")))
        assert cache.get("tokenizer", tokenizer.name_or_path) is not first, "the bound is one"

    def test_what_cannot_be_named_is_refused_at_submit(self, tmp_path: Path) -> None:
        """2: a local class, a lambda, an open file, a nested function, a bound method: which argument, and why."""

        class Local: ...

        def nested() -> float:
            return 1.0

        with (tmp_path / "f").open("w", encoding="utf-8") as file:
            for value, why in (
                (Local, "Local is a local function or class, which no worker can import"),
                (lambda: 1.0, "is a lambda, which no worker can import"),
                (file, "a _io.TextIOWrapper cannot travel"),
                (nested, "nested is a local function or class"),
                (agents.KEPT.run, "is a method bound to an instance"),
            ):
                with pytest.raises(WorkflowError) as caught:
                    name_workflow(Configured, {"reward_fn": functions.half, "bad": [value]}, ALLOWED)
                assert "workflow_kwargs['bad'][0]: " in str(caught.value)
                assert why in str(caught.value)


class Loading(Plain):
    """Loads its tokenizer itself."""

    def __init__(self, path: str) -> None:
        self.tokenizer = load_tokenizer(path)


class TestRules:
    """2: the rules of naming."""

    @pytest.mark.parametrize("workflow", [Plain, "helpers.workflows:Plain"])
    def test_a_class_without_kwargs(self, workflow: Any) -> None:
        """2: a RolloutWorkflow class with kwargs None, not ``{}``, is a ValueError; ``{}`` is enough."""
        with pytest.raises(ValueError, match=r"Plain needs workflow_kwargs; pass \{\}"):
            name_workflow(workflow, None, ALLOWED)
        assert name_workflow(workflow, {}, ALLOWED).kwargs == {}

    @pytest.mark.parametrize(
        "instance",
        [Frozen(2.0), f"{__name__}:KEPT_WORKFLOW", agents.KEPT, agents.Data(2.0), "helpers.agents:KEPT"],
    )
    @pytest.mark.parametrize("kwargs", [{}, {"scale": 9.0}])
    def test_an_instance_with_kwargs(self, instance: Any, kwargs: dict[str, Any]) -> None:
        """2: an instance with kwargs warns and ignores them, in every path."""
        with pytest.warns(ForebayWarning, match="workflow_kwargs are ignored"):
            named = name_workflow(instance, kwargs, ALLOWED)
        assert named == name_workflow(instance, None, ALLOWED)

    @pytest.mark.parametrize("string", ["no.such.module:Thing", "helpers.workflows:Absent", "not an import string", ""])
    def test_a_bad_import(self, string: str) -> None:
        """2: a bad import is a ValueError that names the string."""
        with pytest.raises(ValueError) as caught:
            name_workflow(string, {}, [*ALLOWED, "no"])
        assert string in str(caught.value)

    @pytest.mark.parametrize(
        ("agent", "why"),
        [
            (agents.Blocking, "must be a coroutine function"),
            (agents.Blocking(), "must be a coroutine function"),
            ("helpers.agents:Blocking", "must be a coroutine function"),
            (agents.Yielding, "must be a coroutine function"),
            (agents.Narrow, "unexpected keyword argument 'base_url'"),
            (agents.Wide(), "missing a required argument: 'tools'"),
            (object(), "no `async def run"),
            (3, "no `async def run"),
        ],
    )
    def test_an_agent_without_a_coroutine_run(self, agent: Any, why: str) -> None:
        """2: an agent without a coroutine ``run`` that can be called as agents are is a TypeError."""
        with pytest.raises(TypeError, match=why):
            name_workflow(agent, None, ALLOWED)

    async def test_none_outside_online_mode(self, client: AsyncClient) -> None:
        """2: None outside online mode is a ValueError that says what to pass."""
        with pytest.raises(ValueError, match=r"workflow=None is for online mode.*pass a RolloutWorkflow"):
            await client.submit({}, None)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "options",
        [
            {"group_size": 0},
            {"group_size": -1},
            {"group_size": True},
            {"min_usable_group_size": 0},
            {"group_size": 2, "min_usable_group_size": 3},
        ],
    )
    def test_group_sizes(self, options: dict[str, Any]) -> None:
        """2: ``group_size >= 1`` and ``1 <= min_usable_group_size <= group_size``, else ValueError."""
        with pytest.raises(ValueError, match="group_size="):
            resolve_rules(options, load(RunSettings))

    def test_arguments_that_cannot_be_right(self) -> None:
        """2: ``check_arguments`` refuses at submit, unless a subclass has a constructor that it does not know."""
        with pytest.raises(WorkflowError, match=r"helpers.workflows:Checked refuses its workflow_kwargs: size=0: must"):
            name_workflow(Checked, {"size": 0}, ALLOWED)
        with pytest.raises(WorkflowError, match="size=0"):
            name_workflow(Checked(0), None, ALLOWED)
        assert name_workflow(Checked, {"other": 3}, ALLOWED).kwargs == {"other": 3}
        assert name_workflow(CheckedFurther, {"size": "S"}, ALLOWED).kwargs == {"size": "S"}


class TestAllowlist:
    """2: workers and collectors import only from modules that the run allows, and submit refuses at once."""

    async def test_submit_refuses_at_once(self, client: AsyncClient) -> None:
        """2: workflow, agent, callable argument and filter outside the allowlist are refused, each named."""
        elsewhere = Outside()
        for workflow, kwargs in ((Outside, {}), (elsewhere, None), (f"{__name__}:Outside", {})):
            with pytest.raises(ImportNotAllowedError, match="add its package to FOREBAY_IMPORT_ALLOWLIST"):
                await client.submit({}, workflow, kwargs)
        with pytest.raises(ImportNotAllowedError, match=rf"workflow_kwargs\['reward_fn'\]: {__name__}:outside"):
            await client.submit({}, Configured, {"reward_fn": outside})
        with pytest.raises(ImportNotAllowedError):
            await client.submit({}, Plain, {}, should_accept_fn=outside)
        assert (await client.status()).count("submitted") == 0

    def test_a_worker_imports_nothing_else(self) -> None:
        """2: what is not allowed is an error on the worker too, and never an import."""
        name = "helpers.broken.exits"
        for kwargs in ({"reward_fn": {"__forebay__": "callable", "name": f"{name}:f"}}, None):
            target = "helpers.workflows:Configured" if kwargs else f"{name}:Workflow"
            with pytest.raises(ImportNotAllowedError):
                build_workflow(target, kwargs or {}, ["helpers.workflows"])
        assert name not in sys.modules


class Outside(Plain):
    """Not in the client's allowlist."""


def outside(group: dict[str, Any]) -> bool:
    """Not in the client's allowlist."""
    return True


class TestAgentWorkflow:
    """2: a deprecated AgentWorkflow base exists."""

    def test_an_instance_warns(self) -> None:
        """2: creating an instance of a subclass warns DeprecationWarning; it remembers its arguments."""
        with pytest.warns(DeprecationWarning, match="Old: AgentWorkflow is deprecated"):
            old = agents.Old(2.0, other=3)
        assert isinstance(old, AgentWorkflow)
        named = name_workflow(old, None, ALLOWED)
        assert named == NamedWorkflow(WorkflowKind.AGENT, "helpers.agents:Old", {"scale": 2.0, "other": 3})

    def test_naming_the_class_does_not_warn(self) -> None:
        """2: only instances warn."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            name_workflow(agents.Old, {"scale": 1.0}, ALLOWED)


IMAGE = {"pixel_values": np.ones((4, 3), np.float32)}


class TestTrajectoryFormat:
    """2: check_trajectory_format."""

    @pytest.mark.parametrize("passing", [None, {"c": Interaction([1], [2], [0.0], [0])}])
    def test_what_has_no_keys_passes(self, passing: Any) -> None:
        """2: None passes, and so does a dict of Interactions alone."""
        assert check_trajectory(passing) is None

    @pytest.mark.parametrize("torch_made", [False, True])
    def test_a_right_result_passes(self, torch_made: bool) -> None:
        """2: the table's types pass, of numpy and of torch; the key set is without rollout_reward and rollout_group."""
        values = result(rows=2, is_truncated=np.zeros(2, np.bool_), own=np.zeros((2, 4), np.int16))
        made: dict[str, Any] = {name: torch.from_numpy(v) for name, v in values.items()} if torch_made else dict(values)
        made |= {"multi_modal_input": [IMAGE, IMAGE], "rollout_reward": 1.0, "rollout_group": None}
        assert check_trajectory(made) == {*values, "multi_modal_input"}

    @pytest.mark.parametrize(
        ("found", "why"),
        [
            ([1], "the result is a list; expected a dict or None"),
            ({}, "empty dict"),
            ({"rewards": np.ones(1)}, "no input_ids; it has rewards"),
            (result(attention_mask=None), "no attention_mask"),
            (result(input_ids=np.zeros(4, np.int32)), r"input_ids has shape \[4\], expected \[B, S\]"),
            (result(loss_mask=np.zeros((2, 4), np.int32)), r"loss_mask has shape \[2, 4\]; its first .* must be 1"),
            (result(rewards=np.zeros(3, np.float32)), r"rewards has shape \[3\]; its first"),
            (result(versions=np.zeros((1, 5), np.int32)), r"versions has shape \[1, 5\]; its second .* must be 4"),
            (result(own=np.zeros((1, 5))), r"own has shape \[1, 5\]; its second"),
            (result(own=np.float32(1)), r"own has shape \[\]"),
            (result(own=[[1, 2, 3, 4]]), "own is a list, expected a tensor"),
            (result(c=Interaction([1], [2], [0.0], [0])), "c is a Interaction, expected a tensor"),
            (result(attention_mask=np.ones((1, 4), np.int64)), "attention_mask has dtype int64, expected bool"),
            (result(loss_mask=np.ones((1, 4), np.bool_)), "loss_mask has dtype bool, expected int32"),
            (result(logprobs=np.ones((1, 4))), "logprobs has dtype float64, expected float32"),
            (result(versions=torch.ones((1, 4), dtype=torch.int64)), "versions has dtype int64, expected int32"),
            (result(rewards=torch.ones(1, dtype=torch.float16)), "rewards has dtype float16, expected float32"),
            (result(is_truncated=np.zeros(1, np.int32)), "is_truncated has dtype int32, expected bool"),
            (result(turn_ids=np.ones((1, 4))), "turn_ids has dtype float64"),
            (result(multi_modal_input=[]), "must be a list of dicts that is not empty"),
            (result(multi_modal_input=(IMAGE,)), "must be a list of dicts"),
            (result(multi_modal_input=[IMAGE, IMAGE]), "has 2 entries for 1 rows"),
            (result(multi_modal_input=[{"image_grid_thw": 1}]), r"\[0\] must be a dict with pixel_values"),
        ],
    )
    def test_what_is_wrong_is_said(self, found: Any, why: str) -> None:
        """2: each rule of format, shape and type, with the key, what it has and what is expected."""
        with pytest.raises(WorkflowContractError, match=why):
            check_trajectory(found)

    def test_the_key_set(self) -> None:
        """2: a missing key is an error that names it; extra keys are allowed."""
        check_keys({"a", "b", "extra"}, {"a", "b"})
        with pytest.raises(WorkflowContractError, match="lacks b, c, which the first result of this workflow"):
            check_keys({"a"}, {"a", "b", "c"})

    async def test_the_first_result_of_the_run_counts(self, redis_url: str, run_name: str) -> None:
        """2: the first tensor result of the same workflow, on whatever worker; other workflows have their own."""
        settings = Settings(REDIS_URL=redis_url, experiment_name=run_name.split("/", maxsplit=1)[0])
        stores = [Store.open(settings), Store.open(settings)]
        one, other = (FormatCheck(store) for store in stores)
        try:
            await one("m:A", None)
            await one("m:A", result(own=np.zeros((1, 4))))
            await other("m:A", result(own=np.zeros((1, 4)), more=np.zeros((1, 4))))
            for check in (one, other):
                with pytest.raises(WorkflowContractError, match="lacks own"):
                    await check("m:A", result())
                await check("m:B", result())
        finally:
            for store in stores:
                await store.close()

    @pytest.mark.parametrize("on", [True, False])
    async def test_a_failure_fails_that_slot_only(self, redis_url: str, run_name: str, on: bool) -> None:
        """2: with the check on, a mask of integers fails its slot as contract and its sibling counts; off, both do."""
        loose = result(attention_mask=np.ones((1, 4), np.int64))
        rules = {"check_trajectory_format": on, "batch_size": 1, "import_allowlist": ["helpers"]}
        async with services(redis_url, run_name, **rules) as (_, client):
            await client.submit({"slots": [result(), loose]}, "helpers.workflows:BySlot", {})
            (batch,) = await read(client, 1)
            status = await client.status()
        assert [rollout.sample_idx for rollout in batch.groups[0].rollouts] == ([0] if on else [0, 1])
        assert status.count("slots:failed") == (1 if on else 0)


class TestUnevenKeys:
    """2: optional keys that not all rollouts of a group carry are dropped with a warning that names them."""

    def headers(self, *keys: list[str]) -> Any:
        """Usable slots with these key sets."""
        made = [usable(7, idx) for idx in range(len(keys))]
        for header, names in zip(made, keys, strict=True):
            header.keys = names
        return made

    def test_which(self) -> None:
        """2: what some carry and others do not; rollout_reward is no key of rows, images are kept for those with."""
        full = ["input_ids", "multi_modal_input", "own", "rollout_reward", "turn_ids"]
        assert uneven_keys(self.headers(full, ["input_ids", "turn_ids"], full)) == ("own",)
        assert uneven_keys(self.headers(full, full)) == ()
        assert uneven_keys([]) == ()

    def test_the_warning(self) -> None:
        """2: the collector's warning names the keys and the group, once for each set of keys."""
        warner = UnevenKeys()
        with structlog.testing.capture_logs() as logs:
            for task_id in (1, 2):
                warner.warn(task_id, self.headers(["a", "b"], ["a"]))
            warner.warn(3, self.headers(["a", "c"], ["a"]))
        assert [(log["event"], log["task_id"], log["keys"]) for log in logs] == [
            ("group.keys_dropped", 1, ["b"]),
            ("group.keys_dropped", 3, ["c"]),
        ]

    async def test_they_are_dropped(self, redis_url: str, run_name: str) -> None:
        """2: through the pipeline: the trainer's tensors lack the key, and a warning names it."""
        odd = result(own=np.zeros((1, 4)))
        async with services(redis_url, run_name, batch_size=1, import_allowlist=["helpers"]) as (_, client):
            with structlog.testing.capture_logs() as logs:
                await client.submit({"slots": [result(), odd]}, "helpers.workflows:BySlot", {})
                (batch,) = await read(client, 1)
        with pytest.warns(ForebayWarning, match="not all rows carry them: own"):
            assert "own" not in batch.arrays()
        assert [log["keys"] for log in logs if log["event"] == "group.keys_dropped"] == [["own"]]


async def test_submit_error_is_a_value_error(client: AsyncClient) -> None:
    """2: whatever submit refuses is a SubmitError, a ValueError, and enqueues nothing."""
    for bad in (RolloutWorkflow, InferenceEngine, "helpers.workflows:Abstract"):
        with pytest.raises(SubmitError):
            await client.submit({}, bad, {})  # type: ignore[arg-type]
    assert (await client.status()).queued == 0
