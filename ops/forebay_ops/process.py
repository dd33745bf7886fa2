"""One supervised process: start, readiness, restart with back-off, end.

Rules, each with its test in ``tests/integration/test_supervisor.py``:

- A process that exits without having been asked to is started again, after a wait that doubles.
- A process that exits quickly too often in a row fails for good, with the last lines of its log.
- Nothing of its process group outlives it: not after an exit, a stop, or the death of the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from forebay.errors import ForebayError
from forebay_ops.errors import ProcessFailedError
from forebay_ops.logs import LogTail, last_lines, open_log
from forebay_ops.readiness import Readiness, Started
from forebay_ops.spawning import Guardian, create_time, kill_group, launch_argv
from forebay_ops.terminal import Terminal

__all__ = ["ManagedProcess", "ProcessSpec", "ProcessState", "RestartPolicy"]

_POLL_STARTING_S = 0.05
_POLL_READY_S = 0.2
_STILL_STARTING_S = 10.0
_KILL_WAIT_S = 5.0
_TAIL_LINES = 15
_BAD_INPUT = 2
"""Exit code of every command of ours for an error that it names."""


class ProcessState(StrEnum):
    """What a process is doing."""

    STARTING = "starting"
    """It runs and is not ready yet."""
    READY = "ready"
    WAITING = "waiting"
    """It has exited and is started again after the back-off."""
    STOPPING = "stopping"
    STOPPED = "stopped"
    """It has ended because it was asked to."""
    FAILED = "failed"
    """It has ended for good."""


@dataclass(frozen=True)
class RestartPolicy:
    """When a process that exits is started again."""

    max_quick_failures: int = 4
    """Exits in a row, each less than `quick_s` after its start, before the process has failed for good."""
    quick_s: float = 10.0
    backoff_s: float = 0.25
    """Wait before the first restart; doubles with each further failure in a row."""
    max_backoff_s: float = 5.0

    def wait_s(self, failures: int) -> float:
        """The wait after that many failures in a row (1 or more)."""
        return min(self.backoff_s * 2.0 ** (failures - 1), self.max_backoff_s)


@dataclass(frozen=True)
class ProcessSpec:
    """A process to run."""

    name: str
    """Shown before its lines, and used by ``forebay logs NAME``."""
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Added to the environment of the supervisor."""
    ready: Readiness = field(default_factory=Started)
    address: str = ""
    """Shown once it is ready; holds no password."""
    cwd: Path | None = None
    start_timeout_s: float = 180.0
    """From its start to its readiness; longer is a failure for good."""
    stop_grace_s: float = 10.0
    """From SIGTERM to SIGKILL."""
    log: Path | None = None
    """Where it logs, if not to ``<home>/logs/NAME.log``."""
    show_log: bool = True
    """Whether its lines are shown on the terminal."""
    pass_fds: tuple[int, ...] = ()
    on_start: Callable[[int], None] = lambda _: None
    """Called with each new pid."""
    on_end: Callable[[], None] = lambda: None
    """Called when it has ended and is not started again."""


@dataclass(frozen=True)
class Surroundings:
    """What all processes of a supervisor share."""

    logs: Path
    env: Mapping[str, str] = field(repr=False)
    terminal: Terminal
    guardian: Guardian
    policy: RestartPolicy
    changed: Callable[[], None]
    """Called after each change of a process that others may want to know."""


class ManagedProcess:
    """Runs one spec until it is stopped or fails for good. ``start`` it once."""

    def __init__(self, spec: ProcessSpec, around: Surroundings) -> None:
        self.spec = spec
        self.log = spec.log or around.logs / f"{spec.name}.log"
        self.state = ProcessState.STARTING
        self.pid: int | None = None
        self.created: float | None = None
        """When the current process was started, in seconds since the epoch."""
        self.restarts = 0
        self._around = around
        self._became_ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._log_offset = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Begin; the task ends when the process has been stopped, or raises what made it fail for good."""
        # The task is never cancelled: a cancelled spawn could lose sight of the process that it has just made.
        self._task = asyncio.create_task(self._run(), name=f"process {self.spec.name}")
        return self._task

    def on_end(self, callback: Callable[[asyncio.Task[None]], None]) -> None:
        """Call back with the task of ``start`` when it ends."""
        if self._task is not None:
            self._task.add_done_callback(callback)

    async def wait_ready(self) -> None:
        """Wait until the process has been ready for the first time.

        Raises:
            ProcessFailedError: it failed for good before that.
        """
        if self._task is None:
            raise RuntimeError("wait_ready before start")
        ready = asyncio.create_task(self._became_ready.wait())
        try:
            await asyncio.wait({ready, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self._task.done():
            self._task.result()

    async def stop(self) -> None:
        """SIGTERM, SIGKILL after the grace, and wait for the end. Safe to repeat."""
        if self._task is None:
            return
        if not self._task.done():
            self._stop.set()
            self._set(ProcessState.STOPPING)
            self._signal(signal.SIGTERM)
            await asyncio.wait({self._task}, timeout=self.spec.stop_grace_s)
        if not self._task.done():
            self._around.terminal.progress(self.spec.name, f"did not end within {self.spec.stop_grace_s:g} s: killed")
            self.kill()
            await asyncio.wait({self._task}, timeout=_KILL_WAIT_S)

    def kill(self) -> None:
        """SIGKILL its process group now, and do not start it again."""
        self._stop.set()
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is not None:
            kill_group(self.pid, number)

    def _set(self, state: ProcessState) -> None:
        self.state = state
        self._around.changed()

    async def _run(self) -> None:
        try:
            await self._keep_running()
        except ForebayError:
            self._set(ProcessState.FAILED)
            raise
        finally:
            self.spec.on_end()
        self._set(ProcessState.STOPPED)

    async def _keep_running(self) -> None:
        policy, failures = self._around.policy, 0
        while not self._stop.is_set():
            began = time.monotonic()
            process = await self._spawn()
            try:
                await self._watch(process)
            finally:
                await self._sweep(process)
            if self._stop.is_set():
                return
            if process.returncode == _BAD_INPUT and not self._became_ready.is_set():
                raise self._failure("refused to start")  # it says why, and would again
            failures = failures + 1 if time.monotonic() - began < policy.quick_s else 1
            ended = _describe_exit(process.returncode)
            if failures >= policy.max_quick_failures:
                raise self._failure(f"{ended}, {failures} times in a row")
            wait_s = policy.wait_s(failures)
            self._set(ProcessState.WAITING)
            self._around.terminal.progress(self.spec.name, f"{ended}; starting it again in {wait_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), wait_s)
            self.restarts += 1

    async def _spawn(self) -> asyncio.subprocess.Process:
        spec = self.spec
        with open_log(self.log) as log:
            self._log_offset = log.seek(0, os.SEEK_END)
            try:
                process = await asyncio.create_subprocess_exec(
                    *launch_argv(spec.argv),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self._around.env, **spec.env},
                    cwd=spec.cwd,
                    start_new_session=True,
                    pass_fds=spec.pass_fds,
                )
            except OSError as error:  # no such folder, no more processes
                raise ProcessFailedError(f"{spec.name} cannot be started: {error}") from error
        self.pid = process.pid
        self._around.guardian.watch(process.pid)
        self.created = create_time(process.pid) or time.time()
        spec.on_start(process.pid)
        self._set(ProcessState.STARTING)
        if self._stop.is_set():  # asked to stop while it was being started
            self._signal(signal.SIGTERM)
        return process

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Show its log and wait for its readiness until it exits."""
        tail = LogTail(self.log, offset=self._log_offset)
        exited = asyncio.create_task(process.wait())
        began = time.monotonic()
        reminded = began
        while not exited.done():
            lines = self._show(tail)
            now = time.monotonic()
            if self.state is ProcessState.STARTING:
                if await self.spec.ready.check(process.pid, lines):
                    self._announce_ready(now - began)
                elif now - began > self.spec.start_timeout_s:
                    raise self._failure(f"was not ready within {self.spec.start_timeout_s:g} s")
                elif now - reminded > _STILL_STARTING_S:
                    reminded = now
                    self._around.terminal.progress(self.spec.name, f"still starting ({now - began:.0f} s)")
            poll_s = _POLL_READY_S if self.state is ProcessState.READY else _POLL_STARTING_S
            await asyncio.wait({exited}, timeout=poll_s)
        while self._show(tail, flush=True):
            pass

    def _announce_ready(self, took_s: float) -> None:
        if self._stop.is_set():
            return
        self._set(ProcessState.READY)
        self._became_ready.set()
        where = f" on {self.spec.address}" if self.spec.address else ""
        again = f", restart {self.restarts}" if self.restarts else ""
        self._around.terminal.progress(self.spec.name, f"ready{where} ({took_s:.1f} s{again})")

    def _show(self, tail: LogTail, *, flush: bool = False) -> list[str]:
        lines = tail.read(flush=flush)
        for line in lines if self.spec.show_log else ():
            self._around.terminal.line(self.spec.name, line)
        return lines

    async def _sweep(self, process: asyncio.subprocess.Process) -> None:
        """Kill what is left of the process group, the process itself included if its watch ended early."""
        kill_group(process.pid, signal.SIGKILL)
        await process.wait()
        self._around.guardian.forget(process.pid)
        self.pid = None

    def _failure(self, what: str) -> ProcessFailedError:
        tail = "".join(f"\n  {line}" for line in last_lines(self.log, _TAIL_LINES, offset=self._log_offset))
        return ProcessFailedError(f"{self.spec.name} {what}; the end of {self.log}:{tail or ' (empty)'}")


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"
