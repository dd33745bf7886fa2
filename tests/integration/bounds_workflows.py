"""Workflows that bring much, for tests of what is bounded in bytes."""

from __future__ import annotations

from typing import Any

import torch

from forebay import InferenceEngine, RolloutWorkflow


class LargeWorkflow(RolloutWorkflow):
    """One row of ``tokens`` tokens that do not compress, without a server."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any]:
        """Make it up."""
        tokens = int(data["tokens"])
        return {
            "input_ids": torch.randint(0, 2**31 - 1, (1, tokens), dtype=torch.int32),
            "attention_mask": torch.ones((1, tokens), dtype=torch.bool),
            "loss_mask": torch.ones((1, tokens), dtype=torch.int32),
            "logprobs": -torch.rand((1, tokens), dtype=torch.float32),
            "versions": torch.zeros((1, tokens), dtype=torch.int32),
            "rewards": torch.tensor([1.0], dtype=torch.float32),
        }
