"""Workers that are told to go, as real processes: what runs finishes or is handed back; nothing is lost (case 18)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from aiohttp import web
from conditions import eventually
from scripted_server import answer
from services import WORKFLOW, Services, read, services

from forebay import AsyncClient
from forebay_ops.embedded_redis import RedisHandle, ensure_redis
from forebay_ops.ports import find_free_port

ANSWER = answer([7, 8, 9], weight_version="0")


def hold(running: Services) -> asyncio.Event:
    """The server answers nothing until the event is set."""
    gate = asyncio.Event()

    async def wait_then_answer(_: dict[str, Any]) -> Any:
        await gate.wait()
        return web.json_response(ANSWER)

    running.server.default = wait_then_answer
    return gate


async def submit(client: AsyncClient, count: int) -> list[int]:
    """Submit so many groups."""
    return [await client.submit({"ids": [1, 2]}, WORKFLOW, {}) for _ in range(count)]


def said(log: Path, event: str) -> int:
    """How often workers have said so."""
    return log.read_text().count(event)


async def told(running: Services, name: str, log: Path) -> None:
    """SIGTERM to a worker, and wait until it says that it drains."""
    before = said(log, "worker.draining")
    running.signal(name, signal.SIGTERM)
    await eventually(lambda: said(log, "worker.draining") > before, f"{name} to drain")


async def gone(running: Services, name: str) -> None:
    """Wait until a process has ended, in good order."""
    await eventually(lambda: running.ended(name) is not None, f"{name} to end", timeout_s=30)
    assert running.ended(name) == 0


async def in_flight(running: Services, count: int) -> None:
    """Wait until the server has been asked so often."""
    await eventually(lambda: len(running.server.requests) >= count, f"{count} requests", timeout_s=30)


async def attempts_of(client: AsyncClient, batches: int) -> set[int]:
    """Which attempts brought the next batches."""
    found = await read(client, batches, timeout_s=30, step=True)
    return {rollout.attempt for batch in found for group in batch.groups for rollout in group.rollouts}


async def test_episodes_finish_in_the_time_that_they_have(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """Case 18: a worker that is told to go starts nothing more, lets what runs finish, and ends with code 0."""
    async with services(redis_url, run_name, worker=False, max_staleness=9, lease_s=5.0) as (running, client):
        log = tmp_path / "log"
        await running.kill("worker")
        running.start_process("worker-1", "worker", stderr=log, FOREBAY_WORKER_DRAIN_TIMEOUT_S="60")
        gate = hold(running)
        await submit(client, 2)
        await in_flight(running, 4)
        await told(running, "worker-1", log)
        await submit(client, 2)
        gate.set()
        await gone(running, "worker-1")
        assert len(running.server.requests) == 4, "what was queued while it drained is for others"
        assert await attempts_of(client, 1) == {1}
        status = await client.status()
        assert (status.count("handed_back"), status.count("leases_lost"), status.workers) == (0, 0, {})
        await running.start_worker("worker-2")
        assert await attempts_of(client, 1) == {1}


async def test_what_does_not_finish_is_handed_back_at_once(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """4.2: past drain_timeout_s others have the slots within a second or so; no budget is touched, however often."""
    rules: dict[str, Any] = {"attempts_infra": 1, "attempts_timeout": 1, "attempts_data": 1, "lease_s": 30.0}
    rounds, drain_s = 3, 0.3
    async with services(redis_url, run_name, worker=False, **rules) as (running, client):
        log = tmp_path / "log"
        await running.kill("worker")
        running.start_process("worker-0", "worker", stderr=log, FOREBAY_WORKER_DRAIN_TIMEOUT_S=str(drain_s))
        gate = hold(running)
        await submit(client, 2)
        for at in range(rounds):
            await in_flight(running, 4 * (at + 1))
            name = f"worker-{at + 1}"
            running.start_process(name, "worker", stderr=log, FOREBAY_WORKER_DRAIN_TIMEOUT_S=str(drain_s))
            await eventually(lambda at=at: said(log, "worker.ready") == at + 2, f"{name} to be ready")
            running.signal(f"worker-{at}", signal.SIGTERM)
            began = time.monotonic()
            await in_flight(running, 4 * (at + 2))
            assert time.monotonic() - began < rules["lease_s"] / 3, "at once, not after the lease"
            await gone(running, f"worker-{at}")
        gate.set()
        await attempts_of(client, 1)
        status = await client.status()
        assert status.count("handed_back") == 4 * rounds
        spent = ("failures:infra", "slots:failed", "leases_lost", "dead_letters")
        assert [status.count(name) for name in spent] == [0, 0, 0, 0]


async def test_a_second_signal_ends_the_patience(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """4.2: whoever signals again gets the rest of the drain cut short: handed back at once, code 0."""
    async with services(redis_url, run_name, worker=False, attempts_infra=1, lease_s=5.0) as (running, client):
        log = tmp_path / "log"
        await running.kill("worker")
        running.start_process("worker-1", "worker", stderr=log, FOREBAY_WORKER_DRAIN_TIMEOUT_S="600")
        gate = hold(running)
        await submit(client, 2)
        await in_flight(running, 4)
        began = time.monotonic()
        await told(running, "worker-1", log)
        while (await client.status()).count("handed_back") < 4:
            running.signal("worker-1", signal.SIGINT)
            assert time.monotonic() - began < 20
            await asyncio.sleep(0.1)
        assert time.monotonic() - began > 0.5, "two signals at the same moment are one"
        await gone(running, "worker-1")
        gate.set()
        await running.start_worker("worker-2")
        await attempts_of(client, 1)
        assert (await client.status()).count("slots:failed") == 0


async def test_rolling_restart_under_load(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """Case 18: a replica is SIGKILLed under load, then all are restarted one after another: no slot is lost."""
    groups, size, replicas = 60, 2, 3
    rules: dict[str, Any] = {"max_staleness": 99, "group_size": size, "batch_size": 4, "attempts_infra": 2}
    rules["lease_s"] = 4.0  # a busy machine makes a heart-beat late, which is none of this
    async with services(redis_url, run_name, worker=False, **rules) as (running, client):
        log = tmp_path / "log"
        await running.kill("worker")

        async def slow(_: dict[str, Any]) -> Any:
            await asyncio.sleep(0.5)
            return web.json_response(ANSWER)

        running.server.default = slow

        def start(name: str) -> None:
            running.start_process(name, "worker", stderr=log, FOREBAY_WORKER_MAX_SLOTS="4",
                                  FOREBAY_WORKER_DRAIN_TIMEOUT_S="0.2")  # fmt: skip

        for at in range(replicas):
            start(f"worker-{at}")
        await eventually(lambda: said(log, "worker.ready") == replicas, "the fleet", timeout_s=30)
        tasks = await submit(client, groups)
        await in_flight(running, 12)
        await running.kill("worker-0")
        start("worker-3")
        await eventually(lambda: said(log, "worker.ready") == replicas + 1, "the fleet", timeout_s=30)
        held = (await client.status()).count("leases_lost")
        for at in range(1, replicas + 1):
            running.signal(f"worker-{at}", signal.SIGTERM)
            await gone(running, f"worker-{at}")
            start(f"worker-{at + replicas}")
            ready = replicas + 1 + at
            await eventually(lambda ready=ready: said(log, "worker.ready") == ready, "it", timeout_s=30)
        batches = await read(client, groups // 4, timeout_s=40)
        assert sorted(group.task for batch in batches for group in batch.groups) == tasks
        assert sum(len(batch.rows) for batch in batches) == groups * size
        status = await client.status()
        assert (status.count("slots:failed"), status.in_flight) == (0, 0)
        assert held <= status.count("leases_lost") <= 4, "of the killed one alone"
        assert status.count("handed_back") > 0


async def test_redis_that_is_away_keeps_no_worker(run_name: str, tmp_path: Path) -> None:
    """4.2: a worker that is told to go while Redis is away ends all the same; its slots run again once it is back."""
    port = find_free_port()
    killed: list[RedisHandle] = []
    handle = await asyncio.to_thread(ensure_redis, tmp_path, port=port)
    try:
        async with services(handle.url, run_name, worker=False, lease_s=2.0) as (running, client):
            gate = hold(running)
            await submit(client, 2)
            await in_flight(running, 4)
            os.kill(handle.pid or 0, signal.SIGKILL)
            await asyncio.to_thread(handle.wait, 10)
            killed.append(handle)
            running.signal("worker", signal.SIGTERM)
            await gone(running, "worker")
            handle = await asyncio.to_thread(ensure_redis, tmp_path, port=port)
            await running.start_worker("worker-2")
            gate.set()
            assert await attempts_of(client, 1) == {2}
            assert (await client.status()).count("slots:failed") == 0
    finally:
        for ended in [*killed, handle]:
            await asyncio.to_thread(ended.stop)
