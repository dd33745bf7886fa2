"""Puts slot results together to groups, in whatever order they arrive.

Result entries stay in the stream until their group is committed: a collector that starts anew reads it from the
start and knows what its predecessor knew. A slot has one entry, which ``publish`` guarantees; should one come twice
(a second reading after a fault), the first counts.
"""

from __future__ import annotations

from collections.abc import Mapping
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


class Assembler:
    """The groups of which some slots have ended."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def knows(self, task_id: int) -> bool:
        """Whether the rules of the group are known here."""
        return task_id in self._open

    def open(self, task_id: int, rules: GroupRules, size: int, parent: int | None = None, fault: str = "") -> None:
        """Begin a group."""
        self._open.setdefault(task_id, _Open(rules, size, parent, fault))

    def add(self, entry: ResultEntry) -> Assembled | None:
        """Add a slot's result to its group, which must be open: the group, if that was its last slot."""
        group = self._open[entry.task_id]
        if not 0 <= entry.sample_idx < group.size:
            log.error("result.index_out_of_range", task_id=entry.task_id, sample_idx=entry.sample_idx, size=group.size)
            return None
        group.headers.setdefault(entry.sample_idx, _header(entry))
        if len(group.headers) < group.size:
            return None
        del self._open[entry.task_id]
        return Assembled(entry.task_id, group.size, group.rules, group.headers, group.parent, group.fault)


def _header(entry: ResultEntry) -> SlotHeader:
    try:
        header = SlotHeader.unpack(entry.header)
        if (header.task, header.idx) != (entry.task_id, entry.sample_idx):
            raise FrameError(f"it is of slot {header.idx} of group {header.task}")
    except FrameError as error:
        log.error("result.unreadable", task_id=entry.task_id, sample_idx=entry.sample_idx, reason=str(error))
        return SlotHeader(
            entry.task_id,
            entry.sample_idx,
            attempt=0,
            outcome=SlotOutcome.FAILED.value,
            kind=FailureKind.CONTRACT.value,
            reason=f"unreadable result: {error}",
        )
    return header
