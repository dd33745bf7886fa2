"""What must be true of a run, kept in Python: the reference that the scripts are held to. This half: groups.

Written from the contract (sections 4, 6 and 13), not from the scripts: groups, slots, batches and counters are plain
objects, each method is one call and gives the answer that the call must give. It knows no keys and no clock; what a
test puts into the past it says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.outcomes import FailureKind, SlotOutcome
from forebay.settings import RunSettings
from forebay.store.records import Channel

__all__ = ["Group", "Groups", "Slot"]

Attempt = tuple[int, int, int]
NOBODY = 0


@dataclass
class Slot:
    """One slot of a group."""

    attempt: int = 1
    place: str = "queued"
    """``queued``, ``leased``, ``lapsed`` (leased, but not for longer), ``lost`` (its records are gone) or ``ended``."""
    by: int | None = None
    """The attempt that counts; NOBODY: it was closed."""
    outcome: str = ""
    head: int = -1
    fails: Counter[str] = field(default_factory=Counter)


@dataclass
class Group:
    """One group, from its submit on."""

    task: int
    channel: Channel
    slots: list[Slot]
    label: str = ""
    parent: int | None = None
    requeues: int = 0
    state: str = "queued"
    """``queued``, ``running``, ``ready``, ``held``, ``batched``, ``delivered``, ``rejected`` or ``evicted``."""
    seq: int = 0
    batch: int | None = None
    collected: bool = False
    cancelled: bool = False
    has_prompt: bool = True
    gone: bool = False
    """Only its outcome is left."""

    @property
    def direct(self) -> bool:
        """Whether it is asked for by its id."""
        return self.channel is not Channel.BATCHES

    @property
    def head(self) -> int:
        """Smallest version of its counted results, -1 if they have none."""
        return min((s.head for s in self.slots if s.outcome == SlotOutcome.USABLE and s.head >= 0), default=-1)


@dataclass
class Letter:
    """A group with dead letters."""

    slots: set[int] = field(default_factory=set)
    following: int | None = None
    ended: str | None = None


class Groups:
    """Groups up to their commit or eviction."""

    def __init__(self, rules: RunSettings) -> None:
        self.rules = rules
        self.groups: dict[int, Group] = {}
        self.keys: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        self.version = self.ahead = self.unread = self.settled = self.seq = self.recoveries = 0
        self.end = self.stopped = False
        self.dynamic: bool | None = None
        """None: nobody has said."""
        self.streaks: Counter[str] = Counter()
        self.letters: dict[int, Letter] = {}
        self.drops: list[tuple[int, str, str, str, int | None]] = []
        """Task, outcome, place, reason, child."""
        self.marks: list[int] = []
        """Evicted groups whose dump is to be marked."""
        self.dumped: set[int] = set()

    # -- looking ------------------------------------------------------------------------------------------------------

    def tasks(self, state: str, *, direct: bool | None = None) -> list[int]:
        """The groups in a state, oldest first."""
        return [g.task for g in self.groups.values() if g.state == state and (direct is None or g.direct is direct)]

    @property
    def ready(self) -> list[int]:
        """The groups that wait for a batch, in the order of their commit."""
        return sorted(self.tasks("ready"), key=lambda task: self.groups[task].seq)

    @property
    def capacity(self) -> int:
        """Groups that may be on their way."""
        return self.rules.capacity

    @property
    def used(self) -> int:
        """Groups that are on their way, an unread batch counted whole."""
        running, ready = len(self.tasks("running", direct=False)), len(self.tasks("ready"))
        return running + ready + self.unread * self.rules.batch_size + self.ahead

    def trained_at(self, before: int) -> int:
        """The version at which a group is trained on that `before` others precede."""
        return self.version + (self.ahead + before) // (self.rules.batches_per_version * self.rules.batch_size)

    def stale(self, task: int, trained_at: int) -> bool:
        """Whether a group that is trained on then is too old."""
        head = self.groups[task].head
        return head >= 0 and trained_at - head > self.rules.max_staleness

    def open_slots(self, place: str) -> list[Attempt]:
        """The open slots in that place, with the attempt that each is at."""
        return [
            (g.task, idx, slot.attempt)
            for g in self.groups.values()
            if g.state == "running"
            for idx, slot in enumerate(g.slots)
            if slot.place == place
        ]

    # -- submit, admit, claim ------------------------------------------------------------------------------------------

    def _queue(self, size: int, channel: Channel, label: str, parent: int | None, requeues: int = 0) -> int:
        task = len(self.groups) + 1
        self.groups[task] = Group(task, channel, [Slot() for _ in range(size)], label, parent, requeues)
        return task

    def _full(self, *, direct: bool) -> bool:
        return len(self.tasks("queued", direct=direct)) >= self.rules.max_queued_groups

    def submit(self, key: str, size: int, channel: Channel) -> tuple[int, bool] | str:
        """The task id and whether it is new; or ``stopped``, ``full``."""
        if key in self.keys:
            return self.keys[key], False
        if self.stopped:
            return "stopped"
        if self._full(direct=channel is not Channel.BATCHES):
            return "full"
        task = self.keys[key] = self._queue(size, channel, key, None)
        if channel is Channel.BATCHES:
            self.end = False
        self.counts["submitted"] += 1
        return task, True

    def redrive(self, task: int, *, again: bool) -> tuple[str, int | None]:
        """The state that the answer names, and the new group."""
        letter = self.letters.get(task)
        if letter is None:
            return "unknown", None
        if letter.following is not None and not again:
            return "exists", letter.following
        group = self.groups[task]
        if (letter.ended or group.state) == "delivered":
            if not again:
                return "delivered", None
        elif letter.ended is None:
            return "open", None
        if self.stopped:
            return "stopped", None
        if self._full(direct=group.direct):
            return "full", None
        letter.following = self._queue(len(group.slots), group.channel, group.label, task)
        if not group.direct:
            self.end = False
        self.counts["submitted"] += 1
        self.counts["redriven"] += 1
        return "created", letter.following

    def admit(self, most: int) -> int:
        """How many groups start."""
        if self.stopped:
            return 0
        running = len(self.tasks("running", direct=False))
        left = min(self.capacity - self.used, self.rules.max_concurrent - running)
        direct_left = self.rules.max_concurrent_direct - len(self.tasks("running", direct=True))
        started = [
            *self.tasks("queued", direct=False)[: max(0, min(left, most))],
            *self.tasks("queued", direct=True)[: max(0, min(direct_left, most))],
        ]
        for task in started:
            self.groups[task].state = "running"
        if started:
            self.counts["started"] += len(started)
        return len(started)

    def claim(self, most: int) -> int:
        """How many attempts a worker gets."""
        return 0 if self.stopped else min(most, len(self.open_slots("queued")))

    def claimed(self, attempt: Attempt) -> None:
        """A worker got this one."""
        assert attempt in self.open_slots("queued"), f"{attempt} was handed to a worker, but does not wait"
        self.groups[attempt[0]].slots[attempt[1]].place = "leased"

    def heartbeat(self, held: Sequence[Attempt]) -> list[Attempt]:
        """What the worker has lost."""
        lost = []
        for attempt in held:
            if attempt in self.open_slots("leased") or attempt in self.open_slots("lapsed"):
                self.groups[attempt[0]].slots[attempt[1]].place = "leased"
            else:
                lost.append(attempt)
        return lost

    # -- the end of an attempt -----------------------------------------------------------------------------------------

    def _next_attempt(self, slot: Slot) -> None:
        slot.attempt += 1
        slot.place = "queued"

    def _retries(self, slot: Slot, kind: FailureKind) -> bool:
        slot.fails[kind.value] += 1
        if slot.fails[kind.value] >= self.rules.attempts(kind):
            return False
        self._next_attempt(slot)
        self.counts[f"retries:{kind.value}"] += 1
        return True

    def _stop(self) -> None:
        if not self.stopped:
            self.counts["stops"] += 1
        self.stopped = True

    def _in_a_row(self, row: str, most: int) -> None:
        self.streaks[row] += 1
        if self.streaks[row] >= most:
            self._stop()

    def _fill(self, slot: Slot, by: int, outcome: SlotOutcome, head: int = -1) -> None:
        slot.by, slot.outcome, slot.head, slot.place = by, outcome.value, head, "ended"
        self.counts[f"slots:{outcome.value}"] += 1

    def _letter(self, task: int, idx: int, kind: FailureKind) -> None:
        self.letters.setdefault(task, Letter()).slots.add(idx)
        self.counts["dead_letters"] += 1
        if kind is FailureKind.CONTRACT:
            self._in_a_row("slots", self.rules.max_contract_errors)
        else:
            self.streaks["slots"] = 0

    def publish(self, attempt: Attempt, outcome: SlotOutcome, kind: FailureKind | None, head: int) -> str:
        """The verdict on how an attempt ended."""
        task, idx, number = attempt
        group = self.groups[task]
        slot = group.slots[idx]
        if not group.gone and slot.by == number:
            return "accepted"
        if group.state != "running":
            self.counts["late"] += 1
            return "late"
        if slot.by is not None:
            self.counts["duplicates"] += 1
            return "duplicate"
        if kind is not None:
            if slot.attempt != number:
                return "superseded"
            self.counts[f"failures:{kind.value}"] += 1
            if self._retries(slot, kind):
                return "retry"
            self._fill(slot, number, outcome)
            self._letter(task, idx, kind)
            return "accepted"
        self._fill(slot, number, outcome, head)
        self.streaks["slots"] = 0
        return "accepted"

    def release(self, attempt: Attempt) -> bool:
        """Whether the attempt was handed back."""
        group = self.groups[attempt[0]]
        slot = group.slots[attempt[1]]
        if group.state != "running" or slot.by is not None or slot.attempt != attempt[2]:
            return False
        self._next_attempt(slot)
        self.counts["handed_back"] += 1
        return True

    def lose(self, attempts: Sequence[Attempt]) -> None:
        """The records of these open slots, job or lease, are gone."""
        for task, idx, _ in attempts:
            self.groups[task].slots[idx].place = "lost"

    def lapse(self, attempts: Sequence[Attempt]) -> None:
        """The leases of these attempts have ended."""
        for attempt in attempts:
            if attempt in self.open_slots("leased"):
                self.groups[attempt[0]].slots[attempt[1]].place = "lapsed"

    def sweep(self) -> int:
        """How many lost slots are queued again."""
        lost = self.open_slots("lost")
        for task, idx, _ in lost:
            self._next_attempt(self.groups[task].slots[idx])
        if lost:
            self.counts["jobs_lost"] += len(lost)
        return len(lost)

    def reap_leases(self) -> int:
        """How many leases had ended."""
        ended = self.open_slots("lapsed")
        for task, idx, _ in ended:
            slot = self.groups[task].slots[idx]
            self.counts["leases_lost"] += 1
            self.counts["failures:infra"] += 1
            if not self._retries(slot, FailureKind.INFRA):
                self._fill(slot, NOBODY, SlotOutcome.FAILED)
                self._letter(task, idx, FailureKind.INFRA)
        return len(ended)

    def _close(self, task: int) -> list[int]:
        still = [idx for idx, slot in enumerate(self.groups[task].slots) if slot.by is None]
        for idx in still:
            self._fill(self.groups[task].slots[idx], NOBODY, SlotOutcome.FAILED)
        return still

    def close_late(self, task: int) -> None:
        """The deadline of a group has passed."""
        if self.groups[task].state == "running":
            for idx in self._close(task):
                self.counts["failures:timeout"] += 1
                self._letter(task, idx, FailureKind.TIMEOUT)

    # -- the end of a group --------------------------------------------------------------------------------------------

    def _bury(self, task: int, state: str, place: str = "", reason: str = "", child: int | None = None) -> None:
        group = self.groups[task]
        assert group.state in {"queued", "running", "ready", "held", "batched"} or (
            group.state == "delivered" and not group.gone
        ), f"group {task} ended twice"
        group.state, group.gone = state, True
        if place:
            self.drops.append((task, state, place, reason, child))
        if (letter := self.letters.get(task)) is not None:
            letter.ended = state
            letter.following = child if child is not None else letter.following

    def _evict(self, task: int, place: str) -> None:
        group = self.groups[task]
        child = None
        requeues = self.rules.max_requeues if self.rules.requeue_evicted else 0
        if not group.direct and group.has_prompt and group.requeues < requeues:
            child = self._queue(len(group.slots), Channel.BATCHES, group.label, task, group.requeues + 1)
            self.counts["requeued"] += 1
        self._bury(task, "evicted", place, "stale", child)
        self.counts["evicted"] += 1
        if task in self.dumped:
            self.marks.append(task)

    def commit(self, task: int, reason: str, *, dumped: bool) -> bool:
        """Whether the decision was recorded: '' accepts."""
        group = self.groups[task]
        if group.state != "running" or any(slot.by is None for slot in group.slots):
            return False
        if dumped:
            self.dumped.add(task)
        if not group.direct:
            self.settled += 1
        if group.cancelled:
            self._evict(task, "cancelled")
            return False
        if reason:
            self._reject(task, reason)
            return True
        if group.direct or not self.rules.requeue_evicted:
            group.has_prompt = False
        self.streaks["groups"] = self.streaks["barren"] = 0
        self.counts["accepted"] += 1
        if group.direct:
            group.state = "held"
            return True
        before = self.unread * self.rules.batch_size + len(self.tasks("ready"))
        self.seq += 1
        group.state, group.seq = "ready", self.seq
        if self.stale(task, self.trained_at(before - before % self.rules.batch_size)):
            self._evict(task, "assembly")
        return True

    def _reject(self, task: int, reason: str) -> None:
        self._bury(task, "rejected", "assembly", reason)
        self.counts["rejected"] += 1
        self.counts[f"rejected:{reason}"] += 1
        if reason == "contract_error":
            self._in_a_row("groups", self.rules.max_contract_errors)
        else:
            self.streaks["groups"] = 0
        if reason == "filtered":
            self.streaks["barren"] = 0
        else:
            self._in_a_row("barren", self.rules.max_barren_groups)

    def evict(self, *, running_too: bool) -> set[int]:
        """Which waiting groups are evicted."""
        at = self.trained_at(self.unread * self.rules.batch_size)
        gone = [task for task in self.ready if self.stale(task, at)]
        for task in gone:
            self._evict(task, "waiting")
        for task in self.tasks("running", direct=False) if running_too else []:
            group = self.groups[task]
            if self.stale(task, at) and not group.cancelled:
                group.cancelled = True
                self._close(task)
                self.counts["cancelled"] += 1
        return set(gone)

    def spoil_group(self, task: int) -> bool:
        """Whether the group waited, and is evicted as unreadable."""
        if self.groups[task].state != "ready":
            return False
        self._bury(task, "evicted", "cut", "unreadable")
        self.counts.update({"evicted": 1, "poison": 1, "poison:ready": 1})
        if task in self.dumped:
            self.marks.append(task)
        return True
