"""Ends a worker whose event loop does not turn any more, so that its slots run elsewhere and it is started anew.

A workflow that blocks its thread for ever (``time.sleep``, a regular expression that backtracks, a call into C that
waits) stops every episode of the process, which would be one worker less for good. Its end costs the slot that blocks
an attempt of kind ``infra``, so one that always does fails when its attempts are used up. The other slots are kept
meanwhile and handed back in time (:mod:`forebay_workers.rescue`); where nothing of ours can run, because the code does
not let go of the interpreter, they lose an attempt too.

Invariants (tests in ``tests/unit/test_watchdog.py`` and ``tests/integration/test_worker_watchdog.py``):

- A loop that has been in one and the same step of one task for the limit ends the process with all stacks on stderr
  (``test_blocked_loop_ends``). So does code that does not let go of the interpreter, whether it computes or waits, for
  three limits and a little (``test_blocked_interpreter_ends``).
- A loop that is only busy is left alone, however long one turn of it takes (``test_a_busy_loop_goes_on``); the leases
  are kept in its stead meanwhile.
- What else the process held is delivered (``test_blocking_workflow_fails_and_others_flow``).
- Time during which the process did not run at all, because it was stopped, does not count
  (``test_only_time_that_the_loop_had_counts``, ``test_stopped_process_goes_on``), if it is less than three limits at a
  time: a longer SIGSTOP ends the process when it is continued, because the timer that needs no interpreter cannot tell
  it from a block.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import structlog

__all__ = ["EXIT_CODE", "Watchdog", "watched"]

log = structlog.get_logger(__name__)

EXIT_CODE = 70
"""Of a worker that ended itself; ``EX_SOFTWARE`` of sysexits."""
_CHECKS = 10
"""Looks at the loop within the limit."""
_INTERPRETER_FACTOR = 3.0
"""A blocked interpreter is noticed after this many limits, and the time for the last acts."""
_BARK_S = 8.0
"""For the last acts: stderr may be a full pipe, or locked by the very call that blocks."""


class Slots(Protocol):
    """What the process holds."""

    def keep(self) -> None:
        """Do not lose it yet."""

    def hand_back(self) -> None:
        """Give it to others."""


class Silence:
    """For how long a loop has shown no sign of progress, as far as it could have."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._sign: object = None
        self._silent_s = 0.0

    def after(self, sign: object, waited_s: float) -> float:
        """Seconds of silence, `waited_s` after the last look; `sign` is something that differs once there is progress.

        A longer wait than a step is time when nothing of this process ran, and says nothing about its loop: after a
        SIGSTOP, on a suspended machine or in a debugger the loop gets its time again.
        """
        self._silent_s = self._silent_s + min(waited_s, self._step_s * 1.5) if sign == self._sign else 0.0
        self._sign = sign
        return self._silent_s


class Watchdog:
    """Watches the running event loop from a thread of its own."""

    def __init__(self, limit_s: float, held: Callable[[], Sequence[Any]], slots: Slots | None, lease_s: float) -> None:
        """Make a watchdog that ends the process once the loop has stood for `limit_s` and two leases.

        `held` says for the log what it ran; `slots` are kept, at least three times a lease, and then handed back.
        """
        self._limit_s = max(limit_s, 2 * lease_s)
        self._step_s = min(self._limit_s / _CHECKS, lease_s / 3) if lease_s else self._limit_s / _CHECKS
        self._held = held
        self._slots = slots
        self._loop = asyncio.get_running_loop()
        self._ticks = 0
        self._next_tick: asyncio.TimerHandle | None = None
        self._stop = threading.Event()
        self._arming = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="forebay-watchdog", daemon=True)

    def start(self) -> None:
        """Watch from now on, even if the loop never comes to its next turn."""
        self._tick()
        self._arm()
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        with self._arming:
            self._stop.set()
            faulthandler.cancel_dump_traceback_later()
        if self._next_tick is not None:
            self._next_tick.cancel()

    def _tick(self) -> None:
        # A callback and not a task that sleeps, which would need a second turn of the loop to be woken.
        self._ticks += 1
        self._next_tick = self._loop.call_later(self._step_s / 2, self._tick)

    def _arm(self) -> None:
        """End the process, with all stacks on stderr, unless this is called again in time.

        For code that does not let go of the interpreter, such as a regular expression or a C extension that waits: no
        thread of ours runs then, but this timer's, which is C alone. It counts wall-clock time.
        """
        with self._arming:
            if not self._stop.is_set():
                faulthandler.dump_traceback_later(
                    self._limit_s * _INTERPRETER_FACTOR + _BARK_S, exit=True, file=sys.__stderr__ or 2
                )

    def _running(self) -> weakref.ref[asyncio.Task[Any]] | None:
        """The task whose step the loop runs. Two looks at one task are equal, and at two tasks never."""
        task = asyncio.current_task(self._loop)
        return None if task is None else weakref.ref(task)

    def _watch(self) -> None:
        turn, step, before = Silence(self._step_s), Silence(self._step_s), time.monotonic()
        while not self._stop.wait(self._step_s):
            self._arm()
            now = time.monotonic()
            ticks, waited_s, before = self._ticks, now - before, now
            turning_s = turn.after(ticks, waited_s)
            blocked_s = step.after((ticks, self._running()), waited_s)
            if blocked_s >= self._limit_s:
                self._bark(blocked_s)
            elif turning_s and self._slots is not None:
                with contextlib.suppress(Exception):  # whatever fails there, the watch goes on
                    self._slots.keep()

    def _bark(self, silent_s: float) -> None:
        last = threading.Timer(_BARK_S, os._exit, (EXIT_CODE,))
        last.daemon = True
        last.start()
        with contextlib.suppress(Exception):
            if self._slots is not None:
                self._slots.hand_back()
        with contextlib.suppress(Exception):  # whatever fails here, the process must end
            log.error(
                "worker.blocked",
                seconds=round(silent_s, 1),
                held=[f"{task}:{idx} attempt {attempt}" for task, idx, attempt in list(self._held())[:32]],
                remedy="the stacks below show the call; it belongs in asyncio.to_thread, or in a reward function",
            )
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        os._exit(EXIT_CODE)


@contextlib.contextmanager
def watched(
    limit_s: float, held: Callable[[], Sequence[Any]], slots: Slots | None = None, lease_s: float = 0.0
) -> Iterator[None]:
    """Watch the running loop inside the block as :class:`Watchdog` says; not at all if `limit_s` is 0."""
    if not limit_s:
        yield
        return
    watchdog = Watchdog(limit_s, held, slots, lease_s)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()
