"""Reward functions that cannot stall a worker (contract, section 8)."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from typing import Any

from pebble import ProcessExpired

from forebay.errors import RewardTimeoutError, SettingsError, SlotDataError
from forebay.reward_pool import (
    EXIT_CODE_OF_0,
    MAX_PROCESSES,
    BrokenProcessPool,
    default_processes,
    is_time_out,
    name_of,
    number,
    shared_processes,
)

__all__ = ["AsyncRewardWrapper"]

_TIMEOUT_S = 15.0
_MAX_BROKEN = 2
"""Times that a call is tried again for nothing because all processes broke."""


class AsyncRewardWrapper:
    """Calls a reward function without blocking the event loop, and without trusting it to return.

    A plain function runs in one of the processes that all wrappers of this process share; a call that takes longer than
    `timeout_s`, or that takes its process down, is killed with its process, which is replaced. A coroutine function is
    awaited here, under the same time-out. Function and arguments travel to the process by name and by value, so both
    must be picklable by this host's own processes; nothing from the network is.

    What the function raises reaches the caller as it is, at once: only time-outs and crashes are tried again.

    Args:
        reward_fn: returns a number; called with whatever this wrapper is called with.
        timeout_s: for one call, counted from its start, not from its turn in the queue. Finite; default 15.
        max_workers: processes that there are for plain functions, at least; the largest number that a wrapper of this
            process asks for, up to 512, is what all share. None: half of the processors, from 2 to 8.
        max_retries: further tries after a time-out or a crash.
        on_timeout: the reward to give instead of raising when every try has timed out. None: raise.
        timeout_seconds: `timeout_s` by the name that AReaL has for it.

    Raises:
        SettingsError: an argument cannot work; the text names it and its value.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any],
        timeout_s: float | None = None,
        max_workers: int | None = None,
        max_retries: int = 1,
        on_timeout: float | None = None,
        *,
        timeout_seconds: float | None = None,
    ) -> None:
        if not callable(reward_fn):
            raise SettingsError(f"reward_fn={reward_fn!r} is not callable; pass a function or its import string")
        if timeout_s is not None and timeout_seconds is not None:
            raise SettingsError(f"timeout_s={timeout_s} and timeout_seconds={timeout_seconds} are one; pass either")
        given = timeout_s if timeout_s is not None else timeout_seconds
        self._timeout_s = _TIMEOUT_S if given is None else _finite("timeout_s", given)
        if self._timeout_s <= 0:
            raise SettingsError(f"timeout_s={given!r}: must be above 0")
        if max_workers is not None:
            _whole("max_workers", max_workers, 1, MAX_PROCESSES)
        _whole("max_retries", max_retries, 0, None)
        workers = default_processes() if max_workers is None else max_workers
        on_timeout = None if on_timeout is None else _finite("on_timeout", on_timeout)
        self._fn = reward_fn
        self._max_workers = workers
        self._max_retries = max_retries
        self._on_timeout = on_timeout
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
        tries, broken = 0, 0
        while tries <= self._max_retries:
            tries += 1
            try:
                reward = await self._once(args, kwargs)
                if reward is not None:
                    return reward
                killed = "" if self._is_async else "; its process was killed"
                cause = RewardTimeoutError(f"{self._name} ran longer than {self._timeout_s:g} s{killed}")
            except ProcessExpired as error:
                of_0 = " (of os._exit(0), or its own)" if error.exitcode == EXIT_CODE_OF_0 else ""
                cause = SlotDataError(f"{self._name}: its process died with exit code {error.exitcode}{of_0}")
            except BrokenProcessPool as error:
                cause = SlotDataError(f"{self._name}: the processes for rewards broke: {error}")
                broken += 1
                tries -= broken <= _MAX_BROKEN  # another's fault, and perhaps this call had not begun
        if isinstance(cause, RewardTimeoutError) and self._on_timeout is not None:
            return self._on_timeout
        raise cause

    @property
    def _name(self) -> str:
        return name_of(self._fn)

    async def _once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
        """The reward; None: the time is over. A TimeoutError is the function's own."""
        if self._is_async:
            return await self._await(args, kwargs)
        processes = shared_processes()
        processes.want(self._max_workers)
        if not processes.warm:
            await asyncio.to_thread(processes.start)  # takes its time, once
        future = processes.schedule(self._fn, args, kwargs, self._timeout_s)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.cancel()  # kills the process if the call has begun: nobody waits for it
            raise
        except TimeoutError as error:
            if is_time_out(error):
                return None
            raise

    async def _await(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
        clock = asyncio.timeout(self._timeout_s)
        try:
            async with clock:
                value = await self._fn(*args, **kwargs)
        except TimeoutError:
            if clock.expired():
                return None
            raise
        except (KeyboardInterrupt, SystemExit) as error:  # a task would raise them through the event loop
            raise SlotDataError(f"{self._name} raised {type(error).__name__}: {error}") from None
        return number(self._name, value)


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (abs(value) <= sys.float_info.max):
        raise SettingsError(f"{name}={value!r}: must be a finite number")
    return float(value)


def _whole(name: str, value: Any, least: int, most: int | None) -> None:
    if type(value) is not int or value < least or (most is not None and value > most):
        upper = "" if most is None else f", at most {most}"
        raise SettingsError(f"{name}={value!r}: must be an integer of at least {least}{upper}")
