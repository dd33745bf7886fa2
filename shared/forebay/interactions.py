"""What an agent's model calls leave behind, token-exact (contract, sections 4.5 and 9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forebay.errors import SlotDataError, WorkflowContractError
from forebay.generation import StopReason
from forebay.outcomes import ResultKind
from forebay.wire.rows import LARGEST_REWARD, Row, rows_from_tensors

__all__ = ["Interaction", "InteractionWithTokenLogpReward", "rows_from_interactions", "rows_from_result"]


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
            WorkflowContractError: nothing was generated, the output lists differ in length, or hold no numbers.
            SlotDataError: a logprob is missing, or a value is not finite or out of range.
        """
        before, count = len(self.input_tokens), len(self.output_tokens)
        if not before or not count:
            raise WorkflowContractError(f"it has {before} input and {count} output tokens; both are needed")
        if len(self.output_logprobs) < count:
            raise SlotDataError(
                f"logprobs are missing: {len(self.output_logprobs)} for {count} output tokens; "
                "zeros are never filled in"
            )
        if not len(self.output_logprobs) == len(self.output_versions) == count:
            raise WorkflowContractError(
                f"it has {count} output tokens, {len(self.output_logprobs)} logprobs and "
                f"{len(self.output_versions)} versions; each token has one of each"
            )
        ids = _integers("a token id", [*self.input_tokens, *self.output_tokens], least=0)
        versions = _integers("output_versions", self.output_versions, least=-1)
        return Row(
            {
                "input_ids": ids,
                "loss_mask": np.repeat(np.array([0, 1], dtype=np.int32), [before, count]),
                "logprobs": np.concatenate([np.zeros(before, np.float32), _logprobs(self.output_logprobs)]),
                "versions": np.concatenate([np.full(before, -1, np.int32), versions]),
            },
            reward=_number("reward", self.reward),
            original_reward=_number("original_reward", self.original_reward),
            is_truncated=self.stop_reason == StopReason.LENGTH,
        )


def _integers(what: str, values: Sequence[int], least: int) -> np.ndarray[Any, Any]:
    array = np.array(values)
    if array.dtype.kind not in "iu":
        raise WorkflowContractError(f"{what} is no integer of 64 bits")
    if array.min() < least or array.max() >= 2**31:
        bad = array.min() if array.min() < least else array.max()
        raise SlotDataError(f"{what} is {bad}; it must be at least {least} and fit int32")
    return array.astype(np.int32)


def _logprobs(values: Sequence[float]) -> np.ndarray[Any, Any]:
    try:
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise WorkflowContractError("output_logprobs holds something that is no number") from None
    with np.errstate(over="ignore"):  # becomes infinite, which is looked for next
        array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise SlotDataError(f"output_logprobs[{int(np.flatnonzero(~np.isfinite(array))[0])}] is not finite")
    return array


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch: RuntimeError for several elements
        raise WorkflowContractError(f"{name} is {value!r}, expected a number or None") from None
    if not abs(number) <= LARGEST_REWARD:  # NaN too
        raise SlotDataError(f"{name} is {number}")
    return number


InteractionWithTokenLogpReward = Interaction
"""AReaL's name for it."""


def rows_from_interactions(result: Mapping[str, Interaction]) -> tuple[list[Row], float | None]:
    """A row for each interaction, in the order of the result, and the rollout's reference if any supplies one.

    The messages stay behind: a trainer needs the tokens, and dumps decode them.

    Raises:
        WorkflowContractError: the supplied references differ, or an interaction is malformed.
        SlotDataError: a value is not finite, missing or out of range.
    """
    rows: list[Row] = []
    supplied: set[float] = set()
    for completion, item in result.items():
        if not isinstance(completion, str):
            raise WorkflowContractError(f"the completion id {completion!r} is no text")
        try:
            row = item.to_row()
            reference = _number("rollout_reward", item.rollout_reward)
        except (SlotDataError, WorkflowContractError) as error:
            raise type(error)(f"interaction {completion}: {error}") from None
        row.completion = completion
        rows.append(row)
        if reference is not None:
            supplied.add(reference)
    if len(supplied) > 1:
        raise WorkflowContractError(
            f"the interactions of one rollout supply rollout_rewards from {min(supplied):g} to {max(supplied):g}; "
            "it is one number for each rollout, so they agree"
        )
    return rows, supplied.pop() if supplied else None


def rows_from_result(result: Mapping[str, Any]) -> tuple[ResultKind, list[Row], float | None]:
    """The kind, the rows and the supplied reference of what a workflow returned, a dict that is not empty.

    Raises:
        WorkflowContractError: tensors and Interactions are mixed, or the result is malformed.
        SlotDataError: a value is not finite, missing or out of range.
    """
    interactions = [name for name, value in result.items() if isinstance(value, Interaction)]
    if not interactions:
        return ResultKind.TENSOR, *rows_from_tensors(result)
    if others := [str(name) for name in result if name not in interactions]:
        raise WorkflowContractError(
            f"the result mixes Interactions with other values ({', '.join(others[:5])}); return a dict of tensors, or "
            "of Interactions alone"
        )
    return ResultKind.INTERACTIONS, *rows_from_interactions(result)
