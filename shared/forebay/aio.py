"""What the services share about tasks and signals."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import structlog

__all__ = ["StopEvent", "named_task", "stop_signal", "stop_tasks"]

T = TypeVar("T")

log = structlog.get_logger(__name__)

_RECANCEL_S = 0.2
_SAME_S = 0.5
"""Two signals within this are one wish: Ctrl-C under a launcher comes from the terminal and from the launcher."""


class StopEvent(asyncio.Event):
    """Set by the first signal; `hurry` is set by a further one that comes later, for who has no patience."""

    def __init__(self) -> None:
        super().__init__()
        self.hurry = asyncio.Event()
        self._since = 0.0

    def signalled(self) -> None:
        """A signal has come."""
        now = asyncio.get_running_loop().time()
        if not self.is_set():
            self._since = now
            self.set()
        elif now - self._since >= _SAME_S:
            self.hurry.set()


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
async def stop_signal() -> AsyncIterator[StopEvent]:
    """An event that SIGTERM and SIGINT set."""
    stop = StopEvent()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.signalled)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
