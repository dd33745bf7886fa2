"""Lets a run, or a whole Redis, go back in time."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path

from forebay.store import Store
from forebay_ops.embedded_redis import RedisHandle, ensure_redis


@dataclass
class Snapshot:
    """All keys of one run, to be put back."""

    values: dict[bytes, tuple[int, bytes]] = field(default_factory=dict)

    @classmethod
    async def of(cls, store: Store) -> Snapshot:
        """The run of `store` as it is now."""
        redis = store._redis
        return cls({name: (await redis.pttl(name), await redis.dump(name)) for name in await _names(store)})

    async def restore(self, store: Store) -> None:
        """Put the run back; `store` finds that out on its own."""
        redis = store._redis
        async with redis.pipeline(transaction=True) as pipe:
            for name in await _names(store):
                pipe.delete(name)
            for name, (ttl, value) in self.values.items():
                pipe.restore(name, max(0, ttl), value)
            await pipe.execute()


async def _names(store: Store) -> list[bytes]:
    return [name async for name in store._redis.scan_iter(match=f"*{{{store.keys.run}}}*", count=10_000)]


async def reconnect(store: Store) -> None:
    """Close what `store` has open, as a server that ends does."""
    await store._redis.connection_pool.disconnect()


class OwnRedis:
    """A server of one's own that is killed, stays away, and comes back with its data or with older data."""

    def __init__(self, home: Path, port: int) -> None:
        self.home = home
        self.port = port
        self._handle: RedisHandle | None = None
        self._ended: list[RedisHandle] = []

    @property
    def url(self) -> str:
        """Where it is."""
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        """Start it, on the data that is there."""
        self._handle = await asyncio.to_thread(ensure_redis, self.home, port=self.port)

    async def kill(self) -> None:
        """SIGKILL it."""
        assert self._handle is not None
        os.kill(self._handle.pid or 0, signal.SIGKILL)
        await asyncio.to_thread(self._handle.wait, 10)
        self._ended.append(self._handle)
        self._handle = None

    def keep(self, name: str) -> None:
        """Copy its data, as a back-up does."""
        for _ in range(20):
            try:
                shutil.copytree(self._data, self.home / name, dirs_exist_ok=True)
            except shutil.Error:
                continue  # a file of the server went meanwhile
            return
        raise TimeoutError("the data could not be copied")

    def go_back(self, name: str) -> None:
        """Put data that were kept in place of those that are there."""
        shutil.rmtree(self._data)
        shutil.copytree(self.home / name, self._data)

    @property
    def _data(self) -> Path:
        return self.home / "redis" / "appendonlydir"

    async def stop(self) -> None:
        """Stop it for good."""
        for handle in [*self._ended, *([self._handle] if self._handle else [])]:
            await asyncio.to_thread(handle.stop)
