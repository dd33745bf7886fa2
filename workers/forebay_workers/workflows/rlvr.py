"""Reinforcement learning with verifiable rewards: one prompt, one generation, one reward (contract, section 10)."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable
from typing import Any

from forebay import workflow_context
from forebay.errors import SlotDataError
from forebay.generation import GenerationHyperparameters, InferenceEngine, ModelRequest, ModelResponse, StopReason
from forebay.rewards import AsyncRewardWrapper
from forebay.workflow import RolloutWorkflow

__all__ = ["RLVRWorkflow"]

_RESERVED = frozenset({"prompt", "completion", "prompt_ids", "completion_ids"})
"""What a reward function is given by these names is the episode's, whatever the prompt holds."""


class RLVRWorkflow(RolloutWorkflow):
    """``data["messages"]`` through the chat template, one generation, one reward.

    Args:
        reward_fn: ``(prompt, completion, prompt_ids, completion_ids, **data) -> float``, plain or async. The texts are
            decoded without special tokens.
        gconfig: sampling, as an object or as a dict of its fields; the tokenizer's end-of-text and padding tokens
            are added to its stop tokens.
        tokenizer: a tokenizer, or the folder or name to load one from.
        enable_thinking: passed to the chat template.
        reward_timeout_s: for one call of a plain `reward_fn`, which runs in a process of its own.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any],
        gconfig: GenerationHyperparameters | dict[str, Any],
        tokenizer: Any,
        enable_thinking: bool = False,
        reward_timeout_s: float = 15.0,
    ) -> None:
        if isinstance(tokenizer, str):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        if isinstance(gconfig, dict):  # as it comes from a command line
            gconfig = GenerationHyperparameters(**gconfig)
        importlib.import_module("torch")  # seconds: here, in a thread of its own, not in the first episode
        self.tokenizer = tokenizer
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
        self.enable_thinking = enable_thinking
        self.reward = AsyncRewardWrapper(reward_fn, timeout_s=reward_timeout_s)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """One row: prompt and completion."""
        prompt_ids = self._prompt_ids(data)
        context = workflow_context.get()
        # The slots of a group share the prompt, not the server's cache entry: a rid each.
        request = ModelRequest(
            rid=f"{context.task_id}-{context.sample_idx}-{uuid.uuid4().hex[:8]}",
            input_ids=prompt_ids,
            gconfig=self.gconfig,
            tokenizer=self.tokenizer,
        )
        response = await engine.agenerate(request)
        reward = await self.reward(
            self.tokenizer.decode(response.input_tokens, skip_special_tokens=True),
            self.tokenizer.decode(response.output_tokens, skip_special_tokens=True),
            response.input_tokens,
            response.output_tokens,
            **{name: value for name, value in data.items() if name not in _RESERVED},
        )
        return _tensors(response, reward)

    def _prompt_ids(self, data: dict[str, Any]) -> list[int]:
        if "messages" not in data:
            raise SlotDataError(f"the prompt has no 'messages', a list of chat messages; it has {sorted(data)}")
        text = self.tokenizer.apply_chat_template(
            data["messages"], add_generation_prompt=True, tokenize=False, enable_thinking=self.enable_thinking
        )
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def _tensors(response: ModelResponse, reward: float) -> dict[str, Any]:
    import torch

    prompt, output = response.input_len, response.output_len
    return {
        "input_ids": torch.tensor([response.input_tokens + response.output_tokens], dtype=torch.int32),
        "attention_mask": torch.ones((1, prompt + output), dtype=torch.bool),
        "loss_mask": torch.tensor([[0] * prompt + [1] * output], dtype=torch.int32),
        "logprobs": torch.tensor([[0.0] * prompt + response.output_logprobs], dtype=torch.float32),
        "versions": torch.tensor([[-1] * prompt + response.output_versions], dtype=torch.int32),
        "rewards": torch.tensor([reward], dtype=torch.float32),
        "is_truncated": torch.tensor([response.stop_reason == StopReason.LENGTH], dtype=torch.bool),
    }
