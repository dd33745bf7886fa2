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
from going_back import OwnRedis
from services import read, services

from forebay import AsyncClient, Settings
from forebay.store import Store
from forebay_ops.embedded_redis import RedisHandle, ensure_redis
from forebay_ops.ports import find_free_port

LEASE_S = 1.0
AWAY_S = 3.0
LONG_S = float(os.environ.get("FOREBAY_TEST_AWAY_S", "4"))
"""Set it to 65 to see a whole minute of absence ridden through."""


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


async def test_processes_ride_through_a_long_absence(run_name: str, tmp_path: Path) -> None:
    """Case 39: worker, collector, producer and trainer wait, each says so in a line, and go on by themselves."""
    redis = OwnRedis(tmp_path, find_free_port())
    await redis.start()
    log = tmp_path / "services.log"
    variables = {"FOREBAY_REDIS_AWAY_S": str(LONG_S / 4), "FOREBAY_LOG_JSON": "true"}
    settings = Settings(REDIS_URL=redis.url, experiment_name=run_name.split("/", maxsplit=1)[0], redis_away_s=300)
    try:
        async with services(redis.url, run_name, lease_s=3.0, collector_lease_s=2.0, max_staleness=50) as (running, _):
            await running.stop("worker")
            await running.stop("collector")
            for name in ("collector", "worker"):  # which begin anew when their patience is over
                running.start_process(name, name, stderr=log, **variables)
            client = await AsyncClient.connect(settings)
            gate = asyncio.Event()
            default = running.server.default

            async def wait_then_answer(_: dict[str, Any]) -> Any:
                await gate.wait()
                return web.json_response(default)

            running.server.default = wait_then_answer
            tasks = [await submit_one(client) for _ in range(2)]
            await eventually(lambda: len(running.server.requests) == 4, "four slots in flight")
            reading = asyncio.create_task(read(client, 2, timeout_s=600))
            await redis.kill()
            submitting = asyncio.gather(*(submit_one(client) for _ in range(2)))
            gate.set()  # results come while Redis is away
            done, _ = await asyncio.wait([reading, submitting], timeout=LONG_S)
            assert not done, "both wait"
            await redis.start()
            tasks += await submitting
            batches = await reading
            assert sorted(task for batch in batches for task in batch.task_ids) == sorted(tasks)
            attempts = [rollout.attempt for batch in batches for group in batch.groups for rollout in group.rollouts]
            assert attempts == [1] * 8, "no attempt was burned"
            status = await client.status()
            assert (status.count("leases_lost"), status.count("delivered"), status.in_flight) == (0, 4, 0)
            assert (running.ended("worker"), running.ended("collector")) == (None, None)
            await client.close()
        lines = log.read_text().splitlines()
        told = {event: sum(f'"{event}"' in line for line in lines) for event in ("redis.away", "redis.back")}
        assert told["redis.away"] == told["redis.back"]
        assert 2 <= told["redis.away"] <= 4, "a line of each, not one for each call, and one when it is back"
        assert len([line for line in lines if "warning" in line]) < 40
    finally:
        await redis.stop()


async def submit_one(client: AsyncClient) -> int:
    """Submit a group of two slots."""
    return await client.submit({"ids": [1, 2, 3]}, "pipeline_workflows.EchoWorkflow", {}, group_size=2)


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
