"""The Redis that the benchmarks share.

It is the embedded Valkey of ``make up``, with its configuration, in a folder of its own that goes afterwards.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import redis
import redis.asyncio as redis_asyncio

from forebay_ops.embedded_redis import ensure_redis

__all__ = ["Server", "cpu_s", "running_server"]


@dataclass(frozen=True, slots=True)
class Server:
    """A Redis server that nobody else uses."""

    url: str
    pid: int
    home: Path
    """Scratch folder."""

    def database(self, number: int) -> str:
        """The URL of database `number`, so that ways do not meet."""
        return f"{self.url.rpartition('/')[0]}/{number}"

    def cpu_s(self) -> float:
        """CPU seconds that the server has used so far, in its own words: finer than the system's clock ticks."""
        with redis.Redis.from_url(self.url) as client:
            said: Any = client.info("cpu")
        return float(said["used_cpu_user"] + said["used_cpu_sys"])

    async def empty(self, number: int) -> None:
        """Remove all keys of a database."""
        async with redis_asyncio.Redis.from_url(self.database(number)) as client:
            await client.flushdb()


@contextmanager
def running_server() -> Iterator[Server]:
    """Start a server; stop it and remove its data at the end.

    Raises:
        RedisStartError: there is none to start, or it does not come up.
    """
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        home = Path(folder)
        with ensure_redis(home) as handle:
            if handle.pid is None:  # only of a server given by URL
                raise RuntimeError("the embedded server has no pid")
            yield Server(handle.url, handle.pid, home)


def cpu_s(pid: int) -> float:
    """CPU seconds, user and system, that a process has used so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
