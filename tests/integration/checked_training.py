"""A run whose every call is held to the reference: the trainer's calls, and a whole pass that brings all to an end."""

from __future__ import annotations

from dataclasses import dataclass, field

from checked_run import CheckedRun, Collector
from reference import Batch

from forebay.errors import BatchGoneError, ConsumerError, VersionError
from forebay.outcomes import SlotOutcome
from forebay.settings import RunSettings
from forebay.store import Store
from forebay.store.records import BatchEntry, Cursor, Taken
from forebay.wire.envelopes import BatchIndex

__all__ = ["CheckedTraining", "Reader"]

_ROUNDS = 60


@dataclass
class Reader:
    """One rank of a consumer, as the process that reads has it in memory."""

    cursor: Cursor
    after: str = "0"
    number: int = 0
    """The batch of entry `after`."""
    held: list[BatchEntry] = field(default_factory=list)
    """Handed over and not acknowledged."""


def world(size: int, consumer: str = "trainer", *, follows: bool = False) -> list[Reader]:
    """The ranks of a consumer that has just started."""
    return [Reader(Cursor(consumer, rank, size, follows)) for rank in range(size)]


class CheckedTraining(CheckedRun):
    """The whole run."""

    def __init__(self, store: Store, rules: RunSettings) -> None:
        super().__init__(store, rules)
        self.trainer = world(1)
        self.follower = world(1, "watcher", follows=True)[0]
        self.content: dict[int, bytes] = {}
        """The index of each batch, as it was first handed over."""

    async def take(self, reader: Reader, *, again: bool = False) -> str:
        """Ask for the next batch."""
        cursor, after = reader.cursor, reader.number
        expected, batch, redelivered = self._join_and_take(cursor, after)
        await self.store.join(cursor)
        taken = await self.call(lambda: self.store.take(cursor, "reader", reader.after), again=again)
        if again:
            repeated = self.model.take(cursor, after)
            assert repeated[:2] == (expected, batch), "the reference itself changed"
        assert _kind(taken) == expected
        if taken.batch is None or batch is None:
            return expected
        entry = taken.batch
        assert (entry.batch_id, entry.redelivered) == (batch.number, redelivered)
        assert entry.version == batch.version
        assert entry.missed == self.model.missed.get(cursor.consumer, 0)
        assert self.content.setdefault(entry.batch_id, entry.index) == entry.index, "a frozen batch changed"
        groups = BatchIndex.unpack(entry.index).groups
        assert [group.task for group in groups] == batch.tasks
        names = [(group.task, rollout.sample_idx, rollout.attempt) for group in groups for rollout in group.rollouts]
        assert all(rows is not None for rows in await self.store.read_rows(names)), "rows of a batch are gone"
        reader.after, reader.number = entry.entry_id, entry.batch_id
        reader.held.append(entry)
        return expected

    def _join_and_take(self, cursor: Cursor, after: int) -> tuple[str, Batch | None, bool]:
        assert self.model.enter(cursor)
        return self.model.take(cursor, after)

    async def refuse_second_driver(self) -> None:
        """Another consumer asks to drive."""
        if self.model.driver is None:
            return
        other = Cursor("other")

        async def ask() -> bool:
            try:
                await self.store.join(other)
            except ConsumerError:
                return False
            return True

        assert await self.unchanged(ask) is False

    async def ack(self, reader: Reader, *, again: bool = False) -> None:
        """The oldest batch in hand is done with."""
        entry = reader.held.pop(0)
        first = await self.call(lambda: self.store.ack(reader.cursor, entry), again=again)
        assert first == self.model.ack(reader.cursor, entry.batch_id)

    def restart(self, size: int) -> None:
        """The trainer has died, and begins anew with so many ranks."""
        self.trainer = world(size)

    def restart_follower(self) -> None:
        """The follower has died, and begins anew."""
        self.follower = Reader(self.follower.cursor)

    async def resume_after(self, number: int, *, again: bool = False) -> None:
        """The trainer begins anew from a checkpoint; each rank says so before it reads."""
        self.restart(len(self.trainer))
        for reader in self.trainer:
            assert self.model.enter(reader.cursor)
            done = await self.call(lambda one=reader: self._resume(one, number), again=again)  # type: ignore[misc]
            assert done == self.model.resume_after(reader.cursor, number)
            if done:
                reader.number = 0

    async def _resume(self, reader: Reader, number: int) -> bool:
        try:
            await self.store.resume_after(reader.cursor, number)
        except BatchGoneError:
            return False
        return True

    async def spoil_batch(self, reader: Reader, *, again: bool = False) -> None:
        """The oldest batch in hand cannot be read."""
        entry = reader.held.pop(0)
        answer = await self.call(lambda: self.store.spoil_batch(reader.cursor, entry, "odd"), again=again)
        assert answer == self.model.spoil_batch(reader.cursor, entry.batch_id)

    async def set_version(self, version: int, *, again: bool = False) -> None:
        """The trainer has stepped."""

        async def ask() -> bool:
            try:
                await self.store.set_version(version)
            except VersionError:
                return False
            return True

        if version < self.model.version:
            assert await self.unchanged(ask) is False
        else:
            assert await self.call(ask, again=again) == self.model.set_version(version)

    async def recover(self, version: int, *, again: bool = False) -> None:
        """The trainer begins again at a version."""
        before = await self.call(lambda: self.store.recover(version), again=again, ignoring=("recoveries",))
        assert before == self.model.recover(version)
        if again:
            self.model.recover(version)

    async def set_dynamic(self, *, dynamic: bool, again: bool = False) -> None:
        """Whether batches are cut of what has been settled."""
        await self.call(lambda: self.store.set_dynamic(dynamic), again=again)
        if self.model.dynamic is not dynamic:
            self.model.dynamic, self.model.settled = dynamic, len(self.model.ready)

    async def resume(self, *, again: bool = False) -> None:
        """A run that has stopped itself goes on."""
        assert await self.call(self.store.resume, again=again) == self.model.resume()

    async def collect(self, task: int, *, again: bool = False) -> str:
        """Ask for a group by its id."""
        group = self.model.groups.get(task)
        if group is not None and group.state in {"held", "ready"}:
            self.old.discard(task)
        answer = await self.call(lambda: self.store.collect(task), again=again)
        assert answer.state == self.model.collect(task)
        return answer.state

    async def discard(self, task: int, *, again: bool = False) -> None:
        """The rows of a collected group are read."""
        assert await self.call(lambda: self.store.discard([task]), again=again) == self.model.discard(task)

    # -- passes -------------------------------------------------------------------------------------------------------

    async def advance(
        self, one: Collector, *, groups: int, until: str = "cut", reason: str = "", again: bool = False
    ) -> None:
        """Run what may run and commit it, up to so many groups, and cut what is due; or only as far as `until`."""
        await self.admit(groups)
        if until == "admit":
            return
        claimed = await self.claim("w1", 4 * groups)
        if until == "claim":
            return
        for attempt in claimed:
            await self.publish(attempt, SlotOutcome.USABLE, version=self.model.version, again=again)
        if until == "publish":
            return
        await self.read(one)
        while one.assembled:
            await self.commit(one, reason, again=again)
        if until == "commit":
            return
        await self.fetch(one)
        await self.cut(one, again=again)

    async def train(self, *, again: bool = False) -> None:
        """Each rank takes a batch, if there is one, and all acknowledge what they have; the trainer steps."""
        kinds = [await self.take(reader, again=again) for reader in self.trainer]
        for reader in self.trainer:
            while reader.held:
                await self.ack(reader, again=again)
        if "batch" in kinds or "blocked" in kinds:
            await self.set_version(self.model.version + 1, again=again)

    async def drain(self) -> None:
        """With everything alive all groups come to an end, in a bounded number of rounds (liveness)."""
        one = Collector("the last")
        await self.lapse_lead()
        await self.lead(one)
        await self.seize(one)
        await self.end_of_data()
        for worker in self.held:
            await self.lapse(worker)
        self.restart(1)
        self.restart_follower()
        for _ in range(_ROUNDS):
            await self.resume()
            await self.reap(one)
            await self.sweep(one)
            await self.evict(one, running_too=False)
            await self.advance(one, groups=64)
            for task in self.model.tasks("held"):
                await self.collect(task)
            for group in list(self.model.groups.values()):
                if group.collected and not group.gone:
                    await self.discard(group.task)
            kind = await self._read_on()
            await self.check()
            if kind == "end" and not any(self.model.tasks(state) for state in ("queued", "running", "held")):
                break
        else:
            raise AssertionError(f"after {_ROUNDS} rounds not all has come to an end: {await self.store.status()}")
        while await self.take(self.follower) == "batch":
            await self.ack(self.follower)
        await self._all_ended()

    async def _read_on(self) -> str:
        (reader,) = self.trainer
        kind = await self.take(reader)
        while kind == "batch":
            await self.ack(reader)
            kind = await self.take(reader)
        if kind != "end":
            await self.set_version(self.model.version + 1)
        return kind

    async def _all_ended(self) -> None:
        await self.check()
        status = await self.store.status()
        ended = sum(status.count(name) for name in ("delivered", "rejected", "evicted"))
        assert status.in_flight == 0
        assert status.count("submitted") + status.count("requeued") == ended == len(self.model.groups)
        assert (status.queued_jobs, status.leased, status.delivered_ahead >= 0) == (0, 0, True)
        cursors = await self.store._redis.xinfo_groups(self.store.keys.batches)
        waiting = {cursor["name"]: cursor["pending"] for cursor in cursors if cursor["pending"]}
        done = [number for number, batch in self.model.batches.items() if {"trainer", "watcher"} <= batch.done]
        assert len(done) == len(self.model.batches), "a batch is left that somebody has yet to read"
        assert not waiting, f"entries wait for {waiting}"


def _kind(taken: Taken) -> str:
    if taken.batch is not None:
        return "batch"
    if taken.end:
        return "end"
    if taken.stopped is not None:
        return "stopped"
    return "empty" if taken.blocked_at_version is None else "blocked"
