"""What the slots of one group share in one process: each value is computed once (contract, section 8).

Invariants (tests in ``tests/unit/test_processor_cache.py``):

- At any time at most one computation of a key runs; all who ask meanwhile wait for it (``TestSingleFlight``).
- A failure is everybody's who waited for it, and is not kept (``TestFailures``).
- Who stops waiting, the first who asked included, harms no other waiter (``TestCancellation``).
- No computation waits for itself, and no event loop for what it would have to run (``TestNoDeadlock``). Two
  computations that ask for each other's key are not told apart from two that are slow: both wait until their slots'
  episodes time out. A computation should ask for no key, or all for theirs in one order.
- Once closed, it holds nothing (``TestRelease``).
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, TypeVar, cast

from forebay.errors import SlotDataError

__all__ = ["ProcessorCache"]

T = TypeVar("T")


class _Flight:
    """One computation, and those who wait for it."""

    __slots__ = ("key", "loop", "outcome", "task", "waiters")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.outcome: Future[Any] = Future()
        self.waiters = 0
        self.task: asyncio.Task[None] | None = None
        """What computes it on an event loop; None where a thread does."""
        self.loop: asyncio.AbstractEventLoop | None = None


_computing: ContextVar[tuple[_Flight, ...]] = ContextVar("forebay_computing", default=())
"""The computations that the current code is a part of."""


class ProcessorCache:
    """Values by key, computed once each. May be used from any thread and any event loop.

    Meant for what is costly and the same for all slots of a group, such as a processor's work on the prompt's images:
    every slot gets the same object, which none may change.
    """

    def __init__(self, max_entries: int = 1024) -> None:
        """Make an empty cache; past `max_entries` values the one that was used longest ago is dropped."""
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, Any] = OrderedDict()
        self._flights: dict[Hashable, _Flight] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._values)

    def get_or_compute(self, key: Hashable, fn: Callable[[], T]) -> T:
        """The value of `key`, computed by ``fn()`` in this thread if nobody has it or is at it.

        Waits for a computation that is under way. On a thread that runs an event loop that would stop the loop, and
        with it perhaps the computation: there the value is computed anew instead and not kept. Prefer
        :meth:`aget_or_compute` in coroutines.

        Raises:
            RuntimeError: ``fn`` asks for the value that it computes.
            Exception: whatever ``fn`` raised, here or where it ran.
        """
        found, value, flight, mine = self._claim(key)
        if found:
            return cast("T", value)
        if flight is None:
            return fn()
        if not mine:
            if _in_event_loop():
                self._leave(flight)
                return fn()
            try:
                return cast("T", flight.outcome.result())
            finally:
                self._leave(flight)
        token = _computing.set((*_computing.get(), flight))
        try:
            result = fn()
        except BaseException as error:  # whatever it was, those who wait must learn of it; it goes on from here
            self._finish(flight, error=error)
            raise
        finally:
            _computing.reset(token)
        self._finish(flight, value=result)
        return result

    async def aget_or_compute(self, key: Hashable, fn: Callable[[], Awaitable[T]] | Callable[[], T]) -> T:
        """The value of `key`, computed by `fn` if nobody has it or is at it.

        A coroutine function is awaited; a plain function runs in a thread, and what it returns is awaited if it can
        be. The computation is a task of its own, so a slot that is cancelled leaves it to those who still wait; when
        nobody does any more, it is cancelled.

        Raises:
            RuntimeError: ``fn`` asks for the value that it computes.
            SlotDataError: the computation cancelled itself.
            Exception: whatever ``fn`` raised.
        """
        found, value, flight, mine = self._claim(key)
        if found:
            return cast("T", value)
        if flight is None:
            return cast("T", await _call(fn))
        if mine:
            flight.loop = asyncio.get_running_loop()
            flight.task = flight.loop.create_task(self._compute(flight, fn), name=f"forebay-cache-{key!r:.60}")
        try:
            # Shielded: cancelling the wrapped future would cancel the outcome for everybody.
            return cast("T", await asyncio.shield(asyncio.wrap_future(flight.outcome)))
        finally:
            self._leave(flight)

    def close(self) -> None:
        """Let everything go. Whoever still holds the cache computes for himself, and nothing is kept."""
        with self._lock:
            self._closed = True
            self._values.clear()
            flights = list(self._flights.values())
            self._flights.clear()
        for flight in flights:
            if not flight.waiters:
                _cancel(flight)

    def _claim(self, key: Hashable) -> tuple[bool, Any, _Flight | None, bool]:
        """``(found, value, flight, mine)``; no flight: compute without keeping."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return True, self._values[key], None, False
            if self._closed:
                return False, None, None, False
            flight = self._flights.get(key)
            if flight is not None:
                if flight in _computing.get():
                    raise RuntimeError(f"the computation of {key!r:.100} asks for its own value")
                flight.waiters += 1
                return False, None, flight, False
            flight = self._flights[key] = _Flight(key)
            flight.waiters = 1
            return False, None, flight, True

    async def _compute(self, flight: _Flight, fn: Callable[[], Any]) -> None:
        _computing.set((*_computing.get(), flight))  # the task's own context
        try:
            result = await _call(fn)
        except asyncio.CancelledError:
            # To a waiter a bare CancelledError would look like its own cancellation.
            self._finish(flight, error=SlotDataError(f"the computation of {flight.key!r:.100} was cancelled"))
        except BaseException as error:  # also KeyboardInterrupt, which a task would raise through the event loop
            self._finish(flight, error=error)
        else:
            self._finish(flight, value=result)

    def _finish(self, flight: _Flight, *, value: Any = None, error: BaseException | None = None) -> None:
        with self._lock:
            if self._flights.get(flight.key) is flight:
                del self._flights[flight.key]
                if error is None and not self._closed:
                    self._values[flight.key] = value
                    if len(self._values) > self._max_entries:
                        self._values.popitem(last=False)
        if isinstance(error, StopIteration):  # no future takes it
            error = RuntimeError(f"the computation of {flight.key!r:.100} raised StopIteration")
        if error is None:
            flight.outcome.set_result(value)
        else:
            flight.outcome.set_exception(error)

    def _leave(self, flight: _Flight) -> None:
        with self._lock:
            flight.waiters -= 1
            abandoned = flight.waiters == 0 and not flight.outcome.done()
            if abandoned and self._flights.get(flight.key) is flight:
                del self._flights[flight.key]  # who comes now begins anew
        if abandoned:
            _cancel(flight)


async def _call(fn: Callable[[], Any]) -> Any:
    if inspect.iscoroutinefunction(fn):
        return await fn()
    result = await asyncio.to_thread(_plain, fn)
    return await result if inspect.isawaitable(result) else result


def _plain(fn: Callable[[], Any]) -> Any:
    try:
        return fn()
    except StopIteration as error:  # the future of a thread's call does not take it, and would never end
        raise RuntimeError("the computation raised StopIteration") from error


def _cancel(flight: _Flight) -> None:
    if flight.task is not None and flight.loop is not None and not flight.loop.is_closed():
        flight.loop.call_soon_threadsafe(flight.task.cancel)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
