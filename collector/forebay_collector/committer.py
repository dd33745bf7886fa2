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

    async def commit(self, epoch: int, group: Assembled) -> None:
        """Decide, dump, commit. Raises FencedError, ConnectionLostError."""
        self._uneven_keys.warn(group.task_id, group.headers.values())
        decision = decide(
            group.task_id, group.group_size, group.rules, group.headers, self._shaping, parent=group.parent
        )
        if group.fault:
            decision = replace(decision, reason=RejectReason.CONTRACT_ERROR, detail=group.fault)
        needs_rows = self._dumper.on or (decision.reason is None and group.rules.should_accept_fn is not None)
        rows: list[Row] | None = None
        if needs_rows and decision.summary.rollouts:
            rows = await self._read(decision.summary)
            if rows is None:
                self._dumper.note_lost(group.task_id)
                decision = replace(decision, reason=RejectReason.ROWS_LOST, detail="rows are gone from Redis")
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
        )
        if done and self._metrics is not None:
            self._metrics.decided(decision.summary, decision.reason)
        if done and decision.reason is not None:
            log.info(
                "group.rejected", task_id=group.task_id, reason=decision.reason, detail=decision.detail[:_MAX_DETAIL]
            )

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

    async def _read(self, summary: GroupSummary) -> list[Row] | None:
        names = [(summary.task, rollout.sample_idx, rollout.attempt) for rollout in summary.rollouts]
        frames = await self._store.read_rows(names)
        whole = [frame for frame in frames if frame is not None]
        if len(whole) < len(names):
            return None
        try:
            return await asyncio.to_thread(lambda: [row for frame in whole for row in decode_rows(frame)])
        except FrameError as error:
            log.error("rows.unreadable", task_id=summary.task, reason=str(error))
            return None
