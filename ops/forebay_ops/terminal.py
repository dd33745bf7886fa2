"""What the supervisor shows: progress lines, and the lines of its processes with a coloured prefix."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TextIO

from forebay_ops.logs import plain

__all__ = ["Terminal"]

_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_WIDTH = 10


class Terminal:
    """Writes whole lines. Stops writing, silently, once nobody reads (``forebay up | head``)."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False, hidden: bool = False) -> None:
        """`quiet` leaves out the lines of the processes, `hidden` everything."""
        self._stream = sys.stdout if stream is None else stream
        self._quiet = quiet
        self._hidden = hidden
        self._colour = self._stream.isatty() and "NO_COLOR" not in os.environ
        self._colours: dict[str, int] = {}

    def progress(self, name: str, text: str) -> None:
        """A line of our own: ``redis      ready on redis://127.0.0.1:6390 (0.1 s)``."""
        self._write(f"{self._prefix(name)} {self._paint(1, text)}")

    def line(self, name: str, text: str) -> None:
        """A line of the log of process `name`."""
        if not self._quiet:
            self._write(f"{self._prefix(name)} {self._paint(2, '|')} {text if self._colour else plain(text)}")

    def printer(self, name: str) -> Callable[[str], None]:
        """``progress`` for one name."""
        return lambda text: self.progress(name, text)

    def _prefix(self, name: str) -> str:
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        return self._paint(colour, f"{name:<{_WIDTH}}")

    def _paint(self, code: int, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text

    def _write(self, text: str) -> None:
        if self._hidden:
            return
        encoding = self._stream.encoding or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # the reader is gone, or the stream is closed
            self._hidden = True
