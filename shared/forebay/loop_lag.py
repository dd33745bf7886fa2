"""How late an event loop is: what a service's own CPU work costs all that it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["LAG_BUCKETS_S", "watch_loop"]

LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


async def watch_loop(observe: Callable[[float], object], interval_s: float = 0.1) -> None:
    """Tell `observe` by how many seconds each of many short sleeps came late, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        observe(max(0.0, loop.time() - due))
