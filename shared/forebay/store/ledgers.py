"""What a run keeps for whoever looks into what went wrong: drops, dead letters, what was set aside."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Mapping
from typing import Any

import msgpack

from forebay.errors import FrameError
from forebay.store.base import MAX_SAMPLE, StoreBase, queue_full, run_stopped
from forebay.store.ledger_records import DeadGroup, DeadSlot, Drop, Redriven, SetAside
from forebay.wire.envelopes import SlotHeader

__all__ = ["LedgerCalls"]

_PAGE = 1000
_GROUPS_AT_ONCE = 256
_TASK = re.compile(rb"[0-9]{1,18}")
_INTEGER = re.compile(rb"-?[0-9]{1,18}")


class LedgerCalls(StoreBase):
    """Reads the ledgers; submits what failed again."""

    async def drops(self, *, since_ms: int = 0, limit: int | None = None) -> list[Drop]:
        """The last `limit` groups that did not reach a trainer since then, the newest first."""
        out: list[Drop] = []
        end = "+"
        while limit is None or len(out) < limit:
            count = _PAGE if limit is None else min(_PAGE, limit - len(out))
            (page,) = await self._ask(("XREVRANGE", self.keys.drops, end, str(max(0, since_ms)), "COUNT", count))
            out += [drop for entry, fields in page if (drop := _drop(entry, fields)) is not None]
            if len(page) < count:
                break
            end = "(" + page[-1][0].decode()
        return out

    async def dead_groups(self, kind: str | None = None) -> list[DeadGroup]:
        """The groups with dead letters, the oldest first; with `kind`, those with a slot that failed so."""
        (names,) = await self._ask(("ZRANGE", self.keys.dead, 0, -1))
        tasks = [name for name in names if _TASK.fullmatch(name)]
        out: list[DeadGroup] = []
        for at in range(0, len(tasks), _GROUPS_AT_ONCE):
            found = await asyncio.gather(*(self.dead_group(int(task)) for task in tasks[at : at + _GROUPS_AT_ONCE]))
            out += [group for group in found if group is not None]
        return out if kind is None else [group for group in out if any(slot.kind == kind for slot in group.slots)]

    async def dead_group(self, task_id: int) -> DeadGroup | None:
        """The dead letters of a group; None where there are none, or they are no longer kept."""
        fields, ended = await self._ask(
            ("HGETALL", self.keys.dead_group(task_id)), ("HGET", self.keys.group(task_id), "st")
        )
        return _dead_group(task_id, fields, ended) if fields else None

    async def redrive(self, task_id: int, *, again: bool = False) -> Redriven:
        """Submit the prompt of a group with dead letters again, once; with `again`, whatever became of it.

        Raises:
            QueueFullError: the queue is at its bound.
            RunStoppedError: the run has stopped itself.
        """
        state, *rest = await self._run("redrive", task_id, uuid.uuid4().hex, int(again))
        match state:
            case b"stopped":
                raise run_stopped(rest[0].decode())
            case b"full" | b"full_bytes":
                raise queue_full(rest, "redrive")
            case b"created" | b"exists":
                return Redriven(task_id, state.decode(), int(rest[0]))
            case _:
                return Redriven(task_id, state.decode())

    async def poison(self) -> list[SetAside]:
        """What was set aside as unreadable, the newest first; at most a thousand are kept."""
        (names,) = await self._ask(("ZREVRANGE", self.keys.poison, 0, -1))
        if not names:
            return []
        (found,) = await self._ask(("HMGET", self.keys.poison_about, *names))
        return [_aside(name, about) for name, about in zip(names, found, strict=True) if about is not None]


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")


def _int(value: bytes | None) -> int | None:
    return int(value) if value and _INTEGER.fullmatch(value) else None


def _drop(entry: bytes, by_name: Mapping[bytes, bytes]) -> Drop | None:
    """The entry as it is; None: it names no group."""
    if (task := _int(by_name.get(b"t"))) is None:
        return None
    return Drop(
        task_id=task,
        at_ms=int(entry.split(b"-")[0]),
        outcome=_text(by_name.get(b"o")),
        place=_text(by_name.get(b"p")),
        reason=_text(by_name.get(b"r")),
        detail=_text(by_name.get(b"d")),
        parent=_int(by_name.get(b"parent")),
        child=_int(by_name.get(b"child")),
        prompt=_text(by_name.get(b"key")),
    )


def _dead_group(task_id: int, fields: Mapping[bytes, bytes], state: bytes | None) -> DeadGroup:
    size = _int(fields.get(b"n")) or 0
    ended = fields.get(b"end") or (state if state == b"delivered" else None)
    return DeadGroup(
        task_id=task_id,
        group_size=size,
        channel=_text(fields.get(b"ch")),
        prompt=_text(fields.get(b"key")),
        slots=tuple(_dead_slot(task_id, idx, fields) for idx in _dead_slots(fields)),
        ended=None if ended is None else _text(ended),
        next_task=_int(fields.get(b"next")),
        spec=fields.get(b"spec"),
    )


def _dead_slots(fields: Mapping[bytes, bytes]) -> list[int]:
    """By the fields that there are: the size of the group is what somebody wrote."""
    return sorted(int(name[1:]) for name in fields if name[:1] == b"k" and _TASK.fullmatch(name[1:]))


def _dead_slot(task_id: int, idx: int, fields: Mapping[bytes, bytes]) -> DeadSlot:
    def of(name: bytes) -> bytes | None:
        return fields.get(name + b"%d" % idx)

    try:
        header: Any = SlotHeader.unpack(of(b"h") or b"")
        reason, traceback, worker = header.reason, header.traceback, header.worker
    except FrameError as error:
        reason, traceback, worker = _text(of(b"r")), f"its record cannot be read: {error}", ""
    return DeadSlot(
        task_id=task_id,
        sample_idx=idx,
        kind=_text(of(b"k")),
        reason=reason or _text(of(b"r")),
        traceback=traceback,
        worker=worker or _text(of(b"w")),
        attempts=_int(of(b"a")) or 0,
        at_ms=_int(of(b"t")) or 0,
    )


def _aside(name: bytes, about: bytes) -> SetAside:
    # Written by our own script; its strings are bytes of any kind.
    try:
        form = msgpack.unpackb(about, raw=True)
        where, reason, sample, at = form[b"where"], form[b"reason"], form[b"sample"], int(form[b"at"])
        if all(isinstance(part, bytes) for part in (where, reason, sample)):
            return SetAside(_text(name), _text(where), _text(reason), sample, at)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError, msgpack.UnpackException):
        pass
    return SetAside(_text(name), "poison", "what was noted of it cannot be read", about[:MAX_SAMPLE], 0)
