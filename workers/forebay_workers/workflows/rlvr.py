"""Reinforcement learning with verifiable rewards: one prompt, one generation, one reward (contract, section 10)."""

from __future__ import annotations

from typing import Any

from forebay.generation import InferenceEngine, ModelRequest
from forebay_workers.workflows.base import BuiltInWorkflow, new_rid, row

__all__ = ["RLVRWorkflow"]


class RLVRWorkflow(BuiltInWorkflow):
    """``data["messages"]`` through the chat template, one generation, one reward.

    Args:
        reward_fn: ``(prompt, completion, prompt_ids, completion_ids, **data) -> float``, plain or async. The texts are
            decoded without special tokens.
        gconfig: sampling, as an object or as a dict of its fields; the tokenizer's end-of-text and padding tokens
            are added to its stop tokens.
        tokenizer: a tokenizer, or the folder or name to load one from.
        enable_thinking: passed to the chat template.
        reward_timeout_s: for one call of a plain `reward_fn`, which runs in a process of its own.

    Raises:
        WorkflowError: an argument cannot be used; the message names it, its value and what to pass instead.
    """

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """One row: prompt and completion."""
        request = ModelRequest(
            rid=new_rid(), input_ids=self.prompt_ids(data), gconfig=self.gconfig, tokenizer=self.tokenizer
        )
        response = await self.generate(engine, request)
        return row(response, await self.reward_of(response, data))
