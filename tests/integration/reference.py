"""What must be true of a run, kept in Python. This half: batches and trainers; ``reference_groups``: the rest."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from reference_groups import Groups

from forebay.settings import RunSettings
from forebay.store.records import Channel, Cursor

__all__ = ["Batch", "Reference"]


@dataclass
class Batch:
    """A batch, until it goes."""

    number: int
    tasks: list[int]
    read: bool = False
    version: int | None = None
    """As its readers are told."""
    counted: int | None = None
    """The recovery in which it counted as handed over ahead."""
    given: set[str] = field(default_factory=set)
    """Names of cursors."""
    acked: set[Cursor] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    worlds: dict[str, int] = field(default_factory=dict)
    """Consumer -> the size of its first world that had it."""
    finished: bool = False
    """The driver has been done with it once."""


class Reference(Groups):
    """The whole run."""

    def __init__(self, rules: RunSettings) -> None:
        super().__init__(rules)
        self.batches: dict[int, Batch] = {}
        self.numbers = 0
        self.gone: set[int] = set()
        self.driver: str | None = None
        self.followers: set[str] = set()
        self.missed: dict[str, int] = {}
        self.epoch = 0
        self.holder: str | None = None
        self.leader: str | None = None
        self.owners: dict[int, str] = {}
        """Partition -> whose lease it is."""
        self.last_owner: dict[int, str] = {}
        self.partition_epochs: Counter[int] = Counter()
        self.excused = False
        """A recovery or a partial batch may have left more on its way than the capacity, for a while."""
        self.first_given: dict[int, int] = {}
        """Task -> the batch in which it was handed over."""

    # -- collectors ----------------------------------------------------------------------------------------------------

    def lead(self, owner: str) -> int:
        """The epoch that the owner gets, 0: another one leads."""
        if self.holder not in {None, owner}:
            return 0
        self.holder = owner
        if self.leader != owner:
            self.leader = owner
            self.epoch += 1
        return self.epoch

    def hold(self, owner: str, held: dict[int, int]) -> None:
        """A collector was told that it has these partitions, at these epochs: may it be so?"""
        for partition, epoch in held.items():
            assert self.owners.get(partition, owner) == owner, f"partition {partition} has two owners"
            expected = self.partition_epochs[partition] + (self.last_owner.get(partition) != owner)
            assert epoch == expected, f"partition {partition}: epoch {epoch}, expected {expected}"
            self.owners[partition] = self.last_owner[partition] = owner
            self.partition_epochs[partition] = epoch
        own = {partition for partition, who in self.owners.items() if who == owner}
        assert own == held.keys(), f"{owner} owns {own}, and was told of {sorted(held)}"

    def give_up(self, owner: str, partition: int) -> bool:
        """Whether it was the owner's; its epoch is old from then on."""
        if self.owners.get(partition) != owner:
            return False
        del self.owners[partition], self.last_owner[partition]
        self.partition_epochs[partition] += 1
        return True

    def cut(self, tasks: list[int]) -> int | None:
        """The batch; None: something had changed."""
        at = self.trained_at(self.unread * self.rules.batch_size)
        waiting = [task for task in tasks if self.groups[task].state == "ready"]
        stale = [task for task in waiting if self.stale(task, at)]
        for task in stale:
            self._evict(task, "cut")
        if stale or not tasks or len(waiting) < len(tasks):
            return None
        self.numbers += 1
        for task in tasks:
            self.groups[task].state, self.groups[task].batch = "batched", self.numbers
        self.batches[self.numbers] = Batch(self.numbers, list(tasks))
        self.unread += 1
        self.settled = len(self.tasks("ready"))
        self.counts["batches_cut"] += 1
        self.excused |= len(tasks) < self.rules.batch_size
        return self.numbers

    def due(self) -> int:
        """How many groups a collector would cut a batch of now; 0: none."""
        ready, size = len(self.tasks("ready")), self.rules.batch_size
        ended = self.end and not self.tasks("queued", direct=False) and not self.tasks("running", direct=False)
        return min(ready, size) if ready >= size or ended or (self.dynamic and self.settled >= size) else 0

    # -- trainers ------------------------------------------------------------------------------------------------------

    def enter(self, cursor: Cursor) -> bool:
        """Whether the consumer may be what it asks to be."""
        if cursor.follows:
            if self.driver == cursor.consumer:
                return False
            self.followers.add(cursor.consumer)
        elif self.driver is None:
            self.driver = cursor.consumer
        return self.driver == cursor.consumer or cursor.follows

    def take(self, cursor: Cursor, after: int) -> tuple[str, Batch | None, bool]:
        """``batch``, ``end``, ``stopped``, ``blocked`` or ``empty``; the batch, and whether it comes again."""
        for number in sorted(self.batches):
            batch = self.batches[number]
            if not batch.read and cursor.follows:
                return "empty", None, False
            if not batch.read and any(self.stale(task, self.trained_at(0)) for task in batch.tasks):
                self._dissolve(batch)
            elif cursor.consumer not in batch.done and number > after:
                return "batch", batch, self._hand_over(batch, cursor)
        groups = [*self.tasks("queued", direct=False), *self.tasks("running", direct=False), *self.ready]
        if self.end and not groups and not self.tasks("batched"):
            return "end", None, False
        if self.stopped:
            return "stopped", None, False
        left, size = self.capacity - self.ahead, self.rules.batch_size
        none_can = not self.dynamic and self.unread == 0 and left < size and len(self.tasks("ready")) < size
        return "blocked" if not cursor.follows and (left <= 0 or none_can) else "empty", None, False

    def _dissolve(self, batch: Batch) -> None:
        at = self.trained_at(0)
        for task in batch.tasks:
            group = self.groups[task]
            if self.stale(task, at):
                self._evict(task, "hand-over")
            else:
                group.state, group.batch = "ready", None
        del self.batches[batch.number]
        self.unread -= 1
        self.counts["batches_dissolved"] += 1

    def _hand_over(self, batch: Batch, cursor: Cursor) -> bool:
        if not batch.read:
            batch.read = True
            self.unread -= 1
            for task in batch.tasks:
                assert task not in self.first_given, f"group {task} in batches {self.first_given[task]}, {batch.number}"
                self.first_given[task] = batch.number
                self.groups[task].state, self.groups[task].has_prompt = "delivered", False
            self.counts["delivered"] += len(batch.tasks)
            self.counts["batches_delivered"] += 1
        if not cursor.follows and batch.counted != self.recoveries:
            batch.counted = self.recoveries
            self.ahead += self.rules.batch_size
        again = cursor.name in batch.given
        batch.given.add(cursor.name)
        elsewhere = batch.worlds.setdefault(cursor.consumer, cursor.world_size) != cursor.world_size
        if batch.version is None or (again and not cursor.follows):
            batch.version = self.version
        return again or elsewhere

    def ack(self, cursor: Cursor, number: int) -> bool:
        """Whether the reader was not done with it before."""
        batch = self.batches.get(number)
        if batch is None or cursor.name not in batch.given or cursor.consumer in batch.done or cursor in batch.acked:
            return False
        batch.acked.add(cursor)
        if cursor.follows:
            self.followers.add(cursor.consumer)
        same = [one for one in batch.acked if (one.consumer, one.world_size) == (cursor.consumer, cursor.world_size)]
        if len(same) == cursor.world_size:
            self._finish(batch, cursor.consumer)
            self._tidy()
        return True

    def _finish(self, batch: Batch, consumer: str) -> None:
        batch.done.add(consumer)
        if consumer == self.driver and not batch.finished:
            batch.finished = True
            self.counts["batches_acked"] += 1

    def _tidy(self) -> None:
        retain, lag = self.rules.retain_batches, max(self.rules.retain_batches, self.rules.max_follower_lag)
        done = [batch for _, batch in sorted(self.batches.items()) if self.driver in batch.done]
        for at, batch in enumerate(done):
            newer = len(done) - 1 - at
            if newer >= retain and (newer >= lag or self.followers <= batch.done):
                self._remove(batch)

    def _remove(self, batch: Batch) -> None:
        for follower in self.followers - batch.done:
            self.missed[follower] = self.missed.get(follower, 0) + 1
            self.counts["batches_missed"] += 1
        for task in batch.tasks:
            if self.groups[task].state == "delivered":
                self._bury(task, "delivered")
        self.gone.add(batch.number)
        del self.batches[batch.number]

    def resume_after(self, cursor: Cursor, number: int) -> bool:
        """Whether the trainer may begin again after that batch; then it has."""
        unread = [batch.number for batch in self.batches.values() if not batch.read]
        if number > self.numbers or any(one <= number for one in unread) or any(one > number for one in self.gone):
            return False
        for batch in [self.batches[one] for one in sorted(self.batches) if self.batches[one].read]:
            if batch.number <= number:
                if cursor.consumer not in batch.done:
                    self._finish(batch, cursor.consumer)
                continue
            batch.done.discard(cursor.consumer)
            batch.acked = {
                one
                for one in batch.acked
                if one != cursor and (one.consumer != cursor.consumer or one.world_size == cursor.world_size)
            }
        self._tidy()
        return True

    def spoil_batch(self, cursor: Cursor, number: int) -> int | None:
        """How many groups are evicted with a batch that cannot be read; None: it is not this reader's to decide."""
        batch = self.batches.get(number)
        if batch is None or not batch.read:
            return 0
        others = batch.given - {cursor.name}
        world = {Cursor(cursor.consumer, rank, cursor.world_size).name for rank in range(cursor.world_size)}
        if self.driver != cursor.consumer or others & world:
            return None
        for task in batch.tasks:
            self._bury(task, "evicted", "hand-over", "unreadable")
            if task in self.dumped:
                self.marks.append(task)
        count = len(batch.tasks)
        self.counts.update({"evicted": count, "delivered": -count})
        self.counts.update({"batches_set_aside": 1, "poison": 1, "poison:batches": 1})
        if batch.counted == self.recoveries:
            self.ahead = max(0, self.ahead - self.rules.batch_size)
        del self.batches[number]
        return count

    def set_version(self, version: int) -> bool:
        """Whether the trainer may have stepped to it."""
        if version < self.version:
            return False
        trained = (version - self.version) * self.rules.batches_per_version * self.rules.batch_size
        self.version, self.ahead = version, max(0, self.ahead - trained)
        return True

    def recover(self, version: int) -> int:
        """The version before."""
        before, self.version, self.ahead = self.version, version, 0
        self.recoveries += 1
        self.excused = True
        return before

    def resume(self) -> bool:
        """Whether the run had stopped itself."""
        had, self.stopped = self.stopped, False
        self.streaks.clear()
        return had

    # -- by its id -----------------------------------------------------------------------------------------------------

    def collect(self, task: int) -> str:
        """The state that the answer names."""
        group = self.groups.get(task)
        if group is None:
            return "unknown"
        if group.state in {"rejected", "evicted"}:
            return group.state
        if group.state in {"held", "ready"}:
            if group.channel is not Channel.EVAL and self.stale(task, self.trained_at(0)):
                self._evict(task, "hand-over")
                return "evicted"
            group.state, group.collected, group.has_prompt = "delivered", True, False
            self.counts["delivered"] += 1
            return "group"
        if group.state == "delivered" and group.gone:
            return "unknown"
        if group.collected:
            return "group"
        if group.batch is not None:
            return "batched"
        return "stopped" if self.stopped else "wait"

    def discard(self, task: int) -> int:
        """How many collected groups went."""
        group = self.groups.get(task)
        if group is None or not group.collected or group.gone:
            return 0
        self._bury(task, "delivered")
        return 1

    def forget(self, task: int) -> None:
        """The time has passed for which a result waits for whoever asks for it, or reads its rows."""
        group = self.groups[task]
        if group.state == "held":
            self._bury(task, "evicted", "uncollected", "uncollected")
            self.counts["evicted"] += 1
            if task in self.dumped:
                self.marks.append(task)
        else:
            self.discard(task)
