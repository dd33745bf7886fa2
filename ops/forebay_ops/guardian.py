"""Kill process groups once the supervisor is gone: ``python -I -S guardian.py PARENT_PID``.

The kernel's parent-death signal (``launcher.py``) reaches a child, not the processes that the child started, and only
Linux has it. So the supervisor also runs this one process: it is told on standard input which process groups live
(``+123``, ``-123``), and when the supervisor ends without having taken its groups back, even by SIGKILL, it kills them.
Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys

_POLL_S = 0.5


def _read(parent: int) -> set[int]:
    """Follow the list of groups until the parent is gone; return the groups left on it."""
    groups: set[int] = set()
    rest = b""
    # A fork of the supervisor may hold the other end of the pipe open for longer than the supervisor lives, so end of
    # file is not the only sign.
    while os.getppid() == parent:
        if not select.select([0], [], [], _POLL_S)[0]:
            continue
        chunk = os.read(0, 4096)
        if not chunk:
            break
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            group = int(line[1:])
            if line.startswith(b"+"):
                groups.add(group)
            else:
                groups.discard(group)
    return groups


def _main(parent: int) -> None:
    # What ends the supervisor must not end this process before it has done its work.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    for group in _read(parent):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
