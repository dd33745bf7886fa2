"""Puts slot results together to groups, in whatever order they arrive.

Result entries stay in the stream until their group is committed: a collector that starts anew reads it from the
start and knows what its predecessor knew. A slot has one entry, which ``publish`` guarantees; should one come twice
(a second reading after a fault), the first counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from forebay.errors import FrameError
from forebay.outcomes import FailureKind, SlotOutcome
from forebay.store.records import ResultEntry
from forebay.wire.envelopes import GroupRules, SlotHeader

__all__ = ["Assembled", "Assembler"]

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Open:
    rules: GroupRules
    size: int
    parent: int | None
    fault: str
    headers: dict[int, SlotHeader] = field(default_factory=dict)
    entries: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Assembled:
    """A group whose every slot has ended."""

    task_id: int
    group_size: int
    rules: GroupRules
    headers: Mapping[int, SlotHeader]
    parent: int | None = None
    """The evicted group whose prompt this one is."""
    fault: str = ""
    """What is wrong with the group itself, so that it cannot be accepted."""
    entries: Mapping[int, str] = field(default_factory=dict)
    """The result entry of each slot."""
    partition: int = 0
    """Of the results: the stream of those entries."""


class Assembler:
    """The groups of one partition of which some slots have ended."""

    def __init__(self, unreadable: Callable[[ResultEntry, str], None] | None = None, partition: int = 0) -> None:
        """Begin with none; `unreadable` is told of each entry whose header cannot be read, and why."""
        self._partition = partition
        self._open: dict[int, _Open] = {}
        self._unreadable = unreadable

    def __len__(self) -> int:
        return len(self._open)

    def knows(self, task_id: int) -> bool:
        """Whether the rules of the group are known here."""
        return task_id in self._open

    def open(self, task_id: int, rules: GroupRules, size: int, parent: int | None = None, fault: str = "") -> None:
        """Begin a group."""
        self._open.setdefault(task_id, _Open(rules, size, parent, fault))

    def holds(self, task_id: int, idx: int) -> bool:
        """Whether slot `idx` of an open group has a result."""
        return idx in self._open[task_id].headers

    def size(self, task_id: int) -> int:
        """The slots of an open group."""
        return self._open[task_id].size

    def add(self, entry: ResultEntry) -> Assembled | None:
        """Add a slot's result to its group, which must be open: the group, if that was its last slot."""
        group = self._open[entry.task_id]
        if not 0 <= entry.sample_idx < group.size:
            log.error("result.index_out_of_range", task_id=entry.task_id, sample_idx=entry.sample_idx, size=group.size)
            return None
        if entry.sample_idx not in group.headers:
            group.headers[entry.sample_idx] = self._header(entry)
            group.entries[entry.sample_idx] = entry.entry_id
        if len(group.headers) < group.size:
            return None
        del self._open[entry.task_id]
        return Assembled(
            entry.task_id, group.size, group.rules, group.headers, group.parent, group.fault, group.entries,
            self._partition,
        )  # fmt: skip

    def _header(self, entry: ResultEntry) -> SlotHeader:
        try:
            header = SlotHeader.unpack(entry.header)
            if (header.task, header.idx) != (entry.task_id, entry.sample_idx):
                raise FrameError(f"it is of slot {header.idx} of group {header.task}")
        except FrameError as error:
            log.error("result.unreadable", task_id=entry.task_id, sample_idx=entry.sample_idx, reason=str(error))
            if self._unreadable is not None:
                self._unreadable(entry, str(error))
            return SlotHeader(
                entry.task_id,
                entry.sample_idx,
                attempt=0,
                outcome=SlotOutcome.FAILED.value,
                kind=FailureKind.CONTRACT.value,
                reason=f"unreadable result: {error}",
            )
        return header
