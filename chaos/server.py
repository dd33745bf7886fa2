"""A fast stand-in for an inference server that speaks SGLang's protocol: ``python -m chaos.server PORT``.

It generates in two halves, each with the weights that it holds at that moment, and says so in spans of versions. Its
weights are a folder with a file ``version``; it starts with version 0, as a server that is started anew from its first
checkpoint, so what it samples before the next push is as old as that.
"""

from __future__ import annotations

import asyncio
import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from aiohttp import web

from chaos.workflow import VOCABULARY, write_token
from forebay.aio import stop_signal

__all__: list[str] = []

_SECONDS = (0.1, 1.0)
"""Of a generation, first to last token."""


class _Server:
    def __init__(self) -> None:
        self._path = ""
        self._version = 0
        self._running = asyncio.Event()
        self._running.set()

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        number, count = body["input_ids"][0], body["sampling_params"]["max_new_tokens"]
        half_s = random.uniform(*_SECONDS) / 2
        tokens: list[int] = []
        spans: list[dict[str, Any]] = []
        for start, end in pairwise((0, count // 2, count)):
            await asyncio.sleep(half_s)
            await self._running.wait()
            version = self._version
            tokens += [write_token(version, number)] * (end - start)
            spans.append({"start": start, "end": end, "version": str(version)})
        meta = {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-random.expovariate(1.0), token, None] for token in tokens],
            "weight_version": str(self._version),
            "weight_versions": spans,
        }
        return web.json_response({"output_ids": tokens, "meta_info": meta})

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response({
            "model_path": self._path,
            "vocab_size": VOCABULARY,
            "weight_version": str(self._version),
            "paused": not self._running.is_set(),
        })  # fmt: skip

    async def pause(self, _: web.Request) -> web.Response:
        self._running.clear()
        return web.json_response({"status": "ok"})

    async def resume(self, _: web.Request) -> web.Response:
        self._running.set()
        return web.json_response({"status": "ok"})

    async def update(self, request: web.Request) -> web.Response:
        body = await request.json()
        path = Path(body["model_path"])
        try:
            held = int((path / "version").read_text())
        except (OSError, ValueError) as error:
            return web.json_response({"success": False, "message": f"no weights in {path}: {error}"}, status=400)
        if body["weight_version"] != str(held):
            message = f"the weights in {path} are version {held}, the label says {body['weight_version']}"
            return web.json_response({"success": False, "message": message}, status=400)
        self._path, self._version = str(path), held
        return web.json_response({"success": True, "message": "ok"})


async def _serve(port: int) -> None:
    server, app = _Server(), web.Application(client_max_size=2**26)
    app.add_routes([
        web.post("/generate", server.generate),
        web.post("/pause_generation", server.pause),
        web.post("/continue_generation", server.resume),
        web.post("/update_weights_from_disk", server.update),
        web.get("/model_info", server.model_info),
    ])  # fmt: skip
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        print("server.ready", flush=True)
        async with stop_signal() as stop:
            await stop.wait()
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
