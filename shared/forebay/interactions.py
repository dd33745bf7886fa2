"""What an agent's model calls leave behind, token-exact (contract, sections 4.5 and 9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forebay.errors import SlotDataError, WorkflowContractError
from forebay.generation import StopReason
from forebay.wire.rows import Row

__all__ = ["Interaction", "InteractionWithTokenLogpReward", "rows_from_interactions"]


@dataclass(slots=True)
class Interaction:
    """One model call: the ids that the model was given, and those that it produced.

    The three output lists have one entry for each output token.
    """

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation that was sent."""
    output_message: dict[str, Any] | None = None
    """What came back."""
    reward: float | None = None
    original_reward: float | None = None
    """The raw reward, once `reward` has been changed."""
    rollout_reward: float | None = None
    """The reference of the whole rollout; all interactions that supply one supply the same."""
    parent: str | None = None
    """Completion id of the interaction that this one continues."""
    stop_reason: StopReason = StopReason.STOP

    def to_row(self) -> Row:
        """One row: prompt and completion.

        Raises:
            WorkflowContractError: nothing was generated, or the output lists differ in length.
            SlotDataError: a logprob or a reward is not finite.
        """
        count = len(self.output_tokens)
        if not self.input_tokens or not count:
            raise WorkflowContractError(
                f"an interaction has {len(self.input_tokens)} input and {count} output tokens; both are needed"
            )
        if len(self.output_logprobs) < count:
            raise SlotDataError(
                f"logprobs are missing: {len(self.output_logprobs)} for {count} output tokens; "
                "zeros are never filled in"
            )
        if not len(self.output_logprobs) == len(self.output_versions) == count:
            raise WorkflowContractError(
                f"an interaction has {count} output tokens, {len(self.output_logprobs)} logprobs and "
                f"{len(self.output_versions)} versions; each token has one of each"
            )
        before = len(self.input_tokens)
        logprobs = np.concatenate([np.zeros(before), self.output_logprobs]).astype(np.float32)
        if not np.isfinite(logprobs).all():
            raise SlotDataError(f"logprobs[{int(np.flatnonzero(~np.isfinite(logprobs))[0]) - before}] is not finite")
        for name in ("reward", "original_reward"):
            value = getattr(self, name)
            if value is not None and not np.isfinite(np.float32(value)):
                raise SlotDataError(f"{name} is {value}")
        return Row(
            {
                "input_ids": np.array([*self.input_tokens, *self.output_tokens], dtype=np.int32),
                "loss_mask": np.array([0] * before + [1] * count, dtype=np.int32),
                "logprobs": logprobs,
                "versions": np.array([-1] * before + list(self.output_versions), dtype=np.int32),
            },
            reward=None if self.reward is None else float(self.reward),
            original_reward=None if self.original_reward is None else float(self.original_reward),
            is_truncated=self.stop_reason == StopReason.LENGTH,
        )


InteractionWithTokenLogpReward = Interaction
"""AReaL's name for it."""


def rows_from_interactions(result: Mapping[str, Interaction]) -> tuple[list[Row], float | None]:
    """A row for each interaction, in the order of the result, and the rollout's reference if any supplies one.

    Raises:
        WorkflowContractError: the supplied references differ, or an interaction is malformed.
        SlotDataError: a value is not finite.
    """
    supplied = {item.rollout_reward for item in result.values() if item.rollout_reward is not None}
    if any(not np.isfinite(value) for value in supplied):
        raise SlotDataError(f"rollout_reward is {', '.join(str(value) for value in supplied)}")
    if len(supplied) > 1:
        raise WorkflowContractError(
            f"the interactions of one rollout supply {len(supplied)} different rollout_rewards; they must agree"
        )
    rows = []
    for completion, item in result.items():
        row = item.to_row()
        row.completion = str(completion)
        rows.append(row)
    return rows, float(supplied.pop()) if supplied else None
