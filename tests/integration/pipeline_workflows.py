"""Workflows and filters that the pipeline tests submit by name."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import torch

from forebay import AsyncRewardWrapper, InferenceEngine, ModelRequest, RolloutWorkflow, workflow_context


class EchoWorkflow(RolloutWorkflow):
    """One generation; reward and misbehaviour as the prompt says, for all slots or by ``sample_idx``."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """Do as the prompt says."""
        context = workflow_context.get()
        action = data.get("actions", {}).get(str(context.sample_idx), data.get("action", ""))
        data["actions"] = "changed by one slot"  # must reach no other
        if action == "reject":
            return None
        if action == "reward_raises":
            await AsyncRewardWrapper(broken_reward)("prompt", "completion")
        if action == "raise_from":
            try:
                _ = {}["answer"]
            except KeyError as error:
                raise RuntimeError("the grader failed") from error
        if action == "raise":
            raise RuntimeError("no such puzzle")
        if action == "raise_once" and context.attempt == 1:
            raise ConnectionError("tool server went away")
        if action == "cancel" and (task := asyncio.current_task()) is not None:
            task.cancel()
            await asyncio.sleep(0)
        if action == "empty":
            return {}
        if action == "slow":
            await asyncio.sleep(1.0)
        if action == "hang":
            await asyncio.Event().wait()
        response = await engine.agenerate(ModelRequest(rid=uuid.uuid4().hex, input_ids=data["ids"]))
        prompt, output = response.input_len, response.output_len
        reward = data.get("rewards", {}).get(str(context.sample_idx), 1.0)
        if action == "reward_is_eval":
            reward = float(context.is_eval and workflow_context.stat_scope() == "eval-rollout")
        return {
            "input_ids": torch.tensor([response.input_tokens + response.output_tokens], dtype=torch.int32),
            "attention_mask": torch.ones((1, prompt + output), dtype=torch.bool),
            "loss_mask": torch.tensor([[0] * prompt + [1] * output], dtype=torch.int32),
            "logprobs": torch.tensor([[0.0] * prompt + response.output_logprobs], dtype=torch.float32),
            "versions": torch.tensor([[0] * prompt + response.output_versions], dtype=torch.int32),
            "rewards": torch.tensor([reward], dtype=torch.float32),
        }


async def broken_reward(*_: str) -> float:
    """Fail."""
    raise ZeroDivisionError("the reward divides by nothing")


def accept_good(group: dict[str, Any]) -> bool:
    """Accept groups whose best raw reward is above a half."""
    assert group["input_ids"].shape[0] == sum(group["rollout_group"].row_counts)
    return bool(group["original_rewards"].max() > 0.5)


def accept_broken(group: dict[str, Any]) -> bool:
    """Fail."""
    raise ZeroDivisionError("a filter with a bug")
