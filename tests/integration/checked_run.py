"""A run whose every call is held to the reference: the producer's, the workers' and the collectors' calls.

Each method makes one call on the store and the same on the reference, and compares the answers. `again`: the call is
made twice, as after a lost answer, and the second must change nothing. Nothing waits for a clock: leases and deadlines
are put into the past in Redis.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from driver import a_row
from reference import Reference
from reference_checks import violations
from snapshot import Snapshot

from forebay.errors import FencedError, QueueFullError, RunStoppedError
from forebay.outcomes import FailureKind, SlotOutcome
from forebay.settings import RunSettings
from forebay.store import Store
from forebay.store.records import Channel
from forebay.wire.codec import encode_rows
from forebay.wire.envelopes import (
    BatchIndex,
    GroupRules,
    GroupSpec,
    GroupSummary,
    RolloutSummary,
    RowSummary,
    SlotHeader,
)
from forebay_collector.assembler import Assembled, Assembler

__all__ = ["CheckedRun", "Collector"]

T = TypeVar("T")
Attempt = tuple[int, int, int]

_LONG_S = 600.0
_SPEC = GroupSpec("forebay:x", {}, "a prompt").pack()
_RULES = GroupRules(min_usable_group_size=1).pack()


@dataclass
class Collector:
    """What a collector has in memory."""

    name: str
    epoch: int = 0
    held: dict[int, int] = field(default_factory=dict)
    """The partitions that it believes to own, and the epoch of each."""
    after: dict[int, str] = field(default_factory=dict)
    assemblers: dict[int, Assembler] = field(default_factory=dict)
    assembled: list[Assembled] = field(default_factory=list)
    plan: list[tuple[int, bytes]] | None = None
    """Ready groups that it has fetched to cut them."""

    def crash(self) -> None:
        """Forget everything but the name; a new process has another one."""
        self.epoch, self.plan = 0, None
        self.held, self.after, self.assemblers, self.assembled = {}, {}, {}, []

    def own(self, partition: int, epoch: int) -> None:
        """A partition is read from its start by whoever gets it."""
        if self.held.get(partition) != epoch:
            self.held[partition], self.after[partition] = epoch, "0"
            self.assemblers[partition] = Assembler(partition=partition)
            self.assembled = [group for group in self.assembled if group.partition != partition]


class CheckedRun:
    """The store, the reference, and what the processes have in hand."""

    def __init__(self, store: Store, rules: RunSettings) -> None:
        self.store = store
        self.rules = rules
        self.model = Reference(rules)
        self.held: dict[str, list[Attempt]] = {"w1": [], "w2": [], "w3": []}
        """What each worker believes that it runs."""
        self.tried: list[Attempt] = []
        """Every attempt that a worker ever had."""
        self.late: set[int] = set()
        """Groups whose deadline is in the past."""
        self.closed: set[int] = set()
        """Those that were closed for that."""
        self.old: set[int] = set()
        """Results that have been kept for too long."""

    # -- comparing -----------------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Every invariant, now."""
        wrong = violations(await Snapshot.of(self.store), self.model)
        assert not wrong, "\n".join(wrong)

    async def call(self, call: Callable[[], Awaitable[T]], *, again: bool, ignoring: Collection[str] = ()) -> T:
        """The answer; a repetition must change nothing."""
        answer = await call()
        if again:
            before = await Snapshot.of(self.store)
            await call()
            changes = before.changes(await Snapshot.of(self.store), ignoring)
            assert not changes, "a repeated call changed something:\n" + "\n".join(changes)
        return answer

    async def unchanged(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """A call that must not change anything: its answer, None where it says that the collector is fenced."""
        before = await Snapshot.of(self.store)
        try:
            answer: T | None = await call()
        except FencedError:
            answer = None
        changes = before.changes(await Snapshot.of(self.store))
        assert not changes, "a refused call changed something:\n" + "\n".join(changes)
        return answer

    async def led(self, one: Collector, call: Callable[[], Awaitable[T]], *, again: bool = False) -> tuple[bool, Any]:
        """A collector's call: whether it leads, and the answer. One that is fenced must change nothing."""
        if one.epoch != self.model.epoch:
            answer = await self.unchanged(call)
            assert not answer, f"a fenced collector was told {answer!r}"
            return False, None
        return True, await self.call(call, again=again)

    # -- producers ----------------------------------------------------------------------------------------------------

    async def submit(self, key: str, size: int, channel: Channel = Channel.BATCHES, *, again: bool = False) -> None:
        """Submit a group under a key."""

        async def ask() -> tuple[int, bool] | str:
            try:
                return await self.store.submit(_SPEC, _RULES, size, key, channel)
            except RunStoppedError:
                return "stopped"
            except QueueFullError:
                return "full"

        answer = await self.call(ask, again=again)
        assert answer == self.model.submit(key, size, channel)

    async def redrive(self, task: int, *, twice: bool) -> None:
        """Submit the prompt of dead letters again."""
        try:
            answer = await self.store.redrive(task, again=twice)
            found: tuple[str, int | None] = (answer.state, answer.new_task)
        except RunStoppedError:
            found = ("stopped", None)
        except QueueFullError:
            found = ("full", None)
        assert found == self.model.redrive(task, again=twice)

    async def end_of_data(self, *, again: bool = False) -> None:
        """No more groups."""
        await self.call(self.store.end_of_data, again=again)
        self.model.end = True

    # -- workers ------------------------------------------------------------------------------------------------------

    async def admit(self, most: int = 64) -> int:
        """Start groups."""
        started, _ = await self.store.admit(most, _LONG_S)
        assert started == self.model.admit(most)
        return started

    async def claim(self, worker: str, most: int = 64) -> list[Attempt]:
        """Lease attempts to a worker."""
        expected = self.model.claim(most)
        got = [lease.attempt for lease in await self.store.claim(worker, most, _LONG_S)]
        assert len(got) == expected, f"{worker} got {got}, {expected} wait"
        for attempt in got:
            self.model.claimed(attempt)
        self.held[worker] += got
        self.tried += got
        return got

    async def heartbeat(self, worker: str) -> None:
        """Renew what a worker holds; it drops what it has lost."""
        held = self.held[worker]
        lost = await self.call(lambda: self.store.heartbeat(worker, {}, _LONG_S, held), again=False)
        assert lost == self.model.heartbeat(held)
        self.held[worker] = [attempt for attempt in held if attempt not in lost]

    async def lapse(self, worker: str) -> None:
        """A worker has fallen silent for longer than its leases."""
        for task, idx, number in self.held[worker]:
            name = f"{task}:{idx}:{number}"
            await self.store._ask(("ZADD", self.store.keys.leases, "XX", 1, name))
        self.model.lapse(self.held[worker])

    async def publish(
        self, attempt: Attempt, outcome: SlotOutcome, kind: FailureKind | None = None, version: int = -1, *,
        again: bool = False,
    ) -> str:  # fmt: skip
        """An attempt ends."""
        rows = [a_row(version)] if outcome is SlotOutcome.USABLE else []
        header = SlotHeader(
            *attempt, outcome=outcome.value, kind=kind and kind.value, rows=[RowSummary.of(row) for row in rows]
        )

        async def ask() -> str:
            return await self.store.publish(
                *attempt, outcome=outcome, kind=kind, header=header.pack(), rows=encode_rows(rows) if rows else None,
                rows_ttl_s=_LONG_S, head=version, reason="it failed" if kind else "",
            )  # fmt: skip

        for worker, held in self.held.items():
            self.held[worker] = [one for one in held if one != attempt]
        verdict = await self.call(ask, again=again, ignoring=("late", "duplicates"))
        expected = self.model.publish(attempt, outcome, kind, version)
        assert verdict == expected, f"{attempt} {outcome} {kind}: {verdict}, expected {expected}"
        if again:  # what comes too often is counted as often
            self.model.publish(attempt, outcome, kind, version)
        return verdict

    async def release(self, attempt: Attempt, *, again: bool = False) -> None:
        """A worker that drains hands an attempt back."""
        assert await self.call(lambda: self.store.release(*attempt), again=again) == self.model.release(attempt)

    async def lose(self, attempts: Sequence[Attempt]) -> None:
        """Redis has lost the jobs and leases of open slots."""
        keys = self.store.keys
        for attempt in attempts:
            await self.store._ask(
                ("ZREM", keys.jobs, keys.job_id(*attempt)), ("ZREM", keys.leases, ":".join(map(str, attempt)))
            )
        self.model.lose(attempts)

    # -- collectors ---------------------------------------------------------------------------------------------------

    async def lead(self, one: Collector, *, again: bool = False) -> None:
        """Take or renew the lease; who gets it publishes the rules."""
        epoch = await self.call(lambda: self.store.lead(one.name, _LONG_S), again=again)
        assert epoch == self.model.lead(one.name)
        if epoch and epoch != one.epoch:
            one.epoch = epoch
            await self.call(lambda: self.store.configure(epoch, self.rules), again=again)
        await self.hold(one)

    async def hold(self, one: Collector, *, again: bool = False) -> None:
        """A collector beats: it keeps what it owns, and takes what is free, up to its share.

        A repetition is the next beat: where all have equally many the first by name may take one more.
        """
        if again:
            await self.hold(one)
        held = await self.store.hold(one.name, _LONG_S)
        self.model.hold(one.name, {part.partition: part.epoch for part in held})
        for part in held:
            one.own(part.partition, part.epoch)

    async def seize(self, one: Collector) -> None:
        """All leases have ended, and `one`, which alone lives, gets every partition."""
        await self.store._ask(("DEL", self.store.keys.collectors))
        for partition in range(self.rules.partitions):
            await self.lapse_partition(partition)
        await self.hold(one)

    async def lapse_partition(self, partition: int) -> None:
        """The lease of a partition has ended."""
        await self.store._ask(("DEL", self.store.keys.partition_lease(partition)))
        self.model.owners.pop(partition, None)

    async def give_up(self, one: Collector, partition: int, *, again: bool = False) -> None:
        """Give a partition up; the collector goes on with what it had of it."""
        done = await self.call(lambda: self.store.give_up(one.name, partition), again=again)
        assert done == self.model.give_up(one.name, partition)

    async def lapse_lead(self) -> None:
        """The collector lease has ended."""
        await self.store._ask(("DEL", self.store.keys.collector))
        self.model.holder = None

    async def read(self, one: Collector) -> None:
        """Read results, and put groups together."""
        for entry in await self.store.read_results(one.after, 500, 0.001) if one.after else ():
            one.after[entry.partition] = entry.entry_id
            assembler = one.assemblers[entry.partition]
            if not assembler.knows(entry.task_id):
                known = await self.store.group_rules(entry.task_id, entry.partition)
                if known is None:
                    continue
                assembler.open(entry.task_id, GroupRules.unpack(known[0]), known[1], known[2])
            assembled = assembler.add(entry)
            if assembled is not None:
                one.assembled.append(assembled)

    async def commit(self, one: Collector, reason: str = "", *, dumped: bool = False, again: bool = False) -> None:
        """Decide on the first group that was put together."""
        group = one.assembled.pop(0)
        epoch = one.held[group.partition]
        usable = [h for _, h in sorted(group.headers.items()) if h.outcome == SlotOutcome.USABLE]
        summary = GroupSummary(
            group.task_id, group.group_size, [RolloutSummary(h.idx, h.attempt, h.rows) for h in usable]
        )
        why = reason if usable else "no_usable_slot"

        async def ask() -> bool | None:
            return await self.store.commit(
                epoch, group.task_id, "rejected" if why else "ready", reason=why, summary=summary.pack(),
                head=summary.head, partition=group.partition,
                dump_folder="rollout/0" if dumped else "", detail=why, usable=len(usable),
                entries=[group.entries[idx] for idx in sorted(group.entries)],
            )  # fmt: skip

        if epoch != self.model.partition_epochs[group.partition]:
            assert await self.unchanged(ask) is None
        else:
            done = await self.call(ask, again=again)
            assert done == self.model.commit(group.task_id, why, dumped=dumped)

    async def fetch(self, one: Collector) -> None:
        """Look up which groups the next batch would have."""
        due = self.model.due()
        one.plan = await self.store.ready(due) if due else None

    async def cut(self, one: Collector, *, again: bool = False) -> None:
        """Cut what was fetched, which may have changed since."""
        if one.plan is None:
            return
        plan, one.plan = one.plan, None
        index = BatchIndex([GroupSummary.unpack(summary) for _, summary in plan]).pack()
        tasks = [task for task, _ in plan]
        leads, number = await self.led(one, lambda: self.store.cut(one.epoch, index, tasks), again=again)
        if leads:
            assert number == self.model.cut(tasks)

    async def evict(self, one: Collector, *, running_too: bool, again: bool = False) -> None:
        """Evict what can no longer be fresh."""
        leads, gone = await self.led(
            one, lambda: self.store.evict_stale(one.epoch, running_too=running_too), again=again
        )
        if leads:
            assert set(gone) == self.model.evict(running_too=running_too)

    async def reap(self, one: Collector, *, again: bool = False) -> None:
        """Supersede lost attempts, close late groups, drop what nobody asks for."""
        leads, found = await self.led(one, lambda: self.store.reap(one.epoch), again=again)
        if leads:
            late = [task for task in sorted(self.late) if self.model.groups[task].state == "running"]
            assert found == (self.model.reap_leases(), len(late))
            for task in late:
                self.model.close_late(task)
            for task in self.old:
                self.model.forget(task)
            self.closed |= self.late
            self.late, self.old = set(), set()

    async def sweep(self, one: Collector, *, again: bool = False) -> None:
        """Queue again what was lost."""
        leads, lost = await self.led(one, lambda: self.store.sweep(one.epoch), again=again)
        if leads:
            assert lost == self.model.sweep()

    async def spoil_group(self, one: Collector, task: int, *, again: bool = False) -> None:
        """A group that waits cannot be read."""
        leads, done = await self.led(one, lambda: self.store.spoil_group(one.epoch, task, "odd", b""), again=again)
        if leads:
            assert done == self.model.spoil_group(task)

    async def depose(self, old: Collector, new: Collector) -> None:
        """One leads, and has work in hand when another takes over: nothing that it still does may count."""
        await self.read(old)
        await self.lapse_lead()
        await self.lead(new)
        await self.seize(new)
        epoch, plan = old.epoch, old.plan
        if old.assembled:
            await self.commit(old)
        await self.cut(old)
        await self.evict(old, running_too=True)
        await self.reap(old)
        await self.sweep(old)
        for task, _ in plan or ():
            await self.spoil_group(old, task)
        await self.unchanged(lambda: self.store.configure(epoch, self.rules))

    # -- time ---------------------------------------------------------------------------------------------------------

    async def pass_deadline(self, task: int) -> None:
        """The deadline of a running group is over."""
        await self.store._ask(("ZADD", self.store.keys.deadlines, "XX", 1, task))
        if task not in self.closed:
            self.late.add(task)

    async def outlast(self, task: int) -> None:
        """A result has been held, or handed over by its id, for as long as it may."""
        name = self.store.keys.held if self.model.groups[task].state == "held" else self.store.keys.collected
        await self.store._ask(("ZADD", name, "XX", 1, task))
        self.old.add(task)
