"""Reward functions that cannot stall a worker (contract, section 8)."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import threading
import weakref
from collections.abc import Callable
from typing import Any

from pebble import ProcessExpired, ProcessPool

from forebay.errors import RewardTimeoutError, SettingsError, SlotDataError

__all__ = ["AsyncRewardWrapper"]


class AsyncRewardWrapper:
    """Calls a reward function without blocking the event loop, and without trusting it to return.

    A plain function runs in one of `max_workers` processes of its own; a call that takes longer than `timeout_s`, or
    that takes its process down, is killed with its process, which is replaced. A coroutine function is awaited here,
    under the same time-out. Function and arguments travel to the process by name and by value, so both must be
    picklable by this host's own processes; nothing from the network is.

    Args:
        reward_fn: returns a number; called with whatever this wrapper is called with.
        timeout_s: for one call, counted from its start, not from its turn in the queue.
        max_workers: processes for plain functions.
        max_retries: further tries after a time-out or a crash.
        on_timeout: the reward to give instead of raising when every try has timed out. None: raise.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any],
        timeout_s: float = 15.0,
        max_workers: int = 2,
        max_retries: int = 1,
        on_timeout: float | None = None,
    ) -> None:
        if not callable(reward_fn):
            raise SettingsError(f"reward_fn={reward_fn!r} is not callable; pass a function or its import string")
        if timeout_s <= 0 or max_workers < 1 or max_retries < 0:
            raise SettingsError(
                f"timeout_s={timeout_s} must be above 0, max_workers={max_workers} at least 1, "
                f"max_retries={max_retries} at least 0"
            )
        self._fn = reward_fn
        self._timeout_s = timeout_s
        self._max_workers = max_workers
        self._max_retries = max_retries
        self._on_timeout = on_timeout
        self._pool: ProcessPool | None = None
        self._starting = threading.Lock()
        self._is_async = inspect.iscoroutinefunction(reward_fn) or inspect.iscoroutinefunction(
            getattr(reward_fn, "__call__", None)  # noqa: B004 (an object with an async __call__)
        )

    async def __call__(self, /, *args: Any, **kwargs: Any) -> float:
        """The reward.

        Raises:
            RewardTimeoutError: every try timed out and `on_timeout` is None. Never a silent zero.
            SlotDataError: the process died in every try, or the function returned no number.
        """
        cause: Exception = RewardTimeoutError("unreachable")
        for _ in range(self._max_retries + 1):
            try:
                return self._number(await self._once(args, kwargs))
            except TimeoutError:
                killed = "" if self._is_async else "; its process was killed"
                cause = RewardTimeoutError(f"{self._name} ran longer than {self._timeout_s:g} s{killed}")
            except ProcessExpired as error:
                cause = SlotDataError(f"{self._name}: its process died with exit code {error.exitcode}")
        if isinstance(cause, RewardTimeoutError) and self._on_timeout is not None:
            return self._on_timeout
        raise cause

    @property
    def _name(self) -> str:
        return f"reward function {getattr(self._fn, '__qualname__', repr(self._fn))}"

    async def _once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_async:
            async with asyncio.timeout(self._timeout_s):
                return await self._fn(*args, **kwargs)
        pool = self._pool
        if pool is None:
            pool = await asyncio.to_thread(self._start)  # the fork server takes its time, once
        future = pool.schedule(self._fn, args=args, kwargs=kwargs, timeout=self._timeout_s)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            _cancel(future)  # kills the process if the call has begun: nobody waits for it
            raise

    def _start(self) -> ProcessPool:
        with self._starting:
            if self._pool is None:
                # A fork of a process with threads and an event loop may deadlock; a fork server is forked before them.
                context = multiprocessing.get_context("forkserver")
                pool = ProcessPool(max_workers=self._max_workers, context=context)
                weakref.finalize(self, _stop, pool)  # runs at interpreter exit too
                if not pool.active:  # asking starts its processes
                    raise SlotDataError(f"{self._name}: its processes cannot be started")
                self._pool = pool
            return self._pool

    def _number(self, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # torch: RuntimeError for several elements
            raise SlotDataError(f"{self._name} returned {value!r}, expected a number") from None


def _cancel(future: Any) -> None:
    future.cancel()


def _stop(pool: Any) -> None:
    pool.stop()
    pool.join(timeout=5)
