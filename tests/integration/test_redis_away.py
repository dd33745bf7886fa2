"""Redis is away for longer than a lease, while everything else lives."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from aiohttp import web
from conditions import eventually
from driver import Driver
from services import read, services

from forebay import AsyncClient, Settings
from forebay.store import Store
from forebay_ops.embedded_redis import RedisHandle, ensure_redis
from forebay_ops.ports import find_free_port

LEASE_S = 1.0
AWAY_S = 3.0


async def test_absence_of_redis_costs_no_running_attempt(run_name: str, tmp_path: Path) -> None:
    """Case 39: nobody could renew a lease then, so none is held to have been lost: all attempts end as they began."""
    port = find_free_port()
    killed: list[RedisHandle] = []
    handle = await asyncio.to_thread(ensure_redis, tmp_path, port=port)
    try:
        async with services(handle.url, run_name, lease_s=LEASE_S, collector_lease_s=10.0) as (running, client):
            gate = asyncio.Event()
            default = running.server.default

            async def wait_then_answer(_: dict[str, Any]) -> Any:
                await gate.wait()
                return web.json_response(default)

            running.server.default = wait_then_answer
            await submit(client, 2)
            await eventually(lambda: len(running.server.requests) == 4, "four slots in flight")
            os.kill(handle.pid or 0, signal.SIGKILL)
            await asyncio.to_thread(handle.wait, 10)
            killed.append(handle)
            await asyncio.sleep(AWAY_S)  # the absence itself: there is no condition to wait for
            handle = await asyncio.to_thread(ensure_redis, tmp_path, port=port)
            before = len(running.server.requests)
            await beaten(running.store, 6)  # two leases, in which those that are lost would be found
            assert len(running.server.requests) == before, "no slot was begun anew"
            gate.set()
            (batch,) = await read(client, 1, timeout_s=30)
            attempts = [rollout.attempt for group in batch.groups for rollout in group.rollouts]
            status = await client.status()
            assert (attempts, status.count("leases_lost")) == ([1, 1, 1, 1], 0)
    finally:
        for ended in [*killed, handle]:
            await asyncio.to_thread(ended.stop)


async def test_slots_of_a_fleet_that_died_run_again(redis_url: str, run_name: str) -> None:
    """Case 38: where all workers fell silent because they are dead, their slots run again within lease + 5 s."""
    store = Store.open(Settings(REDIS_URL=redis_url, experiment_name=run_name.split("/", maxsplit=1)[0]))
    driver = Driver(store)
    await driver.lead()
    await driver.submit(1, size=2)
    await driver.admit()
    await store.heartbeat("w1", {}, LEASE_S, await driver.claim(lease_s=LEASE_S))
    began = time.monotonic()
    lost = 0
    async with asyncio.timeout(20):
        while lost < 2:
            lost += (await store.reap(driver.epoch, lease_s=LEASE_S))[0]
            await asyncio.sleep(0.05)
    assert LEASE_S < time.monotonic() - began < LEASE_S + 5
    await store.close()


async def beaten(store: Store, times: int) -> None:
    """Wait until a worker has beaten so many times more."""
    seen: set[float] = set()
    async with asyncio.timeout(20):
        while len(seen) <= times:
            seen.update(await store._redis.zrange(store.keys.workers_seen, 0, -1, withscores=True))
            await asyncio.sleep(0.05)


async def submit(client: AsyncClient, count: int) -> None:
    """Submit groups of two slots."""
    for _ in range(count):
        await client.submit({"ids": [1, 2, 3]}, "pipeline_workflows.EchoWorkflow", {}, group_size=2)
