"""The stream that a trainer reads batches from, and what its waits say (contract, section 13)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Self

import structlog

from forebay.errors import CollectorUnavailableError, FrameError, StallError
from forebay.rollouts import BatchData, CollectedRollouts, Rollouts, concatenated, load_rows, share_of
from forebay.shares import deal, tokens_of
from forebay.stalls import Diagnosis, diagnose
from forebay.store.records import BatchEntry, Cursor
from forebay.store.store import Store, run_stopped
from forebay.wire.envelopes import BatchIndex

if TYPE_CHECKING:
    from forebay.settings import RunSettings

__all__ = [
    "AsyncBatch",
    "AsyncBatchStream",
    "BatchData",
    "CollectedRollouts",
    "Rollouts",
    "Watch",
    "concatenated",
    "load_rows",
]

log = structlog.get_logger(__name__)

_POLL_S = 0.25
_TAKE_OVER_S = 4.0
"""After the lease has run out, how long another collector may take to lead, or a supervisor to start one."""
_MAX_SPOILED = 2
"""Batches in a row that a reader sets aside. A third that it cannot read means that the fault is not the batch's: it is
kept, and the reader raises."""


class AsyncBatch(BatchData):
    """A batch of an :class:`AsyncBatchStream`."""

    stream: AsyncBatchStream

    async def ack(self) -> bool:
        """This rank has trained on the batch, which goes when all have. False if that was so already."""
        return await self.stream.ack(self)


class AsyncBatchStream:
    """Reads the batches of a run, one cursor for each rank of a consumer; unacknowledged batches come again.

    A reader that raised goes on where it was when it is asked again.
    """

    def __init__(
        self,
        store: Store,
        run_settings: RunSettings,
        cursor: Cursor,
        *,
        resume_after: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._store = store
        self._settings = run_settings
        self._cursor = cursor
        self._resume_after = resume_after
        self.timeout_s = timeout_s
        """Bounds the wait for each batch; None: no bound."""
        self._after = "0"
        self._era = store.era
        self._lock = asyncio.Lock()
        self._joined = False
        self._missed: int | None = None
        self._spoiled = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing to release: what was not acknowledged stays pending and comes again."""

    def __aiter__(self) -> AsyncIterator[AsyncBatch]:
        return self

    async def __anext__(self) -> AsyncBatch:
        batch = await self.next()
        if batch is None:
            raise StopAsyncIteration
        return batch

    async def next(self, *, meanwhile: Callable[[], Awaitable[None]] | None = None) -> AsyncBatch | None:
        """The next batch; None when the data has ended and everything was handed over.

        A batch that cannot be read is set aside, with its reason in the log and in the drop ledger, and the next one
        comes; two in a row are, the third is an error. So is one that other ranks have already, or that a follower
        cannot read.

        `meanwhile` is awaited after each look that found nothing, several times a second: who also submits does it
        there.

        Raises:
            CollectorUnavailableError: no collector lives.
            StallError: nothing can come before the version moves (after ``stall_timeout_s``), or none came in time.
            RowsMissingError: Redis has lost rows that the batch counts.
            FrameError: three batches in a row cannot be read, or one that others read too; it is kept, and comes again.
            RunStoppedError: the run has stopped itself; what was cut before is handed over first.
            RolledBackError: Redis has gone back in time; call ``reconcile``, and read on.
            ConsumerError: another consumer drives the version; pass ``follows=True``.
            BatchGoneError: a batch after `resume_after` is not kept any more.
        """
        async with self._lock:  # callers at once get a batch each
            return await self._next(meanwhile)

    async def _next(self, meanwhile: Callable[[], Awaitable[None]] | None) -> AsyncBatch | None:
        if not self._joined:
            if self._resume_after is None:
                await self._store.join(self._cursor)
            else:
                await self._store.resume_after(self._cursor, self._resume_after)
            self._joined = True
        watch = Watch(self._store, self._settings, self.timeout_s)
        while True:
            if self._era != self._store.era:  # reconciled: the place in the stream says nothing of what was trained on
                self._era, self._after = self._store.era, "0"
            taken = await self._store.take(self._cursor, "reader", self._after)
            if taken.batch is not None:
                try:
                    batch = await self._load(taken.batch)
                except FrameError as error:
                    await self._spoil(taken.batch, str(error))
                    continue
                self._spoiled = 0
                self._after = taken.batch.entry_id
                return batch
            if taken.end:
                return None
            if taken.stopped is not None:
                raise run_stopped(taken.stopped)
            if meanwhile is not None:
                await meanwhile()
            await watch.check(taken.blocked_at_version)
            if self._cursor.follows:
                await asyncio.sleep(_POLL_S)  # a batch of the stream is there for it once the driver has it
            else:
                await self._store.wait_for_batch(taken.seen or self._after, _POLL_S)

    async def ack(self, batch: BatchData) -> bool:
        """This rank has trained on `batch`, which goes when all have. False if that was so already."""
        return await self._store.ack(self._cursor, batch.entry)

    async def _spoil(self, batch: BatchEntry, reason: str) -> None:
        if self._spoiled >= _MAX_SPOILED:
            raise FrameError(
                f"batch {batch.batch_id} cannot be read, nor could the {self._spoiled} before it, which were set aside "
                f"(`forebay drops`): {reason}; run the same release everywhere, then read on"
            )
        groups = await self._store.spoil_batch(self._cursor, batch, reason)
        if groups is None:
            raise FrameError(
                f"batch {batch.batch_id} cannot be read here, and stays, for others have it: {reason}; run the same "
                f"release everywhere, or begin all ranks anew with resume_after={batch.batch_id}, which passes over it"
            )
        self._spoiled += 1
        log.error("batch.set_aside", batch_id=batch.batch_id, groups_evicted=groups, reason=reason)

    async def _load(self, entry: BatchEntry) -> AsyncBatch:
        index = BatchIndex.unpack(entry.index)
        cursor = self._cursor
        share = deal([tokens_of(group) for group in index.groups], cursor.world_size)[cursor.rank]
        groups = [index.groups[place] for place in share]
        self._warn_of_missed(entry)
        batch = AsyncBatch(
            batch_id=entry.batch_id,
            version=entry.version,
            groups=groups,
            partial=index.partial,
            redelivered=entry.redelivered,
            rows=await load_rows(self._store, groups, f"batch {entry.batch_id}"),
            entry=entry,
            metrics=index.metrics,
            share=share_of(index.groups, cursor.rank, cursor.world_size),
        )
        batch.stream = self
        return batch

    def _warn_of_missed(self, entry: BatchEntry) -> None:
        if self._missed is not None and entry.missed > self._missed:
            log.warning(
                "batches.missed",
                consumer=self._cursor.consumer,
                batches=entry.missed - self._missed,
                before=entry.batch_id,
                remedy="read faster, or raise max_follower_lag",
            )
        self._missed = entry.missed


class Watch:
    """Turns a wait that cannot end well into an error that says why."""

    def __init__(self, store: Store, settings: RunSettings, timeout_s: float | None, what: str = "batch") -> None:
        self._what = what
        self._store = store
        self._settings = settings
        self._timeout_s = timeout_s
        self._began = self._asked = time.monotonic()
        self._blocked_since: float | None = None
        self._missing: dict[int | None, float] = {}
        """Partitions that nobody owns, and None where nobody leads, by since when."""
        self._warn_s = settings.stall_warn_s

    async def check(self, blocked_at_version: int | None) -> None:
        """Say, between two looks, that nothing came. Raises StallError, CollectorUnavailableError."""
        now = time.monotonic()
        self._check_blocked(blocked_at_version, now)
        if self._timeout_s is not None and now - self._began > self._timeout_s:
            raise StallError(f"no {self._what} in {self._timeout_s:g} s: {(await self._diagnosis()).verdict}")
        if now - self._began > self._warn_s:
            self._warn_s *= 2
            await self._warn(now - self._began)
        if now - self._asked < 1.0:
            return
        self._asked = now
        await self._check_collectors(now)

    async def _check_collectors(self, now: float) -> None:
        owners = await self._store.owners()
        missing: set[int | None] = {*owners.unowned, *(() if owners.leader else (None,))}
        self._missing = {what: self._missing.get(what, now) for what in missing}
        run = self._store.keys.run
        if None in missing and now - self._missing[None] > _TAKE_OVER_S:
            raise CollectorUnavailableError(
                f"no collector serves run {run}: no batch can come; start one (`make up` or "
                "`forebay collector`), and read on: nothing is lost"
            )
        patience_s = max(_TAKE_OVER_S, self._settings.collector_lease_s)
        unread = sorted(what for what in missing if what is not None and now - self._missing[what] > patience_s)
        if unread:
            raise CollectorUnavailableError(
                f"no collector reads partition {', '.join(map(str, unread))} of the results of run {run}, though one "
                "leads: the groups in it cannot end; look at the collectors' logs, or start another one "
                "(`forebay collector`), and read on: nothing is lost"
            )

    async def _diagnosis(self) -> Diagnosis:
        return diagnose(await self._store.look(), self._settings)

    async def _warn(self, waited_s: float) -> None:
        found = await self._diagnosis()
        event = f"{self._what}.waiting"
        log.warning(event, waited_s=round(waited_s, 1), cause=found.cause.value, why=found.verdict, **found.particulars)

    def _check_blocked(self, version: int | None, now: float) -> None:
        if version is None:
            self._blocked_since = None
            return
        self._blocked_since = self._blocked_since or now
        waited = now - self._blocked_since
        if waited > self._settings.stall_timeout_s:
            raise StallError(
                f"waited {waited:.0f} s at version {version}: {self._settings.capacity} groups are handed over ahead "
                "of the version, all that max_staleness allows; push the next version (set_version or "
                "update_weights_from_disk), or set batches_per_version to the batches taken for each version"
            )
