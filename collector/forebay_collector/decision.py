"""What becomes of an assembled group: a pure function of its slots' headers (contract, section 4.4).

The order is the contract's: no usable slot, incomplete, below the minimum, a missing reward, a contract error;
then the rewards are shaped, and normalized unless that takes statistics of the batch. ``should_accept_fn`` and
freshness come after, elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forebay.errors import ContractError
from forebay.group_rewards import with_rewards
from forebay.normalization import normalize, shape_rollout
from forebay.outcomes import OnSlotError, RejectReason, SlotOutcome
from forebay.reward_rules import RewardShaping
from forebay.wire.envelopes import GroupRules, GroupSummary, RolloutSummary, SlotHeader

__all__ = ["Decision", "decide"]


@dataclass(frozen=True, slots=True)
class Decision:
    """Accepted so far where `reason` is None. `summary` has the usable rollouts in either case."""

    summary: GroupSummary
    reason: RejectReason | None = None
    detail: str = ""


def decide(
    task_id: int,
    group_size: int,
    rules: GroupRules,
    headers: Mapping[int, SlotHeader],
    shaping: RewardShaping,
    *,
    parent: int | None = None,
) -> Decision:
    """Decide on a group whose every slot has ended; `headers` has one for each index below `group_size`."""
    usable = [headers[idx] for idx in range(group_size) if headers[idx].outcome == SlotOutcome.USABLE]
    summary = _summary(task_id, group_size, rules, usable, parent)

    def reject(reason: RejectReason, detail: str) -> Decision:
        return Decision(summary, reason, detail)

    if not usable:
        return reject(RejectReason.NO_USABLE_SLOT, _why_unusable(headers))
    failed = any(header.outcome == SlotOutcome.FAILED for header in headers.values())
    if (rules.drop_incomplete_group and len(usable) < group_size) or (
        failed and rules.on_slot_error == OnSlotError.DROP_GROUP
    ):
        return reject(RejectReason.INCOMPLETE, f"{len(usable)} of {group_size} slots usable; {_why_unusable(headers)}")
    if len(usable) < rules.min_usable_group_size:
        need = rules.min_usable_group_size
        return reject(
            RejectReason.BELOW_MINIMUM, f"{len(usable)} usable slots, {need} needed; {_why_unusable(headers)}"
        )
    if rules.reward_normalization is not None and any(row.reward is None for h in usable for row in h.rows):
        return reject(RejectReason.MISSING_REWARD, "a row has no reward to normalize")
    try:
        _check_kinds(usable)
        return Decision(_rewarded(summary, rules, shaping))
    except ContractError as error:
        return reject(RejectReason.CONTRACT_ERROR, str(error))


def _summary(
    task_id: int, group_size: int, rules: GroupRules, usable: Sequence[SlotHeader], parent: int | None
) -> GroupSummary:
    phases = {name: 0.0 for header in usable for name in header.phases}
    for name in phases:
        phases[name] = sum(header.phases.get(name, 0.0) for header in usable) / len(usable)
    summary = GroupSummary(
        task=task_id,
        group_size=group_size,
        rollouts=[RolloutSummary(h.idx, h.attempt, list(h.rows), h.reference) for h in usable],
        rows_bytes=sum(h.rows_bytes for h in usable),
        is_eval=rules.is_eval,
        parent=parent,
        seconds=max((h.seconds for h in usable), default=0.0),
        phases=phases,
    )
    if usable:
        summary.result_kind = usable[0].result_kind
    return summary


def _check_kinds(usable: Sequence[SlotHeader]) -> None:
    kinds = sorted({header.result_kind for header in usable})
    if len(kinds) > 1:
        raise ContractError(
            f"results of different kinds in one group: {', '.join(kinds)}; a workflow returns one kind for all slots"
        )
    seen = Counter(row.completion for header in usable for row in header.rows if row.completion is not None)
    if twice := [name for name, count in seen.items() if count > 1]:
        raise ContractError(f"the completion id {twice[0]} occurs {seen[twice[0]]} times in one group; ids are unique")


def _rewarded(summary: GroupSummary, rules: GroupRules, shaping: RewardShaping) -> GroupSummary:
    """The rewards shaped, and normalized unless that takes statistics of the batch."""
    norm = rules.reward_normalization
    shaped = [
        shape_rollout(
            [row.reward for row in rollout.rows],
            [row.trained for row in rollout.rows],
            rollout.reference,
            shaping,
            normalizing=norm is not None,
        )
        for rollout in summary.rollouts
    ]
    if norm is not None and not norm.uses_batch:
        (values,) = normalize([shaped], norm)
        return with_rewards(summary, shaped, values, normalized=True)
    out = with_rewards(summary, shaped, [rollout.rows for rollout in shaped])
    return out if norm is None else dataclasses.replace(out, batch_norm=norm)


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
