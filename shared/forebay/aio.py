"""What the services share about tasks and signals."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import structlog

__all__ = ["named_task", "stop_signal", "stop_tasks"]

T = TypeVar("T")

log = structlog.get_logger(__name__)

_RECANCEL_S = 0.2


def named_task(name: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task of ours, by a name that shows in its repr and in debuggers."""
    return asyncio.create_task(work, name=f"forebay-{name}")


async def stop_tasks(tasks: Iterable[asyncio.Task[Any]], timeout_s: float = 10.0) -> bool:
    """Cancel `tasks` until they have ended: whether all did within `timeout_s`.

    Again and again, because ``asyncio.wait_for`` of Python 3.11, which libraries use, swallows a cancellation that
    meets the end of what it waits for. What has failed before is not raised here: of several failures at once the
    caller raises the first, and the others, which would else be written with a traceback each, have the same cause.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    tasks = list(tasks)
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            log.debug("task.had_failed", task=task.get_name(), error=str(error))
    pending = {task for task in tasks if not task.done()}
    while pending and asyncio.get_running_loop().time() < deadline:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_RECANCEL_S)
    return not pending


@asynccontextmanager
async def stop_signal() -> AsyncIterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
