"""From an assembled group to its committed outcome.

Read rows (only where a filter or a dump needs them) -> decide -> filter -> dump -> commit. The dump comes before the
commit: whoever dies in between does it again and replaces the same file, so no committed group lacks its dump.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import structlog

from forebay.errors import FrameError
from forebay.outcomes import RejectReason
from forebay.reward_rules import RewardShaping
from forebay.store.store import Store
from forebay.wire.codec import decode_rows
from forebay.wire.envelopes import GroupSummary
from forebay.wire.rows import Row
from forebay_collector.accept import AcceptFilter
from forebay_collector.assembler import Assembled
from forebay_collector.decision import Decision, decide
from forebay_collector.dump import Dumper
from forebay_collector.metrics import CollectorMetrics
from forebay_collector.uneven_keys import UnevenKeys

__all__ = ["Committer"]

log = structlog.get_logger(__name__)

_MAX_DETAIL = 500


class Committer:
    """Decides on assembled groups, and records what was decided."""

    def __init__(
        self,
        store: Store,
        accept: AcceptFilter,
        dumper: Dumper,
        shaping: RewardShaping,
        metrics: CollectorMetrics | None = None,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._shaping = shaping
        self._accept = accept
        self._dumper = dumper
        self._uneven_keys = UnevenKeys()

    async def commit(self, epoch: int, group: Assembled) -> bool:
        """Decide, dump, commit, under the `epoch` of the group's partition. Raises FencedError, ConnectionLostError.

        Returns:
            False, with nothing recorded, where a result entry that the group was put together from is not its own.
        """
        self._uneven_keys.warn(group.task_id, group.headers.values())
        decision = decide(
            group.task_id, group.group_size, group.rules, group.headers, self._shaping, parent=group.parent
        )
        if group.fault:
            decision = replace(decision, reason=RejectReason.CONTRACT_ERROR, detail=group.fault)
        needs_rows = self._dumper.on or (decision.reason is None and group.rules.should_accept_fn is not None)
        rows: list[Row] | None = None
        lost = ""
        if needs_rows and decision.summary.rollouts:
            rows, lost = await self._read(epoch, group.partition, decision.summary)
            if rows is None:
                self._dumper.note_lost(group.task_id)
                decision = replace(decision, reason=RejectReason.ROWS_LOST, detail=lost)
        if decision.reason is None and group.rules.should_accept_fn is not None and rows is not None:
            reason, detail = await self._accept.judge(group.rules.should_accept_fn, decision.summary, rows)
            decision = replace(decision, reason=reason, detail=detail)
        folder = await self._dump(group, decision, rows)
        done = await self._store.commit(
            epoch,
            group.task_id,
            "ready" if decision.reason is None else "rejected",
            reason=decision.reason or "",
            summary=decision.summary.pack(),
            head=decision.summary.head,
            dump_folder=folder,
            detail=decision.detail[:_MAX_DETAIL],
            usable=len(decision.summary.rollouts),
            partition=group.partition,
            entries=[group.entries[idx] for idx in sorted(group.entries)],
        )
        if done is None:
            return False
        if done and self._metrics is not None:
            self._metrics.decided(decision.summary, decision.reason)
        if done and decision.reason is not None:
            log.info(
                "group.rejected", task_id=group.task_id, reason=decision.reason, detail=decision.detail[:_MAX_DETAIL]
            )
        return True

    async def _dump(self, group: Assembled, decision: Decision, rows: Sequence[Row] | None) -> str:
        """Write the group's file: its folder, or "" if it has none."""
        if rows is None or not self._dumper.on:
            return ""
        summary = decision.summary
        current = 0
        if any(row.trained and row.tail < 0 for rollout in summary.rollouts for row in rollout.rows):
            current = await self._store.version()  # stands in for versions that rows do not have
        folder = self._dumper.folder(summary, group.rules, current)
        outcome = "accepted" if decision.reason is None else "rejected"
        done = await self._dumper.write(folder, summary, rows, group.headers, outcome, decision.reason or "", current)
        return folder if done else ""

    async def _read(self, epoch: int, partition: int, summary: GroupSummary) -> tuple[list[Row] | None, str]:
        """The rows; or None, and why they cannot be had."""
        names = [(summary.task, rollout.sample_idx, rollout.attempt) for rollout in summary.rollouts]
        frames = await self._store.read_rows(names)
        whole = [frame for frame in frames if frame is not None]
        if len(whole) < len(names):
            return None, "rows are gone from Redis"
        rows: list[Row] = []
        for name, rollout, frame in zip(names, summary.rollouts, whole, strict=True):
            try:
                found = await asyncio.to_thread(decode_rows, frame)
                if len(found) != len(rollout.rows):
                    raise FrameError(f"there are {len(found)} rows, and {len(rollout.rows)} in the result's header")
            except FrameError as error:
                reason = f"the rows of slot {rollout.sample_idx} cannot be read: {error}"
                log.error("rows.unreadable", task_id=summary.task, reason=reason)
                await self._store.note_unreadable(
                    epoch, ":".join(map(str, name)), "rows", reason, frame, partition=partition
                )
                return None, reason
            rows += found
        return rows, ""
