"""Cuts batches from ready groups, oldest first (contract, section 6).

Rewards that take statistics of the batch are normalized here, in the batch's index alone: what waits in Redis stays as
shaped, so that the groups of a dissolved batch are normalized anew in the next (contract, section 5). Where they are
dumped, the cut also records that their files are to have these rewards (contract, section 11).
"""

from __future__ import annotations

import time

import structlog

from forebay.errors import FrameError
from forebay.group_rewards import normalized_batch, packed_rewards
from forebay.settings import RunSettings
from forebay.store.store import Store
from forebay.wire.envelopes import BatchIndex, GroupSummary
from forebay_collector.metrics import CollectorMetrics

__all__ = ["Cutter"]

log = structlog.get_logger(__name__)

_TRIES = 100
_EVICT_EVERY_S = 0.25


class Cutter:
    """Cuts whenever enough groups are ready; at the end of the data, whatever is left."""

    def __init__(self, store: Store, settings: RunSettings, metrics: CollectorMetrics | None = None) -> None:
        self._store = store
        self._metrics = metrics or CollectorMetrics(settings)
        self._early_cancel = settings.early_cancel
        self._batch_size = settings.batch_size
        self._looked = 0.0

    async def cut(self, epoch: int) -> int:
        """Evict what is stale and cut all batches that can be: how many. Raises FencedError."""
        await self._evict(epoch)
        cut = tries = 0
        while tries < _TRIES:  # a bound: each further try means that something changed under our hands
            # Counted before they are fetched: most wake-ups find too few, and a summary is not free.
            rule = await self._store.cut_rule()
            partial = rule.ready < self._batch_size
            due = not partial or rule.partial or (rule.dynamic and rule.settled >= self._batch_size)
            if not rule.ready or not due:
                break
            ready = await self._store.ready(self._batch_size)
            if len(ready) < min(rule.ready, self._batch_size):
                await self._store.spoil_odd(epoch, self._batch_size)
                tries += 1
                continue
            summaries = await self._summaries(epoch, ready)
            if summaries is None:
                tries += 1
                continue
            groups = normalized_batch(summaries)
            status = await self._store.status()
            told = await self._store.tally()
            index = BatchIndex(groups, partial=partial, metrics=self._metrics.of_batch(groups, status, told))
            tasks = [task_id for task_id, _ in ready]
            batch_id = await self._store.cut(epoch, index.pack(), tasks, packed_rewards(groups), told)
            if batch_id is None:
                tries += 1
                continue
            cut += 1
            self._metrics.cut(groups, status)
            log.info("batch.cut", batch_id=batch_id, groups=len(groups), partial=partial)
        return cut

    async def _summaries(self, epoch: int, ready: list[tuple[int, bytes]]) -> list[GroupSummary] | None:
        """The summaries of ready groups; None where some could not be read, which are evicted."""
        out: list[GroupSummary] = []
        for task_id, packed in ready:
            try:
                summary = GroupSummary.unpack(packed)
                if summary.task != task_id:
                    raise FrameError(f"it is of group {summary.task}")
            except FrameError as error:
                log.error("summary.unreadable", task_id=task_id, reason=str(error))
                await self._store.spoil_group(epoch, task_id, f"its summary cannot be read: {error}", packed)
            else:
                out.append(summary)
        return out if len(out) == len(ready) else None

    async def _evict(self, epoch: int) -> None:
        """Look through the waiting groups, now and then; those of a batch are judged at its cut in any case."""
        now = time.monotonic()
        if now - self._looked < _EVICT_EVERY_S:
            return
        self._looked = now
        evicted = await self._store.evict_stale(epoch, running_too=self._early_cancel)
        if evicted:
            log.info("groups.evicted", count=len(evicted), task_ids=evicted[:20])
