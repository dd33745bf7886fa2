"""Faults that users of such systems have reported, each tried here through real services.

``tests/CASES.md`` has all cases and where each is proved.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from conditions import eventually
from scripted_server import answer, spans
from services import WORKFLOW, Services, read, services

from forebay import AsyncClient
from forebay.errors import StallError
from forebay.store.records import RunStatus
from forebay_ops.ports import find_free_port


def of_version(version: int) -> dict[str, Any]:
    """An answer of weights of `version`, which says so for each token."""
    return answer([7, 8, 9], weight_version=str(version), weight_versions=spans((str(version), 3)))


ANSWER = of_version(0)
ROOT = Path(__file__).parents[2]


async def submit(client: AsyncClient, count: int, **data: Any) -> list[int]:
    """Submit so many groups."""
    return [await client.submit({"ids": [1, 2], **data}, WORKFLOW, {}) for _ in range(count)]


async def settled(client: AsyncClient, **counts: int) -> RunStatus:
    """The status once the counters are at least so high."""
    async with asyncio.timeout(30):
        while True:
            status = await client.status()
            if all(status.count(name.replace("__", ":")) >= value for name, value in counts.items()):
                return status
            await asyncio.sleep(0.02)


def hold(running: Services, version: int = 0) -> asyncio.Event:
    """The server answers nothing until the event is set."""
    gate = asyncio.Event()

    async def wait_then_answer(_: dict[str, Any]) -> Any:
        await gate.wait()
        return web.json_response(of_version(version))

    running.server.default = wait_then_answer
    return gate


def process(running: Services, *argv: str) -> subprocess.Popen[bytes]:
    """A process of Python's in the run."""
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "REDIS_URL": running.settings.resolved_redis_url(),
        "FOREBAY_EXPERIMENT_NAME": running.settings.experiment_name,
    }
    return subprocess.Popen([sys.executable, *argv], env=environment)


async def kill(*processes: subprocess.Popen[bytes]) -> None:
    """SIGKILL them."""
    for one in processes:
        one.kill()
        await asyncio.to_thread(one.wait, 10)


async def test_an_over_long_prompt_among_others(redis_url: str, run_name: str) -> None:
    """Case 5: a prompt that the server always refuses is tried once a slot; all others flow past it meanwhile."""
    async with services(redis_url, run_name, max_staleness=9) as (running, client):

        async def refuse_the_long(body: dict[str, Any]) -> Any:
            if len(body["input_ids"]) > 100:
                text = "Input length (101 tokens) exceeds the maximum allowed length"
                return web.json_response({"error": {"message": text}}, status=400)
            return web.json_response(ANSWER)

        running.server.default = refuse_the_long
        tasks = await submit(client, 2)
        long = await submit(client, 1, ids=[1] * 101)
        tasks += await submit(client, 4)
        batches = await read(client, 3, step=True)
        assert sorted(group.task for batch in batches for group in batch.groups) == tasks
        status = await settled(client, rejected=1)
        assert sum(len(body["input_ids"]) > 100 for body in running.server.requests) == 2
        (drop,) = await client.drops()
        assert drop.task_id == long[0]
        assert "exceeds the maximum allowed length" in drop.detail
        assert status.in_flight == 0


async def test_ten_ready_groups_and_batches_of_two(redis_url: str, run_name: str) -> None:
    """Case 11: what is ready beyond a batch waits for the next ones: ten groups are five batches, each group once."""
    async with services(redis_url, run_name, max_staleness=9) as (_, client):
        tasks = await submit(client, 10)
        await settled(client, accepted=10)
        batches = await read(client, 5, step=True)
        assert [len(batch.groups) for batch in batches] == [2] * 5
        assert sorted(group.task for batch in batches for group in batch.groups) == tasks


async def test_a_worker_that_slept_comes_back_late(redis_url: str, run_name: str) -> None:
    """Cases 12 and 13: results of attempts that others have done meanwhile change no count, and nothing crashes."""
    async with services(redis_url, run_name, worker=False, lease_s=2.0, max_staleness=9) as (running, client):
        gate = hold(running)
        tasks = await submit(client, 2)
        await eventually(lambda: len(running.server.requests) == 4, "four slots in flight")
        running.signal("worker", signal.SIGSTOP)
        await running.start_worker("worker-2")
        running.server.default = ANSWER
        await settled(client, slots__usable=4)
        gate.set()
        running.signal("worker", signal.SIGCONT)
        (batch,) = await read(client, 1)
        assert sorted(group.task for group in batch.groups) == tasks
        assert min(rollout.attempt for group in batch.groups for rollout in group.rollouts) == 2
        await running.stop("worker-2")
        await submit(client, 2)
        await read(client, 1)  # by the worker that slept: it lives, and has room for them
        status = await client.status()
        assert running.ended("worker") is None
        assert [status.count(name) for name in ("slots:usable", "accepted", "delivered")] == [8, 4, 4]
        assert status.count("slots:failed") == status.in_flight == 0


async def test_a_producer_that_was_killed_is_no_end_of_the_data(redis_url: str, run_name: str) -> None:
    """Case 15: the reader of a run whose producer died gets an error that says what it waits for, and no end."""
    async with services(redis_url, run_name, max_staleness=9) as (running, client):
        producer = process(running, str(Path(__file__).parent / "a_producer.py"), WORKFLOW, "3")
        try:
            await settled(client, accepted=3)
        finally:
            await kill(producer)
        stream = client.batches(timeout_s=1.5)
        batch = await stream.next()
        assert batch is not None
        assert len(batch.groups) == 2
        await batch.ack()
        with pytest.raises(StallError, match=r"1 of 2 ready.*submit more, or end the data"):
            await stream.next()
        await client.end_of_data()
        last = await stream.next()
        assert last is not None
        assert (last.partial, len(last.groups)) == (True, 1)
        assert await stream.next() is None


@pytest.mark.parametrize("staleness", [0, 2])
async def test_no_burst_after_a_recovery(redis_url: str, run_name: str, staleness: int) -> None:
    """Case 20: a trainer that begins again at version 100 has (max_staleness + 1) x batch groups running, no more."""
    async with services(redis_url, run_name, max_staleness=staleness) as (running, client):
        await client.recover(100)
        gate = hold(running, 100)
        tasks = await submit(client, 20)
        bound = (staleness + 1) * 2
        await eventually(lambda: len(running.server.requests) == bound * 2, "as many slots as may run")
        status = await client.status()
        assert (status.running, status.queued) == (bound, 20 - bound)
        gate.set()
        delivered: list[int] = []
        async with client.batches(timeout_s=20) as stream:
            for step in range(10):
                batch = await stream.next()
                assert batch is not None
                delivered += [group.task for group in batch.groups]
                status = await client.status()
                assert status.running + status.ready + status.cut + status.delivered_ahead <= bound
                await batch.ack()
                running.server.default = of_version(101 + step)
                await client.set_version(101 + step)
        assert sorted(delivered) == tasks


async def test_one_of_two_servers_is_killed(redis_url: str, run_name: str) -> None:
    """Case 35: a server process is SIGKILLed with requests in flight: all slots finish on the other, none is failed."""
    rules: dict[str, Any] = {"batch_size": 8, "max_staleness": 9, "import_allowlist": ["pipeline_workflows", "chaos"]}
    async with services(redis_url, run_name, worker=False, **rules) as (running, client):
        await running.kill("worker")
        await running.store._ask(("DEL", running.store.keys.servers))
        free = [find_free_port(), find_free_port()]
        servers = [process(running, "-m", "chaos.server", str(port)) for port in free]
        try:
            await running.store.add_servers([f"http://127.0.0.1:{port}" for port in free])
            await running.start_worker("worker-2")
            await submit(client, 16)
            await settled(client, slots__usable=4)
            await kill(servers[0])
            batches = await read(client, 2, timeout_s=60)
            assert sum(len(batch.rows) for batch in batches) == 32
            status = await client.status()
            assert (status.count("slots:failed"), status.in_flight) == (0, 0)
        finally:
            await kill(*servers)
