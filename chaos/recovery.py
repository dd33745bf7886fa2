"""How long the slots of a killed worker stand still.

From the kill to the moment when an attempt of the slot runs again, or the slot or its group has ended. Redis is asked
what the worker held just before it is killed, and then again and again; the poll bounds the resolution.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, cast

import redis.asyncio as redis_asyncio

from forebay.store.keys import Keys

__all__ = ["Recovery", "percentile"]


@dataclass(slots=True)
class _Waiting:
    task: int
    idx: int
    attempt: int
    since: float
    calm: bool


class Recovery:
    """Follows the slots of killed workers."""

    def __init__(self, client: redis_asyncio.Redis, keys: Keys) -> None:
        self._redis = client
        self._keys = keys
        self._waiting: list[_Waiting] = []
        self.seconds: list[float] = []
        """Of every slot that came back."""
        self.calm_seconds: list[float] = []
        """Of those during whose wait Redis and one of each other kind was up all the time: they have a bound."""

    @property
    def waiting(self) -> int:
        """Slots that have not come back yet."""
        return len(self._waiting)

    async def held_by(self, pid: int) -> list[tuple[int, int, int]]:
        """What the worker with this pid holds, as ``(task, idx, attempt)``."""
        members = await self._redis.zrange(self._keys.leases, 0, -1)
        attempts = [cast("tuple[int, int, int]", tuple(map(int, member.split(b":")))) for member in members]
        if not attempts:
            return []
        pipe = self._redis.pipeline(transaction=False)
        for task, idx, _ in attempts:
            pipe.hget(self._keys.group(task), f"w{idx}")
        workers: list[bytes | None] = await pipe.execute()
        # A worker's name is host:pid:random.
        return [
            attempt
            for attempt, worker in zip(attempts, workers, strict=True)
            if worker is not None and worker.split(b":")[-2] == str(pid).encode()
        ]

    def begin(self, held: list[tuple[int, int, int]]) -> None:
        """The worker that held these is dead from now on."""
        now = time.monotonic()
        self._waiting += [_Waiting(*attempt, since=now, calm=True) for attempt in held]

    def disturb(self) -> None:
        """What the bound presupposes does not hold now."""
        for slot in self._waiting:
            slot.calm = False

    async def look(self) -> None:
        """Ask which slots have come back."""
        if not self._waiting:
            return
        pipe = self._redis.pipeline(transaction=False)
        for slot in self._waiting:
            pipe.hmget(self._keys.group(slot.task), ["st", f"d{slot.idx}", f"a{slot.idx}"])
        states: list[list[bytes | None]] = await pipe.execute()
        leases: set[bytes] = set(await cast("Awaitable[Any]", self._redis.zrange(self._keys.leases, 0, -1)))
        now = time.monotonic()
        left = []
        for slot, (state, done, current) in zip(self._waiting, states, strict=True):
            later = current is not None and int(current) > slot.attempt
            runs = later and f"{slot.task}:{slot.idx}:{int(current or 0)}".encode() in leases
            if state != b"running" or done is not None or runs:
                self.seconds.append(now - slot.since)
                if slot.calm:
                    self.calm_seconds.append(now - slot.since)
            else:
                left.append(slot)
        self._waiting = left


def percentile(values: list[float], share: float) -> float | None:
    """The smallest of `values` that at least `share` of them do not exceed; None without values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
