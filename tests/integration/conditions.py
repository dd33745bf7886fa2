"""Waiting for conditions with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_POLL_S = 0.02


def until(condition: Callable[[], bool], what: str, *, timeout_s: float = 20.0) -> None:
    """Wait until the condition holds; fail, saying for what, after the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}")
        time.sleep(_POLL_S)


async def eventually(condition: Callable[[], bool], what: str, *, timeout_s: float = 20.0) -> None:
    """``until`` for code in an event loop."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}")
        await asyncio.sleep(_POLL_S)
