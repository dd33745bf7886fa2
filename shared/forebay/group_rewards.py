"""The rewards in group summaries: which values count, and the statistics of a batch (contract, section 5).

A summary in Redis keeps the rewards as shaped while its rule takes statistics of the batch. They are normalized in a
copy, for the batch that is cut: a batch that is dissolved leaves no trace in its groups, and the next cut takes other
statistics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from forebay.normalization import ShapedRollout, normalize
from forebay.reward_rules import NormConfig
from forebay.wire.envelopes import GroupSummary, RowSummary

__all__ = ["normalized_batch", "packed_rewards", "with_rewards"]


def normalized_batch(groups: Sequence[GroupSummary]) -> list[GroupSummary]:
    """`groups` in the same order, those that wait for statistics of the batch normalized by this one's.

    Groups with the same rule are normalized together. Where a batch holds groups with different rules, since they were
    submitted so, each rule's statistics are over its own groups. Groups without such a rule, and those that have been
    normalized already, stay as they are.
    """
    out = list(groups)
    by_rule: dict[NormConfig, list[int]] = {}
    for at, group in enumerate(groups):
        if group.batch_norm is not None and not group.rewards_normalized:
            by_rule.setdefault(group.batch_norm, []).append(at)
    for norm, places in by_rule.items():
        shaped = [
            [
                ShapedRollout(tuple(row.reward for row in rollout.rows), rollout.reference)
                for rollout in out[at].rollouts
            ]
            for at in places
        ]
        for at, known, values in zip(places, shaped, normalize(shaped, norm), strict=True):
            out[at] = with_rewards(out[at], known, values, normalized=True)
    return out


def packed_rewards(groups: Sequence[GroupSummary]) -> dict[int, bytes]:
    """Packed summaries, by task id, of those of `groups` that :func:`normalized_batch` has given their rewards.

    Their dumps, if they have any, were written before, and are rewritten from these (contract, section 11).
    """
    return {group.task: group.pack() for group in groups if group.batch_norm is not None and group.rewards_normalized}


def with_rewards(
    summary: GroupSummary,
    shaped: Sequence[ShapedRollout],
    values: Sequence[Sequence[float | None]],
    *,
    normalized: bool = False,
) -> GroupSummary:
    """`summary` with the references of `shaped`, and `values` for its rows' rewards.

    Where they are `normalized`, or one differs from the raw reward, all rows keep their raw one in
    ``original_reward``.
    """
    changed = normalized or any(
        row.original_reward is not None or row.reward != value
        for rollout, new in zip(summary.rollouts, values, strict=True)
        for row, value in zip(rollout.rows, new, strict=True)
    )
    rollouts = [
        dataclasses.replace(
            rollout,
            reference=known.reference,
            rows=[_with_reward(row, value) if changed else row for row, value in zip(rollout.rows, new, strict=True)],
        )
        for rollout, known, new in zip(summary.rollouts, shaped, values, strict=True)
    ]
    return dataclasses.replace(summary, rollouts=rollouts, rewards_normalized=normalized)


def _with_reward(row: RowSummary, reward: float | None) -> RowSummary:
    raw = row.reward if row.original_reward is None else row.original_reward
    return dataclasses.replace(row, reward=reward, original_reward=raw)
