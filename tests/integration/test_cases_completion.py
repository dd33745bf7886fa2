"""Public faults of group completion (cases 1 to 10), end to end: real Redis, real HTTP, processes where they die.

Case 5 stands in ``test_pipeline.py`` and ``test_store.py``, where the transitions of cases 1, 3, 7, 9 and 10 are too.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from aiohttp import web
from conditions import eventually
from explaining import why_json
from scripted_server import answer
from services import WORKFLOW, read, services

from forebay import AsyncClient
from forebay.errors import CollectorUnavailableError, RunStoppedError
from forebay.stalls import Cause

GOOD = answer([7, 8, 9], weight_version="0")


async def submit(client: AsyncClient, count: int = 1, **fields: Any) -> list[int]:
    """Submit that many groups."""
    return [await client.submit({"ids": [1, 2], **fields}, WORKFLOW, {}) for _ in range(count)]


async def counted(client: AsyncClient, **counts: int) -> None:
    """Wait until the counters are at least so high."""
    async with asyncio.timeout(30):
        while True:
            status = await client.status()
            if all(status.count(name) >= value for name, value in counts.items()):
                return
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_a_slot_that_hangs_for_ever(redis_url: str, run_name: str) -> None:
    """Case 1: the group closes by its deadline with its usable slot; till then `why` names what it waits for."""
    rules = {"group_deadline_s": 20.0, "episode_timeout_s": 20.0, "lease_s": 1.5}
    async with services(redis_url, run_name, collector=False, worker=False, **rules) as (running, client):
        hung = 0

        async def step(body: dict[str, Any]) -> Any:
            nonlocal hung
            if body["input_ids"] == [9, 9]:
                hung += 1
                if hung == 1:
                    await asyncio.Event().wait()
            return web.json_response(GOOD)

        running.server.default = step
        slow = await client.submit({"ids": [9, 9]}, WORKFLOW, {})
        quick = await submit(client, 2)
        async with client.batches(timeout_s=60) as stream:
            first = await stream.next()
            assert first is not None
            assert sorted(group.task for group in first.groups) == quick
            await first.ack()
            found = await why_json(
                running, lambda form: bool(form["groups"] and form["groups"][0]["slots"][0]["server"])
            )
            (group,) = found["groups"]
            (slot,) = group["slots"]
            assert (found["cause"], group["task_id"], group["open_slots"]) == ("running", slow, 1)
            assert (slot["state"], slot["phase"], slot["server"]) == ("running", "generating", running.server.url)
            assert slot["worker"] in found["workers"]
            assert 0 < slot["age_s"] <= group["age_s"] < 20
            assert f"slot {slot['sample_idx']}, attempt 1" in found["verdict"]
            await client.end_of_data()
            last = await stream.next()
        assert last is not None
        assert [group.task for group in last.groups] == [slow]
        assert [one.sample_idx for one in last.groups[0].rollouts] == [1 - slot["sample_idx"]]


async def test_one_straggler(redis_url: str, run_name: str) -> None:
    """Case 2: while one slot takes far longer than all others, batches of other groups come; then its group does."""
    async with services(redis_url, run_name, max_staleness=20) as (running, client):
        gate = asyncio.Event()

        async def step(body: dict[str, Any]) -> Any:
            if body["input_ids"] == [9, 9]:
                await gate.wait()
            return web.json_response(GOOD)

        running.server.default = step
        slow = await client.submit({"ids": [9, 9]}, WORKFLOW, {})
        quick = await submit(client, 11)
        batches = await read(client, 5)
        before = [group.task for batch in batches for group in batch.groups]
        assert slow not in before
        gate.set()
        (last,) = await read(client, 1)
        assert sorted([*before, *(group.task for group in last.groups)]) == sorted([slow, *quick])


async def test_prompts_that_no_batch_size_divides(redis_url: str, run_name: str) -> None:
    """Case 3: five groups in batches of two: a last partial batch that says so, then the end, and `why` says so."""
    async with services(redis_url, run_name, max_staleness=9) as (_, client):
        tasks = await submit(client, 5)
        await client.end_of_data()
        batches = await read(client, 9)
        assert [len(batch.groups) for batch in batches] == [2, 2, 1]
        assert [batch.partial for batch in batches] == [False, False, True]
        assert sorted(group.task for batch in batches for group in batch.groups) == tasks
        assert (await client.explain()).cause is Cause.END_OF_DATA


@pytest.mark.slow
async def test_a_killed_collector(redis_url: str, run_name: str) -> None:
    """Case 4: SIGKILL of the collector: the read fails within seconds, and goes on by itself once one is back."""
    async with services(redis_url, run_name, collector=False) as (running, client):
        stream = client.batches()
        waiting = asyncio.create_task(stream.next())
        await running.kill("collector")
        began = time.monotonic()
        with pytest.raises(CollectorUnavailableError, match="no collector serves run"):
            await waiting
        assert time.monotonic() - began < 15
        assert (await client.explain()).cause is Cause.NO_COLLECTOR
        await submit(client, 2)
        running.start_process("collector", "collector")
        async with asyncio.timeout(60):
            while not await running.store.collector_alive():  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.05)
        batch = await stream.next()
        assert batch is not None
        assert len(batch.groups) == 2


async def test_every_reward_raises(redis_url: str, run_name: str) -> None:
    """Case 6: the run stops with the cause after max_barren_groups groups, for the reader, the producer and `why`."""
    rules = {"max_barren_groups": 4, "max_failed_share_data": 1.0, "max_staleness": 20}
    async with services(redis_url, run_name, **rules) as (_, client):
        await submit(client, 12, action="reward_raises")
        with pytest.raises(RunStoppedError, match=r"4 groups in a row.*the reward divides by nothing"):
            await read(client, 1)
        with pytest.raises(RunStoppedError, match="max_barren_groups"):
            await submit(client, 1)
        found = await client.explain()
        assert found.cause is Cause.STOPPED
        assert "divides by nothing" in found.verdict


async def test_a_permanent_422(redis_url: str, run_name: str) -> None:
    """Case 7: one request for each slot, and the server's own text in the reason of the dead letter and of the drop."""
    async with services(redis_url, run_name) as (running, client):
        running.server.default = 422
        (task_id,) = await submit(client, 1)
        await counted(client, rejected=1)
        letter = await client.dead_letter(task_id)
        assert letter is not None
        assert len(letter.slots) == 2
        assert all("422" in slot.reason and "scripted 422" in slot.reason for slot in letter.slots)
        (drop,) = await client.drops()
        assert "scripted 422" in drop.detail
        running.server.default = GOOD
        await submit(client, 2)
        await read(client, 1)
        assert len(running.server.requests) == 2 + 4, "not one more for the slots that failed"


async def test_an_exception_in_a_slot(redis_url: str, run_name: str) -> None:
    """Case 8: a slot's exception comes as a failure with surface, root cause and traceback; the sibling is kept."""
    async with services(redis_url, run_name) as (_, client):
        tasks = await submit(client, 2, actions={"0": "raise_from"})
        (batch,) = await read(client, 1)
        assert [[one.sample_idx for one in group.rollouts] for group in batch.groups] == [[1], [1]]
        letter = await client.dead_letter(tasks[0])
        assert letter is not None
        (slot,) = letter.slots
        assert slot.reason == "RuntimeError: the grader failed (from KeyError: 'answer')"
        assert '_ = {}["answer"]' in slot.traceback
        assert "pipeline_workflows.py" in slot.traceback


async def test_a_group_that_is_evicted_before_all_its_slots_began(redis_url: str, run_name: str) -> None:
    """Case 9: slots that had not begun never reach a server, those that end late recreate nothing; one outcome."""
    rules = {"group_size": 8, "max_staleness": 0, "early_cancel": True}
    async with services(redis_url, run_name, worker=False, **rules) as (running, client):
        await running.kill("worker")
        gate = asyncio.Event()

        async def step(_: dict[str, Any]) -> Any:
            if len(running.server.requests) > 2:
                await gate.wait()
            return web.json_response(GOOD)

        running.server.default = step
        await running.start_worker("few", slots=3)
        await submit(client, 1)
        await eventually(lambda: len(running.server.requests) == 5, "two slots ended, three under way, three not begun")
        await client.set_version(5)
        await counted(client, evicted=1)
        gate.set()
        running.server.default = answer([7], weight_version="5")
        good = await submit(client, 2)
        (batch,) = await read(client, 1)
        assert sorted(group.task for group in batch.groups) == good
        status = await client.status()
        assert (status.count("evicted"), status.count("delivered"), status.in_flight) == (1, 2, 0)
        assert len(running.server.requests) == 5 + 16, "none of the three that had not begun"


async def test_staleness_0_with_slow_pushes(redis_url: str, run_name: str) -> None:
    """Case 10: with max_staleness 0 every slow push of weights is followed by a batch of that version."""
    async with services(redis_url, run_name, max_staleness=0) as (running, client):
        versions = []
        async with client.batches(timeout_s=30) as stream:
            for version in range(1, 4):
                await submit(client, 2)
                batch = await stream.next()
                assert batch is not None
                versions.append({group.head for group in batch.groups})
                assert (await client.explain()).cause is Cause.TRAINER_AHEAD
                running.server.update_gate = asyncio.Event()
                push = asyncio.create_task(client.update_weights_from_disk("/weights", version))
                await eventually(lambda at=version: len(running.server.updates) == at, "the push under way")
                await asyncio.sleep(0.2)  # a slow one
                running.server.update_gate.set()
                await push
                running.server.default = answer([7], weight_version=str(version))
                await batch.ack()
        assert versions == [{0}, {1}, {2}]
