"""Batches as a trainer gets them, and the stream they come from (contract, section 13)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import structlog

from forebay.errors import CollectorUnavailableError, FrameError, RowsMissingError, StallError
from forebay.shares import ShareOf, deal, tokens_of, trained_tokens_of
from forebay.store.records import BatchEntry, Cursor, RunStatus
from forebay.store.store import Store, run_stopped
from forebay.trajectories import TrajBatchMeta
from forebay.wire.codec import decode_rows
from forebay.wire.envelopes import BatchIndex, GroupSummary
from forebay.wire.rows import Row
from forebay.wire.tensors import RolloutGroup, common_keys, pad_rows, to_torch, warn_of

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
    "explain",
    "load_rows",
]

log = structlog.get_logger(__name__)

_POLL_S = 0.25
_TAKE_OVER_S = 4.0
"""After the lease has run out, how long another collector may take to lead, or a supervisor to start one."""
_ROWS_PER_READ = 256
_MAX_SPOILED = 2
"""Batches in a row that a reader sets aside. A third that it cannot read means that the fault is not the batch's: it is
kept, and the reader raises."""


@dataclass(slots=True, kw_only=True)
class Rollouts:
    """Accepted groups and their rows."""

    version: int
    """The run's version when they were handed over."""
    groups: list[GroupSummary]
    rows: list[Row] = field(repr=False)
    """In group, rollout, row order."""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def group_index(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[rows]: the position in `groups` of each row's group."""
        counts = [sum(len(rollout.rows) for rollout in group.rollouts) for group in self.groups]
        return np.repeat(np.arange(len(counts)), counts)

    @property
    def rollout_groups(self) -> list[RolloutGroup]:
        """For each group, which rows belong to which rollout."""
        return [
            RolloutGroup(
                row_counts=tuple(len(rollout.rows) for rollout in group.rollouts),
                rewards=tuple(rollout.reference for rollout in group.rollouts),
                sample_idx=tuple(rollout.sample_idx for rollout in group.rollouts),
            )
            for group in self.groups
        ]

    def select(self, places: Sequence[int]) -> Rollouts:
        """The groups at these places of `groups`, in this order, with their rows."""
        index = self.group_index
        rows = [self.rows[int(at)] for place in places for at in np.flatnonzero(index == place)]
        return Rollouts(version=self.version, groups=[self.groups[place] for place in places], rows=rows)

    @property
    def task_ids(self) -> list[int]:
        """What a checkpoint is to remember of them for ``reconcile``: their ids, and whose prompts they had."""
        return [task for group in self.groups for task in (group.task, group.parent) if task is not None]

    @property
    def normalized_groups(self) -> list[bool]:
        """For each group, whether its rewards are normalized already."""
        return [group.rewards_normalized for group in self.groups]

    @property
    def rewards_normalized(self) -> bool:
        """Whether rewards are normalized already, so that a trainer must not do it again (contract, section 5).

        True where those of any group are. Groups differ only where they were submitted so; `normalized_groups` says
        which are.
        """
        return any(self.normalized_groups)

    @property
    def tokens(self) -> int:
        """Real tokens, prompts included."""
        return sum(row.seqlen for row in self.rows)

    def arrays(self, *, pad_token_id: int = 0) -> dict[str, Any]:
        """All rows as numpy arrays [B, S], padded to the right (contract, section 3).

        ``rewards`` is NaN for a row without one, if any row has one; another key that only some rows carry is left out.
        A ForebayWarning names the keys and the task ids of the groups.
        """
        return pad_rows(self.rows, pad_token_id=pad_token_id, tasks=self._tasks)

    def tensors(self, *, pad_token_id: int = 0) -> dict[str, Any]:
        """All rows as torch tensors [B, S], as :meth:`arrays` makes them."""
        return to_torch(self.arrays(pad_token_id=pad_token_id))

    @property
    def meta(self) -> TrajBatchMeta:
        """Which rows of ``tensors()`` belong to which group; it takes them apart, splits and shuffles them."""
        groups = self.rollout_groups
        rows = self._rows_by_group()
        return TrajBatchMeta(
            n_trajs=len(groups),
            traj_group_sizes=tuple(len(own) for own in rows),
            traj_seqlens=tuple(max(row.seqlen for row in own) for own in rows),
            rollout_groups=tuple(groups),
        )

    def trajectories(self, *, pad_token_id: int = 0) -> list[dict[str, Any]]:
        """Each group's torch tensors [B, S], padded to its own longest row, with its ``rollout_group``.

        All have the keys of ``tensors()``: what not all rows of the batch carry is left out.
        """
        keys, notes = common_keys(self.rows, self._tasks)
        warn_of(notes)
        return [
            to_torch(pad_rows(rows, pad_token_id=pad_token_id, keys=keys)) | {"rollout_group": group}
            for rows, group in zip(self._rows_by_group(), self.rollout_groups, strict=True)
        ]

    @property
    def _tasks(self) -> list[int]:
        """The task id of each row's group."""
        return [group.task for group in self.groups for rollout in group.rollouts for _ in rollout.rows]

    def _rows_by_group(self) -> list[list[Row]]:
        rows = iter(self.rows)
        return [list(islice(rows, sum(group.row_counts))) for group in self.rollout_groups]


@dataclass(slots=True, kw_only=True)
class BatchData(Rollouts):
    """A batch, or one rank's share of it: after the hand-over its content never changes.

    A share may be empty, where a batch has fewer groups than there are ranks: it has no groups and no rows then,
    ``tensors()`` is ``{}``, and it is to be acknowledged like any other.
    """

    batch_id: int
    partial: bool
    """Fewer groups than ``batch_size``: the end of the data, or a batch of dynamic size."""
    redelivered: bool
    """It was handed to this consumer before."""
    entry: BatchEntry = field(repr=False)
    share: ShareOf | None = field(default=None, repr=False)
    """See `share_of`."""

    @property
    def share_of(self) -> ShareOf:
        """Which rank's share of which batch this is; a trainer of one rank has the whole."""
        return self.share or _share_of(self.groups, 0, 1)


@dataclass(slots=True, kw_only=True)
class CollectedRollouts(Rollouts):
    """Groups that were asked for by their task ids, in that order, but for those that ended without a result."""

    ended: dict[int, str] = field(default_factory=dict)
    """The others: task id -> ``rejected: REASON`` or ``evicted: REASON``."""


def _share_of(groups: Sequence[GroupSummary], rank: int, world_size: int) -> ShareOf:
    tokens = sum(tokens_of(group) for group in groups)
    return ShareOf(rank, world_size, len(groups), tokens, sum(trained_tokens_of(group) for group in groups))


def concatenated(parts: Sequence[Rollouts]) -> Rollouts:
    """All groups of `parts`, in order; the version is the last part's."""
    return Rollouts(
        version=parts[-1].version,
        groups=[group for part in parts for group in part.groups],
        rows=[row for part in parts for row in part.rows],
    )


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
            share=_share_of(index.groups, cursor.rank, cursor.world_size),
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


async def load_rows(store: Store, groups: Sequence[GroupSummary], where: str) -> list[Row]:
    """The rows of `groups`, in order, with the rewards that their summaries say.

    Raises:
        RowsMissingError: Redis has lost some; `where` says what counts them.
        FrameError: some cannot be read; names the group and the slot.
    """
    names = [(group.task, rollout.sample_idx, rollout.attempt) for group in groups for rollout in group.rollouts]
    frames: list[bytes | None] = []
    for at in range(0, len(names), _ROWS_PER_READ):
        frames += await store.read_rows(names[at : at + _ROWS_PER_READ])
    for name, frame in zip(names, frames, strict=True):
        if frame is None:
            raise RowsMissingError(
                f"{where}: the rows of group {name[0]}, slot {name[1]} are gone from Redis; it was "
                "flushed, or lost writes: check its persistence (appendonly yes, appendfsync always)"
            )
    # Decoding is CPU work: off the event loop, which also serves the other calls of this client.
    return await asyncio.to_thread(_rows_of, groups, [frame for frame in frames if frame is not None], where)


def _rows_of(groups: Sequence[GroupSummary], frames: list[bytes], where: str) -> list[Row]:
    out: list[Row] = []
    summaries = [(group.task, rollout) for group in groups for rollout in group.rollouts]
    for (task_id, rollout), frame in zip(summaries, frames, strict=True):
        try:
            found = decode_rows(frame)
            if len(found) != len(rollout.rows):
                raise FrameError(f"there are {len(found)}, and {len(rollout.rows)} in the index")
        except FrameError as error:
            slot = f"group {task_id}, slot {rollout.sample_idx}"
            raise FrameError(f"{where}: the rows of {slot} cannot be read: {error}") from None
        for row, summary in zip(found, rollout.rows, strict=True):
            # The rows were written before rewards were shaped and normalized: the summary has those that count.
            row.reward, row.original_reward = summary.reward, summary.original_reward
            out.append(row)
    return out


class Watch:
    """Turns a wait that cannot end well into an error that says why."""

    def __init__(self, store: Store, settings: RunSettings, timeout_s: float | None, what: str = "batch") -> None:
        self._what = what
        self._store = store
        self._settings = settings
        self._timeout_s = timeout_s
        self._began = self._asked = time.monotonic()
        self._blocked_since: float | None = None
        self._dead_since: float | None = None

    async def check(self, blocked_at_version: int | None) -> None:
        """Say, between two looks, that nothing came. Raises StallError, CollectorUnavailableError."""
        now = time.monotonic()
        self._check_blocked(blocked_at_version, now)
        if self._timeout_s is not None and now - self._began > self._timeout_s:
            raise StallError(
                f"no {self._what} in {self._timeout_s:g} s: {explain(await self._store.status(), self._settings)}"
            )
        if now - self._asked < 1.0:
            return
        self._asked = now
        if await self._store.collector_alive():
            self._dead_since = None
        elif self._dead_since is None:
            self._dead_since = now
        elif now - self._dead_since > _TAKE_OVER_S:
            raise CollectorUnavailableError(
                f"no collector serves run {self._store.keys.run}: no batch can come; start one (`make up` or "
                "`forebay collector`), and read on: nothing is lost"
            )

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


def explain(status: RunStatus, settings: RunSettings) -> str:
    """One line on what the next batch waits for."""
    where = f"{status.queued} groups queued, {status.running} running, {status.ready} of {settings.batch_size} ready"
    if direct := status.direct_queued + status.direct_running:
        where += f"; {direct} groups to be collected by id queued or running"
    if status.stopped is not None:
        return f"the run has stopped itself: {status.stopped}; mend the cause, then `forebay resume`"
    if not status.collector_alive:
        return f"no collector is alive ({where})"
    if status.cut == 0 and status.ready < settings.batch_size:
        ahead = status.delivered_ahead
        if ahead and ahead + settings.batch_size > status.capacity:
            return (
                f"{ahead} groups are handed over ahead of version {status.version}, and max_staleness allows no "
                f"further batch: push the next version ({where})"
            )
    if status.in_flight == 0:
        ends = ", ".join(f"{status.count(name)} {name}" for name in ("delivered", "rejected", "evicted"))
        return f"all {status.count('submitted')} submitted groups have ended ({ends}); submit more, or end the data"
    if not status.workers and status.in_flight:
        return f"no worker is alive ({where}); start one with `forebay worker`"
    if not status.servers:
        return f"no inference server is registered ({where}); set FOREBAY_SERVERS for the workers"
    if status.workers and all(about.get("servers_healthy") == 0 for about in status.workers.values()):
        return f"no inference server answers ({', '.join(status.servers)}; {where})"
    reasons = {name.removeprefix("rejected:"): n for name, n in status.counters.items() if name.startswith("rejected:")}
    if reasons:
        most = max(reasons, key=lambda name: reasons[name])
        where += f"; rejected so far: {status.count('rejected')}, most of them {most} ({reasons[most]})"
    if status.running == direct == 0 and status.ready < settings.batch_size and status.queued == 0:
        return f"too few groups for a batch ({where}); submit more, or end the data (`forebay end`)"
    return where
