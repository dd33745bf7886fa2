"""Looks at a run without changing it: what its next batch waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgpack
from redis.exceptions import ResponseError

from forebay.errors import FrameError
from forebay.store.base import StoreBase
from forebay.store.connection import address
from forebay.store.look_records import OpenSlot, RunLook, RunningGroup
from forebay.store.records import RunStatus
from forebay.wire.doing import AttemptDoing, Doing, ServerSeen

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["LookCalls"]

_WORKERS_ASKED = 64
_LOST_AFTER_S = 15.0
"""A worker that has been silent for longer tells nothing of its attempts any more."""


class LookCalls(StoreBase):
    """What shows why a batch does not come."""

    if TYPE_CHECKING:

        async def status(self, *, live_within_s: float = 15.0) -> RunStatus:
            """Of :class:`Store`."""
            raise NotImplementedError

    async def look(self, *, leading: bool = False, groups: int = 8, slots: int = 16) -> RunLook:
        """What the run does, with its oldest `groups` running ones and up to `slots` open slots of each.

        Two round trips, whatever the run's size; `leading` is for the collector's own watch.

        Raises:
            FrameError: Redis refuses to look, as for a user that may not, or what it says cannot be read.
        """
        try:
            status, packed = await asyncio.gather(
                self.status(live_within_s=_LOST_AFTER_S), self._run("look", int(leading), groups, slots)
            )
        except ResponseError as error:
            raise FrameError(f"Redis refused the look at the run: {error}") from None
        form = _form(packed)
        running = [_map(one) for one in _list(form.get("groups"))]
        named = [_text(_map(slot).get("worker")) for group in running for slot in _list(group.get("slots"))]
        workers = list(dict.fromkeys([name for name in named if name] + sorted(status.workers)))[:_WORKERS_ASKED]
        said = await self._said(workers)
        return RunLook(
            status=status,
            groups=tuple(_group(group, said, status) for group in running),
            since_cut_s=_seconds(form.get("since_cut")),
            since_watched_s=_seconds(form.get("watched")),
            since_submit_s=_seconds(form.get("since_submit")),
            ended=bool(form.get("ended")),
            driver=_text(form.get("driver")),
            reader_idle_s=_seconds(form.get("reader_idle")),
            due_attempts=_int(form.get("due")),
            later_attempts=_int(form.get("later")),
            drops={_text(name): _int(count) for name, count in _map(form.get("drops")).items()},
            drop_details={_text(name): _text(text) for name, text in _map(form.get("details")).items()},
            servers=_servers(said[name] for name in workers if name in said and name in status.workers),
        )

    async def _said(self, workers: list[str]) -> dict[str, Doing]:
        if not workers:
            return {}
        (found,) = await self._ask(("HMGET", self.keys.workers_doing, *workers))
        said: dict[str, Doing] = {}
        for name, frame in zip(workers, found, strict=True):
            if frame is not None:
                try:
                    said[name] = Doing.unpack(frame)
                except FrameError:  # of another release: then nothing is known of what it does
                    continue
        return said


def _group(form: Mapping[str, Any], said: Mapping[str, Doing], status: RunStatus) -> RunningGroup:
    task_id = _int(form.get("task"))
    age_s = _seconds(form.get("age")) or 0.0
    return RunningGroup(
        task_id=task_id,
        size=_int(form.get("size")),
        open_slots=_int(form.get("open")),
        age_s=age_s,
        deadline_in_s=-(_seconds(form.get("deadline")) or 0.0),
        direct=_text(form.get("channel")) != "",
        slots=tuple(_slot(_map(slot), task_id, age_s, said, status) for slot in _list(form.get("slots"))),
    )


def _slot(
    form: Mapping[str, Any], task_id: int, group_age_s: float, said: Mapping[str, Doing], status: RunStatus
) -> OpenSlot:
    idx, attempt = _int(form.get("idx")), _int(form.get("attempt"))
    failure, worker = _text(form.get("failure")), _text(form.get("worker"))
    due_s = _seconds(form.get("due"))
    if not worker:
        state = "lost" if due_s is None else "queued" if due_s >= 0 else "backing off"
        age_s = group_age_s if due_s is None else max(0.0, due_s)
        return OpenSlot(idx, attempt, state, age_s, due_in_s=max(0.0, -(due_s or 0.0)), last_failure=failure)
    age_s = _seconds(form.get("leased")) or 0.0
    silent: float | None = status.workers.get(worker, {}).get("silent_s")
    doing: AttemptDoing | None = None
    if worker in said:
        doing = said[worker].attempts.get((task_id, idx, attempt))
    if doing is None or silent is None:
        return OpenSlot(idx, attempt, "running", age_s, worker=worker, silent_s=silent, last_failure=failure)
    return OpenSlot(
        idx,
        attempt,
        "running",
        age_s,
        worker=worker,
        phase=doing.phase,
        phase_s=doing.phase_s + silent,
        server=address(doing.server) if doing.server else "",
        silent_s=silent,
        last_failure=failure,
    )


def _servers(said: Iterable[Doing]) -> dict[str, ServerSeen]:
    """Each server as the best of the workers sees it: what one of them can use is not what the run waits for."""
    best: dict[str, ServerSeen] = {}
    for one in said:
        for url, seen in one.servers.items():
            name = address(url)
            if name not in best or _rank(seen) < _rank(best[name]):
                best[name] = seen
    return best


def _rank(seen: ServerSeen) -> tuple[bool, float, float]:
    return not seen.healthy, seen.paused_s or 0.0, seen.down_s or 0.0


def _form(packed: Any) -> Mapping[Any, Any]:
    try:
        # Lua has but one kind of string, so msgpack of Lua has no text: names and values are bytes here.
        form = msgpack.unpackb(packed, raw=True, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise FrameError(f"the look at the run cannot be read: {error}") from None
    return _map(form)


def _map(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):  # an empty table of Lua is an array
        return {}
    return {name.decode(errors="replace") if isinstance(name, bytes) else name: item for name, item in value.items()}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def _int(value: Any) -> int:
    return int(value) if isinstance(value, (int, float)) else 0


def _seconds(ms: Any) -> float | None:
    return ms / 1000 if isinstance(ms, (int, float)) else None
