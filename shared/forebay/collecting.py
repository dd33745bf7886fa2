"""Groups that are asked for by their task ids (contract, section 13: ``wait_for_task``, ``rollout_batch``).

They do not go through the batches: each is handed over by itself once it has been decided on. Statistics of the batch,
where a group is normalized by such, are those of all groups that one call asks for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from forebay.batches import CollectedRollouts, Watch, load_rows
from forebay.errors import FrameError, GroupNotDeliveredError
from forebay.group_rewards import normalized_batch, packed_rewards
from forebay.metrics import scope_metrics, scope_of
from forebay.settings import RunSettings
from forebay.store.records import Collected
from forebay.store.store import Store, run_stopped
from forebay.wire.envelopes import GroupSummary

__all__ = ["collect_groups"]

_FIRST_POLL_S = 0.01
_LONGEST_POLL_S = 0.25


async def collect_groups(
    store: Store, settings: RunSettings, task_ids: Sequence[int], timeout_s: float | None, *, is_eval: bool = False
) -> CollectedRollouts:
    """Wait for these groups, one after the other, and take them; `timeout_s` bounds the whole wait.

    Raises:
        StallError: they have not all ended in time.
        CollectorUnavailableError: no collector lives.
        RunStoppedError: the run has stopped itself before they ended.
        GroupNotDeliveredError: one is unknown, or is delivered in a batch.
        RowsMissingError: Redis has lost rows of one.
        FrameError: what is kept of one cannot be read; it is named.
    """
    watch = Watch(store, settings, timeout_s, "result")
    groups: list[GroupSummary] = []
    ended: dict[int, str] = {}
    others: list[Collected] = []
    version = 0
    for task_id in task_ids:
        found = await _one(store, watch, task_id)
        if found.state == "group":
            groups.append(_summary(task_id, found.summary))
            version = found.version
        else:
            ended[task_id] = f"{found.state}: {found.detail}"
            others.append(found)
    rows = await load_rows(store, groups, "the groups that were asked for")
    normalized = normalized_batch(groups)
    at = 0
    for group in normalized:
        for rollout in group.rollouts:
            for summary in rollout.rows:
                rows[at].reward, rows[at].original_reward = summary.reward, summary.original_reward
                at += 1
    await store.discard([group.task for group in groups], packed_rewards(normalized))
    metrics = scope_metrics(
        normalized,
        scope_of(is_eval=is_eval),
        rejected=[(one.group_size, one.usable, one.detail) for one in others if one.state == "rejected"],
        evicted=[(one.group_size, one.usable) for one in others if one.state == "evicted"],
    )
    return CollectedRollouts(version=version, groups=normalized, rows=rows, ended=ended, metrics=metrics)


def _summary(task_id: int, packed: bytes) -> GroupSummary:
    try:
        return GroupSummary.unpack(packed)
    except FrameError as error:
        raise FrameError(f"the result of group {task_id} cannot be read: {error}") from None


async def _one(store: Store, watch: Watch, task_id: int) -> Collected:
    pause = _FIRST_POLL_S
    while True:
        found = await store.collect(task_id)
        match found.state:
            case "wait":
                await watch.check(None)
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_POLL_S)
            case "stopped":
                raise run_stopped(found.detail)
            case "batched":
                raise GroupNotDeliveredError(
                    f"group {task_id} is in batch {found.detail}: read the batches, or submit it with batched=False"
                )
            case "unknown":
                raise GroupNotDeliveredError(
                    f"group {task_id} is not known: it was never submitted to this run, was collected before, or ended "
                    "more than an hour ago"
                )
            case _:
                return found
