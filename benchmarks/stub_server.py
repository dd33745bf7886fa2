"""An inference server that answers at once with as many tokens as may be generated. Prints its URL, then serves.

The bodies of its answers are made once for each length, so that its own part in the time is small.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from functools import cache

from aiohttp import web

__all__ = ["VOCABULARY"]

VOCABULARY = 150_000
_BUDGET = re.compile(rb'"max_new_tokens": *([0-9]+)')


@cache
def _answer(tokens: int) -> bytes:
    rng = random.Random(tokens)
    ids = [rng.randrange(VOCABULARY) for _ in range(tokens)]
    logprobs = [[-rng.expovariate(1.0), token, None] for token in ids]
    meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": logprobs}
    return json.dumps({"output_ids": ids, "meta_info": meta}).encode()


async def _generate(request: web.Request) -> web.Response:
    found = _BUDGET.search(await request.read())
    if found is None:
        return web.json_response({"error": {"message": "no max_new_tokens"}}, status=400)
    return web.Response(body=_answer(int(found[1])), content_type="application/json")


async def _model_info(_: web.Request) -> web.Response:
    return web.json_response({"model_path": "/nowhere", "vocab_size": VOCABULARY})


async def _serve() -> None:
    app = web.Application(client_max_size=2**26)
    app.add_routes([web.post("/generate", _generate), web.get("/model_info", _model_info)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve())
