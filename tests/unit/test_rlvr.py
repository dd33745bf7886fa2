"""The built-in RLVR workflow (contract 10) against a scripted engine and a real tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forebay import GenerationHyperparameters, InferenceEngine, ModelRequest, ModelResponse, StopReason
from forebay.errors import SlotDataError
from forebay.wire.rows import rows_from_tensors
from forebay.workflow_context import WorkflowContext, scope
from forebay_ops.tiny_model import VOCABULARY, create_tiny_model
from forebay_workers.workflows import RLVRWorkflow

PAD, EOS = VOCABULARY.index("<pad>"), VOCABULARY.index("<eos>")
OUTPUT = [VOCABULARY.index("1"), VOCABULARY.index("2"), EOS]
PROMPT = [VOCABULARY.index(char) for char in "c:12="]
DATA: dict[str, Any] = {"messages": [{"role": "user", "content": "c:12="}], "answer": "12"}


class ScriptedEngine(InferenceEngine):
    """Answers with three tokens, and keeps the requests."""

    def __init__(self, stop: StopReason = StopReason.STOP, output: list[int] | None = None) -> None:
        self.requests: list[ModelRequest] = []
        self.stop = stop
        self.output = OUTPUT if output is None else output

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """The scripted answer; two versions took part in it."""
        self.requests.append(req)
        count = len(self.output)
        versions = [4, 5, 5][:count]
        return ModelResponse(list(req.input_ids), list(self.output), [-0.5, -0.25, -0.125][:count], versions, self.stop)

    def get_version(self) -> int:
        """The newest version."""
        return 5


class Reward:
    """A coroutine reward that keeps what it was called with."""

    def __init__(self, value: float = 0.75) -> None:
        self.value = value
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    async def __call__(self, /, *args: Any, **kwargs: Any) -> float:
        """The reward."""
        self.calls.append((args, kwargs))
        return self.value


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tiny model's tokenizer."""
    from transformers import AutoTokenizer

    folder: Path = create_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    return AutoTokenizer.from_pretrained(folder)


async def episode(
    workflow: RLVRWorkflow, engine: InferenceEngine, data: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One episode's result."""
    result = await workflow.arun_episode(engine, DATA if data is None else data)
    assert result is not None
    return result


class TestResult:
    """contract 3: the tensor dict."""

    async def test_the_row_in_full(self, tokenizer: Any) -> None:
        """Prompt and completion in one row: masks, logprobs and versions are the completion's alone."""
        result = await episode(RLVRWorkflow(Reward(), GenerationHyperparameters(), tokenizer), ScriptedEngine())
        assert {name: value.tolist() for name, value in result.items()} == {
            "input_ids": [PROMPT + OUTPUT],
            "attention_mask": [[True] * 8],
            "loss_mask": [[0] * 5 + [1] * 3],
            "logprobs": [[0.0] * 5 + [-0.5, -0.25, -0.125]],
            "versions": [[-1] * 5 + [4, 5, 5]],
            "rewards": [0.75],
            "is_truncated": [False],
        }
        assert {name: value.dtype for name, value in result.items()} == {
            "input_ids": torch.int32,
            "attention_mask": torch.bool,
            "loss_mask": torch.int32,
            "logprobs": torch.float32,
            "versions": torch.int32,
            "rewards": torch.float32,
            "is_truncated": torch.bool,
        }

    async def test_the_row_travels(self, tokenizer: Any) -> None:
        """It is a row by the contract, with the head and tail of its trained tokens."""
        result = await episode(RLVRWorkflow(Reward(), GenerationHyperparameters(), tokenizer), ScriptedEngine())
        (one,), reference = rows_from_tensors(result)
        assert (one.prompt_len, one.head_tail, one.reward, reference) == (5, (4, 5), 0.75, None)

    @pytest.mark.parametrize(
        ("stop", "truncated"),
        [(StopReason.STOP, False), (StopReason.LENGTH, True), (StopReason.TOOL_CALLS, False), ("length", True)],
    )
    async def test_is_truncated(self, tokenizer: Any, stop: StopReason, truncated: bool) -> None:
        """Contract 3: built-in workflows always set it: true where the length limit stopped the response."""
        workflow = RLVRWorkflow(Reward(), GenerationHyperparameters(), tokenizer)
        assert (await episode(workflow, ScriptedEngine(stop)))["is_truncated"].tolist() == [truncated]

    async def test_an_empty_completion_is_a_row(self, tokenizer: Any) -> None:
        """A completion without tokens is a row without trained tokens."""
        result = await episode(
            RLVRWorkflow(Reward(), GenerationHyperparameters(), tokenizer), ScriptedEngine(output=[])
        )
        assert result["loss_mask"].tolist() == [[0] * 5]

    async def test_case_25_missing_logprobs_fail_the_slot(self, tokenizer: Any) -> None:
        """Case 25: an engine that gives n-1 logprobs fails the slot; no zero is filled in."""

        class Short(ScriptedEngine):
            async def agenerate(self, req: ModelRequest) -> ModelResponse:
                response = await super().agenerate(req)
                response.output_logprobs.pop()
                return response

        result = await episode(RLVRWorkflow(Reward(), GenerationHyperparameters(), tokenizer), Short())
        with pytest.raises(SlotDataError, match="logprobs are missing: 7 for 8 tokens"):
            rows_from_tensors(result)


class TestReward:
    """contract 10: reward ``(prompt, completion, prompt_ids, completion_ids, **data)``."""

    async def test_its_arguments(self, tokenizer: Any) -> None:
        """Texts without special tokens, the ids with them, and the data, messages included."""
        reward = Reward()
        await episode(RLVRWorkflow(reward, GenerationHyperparameters(), tokenizer), ScriptedEngine())
        assert reward.calls == [(("c:12=", "12", PROMPT, OUTPUT), DATA)]

    async def test_reserved_names_are_the_episodes(self, tokenizer: Any) -> None:
        """Data under the names of the four arguments neither clash nor replace them; other names all arrive."""
        reserved = {"prompt": "p", "completion": "c", "prompt_ids": [0], "completion_ids": [0]}
        others = {"self": 1, "args": 2, "reward_fn": 3}
        reward = Reward()
        await episode(
            RLVRWorkflow(reward, GenerationHyperparameters(), tokenizer), ScriptedEngine(), DATA | reserved | others
        )
        assert reward.calls == [(("c:12=", "12", PROMPT, OUTPUT), DATA | others)]

    async def test_a_plain_function_runs_in_a_process(self, tokenizer: Any) -> None:
        """A plain reward function is called in a process of its own with the same arguments."""
        from helpers import reward_functions

        workflow = RLVRWorkflow(reward_functions.half, GenerationHyperparameters(), tokenizer, reward_timeout_s=60)
        assert (await episode(workflow, ScriptedEngine()))["rewards"].tolist() == [0.5]

    async def test_its_exception_passes_through(self, tokenizer: Any) -> None:
        """What the reward raises is the slot's failure: nothing becomes a zero here."""

        async def broken(*_: Any, **__: Any) -> float:
            raise ZeroDivisionError("by the reward")

        with pytest.raises(ZeroDivisionError):
            await episode(RLVRWorkflow(broken, GenerationHyperparameters(), tokenizer), ScriptedEngine())


class TestRequest:
    """What the engine is asked for."""

    async def test_prompt_and_sampling(self, tokenizer: Any) -> None:
        """The chat template's tokens, and the settings with end-of-text and padding as stops (contract 7)."""
        engine = ScriptedEngine()
        gconfig = GenerationHyperparameters(max_new_tokens=7, stop_token_ids=[9])
        await episode(RLVRWorkflow(Reward(), gconfig, tokenizer), engine)
        (request,) = engine.requests
        assert request.input_ids == PROMPT
        assert request.gconfig == gconfig.new(stop_token_ids=[9, EOS, PAD])
        assert gconfig.stop_token_ids == [9]

    async def test_the_chat_template_gets_its_options(self, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """enable_thinking and the generation prompt reach the template, and its text is encoded as it is."""
        seen: dict[str, Any] = {}

        def template(messages: list[dict[str, str]], **options: Any) -> str:
            seen.update(options, messages=messages)
            return "<eos>1"

        monkeypatch.setattr(tokenizer, "apply_chat_template", template, raising=False)
        engine = ScriptedEngine()
        await episode(RLVRWorkflow(Reward(), GenerationHyperparameters(), tokenizer, enable_thinking=True), engine)
        assert seen == {
            "messages": DATA["messages"],
            "add_generation_prompt": True,
            "tokenize": False,
            "enable_thinking": True,
        }
        assert engine.requests[0].input_ids == [EOS, VOCABULARY.index("1")]

    async def test_each_slot_has_a_rid_of_its_own(self, tokenizer: Any) -> None:
        """Requests of one slot's attempts and of its siblings never share a rid, which names group and slot."""
        engine = ScriptedEngine()
        workflow = RLVRWorkflow(Reward(), GenerationHyperparameters(), tokenizer)
        for idx in (0, 1, 1):
            with scope(WorkflowContext(task_id=12, sample_idx=idx)):
                await episode(workflow, engine)
        rids = [request.rid for request in engine.requests]
        assert len(set(rids)) == 3
        assert [rid.rsplit("-", 1)[0] for rid in rids] == ["12-0", "12-1", "12-1"]

    async def test_no_messages(self, tokenizer: Any) -> None:
        """A prompt without messages is bad data; the error says what it has, and nothing is generated."""
        engine = ScriptedEngine()
        with pytest.raises(SlotDataError, match=r"no 'messages'.*\['question'\]"):
            await episode(RLVRWorkflow(Reward(), GenerationHyperparameters(), tokenizer), engine, {"question": "?"})
        assert engine.requests == []


def test_arguments_as_they_come_from_a_command_line(tokenizer: Any) -> None:
    """A folder is loaded as the tokenizer, and a dict taken as the sampling settings."""
    gconfig: Any = {"max_new_tokens": 5}
    workflow = RLVRWorkflow(Reward(), gconfig, tokenizer.name_or_path)
    assert workflow.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert workflow.gconfig.max_new_tokens == 5
