"""What the store's methods give: plain records."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from forebay.errors import ConsumerError
from forebay.store.bounds import Bound

__all__ = [
    "BatchEntry",
    "Channel",
    "Collected",
    "Cursor",
    "CutRule",
    "Held",
    "Lease",
    "Owners",
    "PartitionOwner",
    "ResultEntry",
    "RunStatus",
    "Taken",
]

_CONSUMER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MAX_WORLD_SIZE = 65_536


class Channel(StrEnum):
    """How a group reaches its trainer."""

    BATCHES = ""
    """In a batch of the stream."""
    DIRECT = "direct"
    """To whoever asks for it by its task id; outside the capacity, but never stale."""
    EVAL = "eval"
    """Likewise, and whatever its version."""


@dataclass(frozen=True, slots=True)
class Lease:
    """An attempt that a worker has claimed."""

    job_id: str
    attempt: tuple[int, int, int]
    """``(task_id, sample_idx, attempt)``."""
    spec: bytes
    group_size: int
    deadline_s: float
    """Seconds from the claim to the group's deadline."""


@dataclass(frozen=True, slots=True)
class ResultEntry:
    """One entry of the results stream."""

    entry_id: str
    task_id: int
    sample_idx: int
    header: bytes
    fault: str = ""
    """Why it is no slot's result."""
    partition: int = 0
    """Of the results: the stream that it is in."""


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """A batch as handed over."""

    entry_id: str
    batch_id: int
    index: bytes
    version: int
    """The version in force at the hand-over."""
    redelivered: bool
    missed: int = 0
    """How many batches this follower has been too slow for, since it joined."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """Who reads batches: one rank of a consumer."""

    consumer: str = "trainer"
    rank: int = 0
    world_size: int = 1
    follows: bool = False
    """It reads beside the consumer that drives the version, what that one was handed."""

    def __post_init__(self) -> None:
        """Check each part. Raises ConsumerError."""
        if not isinstance(self.consumer, str) or not _CONSUMER.fullmatch(self.consumer):
            raise ConsumerError(
                f"consumer={self.consumer!r}: use 1 to 100 letters, digits, '.', '_' or '-', and start with a letter "
                "or a digit"
            )
        if type(self.world_size) is not int or not 1 <= self.world_size <= _MAX_WORLD_SIZE:
            raise ConsumerError(f"world_size={self.world_size!r}: must be an integer from 1 to {_MAX_WORLD_SIZE}")
        if type(self.rank) is not int or not 0 <= self.rank < self.world_size:
            raise ConsumerError(
                f"rank={self.rank!r}: must be an integer from 0 to world_size - 1 = {self.world_size - 1}"
            )

    @property
    def name(self) -> str:
        """Of the consumer group."""
        return self.consumer if self.world_size == 1 else f"{self.consumer}/{self.rank}/{self.world_size}"


@dataclass(frozen=True, slots=True)
class Taken:
    """The answer to a reader that asks for the next batch; one of the fields is set, or none: nothing yet."""

    batch: BatchEntry | None = None
    end: bool = False
    blocked_at_version: int | None = None
    seen: str | None = None
    """Where there was no batch: the entry of the stream after which something new comes."""
    stopped: str | None = None
    """Why the run has stopped itself."""


@dataclass(frozen=True, slots=True)
class Collected:
    """The answer to whoever asks for one group."""

    state: str
    """``group``, ``wait``, ``stopped``, ``rejected``, ``evicted``, ``batched`` or ``unknown``."""
    detail: str = ""
    """Why, or the batch id."""
    summary: bytes = b""
    version: int = 0
    group_size: int = 0
    """Slots asked for, of one that was rejected or evicted."""
    usable: int = 0
    """Usable ones of those, as they were decided on."""


@dataclass(frozen=True, slots=True)
class CutRule:
    """When the next batch may be cut."""

    ready: int
    """Groups that wait for one."""
    partial: bool
    """The data has ended and nothing is queued or running: whatever is left may be cut."""
    dynamic: bool
    """A batch is cut once `settled` reaches the batch size, with as many groups as were accepted."""
    settled: int
    """Groups accepted or rejected since the last cut."""


@dataclass(frozen=True, slots=True)
class Held:
    """A partition of the results that a collector owns."""

    partition: int
    epoch: int
    """Fences whoever owned it before."""
    surplus: bool
    """It is more than this collector's share: another one waits for it."""


@dataclass(frozen=True, slots=True)
class PartitionOwner:
    """A partition of the results that needs an owner."""

    number: int
    owner: str
    """The collector that holds its lease; "" where none does."""
    unread: int
    """Results of groups that have not ended."""


@dataclass(frozen=True, slots=True)
class Owners:
    """Who collects, at one instant."""

    leader: str
    """The collector that leads; "" where none does."""
    collectors: tuple[str, ...]
    """Those whose heart-beat is younger than their lease."""
    partitions: tuple[PartitionOwner, ...]

    @property
    def unowned(self) -> tuple[int, ...]:
        """The partitions that nobody owns."""
        return tuple(one.number for one in self.partitions if not one.owner)


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Where the groups of the run are, at one instant."""

    version: int
    delivered_ahead: int
    capacity: int
    queued: int
    running: int
    ready: int
    cut: int
    queued_jobs: int
    leased: int
    collector_alive: bool
    counters: dict[str, int]
    workers: dict[str, dict[str, Any]]
    """Live workers by id: what they last said of themselves, with ``silent_s``."""
    servers: tuple[str, ...]
    direct_queued: int = 0
    direct_running: int = 0
    held: int = 0
    """Results that wait for whoever asks for them."""
    stopped: str | None = None
    """Why the run has stopped itself; None: it has not."""
    bounds: tuple[Bound, ...] = ()
    """What is bounded, and how much of it there is."""
    cut_batches: int = 0
    """Batches that nobody has read yet; a partial one counts whole where versions are counted."""
    owners: Owners = Owners("", (), ())
    """Who collects."""

    def bound(self, name: str) -> Bound | None:
        """The bound `name`."""
        return next((bound for bound in self.bounds if bound.name == name), None)

    @property
    def in_flight(self) -> int:
        """Groups that have been submitted and have not ended."""
        batched = self.queued + self.running + self.ready + self.cut
        return batched + self.direct_queued + self.direct_running + self.held

    def count(self, name: str) -> int:
        """The total of counter `name` since the run began."""
        return self.counters.get(name, 0)
