"""What every local process needs: a command line that dies with its parent, a guard, an identity, an end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import psutil

__all__ = ["Guardian", "create_time", "is_alive", "kill_group", "launch_argv", "terminate"]

_HERE = Path(__file__).parent
_POLL_S = 0.02
_KILL_WAIT_S = 5.0


def launch_argv(argv: Sequence[str]) -> list[str]:
    """`argv`, wrapped so that the process is killed when the calling thread ends (Linux).

    Start it from a thread that lives as long as the process should: the main thread or an event loop's.
    """
    return [sys.executable, "-I", "-S", str(_HERE / "launcher.py"), str(os.getpid()), *argv]


class Guardian:
    """The process that kills our process groups if we die without doing so (``guardian.py``)."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own script
            [sys.executable, "-I", "-S", str(_HERE / "guardian.py"), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def watch(self, group: int) -> None:
        """Kill `group` if this process dies."""
        self._say(f"+{group}\n")

    def forget(self, group: int) -> None:
        """`group` has ended."""
        self._say(f"-{group}\n")

    def close(self) -> None:
        """End the guardian; it kills the groups that it was not told to forget."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=5)

    def _say(self, line: str) -> None:
        if self._process.stdin is None or self._process.stdin.closed:
            return
        # Somebody may have killed the guardian; the kernel's parent-death signal still stands.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def create_time(pid: int) -> float | None:
    """When process `pid` was started, in seconds since the epoch; None if there is none (a zombie counts as none)."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


def is_alive(pid: int, created: float) -> bool:
    """Whether `pid` is still the process that was started at `created`, not a later one with the same number."""
    now = create_time(pid)
    return now is not None and abs(now - created) < 0.1


def kill_group(group: int, number: signal.Signals) -> bool:
    """Signal a process group of ours; False if it is empty."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS answers this for a group of zombies
        return False
    return True


def terminate(pid: int, created: float, *, grace_s: float) -> bool:
    """SIGTERM, then SIGKILL after `grace_s`, for a process that need not be our child. False if it was gone already."""
    if not is_alive(pid, created):
        return False
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_WAIT_S)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if not is_alive(pid, created):
                return True
            time.sleep(_POLL_S)
    return True
