"""Become a command that dies with its parent: ``python -I -S launcher.py PARENT_PID COMMAND [ARGUMENT ...]``.

Replaces itself with the command, so pid, start time and process group stay. A ``preexec_fn`` would do the same, but it
runs Python between fork and exec, which is unsafe in a process with threads (a trainer that runs the demo has many).
Standard library only, no site-packages: it adds some 20 ms to a start.
"""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def _die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the thread that started this process ends. Only Linux has this."""
    if sys.platform != "linux":
        return
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        sys.exit(f"launcher: prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before the request was made, so no signal would come
        sys.exit("launcher: the parent process is gone")


def _main(parent: int, argv: list[str]) -> None:
    _die_with_parent(parent)
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - no shell is wanted
    except OSError as error:
        print(f"cannot run {argv[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
