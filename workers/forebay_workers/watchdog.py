"""Ends a worker whose event loop does not turn any more, so that its slots run elsewhere and it is started anew.

A workflow that blocks its thread for ever (``time.sleep``, a regular expression that backtracks, a call into C that
waits) stops every episode of the process, which would be one worker less for good. Its end costs the slot that blocks
an attempt of kind ``infra``, so one that always does fails when its attempts are used up. The other slots are kept
meanwhile and handed back in time (:mod:`forebay_workers.rescue`); where nothing of ours can run, because the code does
not let go of the interpreter, they lose an attempt too.

Invariants (tests in ``tests/unit/test_watchdog.py`` and ``tests/integration/test_worker_watchdog.py``):

- A loop that has not ticked for the limit ends the process with all stacks on stderr (``test_blocked_loop_ends``),
  whether the block leaves the interpreter free or not (``test_blocked_interpreter_ends``).
- What else the process held is delivered (``test_blocking_workflow_fails_and_others_flow``).
- Time during which the process did not run at all, because it was stopped or its machine slept, does not count
  (``test_only_time_that_the_loop_had_counts``, ``test_stopped_process_goes_on``).
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import structlog

from forebay.aio import named_task

__all__ = ["EXIT_CODE", "Watchdog", "watched"]

log = structlog.get_logger(__name__)

EXIT_CODE = 70
"""Of a worker that ended itself; ``EX_SOFTWARE`` of sysexits."""
_CHECKS = 10
"""Looks at the loop within the limit."""
_CPU_FACTOR = 2.0
"""A blocked interpreter is noticed after this many limits of CPU time."""
_BARK_S = 8.0
"""For the last acts: stderr may be a full pipe, or locked by the very call that blocks."""


class Slots(Protocol):
    """What the process holds."""

    def keep(self) -> None:
        """Do not lose it yet."""

    def hand_back(self) -> None:
        """Give it to others."""


class Silence:
    """For how long a loop has not ticked, as far as it could have."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._ticks = -1
        self._silent_s = 0.0

    def after(self, ticks: int, waited_s: float) -> float:
        """Seconds of silence once the loop has ticked `ticks` times, `waited_s` after the last look at it.

        A longer wait than a step is time when nothing of this process ran, and says nothing about its loop: after a
        SIGSTOP, on a suspended machine or in a debugger the loop gets its time again.
        """
        self._silent_s = self._silent_s + min(waited_s, self._step_s * 1.5) if ticks == self._ticks else 0.0
        self._ticks = ticks
        return self._silent_s


class Watchdog:
    """Watches one event loop from a thread of its own."""

    def __init__(self, limit_s: float, held: Callable[[], Sequence[Any]], slots: Slots | None, lease_s: float) -> None:
        """Make a watchdog that ends the process once the loop has stood for `limit_s` and two leases.

        `held` says for the log what it ran; `slots` are kept, at least three times a lease, and then handed back.
        """
        self._limit_s = max(limit_s, 2 * lease_s)
        self._step_s = min(self._limit_s / _CHECKS, lease_s / 3) if lease_s else self._limit_s / _CHECKS
        self._held = held
        self._slots = slots
        self._ticks = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="forebay-watchdog", daemon=True)

    def start(self) -> None:
        """Watch from now on, even if the loop never comes to its first tick."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._stop.set()

    async def tick(self) -> None:
        """Show that the loop turns, until cancelled."""
        while True:
            self._ticks += 1
            await asyncio.sleep(self._step_s / 2)

    def _watch(self) -> None:
        silence, before = Silence(self._step_s), time.monotonic()
        with _cpu_alarm(self._limit_s * _CPU_FACTOR) as rearm:
            while not self._stop.wait(self._step_s):
                rearm()
                now = time.monotonic()
                silent_s = silence.after(self._ticks, now - before)
                before = now
                if silent_s >= self._limit_s:
                    self._bark(silent_s)
                elif silent_s and self._slots is not None:
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
    ticking = named_task("watchdog", watchdog.tick())
    try:
        yield
    finally:
        watchdog.stop()
        ticking.cancel()


@contextlib.contextmanager
def _cpu_alarm(seconds: float) -> Iterator[Callable[[], None]]:
    """End the process, with all stacks on stderr, once it has computed for `seconds` since the last call of the result.

    For code that computes without ever letting go of the interpreter, such as a regular expression: no thread of ours
    runs then, but a signal's handler in C does. The timer counts the process's time on a CPU, so a process that is
    stopped, or waits, or is starved, never rings; neither does one that computes in threads that leave the
    interpreter free, because then :meth:`Watchdog._watch` winds the timer again.
    """
    if not hasattr(signal, "SIGVTALRM") or signal.getsignal(signal.SIGVTALRM) is not signal.SIG_DFL:
        yield lambda: None  # somebody else's, a profiler's perhaps
        return
    # chain: after the stacks, what the signal does by default, which is to end the process.
    faulthandler.register(signal.SIGVTALRM, file=sys.__stderr__ or 2, all_threads=True, chain=True)

    def rearm() -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)

    rearm()
    try:
        yield rearm
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        faulthandler.unregister(signal.SIGVTALRM)
