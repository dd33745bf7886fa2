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
    batch = _Statistics([value for own in references for value in own], norm) if norm.uses_batch else None
    out: list[list[list[float]]] = []
    at = 0
    for group, own in zip(groups, references, strict=True):
        group_statistics = _Statistics(own, norm) if norm.uses_group else None
        centre = batch if norm.mean_level == "batch" else group_statistics
        first = at if norm.mean_level == "batch" else 0
        spread = batch if norm.std_level == "batch" else group_statistics
        scale = 1.0 if norm.std_level is None or spread is None else spread.scale
        shifted = []
        for place, rollout in enumerate(group, start=first):
            base = 0.0 if norm.mean_level is None or centre is None else centre.baseline(place)
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

    def __init__(self, values: Sequence[float], norm: NormConfig) -> None:
        ratios = [value.as_integer_ratio() for value in values]
        self._unit = max((below for _, below in ratios), default=1)
        self._exact = [above * (self._unit // below) for above, below in ratios]
        self._total = sum(self._exact)
        self._leave_out = norm.mean_leave1out and len(values) > 1  # the baseline of a single one is itself
        self.scale = self._scale(norm)

    def baseline(self, place: int) -> float:
        """What is subtracted from the reference at `place`: the mean, or that of all others."""
        # The division of integers rounds once.
        if self._leave_out:
            return (self._total - self._exact[place]) / ((len(self._exact) - 1) * self._unit)
        return self._total / (len(self._exact) * self._unit)

    def _scale(self, norm: NormConfig) -> float:
        count = len(self._exact)
        if count <= 1:
            return 1.0
        # n times the sum of squares around the mean, which is zero exactly where all are equal
        squares = count * sum(value * value for value in self._exact) - self._total * self._total
        divisor = count * (count - 1 if norm.std_unbiased else count)
        std = math.sqrt(squares / (divisor * self._unit * self._unit))
        return 1.0 if std <= norm.eps else std + norm.eps
