"""What the built-in workflows share (contract, section 10)."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable
from typing import Any, ClassVar

from forebay import workflow_context
from forebay.errors import SlotDataError
from forebay.generation import GenerationHyperparameters, InferenceEngine, ModelRequest, ModelResponse, StopReason
from forebay.pretrained import load_tokenizer
from forebay.rewards import AsyncRewardWrapper
from forebay.tracing import trace_session
from forebay.workflow import RolloutWorkflow
from forebay_workers.workflows.arguments import Checks, as_gconfig, check, check_common, warn_of_missing_path

__all__ = ["BuiltInWorkflow", "messages_of", "new_rid", "row", "tensors"]

_RESERVED = frozenset({"prompt", "completion", "prompt_ids", "completion_ids"})
"""What a reward function is given by these names is the episode's, whatever the prompt holds."""


class BuiltInWorkflow(RolloutWorkflow):
    """Prompts from chat messages, rewards from a function of the completion."""

    _checks: ClassVar[Checks] = check_common()
    _loaded: ClassVar[tuple[str, ...]] = ("tokenizer",)
    """Arguments that may be a folder."""

    def __init__(
        self,
        reward_fn: Callable[..., Any],
        gconfig: GenerationHyperparameters | dict[str, Any],
        tokenizer: Any,
        enable_thinking: bool = False,
        reward_timeout_s: float = 15.0,
    ) -> None:
        given = {
            "reward_fn": reward_fn,
            "gconfig": gconfig,
            "tokenizer": tokenizer,
            "enable_thinking": enable_thinking,
            "reward_timeout_s": reward_timeout_s,
        }
        check(type(self), given, self._checks)
        if isinstance(tokenizer, str):
            tokenizer = load_tokenizer(tokenizer)
        importlib.import_module("torch")  # seconds: here, in a thread of its own, not in the first episode
        self.tokenizer = tokenizer
        self.gconfig = as_gconfig(gconfig).new_with_stop_and_pad_token_ids(tokenizer)
        self.enable_thinking = enable_thinking
        self.reward = AsyncRewardWrapper(reward_fn, timeout_s=reward_timeout_s)

    @classmethod
    def check_arguments(cls, **arguments: Any) -> None:
        """Refuse, where it is submitted, what a worker could not run.

        Raises:
            WorkflowError: names the argument and its value, and says what to pass instead.

        Warns:
            ForebayWarning: a folder to load from is not on this host, where no worker may run.
        """
        check(cls, arguments, cls._checks)
        warn_of_missing_path(arguments, *cls._loaded)

    def prompt_ids(self, data: dict[str, Any]) -> list[int]:
        """The token ids of ``data["messages"]``, ready for an answer. Raises SlotDataError."""
        return self.encode(self.chat_text(messages_of(data)))

    def chat_text(self, messages: list[dict[str, Any]] | str) -> str:
        """`messages` through the chat template, with the beginning of an answer."""
        return str(
            self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, enable_thinking=self.enable_thinking
            )
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that a chat template made, which has its special tokens already."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    async def generate(self, engine: InferenceEngine, request: ModelRequest) -> ModelResponse:
        """The engine's answer, traced as the phase ``generate``."""
        with trace_session("generate"):
            return await engine.agenerate(request)

    async def reward_of(self, response: ModelResponse, data: dict[str, Any]) -> float:
        """The reward function's value, traced as the phase ``reward``."""
        with trace_session("reward"):
            return await self.reward(
                self.tokenizer.decode(response.input_tokens, skip_special_tokens=True),
                self.tokenizer.decode(response.output_tokens, skip_special_tokens=True),
                response.input_tokens,
                response.output_tokens,
                **{name: value for name, value in data.items() if name not in _RESERVED},
            )


def messages_of(data: dict[str, Any]) -> Any:
    """``data["messages"]``. Raises SlotDataError where there are none."""
    if not data.get("messages"):
        raise SlotDataError(f"the prompt has no 'messages', a list of chat messages; it has {sorted(data)}")
    return data["messages"]


def new_rid() -> str:
    """A request id that names the slot. The slots of a group share the prompt, not a server's cache entry."""
    context = workflow_context.get()
    return f"{context.task_id}-{context.sample_idx}-{uuid.uuid4().hex[:8]}"


def row(response: ModelResponse, reward: float) -> dict[str, Any]:
    """One row [1, S] of a prompt and its completion (contract, section 3)."""
    prompt, output = response.input_len, response.output_len
    return tensors(
        response.input_tokens + response.output_tokens,
        [0] * prompt + [1] * output,
        [0.0] * prompt + response.output_logprobs,
        [-1] * prompt + response.output_versions,
        reward,
        response.stop_reason,
    )


def tensors(
    ids: list[int],
    loss_mask: list[int],
    logprobs: list[float],
    versions: list[int],
    reward: float,
    stop_reason: StopReason,
) -> dict[str, Any]:
    """One row [1, S]. Lists of other lengths than `ids` stay so, and are refused where rows are made of tensors."""
    import torch

    return {
        "input_ids": torch.tensor([ids], dtype=torch.int32),
        "attention_mask": torch.ones((1, len(ids)), dtype=torch.bool),
        "loss_mask": torch.tensor([loss_mask], dtype=torch.int32),
        "logprobs": torch.tensor([logprobs], dtype=torch.float32),
        "versions": torch.tensor([versions], dtype=torch.int32),
        "rewards": torch.tensor([reward], dtype=torch.float32),
        "is_truncated": torch.tensor([stop_reason == StopReason.LENGTH], dtype=torch.bool),
    }
