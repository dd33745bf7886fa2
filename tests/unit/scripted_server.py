"""An inference server that does what a test tells it, for faults that a real one shows rarely."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web

from forebay.settings import EngineSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Step = Callable[[dict[str, Any]], Awaitable[web.StreamResponse]]

DIE = -1
"""A step that closes the connection without an answer."""
FAST: dict[str, Any] = {
    "connect_timeout_s": 1.0,
    "request_timeout_s": 10.0,
    "no_server_timeout_s": 5.0,
    "health_interval_s": 0.02,
    "pause_poll_s": 0.002,
    "update_timeout_s": 5.0,
}


def fast_settings(**changes: Any) -> EngineSettings:
    """Settings with short times."""
    return EngineSettings(**{**FAST, **changes})


def answer(tokens: list[int], stop: str = "stop", **changes: Any) -> dict[str, Any]:
    """The body of an answer; `changes` overwrite parts of its ``meta_info``."""
    meta: dict[str, Any] = {
        "finish_reason": {"type": stop},
        "output_token_logprobs": [[-0.5 - token / 1000, token, None] for token in tokens],
    }
    meta.update(changes)
    return {"output_ids": tokens, "meta_info": meta}


def spans(*parts: tuple[str, int]) -> list[dict[str, Any]]:
    """``weight_versions`` of consecutive (label, number of tokens)."""
    result, start = [], 0
    for version, count in parts:
        result.append({"version": version, "start": start, "end": start + count})
        start += count
    return result


class ScriptedServer:
    """Answers ``/generate`` with the steps of `script`, one a call, then with ``default``."""

    def __init__(self) -> None:
        self.script: deque[dict[str, Any] | int | Step] = deque()
        self.default: dict[str, Any] | int | Step = answer([1, 2, 3])
        self.requests: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.updates: list[dict[str, Any]] = []
        self.info: dict[str, Any] = {"model_path": "/nowhere", "weight_version": "default"}
        self.healthy = True
        self.changes_weights = True
        self.update_replies: deque[tuple[int, str]] = deque()
        self.update_gate: asyncio.Event | None = None
        self.fail_paths: dict[str, int] = {}
        self.url = ""
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def start(self) -> None:
        """Listen; again on the same port after a stop."""
        app = web.Application()
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.get("/model_info", self._model_info),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.post("/update_weights_from_disk", self._update),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        step = self.script.popleft() if self.script else self.default
        if callable(step):
            return await step(body)
        if step == DIE and request.transport is not None:
            request.transport.close()
            return web.Response()
        if isinstance(step, int):
            return web.json_response({"error": {"message": f"scripted {step}"}}, status=step)
        return web.json_response(step)

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response(self.info, status=200 if self.healthy else 503)

    async def _pause(self, request: web.Request) -> web.Response:
        return await self._control(request, paused=True)

    async def _continue(self, request: web.Request) -> web.Response:
        return await self._control(request, paused=False)

    async def _control(self, request: web.Request, *, paused: bool) -> web.Response:
        self.calls.append(request.path)
        status = self.fail_paths.get(request.path, 200)
        if status == 200:
            self.info["paused"] = paused
        return web.json_response({"message": "ok" if status == 200 else f"scripted {status}"}, status=status)

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(request.path)
        self.updates.append(body)
        if self.update_gate is not None:
            await self.update_gate.wait()
        status, message = self.update_replies.popleft() if self.update_replies else (200, "ok")
        if self.changes_weights:
            self.info.update(weight_version=body["weight_version"], model_path=body["model_path"])
        return web.json_response({"success": status == 200, "message": message}, status=status)


@asynccontextmanager
async def scripted(count: int = 1) -> AsyncIterator[list[ScriptedServer]]:
    """`count` running servers."""
    servers = [ScriptedServer() for _ in range(count)]
    try:
        for server in servers:
            await server.start()
        yield servers
    finally:
        for server in servers:
            await server.stop()


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Return once `condition` holds; a TimeoutError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not come true in time")
        await asyncio.sleep(0.002)
