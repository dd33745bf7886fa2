"""Reward shaping and normalization: pure functions of numbers (contract, section 5).

A row's reward gets the overlong penalty, then bias, scaling and clipping. Statistics are taken over references, one for
each rollout; every row is centred and scaled by its group's, or its batch's, with its own reward:
``(row - mean) / scale``.

Sums are exact, so that means, leave-one-out baselines and variances are the float64 numbers next to the true ones:
equal rewards give exact zeros, and the order of the rollouts does not matter. The time is linear in the rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.errors import ContractError
from forebay.reward_rules import NormConfig, RewardShaping

__all__ = ["ShapedRollout", "normalize", "overlong_penalty", "shape", "shape_rollout"]


@dataclass(frozen=True, slots=True)
class ShapedRollout:
    """The rewards of one rollout's rows, as shaped, and its reference."""

    rows: tuple[float | None, ...]
    reference: float | None
    """None: its rows have no reward in common, or none."""


def overlong_penalty(trained: int, shaping: RewardShaping) -> float:
    """What a row of `trained` trained tokens loses: 0 up to ``max_new_tokens - overlong_tokens``, then linearly."""
    if shaping.overlong_tokens is None or shaping.max_new_tokens is None:
        return 0.0
    over = trained - (shaping.max_new_tokens - shaping.overlong_tokens)
    return min(0.0, -over / shaping.overlong_tokens * shaping.overlong_factor)


def shape(reward: float, shaping: RewardShaping) -> float:
    """``clip((reward + bias) * scaling, -clip, +clip)``."""
    return max(-shaping.clip, min(shaping.clip, (reward + shaping.bias) * shaping.scaling))


def shape_rollout(
    rewards: Sequence[float | None],
    trained: Sequence[int],
    supplied: float | None,
    shaping: RewardShaping,
    *,
    normalizing: bool,
) -> ShapedRollout:
    """The shaped rewards of one rollout's rows, and its reference.

    The reference is what the workflow supplied, which bypasses the overlong penalty, else the reward that its rows
    have in common after it.

    Args:
        rewards: of each row; None where it has none.
        trained: trained tokens of each row.
        supplied: its ``rollout_reward``, or None.
        shaping: what is done to each.
        normalizing: whether the reference is needed.

    Raises:
        ContractError: it is needed, but its rows differ before or after the penalty, and none was supplied.
    """
    penalized = [
        None if reward is None else reward + overlong_penalty(count, shaping)
        for reward, count in zip(rewards, trained, strict=True)
    ]
    rows = tuple(None if reward is None else shape(reward, shaping) for reward in penalized)
    if supplied is not None:
        return ShapedRollout(rows, shape(supplied, shaping))
    for when, values in (("", rewards), (" after the overlong penalty", penalized)):
        if any(value != values[0] for value in values):
            if normalizing:
                known = [value for value in values if value is not None]
                raise ContractError(
                    f"the {len(values)} rows of a rollout have rewards from {min(known):g} to {max(known):g}{when}, "
                    "and no rollout_reward; supply one finite rollout_reward to normalize them by"
                )
            return ShapedRollout(rows, None)
    return ShapedRollout(rows, rows[0])


def normalize(groups: Sequence[Sequence[ShapedRollout]], norm: NormConfig) -> list[list[list[float]]]:
    """The rows' rewards of each rollout of each group, centred and scaled as `norm` says.

    Where a level is ``batch``, its statistics are over all references of `groups`. The deviation is around the plain
    mean in any case: around the leave-one-out baselines, as AReaL takes it, it would be too large. The scale is 1
    where there is nothing to scale by (one reference, a deviation of at most ``eps``, no level).

    Args:
        groups: every row has a reward, every rollout a reference, all finite.
        norm: the rule.

    Raises:
        ContractError: a reward or a reference is missing.
    """
    references = [[_known(rollout.reference) for rollout in group] for group in groups]
    batch = _Statistics([value for own in references for value in own]) if norm.uses_batch else None
    out: list[list[list[float]]] = []
    at = 0
    for group, own in zip(groups, references, strict=True):
        group_statistics = _Statistics(own) if norm.uses_group else None
        centre = batch if norm.mean_level == "batch" else group_statistics
        first = at if norm.mean_level == "batch" else 0
        spread = batch if norm.std_level == "batch" else group_statistics
        scale = 1.0 if norm.std_level is None or spread is None else spread.scale(norm)
        shifted = []
        for place, rollout in enumerate(group, start=first):
            base = 0.0
            if norm.mean_level is not None and centre is not None:
                base = centre.mean_without(place) if norm.mean_leave1out else centre.mean
            shifted.append([(_known(row) - base) / scale for row in rollout.rows])
        out.append(shifted)
        at += len(group)
    return out


def _known(value: float | None) -> float:
    if value is None:
        raise ContractError("a reward or a reference is missing; only groups whose every row has one are normalized")
    return value


class _Statistics:
    """Of one or more references, in integer arithmetic: each float is an integer over one common power of two."""

    def __init__(self, values: Sequence[float]) -> None:
        ratios = [value.as_integer_ratio() for value in values]
        self._unit = max((below for _, below in ratios), default=1)
        self._exact = [above * (self._unit // below) for above, below in ratios]
        self._total = sum(self._exact)
        self._count = len(values)

    @property
    def mean(self) -> float:
        return self._total / (self._count * self._unit)  # the division of integers rounds once

    def mean_without(self, place: int) -> float:
        """The mean of all others; of a single one, itself."""
        if self._count == 1:
            return self.mean
        return (self._total - self._exact[place]) / ((self._count - 1) * self._unit)

    def scale(self, norm: NormConfig) -> float:
        count = self._count
        if count <= 1:
            return 1.0
        # n * (sum of squares - square of sum / n), which is zero exactly where all are equal
        squares = count * sum(value * value for value in self._exact) - self._total * self._total
        divisor = count * (count - 1 if norm.std_unbiased else count)
        std = math.sqrt(squares / (divisor * self._unit * self._unit))
        return 1.0 if std <= norm.eps else std + norm.eps
