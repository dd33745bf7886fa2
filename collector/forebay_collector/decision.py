"""What becomes of an assembled group: a pure function of its slots' headers (contract, section 4.4).

The order is the contract's: no usable slot, incomplete, below the minimum, a missing reward, a contract error;
then the rewards are normalized. ``should_accept_fn`` and freshness come after, elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from forebay.errors import ContractError
from forebay.outcomes import RejectReason, ResultKind, SlotOutcome
from forebay.wire.envelopes import GroupRules, GroupSummary, RolloutSummary, RowSummary, SlotHeader
from forebay_collector.normalization import normalize_group

__all__ = ["Decision", "decide"]


@dataclass(frozen=True, slots=True)
class Decision:
    """Accepted so far where `reason` is None. `summary` has the usable rollouts in either case."""

    summary: GroupSummary
    reason: RejectReason | None = None
    detail: str = ""


def decide(task_id: int, group_size: int, rules: GroupRules, headers: Mapping[int, SlotHeader]) -> Decision:
    """Decide on a group whose every slot has ended; `headers` has one for each index below `group_size`."""
    usable = [headers[idx] for idx in range(group_size) if headers[idx].outcome == SlotOutcome.USABLE]
    summary = GroupSummary(
        task=task_id,
        group_size=group_size,
        rollouts=[RolloutSummary(h.idx, h.attempt, list(h.rows), h.reference) for h in usable],
        rows_bytes=sum(h.rows_bytes for h in usable),
    )

    def reject(reason: RejectReason, detail: str) -> Decision:
        return Decision(summary, reason, detail)

    if not usable:
        return reject(RejectReason.NO_USABLE_SLOT, _why_unusable(headers))
    if rules.drop_incomplete_group and len(usable) < group_size:
        return reject(RejectReason.INCOMPLETE, f"{len(usable)} of {group_size} slots usable; {_why_unusable(headers)}")
    if len(usable) < rules.min_usable_group_size:
        need = rules.min_usable_group_size
        return reject(
            RejectReason.BELOW_MINIMUM, f"{len(usable)} usable slots, {need} needed; {_why_unusable(headers)}"
        )
    kinds = {h.result_kind for h in usable}
    if rules.reward_normalization and any(row.reward is None for h in usable for row in h.rows):
        return reject(RejectReason.MISSING_REWARD, "a row has no reward to normalize")
    if len(kinds) > 1:
        return reject(
            RejectReason.CONTRACT_ERROR, f"results of different kinds in one group: {', '.join(sorted(kinds))}"
        )
    if ResultKind.INTERACTIONS in kinds:
        return reject(RejectReason.CONTRACT_ERROR, "interaction results are not supported by this release")
    if not rules.reward_normalization:
        return Decision(summary)
    try:
        return Decision(_normalized(summary))
    except ContractError as error:
        return reject(RejectReason.CONTRACT_ERROR, str(error))


def _normalized(summary: GroupSummary) -> GroupSummary:
    rewards = [[row.reward or 0.0 for row in rollout.rows] for rollout in summary.rollouts]
    shifted = normalize_group(rewards, [rollout.reference for rollout in summary.rollouts])
    rollouts = [
        dataclasses.replace(
            rollout, rows=[_with_reward(row, value) for row, value in zip(rollout.rows, new, strict=True)]
        )
        for rollout, new in zip(summary.rollouts, shifted, strict=True)
    ]
    return dataclasses.replace(summary, rollouts=rollouts, rewards_normalized=True)


def _with_reward(row: RowSummary, reward: float) -> RowSummary:
    raw = row.reward if row.original_reward is None else row.original_reward
    return dataclasses.replace(row, reward=reward, original_reward=raw)


def _why_unusable(headers: Mapping[int, SlotHeader]) -> str:
    """The causes, most frequent first, each once."""
    causes: dict[str, int] = {}
    for header in headers.values():
        if header.outcome == SlotOutcome.REJECTED:
            cause = "the workflow returned None"
        elif header.outcome == SlotOutcome.FAILED:
            cause = f"failed({header.kind}): {header.reason}"
        else:
            continue
        causes[cause] = causes.get(cause, 0) + 1
    ranked = sorted(causes.items(), key=lambda item: -item[1])
    return "; ".join(f"{count} x {cause}" for cause, count in ranked[:3])
