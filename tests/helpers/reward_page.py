"""Contract, section 5, written from the page in exact fractions: slow, and without a look at the implementation."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, localcontext
from fractions import Fraction

from forebay import NormConfig
from forebay.reward_rules import RewardShaping

Rollout = tuple[Sequence[Fraction], Fraction]
"""The rows' rewards of a rollout, and its reference."""


class RefusedError(Exception):
    """The page says contract error."""


def page_shaped(reward: Fraction, shaping: RewardShaping) -> Fraction:
    """``clip((x + bias) * scaling, -clip, +clip)``."""
    value = (reward + Fraction(shaping.bias)) * Fraction(shaping.scaling)
    return sorted([-Fraction(shaping.clip), value, Fraction(shaping.clip)])[1]


def page_penalty(trained: int, shaping: RewardShaping) -> Fraction:
    """``min(0, -(trained - (max_new_tokens - overlong_tokens)) / overlong_tokens * overlong_factor)``."""
    if shaping.overlong_tokens is None or shaping.max_new_tokens is None:
        return Fraction(0)
    over = Fraction(trained - (shaping.max_new_tokens - shaping.overlong_tokens), shaping.overlong_tokens)
    return min(Fraction(0), -over * Fraction(shaping.overlong_factor))


def page_rollout(
    rewards: Sequence[float], trained: Sequence[int], supplied: float | None, shaping: RewardShaping
) -> Rollout:
    """The shaped rows and the reference of a rollout that is to be normalized."""
    raw = [Fraction(reward) for reward in rewards]
    penalized = [reward + page_penalty(count, shaping) for reward, count in zip(raw, trained, strict=True)]
    rows = [page_shaped(reward, shaping) for reward in penalized]
    if supplied is not None:
        return rows, page_shaped(Fraction(supplied), shaping)
    if len(set(raw)) > 1 or len(set(penalized)) > 1:
        raise RefusedError
    return rows, rows[0]


def page_scale(references: Sequence[Fraction], norm: NormConfig) -> Fraction:
    """``std + eps`` around the plain mean, but 1 where ``std <= eps`` or n <= 1."""
    count = len(references)
    if count <= 1:
        return Fraction(1)
    mean = sum(references, Fraction(0)) / count
    variance = sum(((value - mean) ** 2 for value in references), Fraction(0)) / (count - norm.std_unbiased)
    with localcontext() as context:
        context.prec = 60
        std = Fraction((Decimal(variance.numerator) / Decimal(variance.denominator)).sqrt())
    return Fraction(1) if std <= Fraction(norm.eps) else std + Fraction(norm.eps)


def page_baseline(references: Sequence[Fraction], place: int, norm: NormConfig) -> Fraction:
    """The mean, or that of the others; of a single one, itself."""
    if norm.mean_leave1out and len(references) > 1:
        references = [value for at, value in enumerate(references) if at != place]
    return sum(references, Fraction(0)) / len(references)


def page_normalized(groups: Sequence[Sequence[Rollout]], norm: NormConfig) -> list[list[list[Fraction]]]:
    """``(row - mean_ref) / scale`` with the statistics of the row's group or batch."""
    batch = [(number, reference) for number, group in enumerate(groups) for _, reference in group]
    out = []
    for number, group in enumerate(groups):
        by_level = {
            "group": [reference for _, reference in group],
            "batch": [reference for _, reference in batch],
        }
        before = sum(1 for other, _ in batch if other < number)
        scaled = []
        for place, (rows, _) in enumerate(group):
            base, scale = Fraction(0), Fraction(1)
            if norm.mean_level is not None:
                at = place + (before if norm.mean_level == "batch" else 0)
                base = page_baseline(by_level[norm.mean_level], at, norm)
            if norm.std_level is not None:
                scale = page_scale(by_level[norm.std_level], norm)
            scaled.append([(value - base) / scale for value in rows])
        out.append(scaled)
    return out
