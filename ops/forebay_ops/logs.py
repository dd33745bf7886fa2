"""Log files of the local processes.

Each process writes straight into its file, so that neither a busy event loop here nor the death of this process can
block a child or lose its last words. What is shown on a terminal, and what tells that a process is ready, is read back
from the file.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

__all__ = ["LogTail", "follow", "last_lines", "open_log", "plain"]

MAX_LOG_BYTES = 16 * 2**20
"""A log file above this size becomes ``NAME.log.1`` when its process is next started."""

_MAX_LINE_BYTES = 64 * 2**10
_MAX_READ_BYTES = 2**20
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def plain(line: str) -> str:
    """The line without terminal colours."""
    return _ANSI.sub("", line)


def open_log(path: Path, *, max_bytes: int = MAX_LOG_BYTES) -> IO[bytes]:
    """Open a log for a process to append to; rotate it first if it has grown too large."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > max_bytes:
        path.replace(path.with_name(path.name + ".1"))
    return open(path, "ab", buffering=0, opener=_for_us_alone)


def _for_us_alone(path: str, flags: int) -> int:
    # Prompts, completions and tracebacks of users' code may stand in a log.
    return os.open(path, flags, 0o600)


class LogTail:
    """Reads what is added to a file, as whole lines."""

    def __init__(self, path: Path, *, offset: int | None = None) -> None:
        """Start at `offset`, by default at the end of the file."""
        self._path = path
        self._rest = b""
        self._offset = (path.stat().st_size if path.exists() else 0) if offset is None else offset

    def read(self, *, flush: bool = False) -> list[str]:
        """The lines added since the last call. `flush` also gives a last line that has no end."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:  # rotated or truncated
                    self._offset = 0
                file.seek(self._offset)
                chunk = file.read(_MAX_READ_BYTES)
        except FileNotFoundError:
            return []
        self._offset += len(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if self._rest and (flush or len(self._rest) > _MAX_LINE_BYTES):
            lines.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", "replace").rstrip("\r") for line in lines]


def last_lines(path: Path, count: int, *, offset: int = 0) -> list[str]:
    """The last lines of a log, at most `count`, from `offset` on; empty if there is no such file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, min(offset, size), size - _MAX_READ_BYTES))
            text = file.read(_MAX_READ_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return text.splitlines()[-count:] if count > 0 else []


def follow(paths: dict[str, Path], *, stop: Callable[[], bool], poll_s: float = 0.2) -> Iterator[tuple[str, str]]:
    """New lines of several logs as (name, line), until `stop()` is true and everything has been read."""
    tails = {name: LogTail(path) for name, path in paths.items()}
    while True:
        last = stop()
        idle = True
        for name, tail in tails.items():
            for line in tail.read(flush=last):
                idle = False
                yield name, line
        if idle:
            if last:
                return
            time.sleep(poll_s)
