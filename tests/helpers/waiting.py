"""Waiting for conditions, with deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

DEADLINE_S = 60.0
"""Bound on any wait; generous, a busy machine is slow."""


async def until(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds; TimeoutError after the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 (what is waited for happens in another process)
            await asyncio.sleep(0.01)
