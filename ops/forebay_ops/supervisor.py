"""All processes of the pipeline on this machine, under one supervisor.

``async with LocalStack(config) as stack:`` starts Redis (unless ``REDIS_URL`` names one), inference servers and
collector, then the workers, and stops them in the opposite order. Rules, each with its test in
``tests/integration/test_supervisor.py``:

- However the supervisor ends, SIGKILL included, none of its processes outlives it.
- SIGINT, SIGTERM and SIGHUP stop everything in order, at any time, also while it starts. A second one kills at once.
- A process that fails for good ends the whole stack; the error quotes the end of its log.
- One supervisor per home.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from forebay.errors import SettingsError
from forebay_ops import embedded_redis, specs
from forebay_ops.control import ControlServer
from forebay_ops.errors import AlreadyUpError, ProcessFailedError, RedisStartError, StackFailedError
from forebay_ops.process import ManagedProcess, ProcessSpec, ProcessState, Surroundings
from forebay_ops.spawning import Guardian, create_time
from forebay_ops.specs import LocalStackConfig, Role
from forebay_ops.state import (
    ProcessRecord,
    StackState,
    clear_stale,
    read_live_state,
    remove_state,
    write_state,
)
from forebay_ops.terminal import Terminal

__all__ = ["LocalStack", "LocalStackConfig"]

_REDIS_ATTEMPTS = 3
_DOUBLED_SIGNAL_S = 0.3
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class _StopRequest:
    reason: str
    exit_code: int


class LocalStack:
    """The processes of one home. Enter it once.

    When the stack has to end while the body of ``async with`` runs, the body is cancelled and the block raises
    :class:`StackFailedError` (a process failed for good) or SystemExit (a signal, or ``forebay down``).
    """

    def __init__(self, config: LocalStackConfig) -> None:
        self._config = config
        self._home = config.home.resolve()
        self._terminal = config.terminal or Terminal(quiet=config.quiet)
        self._env: dict[str, str] = {}
        self._redis_url = ""
        self._server_urls: list[str] = []
        self._processes: dict[str, tuple[Role, ManagedProcess]] = {}
        self._around: Surroundings | None = None
        self._control: ControlServer | None = None
        self._locks: list[IO[bytes] | int] = []
        self._phase = "starting"
        self._created = create_time(os.getpid()) or time.time()
        self._scaling = asyncio.Lock()
        self._owner: asyncio.Task[Any] | None = None
        self._owner_cancelled = False
        self._waiting = False
        self._stop_request: _StopRequest | None = None
        self._stop_event = asyncio.Event()
        self._failure: BaseException | None = None
        self._first_signal: float | None = None
        self._old_handlers: dict[signal.Signals, Any] = {}

    @property
    def home(self) -> Path:
        """The home, absolute."""
        return self._home

    @property
    def env(self) -> dict[str, str]:
        """What a process needs in its environment to work with this stack: ``REDIS_URL`` (with password) and more."""
        return dict(self._env)

    @property
    def redis_url(self) -> str:
        """URL of Redis, with its password if it has one."""
        return self._redis_url

    @property
    def servers(self) -> list[str]:
        """URLs of the inference servers started here."""
        return list(self._server_urls)

    @property
    def processes(self) -> dict[str, ManagedProcess]:
        """The processes by name: ``redis``, ``server-0``, ``collector``, ``worker-0``, ..."""
        return {name: process for name, (_, process) in self._processes.items()}

    def check(self) -> None:
        """Find early what would stop the start.

        Raises:
            AlreadyUpError: the home is taken.
            PortInUseError: a server's port is.
        """
        self._refuse_second()
        specs.server_ports(self._config)

    def _refuse_second(self) -> None:
        if (state := read_live_state(self._home)) is not None:
            raise AlreadyUpError(
                f"already up in {self._home}: supervisor pid {state.pid}; stop it with `make down` or `forebay down`"
            )

    # Entering and leaving

    async def __aenter__(self) -> Self:
        self._owner = asyncio.current_task()
        self._take_home()
        self._handle_signals()
        try:
            await self._start()
        except BaseException as error:
            await self._close()
            self._raise_reason(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()
        self._raise_reason(error)

    async def wait(self) -> None:
        """Wait until the stack is asked to end: by a signal or by ``forebay down``.

        Raises:
            StackFailedError: a process failed for good.
        """
        self._waiting = True
        try:
            if self._owner_cancelled:
                await asyncio.sleep(0)  # asked to end just before this call: takes the cancellation that is on its way
            await self._stop_event.wait()
        except asyncio.CancelledError:
            if not self._owner_cancelled:
                raise
            self._uncancel()
        finally:
            self._waiting = False
        self._owner_cancelled = False
        request, self._stop_request = self._stop_request, None
        if self._failure is not None:
            raise self._failure
        if request is not None:
            self._terminal.progress("forebay", f"{request.reason}: stopping")

    def _request_stop(self, reason: str, exit_code: int) -> None:
        if self._stop_request is not None or self._stop_event.is_set():
            return
        self._stop_request = _StopRequest(reason, exit_code)
        self._stop_event.set()
        if self._phase != "stopping" and not self._waiting and self._owner is not None:
            self._owner_cancelled = True
            self._owner.cancel(reason)

    def _raise_reason(self, error: BaseException | None) -> None:
        """Say why the block ended, if it was us who ended it."""
        self._uncancel()
        ours = error is None or isinstance(error, asyncio.CancelledError)
        if self._failure is not None and error is not self._failure:
            raise self._failure from (None if ours else error)
        if self._stop_request is not None and ours:
            raise SystemExit(self._stop_request.exit_code) from None

    def _uncancel(self) -> None:
        if self._owner_cancelled and self._owner is not None:
            self._owner.uncancel()
            self._owner_cancelled = False

    async def _close(self) -> None:
        """Stop everything; a further cancellation of our task does not cut that short."""
        self._phase = "stopping"
        work = asyncio.create_task(self._shut_down(), name="stop the local stack")
        cancelled = False
        while not work.done():
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:
                cancelled = True
        work.result()
        if cancelled and not self._owner_cancelled:
            raise asyncio.CancelledError

    # Signals

    def _handle_signals(self) -> None:
        if not self._config.handle_signals or threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            self._old_handlers[number] = signal.getsignal(number)
            loop.add_signal_handler(number, self._on_signal, number)

    def _restore_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number, handler in self._old_handlers.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
        self._old_handlers.clear()

    def _on_signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._first_signal is None:
            self._first_signal = now
            self._terminal.progress("forebay", f"{number.name}: stopping; once more kills at once")
            self._request_stop(number.name, 128 + number)
        elif now - self._first_signal > _DOUBLED_SIGNAL_S:  # some wrappers pass on a Ctrl-C that we also got ourselves
            for process in self.processes.values():
                process.kill()

    # Start

    def _take_home(self) -> None:
        """Become the one supervisor of this home, or say who is."""
        self._refuse_second()
        self._home.mkdir(parents=True, exist_ok=True)
        lock = (self._home / "supervisor.lock").open("ab")
        try:
            # lockf, not flock: a process that this one forks does not hold it. It goes when any descriptor of the file
            # is closed in this process, so the file is opened only where no supervisor lives in this process.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise AlreadyUpError(f"another supervisor is starting or ending in {self._home}: try again") from None
        self._locks.append(lock)

    async def _start(self) -> None:
        config = self._config
        for name in clear_stale(self._home):
            self._terminal.progress(name, "left over from a supervisor that died: killed")
        server_ports = specs.server_ports(config)
        guardian = Guardian()
        self._around = Surroundings(
            self._home / "logs", self._env, self._terminal, guardian, config.policy, self._save_state
        )
        self._control = ControlServer(self._home, self._on_command)
        await self._control.start()
        self._save_state()
        self._env.update(specs.environment(config, self._home))
        if config.redis:
            await self._start_redis()
        self._server_urls.extend(specs.server_url(port) for port in server_ports)
        if self._server_urls:
            self._env["FOREBAY_SERVERS"] = ",".join(self._server_urls)
        servers = [self._add(Role.SERVER, specs.server_spec(config, i, port)) for i, port in enumerate(server_ports)]
        others = [self._add(Role.EXTRA, spec) for spec in config.extra]
        if config.collector:
            others.append(self._add(Role.COLLECTOR, specs.collector_spec(config)))
        await _all_ready(*servers, *others)
        await self._scale(config.workers)
        self._phase = "up"
        self._save_state()

    async def _start_redis(self) -> None:
        url = self._config.redis_url or self._env.get("REDIS_URL") or os.environ.get("REDIS_URL")
        began = time.monotonic()
        if url:
            await asyncio.to_thread(embedded_redis.check_url, url)
            took = time.monotonic() - began
            self._terminal.progress("redis", f"ready on {embedded_redis.redact_url(url)} ({took:.1f} s, not ours)")
        else:
            url = await self._use_embedded_redis()
        self._redis_url = self._env["REDIS_URL"] = url
        self._save_state()

    async def _use_embedded_redis(self) -> str:
        lock = embedded_redis.take_lock(self._home)
        if lock is None:
            running = await asyncio.to_thread(embedded_redis.find_running, self._home)
            if running is not None:
                self._terminal.progress("redis", f"ready on {running.url} (up already, pid {running.pid}, left alone)")
                return running.url
            lock = embedded_redis.take_lock(self._home)
            if lock is None:
                raise RedisStartError(f"another process is starting a Redis server in {self._home}: try again")
        self._locks.append(lock)
        fixed = self._config.redis_port
        for attempt in range(_REDIS_ATTEMPTS):
            plan = embedded_redis.plan_redis(self._home, port=fixed)
            process = self._add(Role.REDIS, specs.redis_spec(self._config, plan, lock), guarded=False)
            try:
                await process.wait_ready()
            except (ProcessFailedError, RedisStartError) as error:
                if fixed is not None or not embedded_redis.lost_port(error) or attempt == _REDIS_ATTEMPTS - 1:
                    raise
            else:
                self._guard(process)
                return plan.url
        raise RedisStartError("no free port")  # not reached: the last attempt returns or raises

    def _add(self, role: Role, spec: ProcessSpec, *, guarded: bool = True) -> ManagedProcess:
        """Start a process. Unless it is `guarded`, its failure is the caller's to see."""
        if self._around is None or self._phase == "stopping":
            raise StackFailedError("the local stack is not up")
        process = ManagedProcess(spec, self._around)
        self._processes[spec.name] = (role, process)
        process.start()
        if guarded:
            self._guard(process)
        return process

    def _guard(self, process: ManagedProcess) -> None:
        process.on_end(self._on_process_end)

    def _on_process_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and self._failure is None and self._phase != "stopping":
            self._failure = error
            self._request_stop("a process failed", 1)

    # Commands

    async def scale(self, workers: int) -> None:
        """Run this many workers. Returns once new ones are ready and those that are too many have ended."""
        await self._scale(workers)
        self._save_state()

    async def _scale(self, workers: int) -> None:
        if workers < 0:
            raise SettingsError(f"workers={workers}: give 0 or more")
        async with self._scaling:
            names = [name for name, (role, _) in self._processes.items() if role is Role.WORKER]
            for name in reversed(names[workers:]):
                self._terminal.progress(name, "no longer needed: stopping")
            await asyncio.gather(*(self._remove(name) for name in names[workers:]))
            added = [self._add(Role.WORKER, specs.worker_spec(self._config, i)) for i in range(len(names), workers)]
            await _all_ready(*added)

    async def _remove(self, name: str) -> None:
        await self._processes[name][1].stop()
        del self._processes[name]

    async def _on_command(self, request: Mapping[str, Any]) -> dict[str, Any]:
        command = request.get("command")
        if command == "status":
            return {"state": self._snapshot().model_dump(mode="json")}
        if command == "scale":
            workers = request.get("workers")
            if not isinstance(workers, int):
                raise SettingsError(f"workers={workers!r}: give a whole number")
            if self._phase != "up":
                raise StackFailedError(f"the local stack is {self._phase}: try again")
            await self.scale(workers)
            return {"state": self._snapshot().model_dump(mode="json")}
        if command == "stop":
            self._request_stop("`forebay down`", 128 + signal.SIGTERM)
            return {}
        raise SettingsError(f"command={command!r}: use status, scale or stop")

    def _snapshot(self) -> StackState:
        return StackState(
            pid=os.getpid(),
            create_time=self._created,
            phase=self._phase,
            socket=self._control.path if self._control is not None else self._home,
            redis_url=embedded_redis.redact_url(self._redis_url),
            servers=self._server_urls,
            processes=[
                ProcessRecord(
                    name=process.spec.name,
                    state=process.state.value,
                    pid=process.pid,
                    create_time=process.created,
                    restarts=process.restarts,
                    address=process.spec.address,
                    log=process.log,
                )
                for process in self.processes.values()
            ],
        )

    def _save_state(self) -> None:
        try:
            write_state(self._home, self._snapshot())
        except OSError as error:  # a full disk, or no home any more: no reason to fail
            self._terminal.progress("forebay", f"cannot write {self._home / 'state.json'}: {error.strerror}")

    # End

    async def _shut_down(self) -> None:
        self._save_state()
        for role in sorted(Role, reverse=True):
            ending = [process for its_role, process in self._processes.values() if its_role is role]
            running = [process for process in ending if process.state is not ProcessState.FAILED]
            await asyncio.gather(*(process.stop() for process in running))
            if running:
                self._terminal.progress(running[0].spec.name.partition("-")[0], f"stopped ({len(running)})")
        if self._around is not None:
            await asyncio.to_thread(self._around.guardian.close)
        if self._control is not None:
            await self._control.close()
        remove_state(self._home)
        for lock in self._locks:
            if isinstance(lock, int):
                os.close(lock)
            else:
                lock.close()
        self._locks.clear()
        self._restore_signals()


async def _all_ready(*processes: ManagedProcess) -> None:
    """Wait for all; raise what the first of them that fails raises."""
    waits = [asyncio.create_task(process.wait_ready()) for process in processes]
    try:
        await asyncio.gather(*waits)
    finally:
        for wait in waits:
            wait.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*waits, return_exceptions=True)
