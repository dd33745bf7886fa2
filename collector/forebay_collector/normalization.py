"""Reward statistics over a group: pure functions of numbers (contract, section 5).

Statistics are taken over references, one for each rollout, in float64; every row is centred and scaled by its
group's, with its own reward: ``(row - mean) / scale``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from forebay.errors import ContractError

__all__ = ["EPS", "group_scale", "normalize_group", "reference_of"]

EPS = 1e-8
"""Of ``reward_normalization=True``: group mean and biased standard deviation, AReaL's rule at rollout time."""


def reference_of(rows: Sequence[float], supplied: float | None) -> float:
    """The reference reward of one rollout: what it supplied, else the common reward of its rows.

    Raises:
        ContractError: its rows differ and it supplied none.
    """
    if supplied is not None:
        return supplied
    if any(row != rows[0] for row in rows):
        raise ContractError(
            f"the {len(rows)} rows of a rollout have rewards from {min(rows):g} to {max(rows):g}, no rollout_reward; "
            "supply one finite rollout_reward to normalize them by"
        )
    return rows[0]


def group_scale(references: Sequence[float], eps: float = EPS) -> tuple[float, float]:
    """``(mean, scale)``: scale is the biased standard deviation plus `eps`.

    It is exactly 1 where there is nothing to scale by: one reference, or a deviation of at most `eps`. Equal rewards
    then give exact zeros.
    """
    count = len(references)
    mean = math.fsum(references) / count
    if all(value == references[0] for value in references):
        return references[0], 1.0  # not the sum's rounding
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in references) / count)
    return mean, 1.0 if count <= 1 or std <= eps else std + eps


def normalize_group(
    rollouts: Sequence[Sequence[float]], supplied: Sequence[float | None], eps: float = EPS
) -> list[list[float]]:
    """The rows' rewards of each rollout, centred and scaled by the group's references.

    Args:
        rollouts: for each usable rollout, the rewards of its rows.
        supplied: for each, its ``rollout_reward`` or None.
        eps: added to the deviation, and the bound below which it counts as none.

    Raises:
        ContractError: a rollout has differing rows and supplied no reference.
    """
    references = [reference_of(rows, given) for rows, given in zip(rollouts, supplied, strict=True)]
    mean, scale = group_scale(references, eps)
    return [[(row - mean) / scale for row in rows] for rows in rollouts]
