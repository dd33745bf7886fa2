"""Reading and assembling the partitions of the results that this collector owns, and committing what is whole.

Invariants, each with its test in ``tests/integration/test_collectors.py``:

- Whoever owns a partition reads it from its start: what stands in the stream has not been committed, whoever read it
  before (``test_killed_collector``).
- All that is changed under a partition carries its epoch. Losing it ends the work in that partition, and in no other
  (``test_a_lost_partition_ends_alone``).
- All owned partitions are read in one call; one that is gained joins at the next, within ``_BLOCK_S``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby

import structlog

from forebay.aio import named_task, stop_tasks
from forebay.errors import ConnectionLostError, FencedError, FrameError
from forebay.store.records import Held, ResultEntry
from forebay.store.store import Store
from forebay.wire.envelopes import GroupRules
from forebay_collector.assembler import Assembled, Assembler
from forebay_collector.committer import Committer

__all__ = ["Partitions"]

log = structlog.get_logger(__name__)

_READ_COUNT = 500
_LEAST_COUNT = 25
_BLOCK_S = 0.5
_COMMITS_AT_ONCE = 16
_AWAY_S = 0.5
_END_S = 1.0
"""How long commits that are cancelled may take to end; one that takes longer is fenced all the same."""


class Partitions:
    """The partitions that one collector owns."""

    def __init__(self, store: Store, committer: Committer) -> None:
        self._store = store
        self._committer = committer
        self._room = asyncio.Semaphore(_COMMITS_AT_ONCE)
        self._owned: dict[int, _Partition] = {}
        self._some = asyncio.Event()

    @property
    def numbers(self) -> list[int]:
        """Those that are owned, sorted."""
        return sorted(self._owned)

    async def own(self, held: Sequence[Held]) -> list[int]:
        """Own these and no others; the numbers of those that were owned before and are to be given up.

        One whose epoch has changed was another's in between: it is read anew.
        """
        kept = {one.partition: one.epoch for one in held if not one.surplus}
        ended = [one for number, one in self._owned.items() if kept.get(number) != one.epoch]
        for one in ended:
            await self._end(one)
        for number, epoch in kept.items():
            if number not in self._owned:
                self._owned[number] = _Partition(number, epoch, self._store, self._committer, self._room)
                log.info("partition.taken", partition=number, epoch=epoch)
        if self._owned:
            self._some.set()
        else:
            self._some.clear()
        surplus = {one.partition for one in held if one.surplus}
        return sorted(surplus | {one.number for one in ended if one.number not in kept})

    async def run(self) -> None:
        """Read and commit until cancelled, through losses of the connection and of partitions."""
        while True:
            await self._some.wait()
            try:
                await self._read()
            except ConnectionLostError as error:
                log.warning("duty.waits", duty="results", reason=str(error))
                for one in self._owned.values():  # what of it was done is not known
                    one.begin_anew = True
                await asyncio.sleep(_AWAY_S)

    async def close(self) -> None:
        """Cancel what is under way; another owner does it again."""
        for one in list(self._owned.values()):
            await self._end(one)

    async def _end(self, one: _Partition) -> None:
        if self._owned.get(one.number) is one:
            del self._owned[one.number]
            log.info("partition.left", partition=one.number, epoch=one.epoch)
        await one.close()

    async def _read(self) -> None:
        for one in list(self._owned.values()):
            await self._work(one, ())
        count = max(_LEAST_COUNT, _READ_COUNT // max(1, len(self._owned)))
        asked = dict(self._owned)
        after = {number: one.after for number, one in asked.items()}
        if not after:
            self._some.clear()
            return
        # In the order in which slots ended, whatever their partition: so groups are committed, and cut, oldest first.
        read = sorted(await self._store.read_results(after, count, _BLOCK_S), key=_age)
        for number, some in groupby(read, key=lambda entry: entry.partition):
            entries = list(some)
            if asked[number].after == after[number]:  # else it begins anew, or stopped in between
                await self._work(asked[number], entries)
            after[number] = entries[-1].entry_id

    async def _work(self, one: _Partition, entries: Sequence[ResultEntry]) -> None:
        """Take in what was read; without entries, look after what is under way."""
        try:
            await one.work(entries)
        except FencedError as error:
            if self._owned.get(one.number) is one:  # else it was given up meanwhile
                log.warning("partition.lost", partition=one.number, epoch=one.epoch, reason=str(error))
            await self._end(one)


class _Partition:
    """One partition, under one epoch."""

    def __init__(self, number: int, epoch: int, store: Store, committer: Committer, room: asyncio.Semaphore) -> None:
        self.number = number
        self.epoch = epoch
        self.after = "0"
        """The last entry that was taken in."""
        self.begin_anew = False
        """What was assembled is not to be trusted: an entry that is no slot's result was counted in, or an answer was
        lost."""
        self._store = store
        self._committer = committer
        self._room = room
        self._closed = False
        self._assembler = Assembler(self._note_unreadable, number)
        self._unreadable: list[tuple[ResultEntry, str]] = []
        self._commits: dict[int, asyncio.Task[None]] = {}
        """The commits under way, by task id."""

    async def close(self) -> None:
        """Stop for good. What the commits raise then is nothing to anybody."""
        self._closed = True
        await self._cancel_commits()

    async def work(self, entries: Sequence[ResultEntry]) -> None:
        """Take in what was read after `after`. Raises FencedError, ConnectionLostError."""
        if self.begin_anew:
            await self._cancel_commits()
            self._assembler = Assembler(self._note_unreadable, self.number)
            self._unreadable.clear()
            self.after, self.begin_anew = "0", False
            return  # what was read is not what comes after that
        self._forget_done_commits()
        for entry in entries:
            if self._closed or self.begin_anew:
                return
            self.after = entry.entry_id
            await self._add(entry)

    async def _cancel_commits(self) -> None:
        commits = list(self._commits.values())
        self._commits.clear()
        await stop_tasks(commits, _END_S)
        for commit in commits:
            if commit.done() and not commit.cancelled():
                commit.exception()  # retrieved: it is of no consequence any more

    def _forget_done_commits(self) -> None:
        """Forget what is done. Raises what a commit raised: then all begins anew from the stream."""
        for task_id in [task_id for task_id, commit in self._commits.items() if commit.done()]:
            self._commits.pop(task_id).result()

    def _note_unreadable(self, entry: ResultEntry, reason: str) -> None:
        self._unreadable.append((entry, reason))

    async def _set_aside(self, entry: ResultEntry, reason: str) -> None:
        # False: the entry left the stream meanwhile, by a commit of its group. Then nothing was wrong with it.
        if await self._store.set_aside_result(self.epoch, entry, reason):
            log.error("result.set_aside", entry=entry.entry_id, task_id=entry.task_id, reason=reason)

    async def _open(self, task_id: int) -> bool:
        """Begin a group; False: it does not run, or not in this partition."""
        known = await self._store.group_rules(task_id, self.number)
        if known is None:
            return False
        packed, size, parent = known
        rules, fault = _rules(task_id, packed)
        if fault:
            await self._store.note_unreadable(self.epoch, str(task_id), "rules", fault, packed, partition=self.number)
        self._assembler.open(task_id, rules, size, parent, fault)
        return True

    async def _add(self, entry: ResultEntry) -> None:
        if entry.fault:
            await self._set_aside(entry, entry.fault)
            return
        if (commit := self._commits.get(entry.task_id)) is not None and not commit.done():
            await self._set_aside_foreign(entry)
            return
        if not self._assembler.knows(entry.task_id) and not await self._open(entry.task_id):
            await self._set_aside(entry, f"group {entry.task_id} has ended, is of another partition, or never was")
            return
        if entry.sample_idx >= (size := self._assembler.size(entry.task_id)):
            await self._set_aside(entry, f"slot {entry.sample_idx} of group {entry.task_id}, which has {size}")
            return
        if self._assembler.holds(entry.task_id, entry.sample_idx):
            await self._set_aside_foreign(entry)
            return
        assembled = self._assembler.add(entry)
        while self._unreadable:
            odd, reason = self._unreadable.pop()
            await self._store.note_unreadable(
                self.epoch, f"{self.number}:{odd.entry_id}", "results", reason, odd.header, partition=self.number
            )
        if assembled is not None:
            await self._begin_commit(assembled)

    async def _begin_commit(self, assembled: Assembled) -> None:
        await self._room.acquire()
        if self._closed:
            self._room.release()
            return
        task = named_task("commit", self._commit(assembled))
        task.add_done_callback(lambda _: self._room.release())
        self._commits[assembled.task_id] = task

    async def _set_aside_foreign(self, entry: ResultEntry) -> None:
        # A second entry for a slot. Where it is the slot's own, the first is not, which the commit finds out.
        if await self._store.foreign_results(entry.task_id, {entry.sample_idx: entry.entry_id}):
            await self._set_aside(entry, _not_its_own(entry.task_id, entry.sample_idx))

    async def _commit(self, group: Assembled) -> None:
        if not await self._committer.commit(self.epoch, group):
            # The group is not forgotten: what is in the stream is read anew, without the entries that are not its own.
            for idx in await self._store.foreign_results(group.task_id, group.entries):
                header = group.headers[idx].reason.encode()
                entry = ResultEntry(group.entries[idx], group.task_id, idx, header, partition=self.number)
                await self._set_aside(entry, _not_its_own(group.task_id, idx))
            self.begin_anew = True


def _age(entry: ResultEntry) -> tuple[int, ...]:
    return tuple(map(int, entry.entry_id.split("-")))


def _not_its_own(task_id: int, idx: int) -> str:
    return f"it is not the result of slot {idx} of group {task_id}"


def _rules(task_id: int, packed: bytes) -> tuple[GroupRules, str]:
    """The rules of a group, and what is wrong with them: it is rejected once it has ended."""
    try:
        return GroupRules.unpack(packed), ""
    except FrameError as error:
        log.error("rules.unreadable", task_id=task_id, reason=str(error))
        return GroupRules(min_usable_group_size=1), f"its rules are unreadable: {error}"
