"""How full the pools of a process are: HTTP connections and processes for reward functions (contract, section 8)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp import web

from forebay.http_clients import HttpClients
from forebay.pools import PoolUse
from forebay.reward_pool import RewardProcesses


class Gated:
    """A server that answers once it may."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.requests = 0
        self.url = ""

    async def answer(self, _: web.Request) -> web.Response:
        """Wait, then answer."""
        self.requests += 1
        await self.gate.wait()
        return web.Response(text="done")


@pytest.fixture
async def server() -> AsyncIterator[Gated]:
    """A server whose gate is closed."""
    made = Gated()
    app = web.Application()
    app.router.add_get("/", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    yield made
    made.gate.set()
    await runner.cleanup()


@pytest.fixture
async def clients() -> AsyncIterator[HttpClients]:
    """Clients of two connections each."""
    made = HttpClients()
    made.max_connections = 2
    yield made
    await made.aclose()


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for `condition`, within 10 s."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (there is no event of it)
            await asyncio.sleep(0.01)


async def by_aiohttp(clients: HttpClients, url: str) -> str:
    """One request."""
    async with clients.aiohttp_session().get(url) as reply:
        return await reply.text()


async def by_httpx(clients: HttpClients, url: str) -> str:
    """One request."""
    return (await clients.httpx_client().get(url)).text


CLIENTS: list[Any] = [("aiohttp", by_aiohttp), ("httpx", by_httpx)]


class TestHttp:
    @pytest.mark.parametrize(("name", "ask"), CLIENTS)
    async def test_what_is_in_use_and_what_waits(
        self, server: Gated, clients: HttpClients, name: str, ask: Any
    ) -> None:
        """8: five requests at once take the two connections that there may be, and three wait; then none."""
        tasks = [asyncio.create_task(ask(clients, server.url)) for _ in range(5)]
        await eventually(lambda: clients.use[name] == PoolUse(2, 3, 2))
        await eventually(lambda: server.requests == 2)
        tasks.pop().cancel()
        await eventually(lambda: clients.use[name] == PoolUse(2, 2, 2))
        server.gate.set()
        assert await asyncio.gather(*tasks) == ["done"] * 4
        assert clients.use[name] == PoolUse(0, 0, 2)

    @pytest.mark.parametrize(("name", "ask"), CLIENTS)
    async def test_what_fails_is_not_in_use(self, clients: HttpClients, name: str, ask: Any) -> None:
        """8: a request that found no server has given its place back."""
        with pytest.raises((aiohttp.ClientError, httpx.HTTPError)):
            await ask(clients, "http://127.0.0.1:1/")
        assert clients.use[name] == PoolUse(0, 0, 2)


class TestRewards:
    async def test_the_limit_is_above_what_wrappers_ask_for(self) -> None:
        """8: four processes are asked for, one may be: one call runs, the other waits, both end."""
        processes = RewardProcesses()
        processes.limit = 1
        processes.want(4)
        try:
            futures = [processes.schedule(time.sleep, (1,), {}, 10.0), processes.schedule(abs, (-2.0,), {}, 10.0)]
            assert processes.size == 1
            assert processes.use == PoolUse(1, 1, 1)
            assert await asyncio.wrap_future(futures[1]) == 2.0
            await eventually(lambda: processes.use == PoolUse(0, 0, 1))
        finally:
            processes.close()

    async def test_killed_calls_are_not_in_use(self) -> None:
        """8: closing the pool ends what runs, and what waits."""
        processes = RewardProcesses()
        processes.want(1)
        futures = [processes.schedule(time.sleep, (60,), {}, 100.0) for _ in range(3)]
        await eventually(lambda: processes.use == PoolUse(1, 2, 512))
        for future in futures:
            future.cancel()
        processes.close()
        await eventually(lambda: processes.use == PoolUse(0, 0, 512))
