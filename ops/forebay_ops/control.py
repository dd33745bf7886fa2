"""Commands to a running supervisor: one JSON object a line, over a unix socket in its home.

``{"command": "status"}``, ``{"command": "scale", "workers": 4}``, ``{"command": "stop"}``; the answer is
``{"ok": true, ...}`` or ``{"ok": false, "error": "..."}``.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from forebay.errors import ForebayError
from forebay_ops.errors import NotUpError, StackFailedError
from forebay_ops.state import read_live_state, remove_socket

__all__ = ["ControlServer", "call"]

Handler = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]

_MAX_PATH_BYTES = 100
"""Below the kernel's limit for socket paths, 104 on macOS and 108 on Linux."""
_MAX_LINE_BYTES = 2**16
_IDLE_TIMEOUT_S = 10.0


def socket_path(home: Path) -> Path:
    """``<home>/control.sock``; a new short folder under the temporary one where that is too long for a socket."""
    path = home / "control.sock"
    if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        return path
    folder = tempfile.mkdtemp(prefix="forebay-")
    if len(os.fsencode(folder)) > _MAX_PATH_BYTES - 20:  # a long TMPDIR
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="forebay-", dir="/tmp")  # mkdtemp makes it ours alone
    return Path(folder) / "control.sock"


class ControlServer:
    """Listens on the socket and hands each command to the handler."""

    def __init__(self, home: Path, handler: Handler) -> None:
        self._home = home
        self.path = socket_path(home)
        self._handler = handler
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen. The socket can be used by this user only."""
        self._server = await asyncio.start_unix_server(self._serve, path=self.path, limit=_MAX_LINE_BYTES)
        self.path.chmod(0o600)

    async def close(self) -> None:
        """Stop listening and remove the socket."""
        if self._server is not None:
            self._server.close()
        remove_socket(self.path, self._home)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await asyncio.wait_for(reader.readline(), _IDLE_TIMEOUT_S)
            writer.write(json.dumps(await self._answer(line)).encode() + b"\n")
            await asyncio.wait_for(writer.drain(), _IDLE_TIMEOUT_S)
        except (OSError, TimeoutError, ValueError):  # the caller left, was silent, or sent an endless line
            pass
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            return {"ok": False, "error": "not JSON"}
        if not isinstance(request, dict):
            return {"ok": False, "error": "not a JSON object"}
        try:
            return {"ok": True, **await self._handler(request)}
        except ForebayError as error:
            return {"ok": False, "error": str(error)}


def call(home: Path, command: str, *, timeout_s: float = 10.0, **values: Any) -> dict[str, Any]:
    """Send one command to the supervisor of this home and return its answer.

    Raises:
        NotUpError: no supervisor runs, or it is about to end.
        StackFailedError: it refused, or did not answer in time.
    """
    state = read_live_state(home)
    if state is None:
        raise NotUpError(f"nothing is up in {home}: start it with `make up` or `forebay up`")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(state.socket))
            connection.sendall(json.dumps({"command": command, **values}).encode() + b"\n")
            with connection.makefile("rb") as file:
                line = file.readline()
    except (FileNotFoundError, ConnectionError) as error:
        raise NotUpError(f"the supervisor (pid {state.pid}) of {home} takes no commands: it starts or ends") from error
    except TimeoutError as error:
        raise StackFailedError(
            f"the supervisor (pid {state.pid}) did not answer {command!r} within {timeout_s:g} s"
        ) from error
    answer = json.loads(line) if line.strip() else {"ok": False, "error": "the supervisor ended"}
    if not isinstance(answer, dict) or not answer.get("ok"):
        raise StackFailedError(str(answer.get("error", answer)) if isinstance(answer, dict) else "a malformed answer")
    return answer
