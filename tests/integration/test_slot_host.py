"""The host of slot jobs, and what becomes of what it has leased when it is told to stop."""

from __future__ import annotations

import asyncio

from conditions import eventually

from forebay.aio import stop_tasks
from forebay_workers.arq_host import SlotHost


async def test_a_claim_on_its_way_is_not_lost(redis_url: str, run_name: str) -> None:
    """4.2: what Redis has leased as the worker is told to go gets its task, so that it can be handed back."""
    asked, answer, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
    started: list[str] = []

    async def claim(_: int) -> list[str]:
        asked.set()
        await answer.wait()
        return ["a", "b"]

    async def run_slot(job: str) -> None:
        started.append(job)
        await go_on.wait()

    async def idle() -> None:
        await asyncio.sleep(0.01)

    host = SlotHost(redis_url, run_name, claim, run_slot, idle=idle, max_slots=4, poll_delay_s=0.01)
    serving = asyncio.create_task(host.run())
    try:
        await asyncio.wait_for(asked.wait(), 10)
        stopping = asyncio.create_task(host.stop_claiming(10))
        await asyncio.sleep(0)
        assert not stopping.done()
        answer.set()
        await asyncio.wait_for(stopping, 10)
        assert not await host.wait_idle(0)
        await eventually(lambda: started == ["a", "b"], "both to run")
        go_on.set()
        assert await host.wait_idle(10)
    finally:
        await stop_tasks([serving])
        await host.close()


async def test_an_answer_that_does_not_come_is_not_waited_for(redis_url: str, run_name: str) -> None:
    """4.2: a Redis that is away does not keep a worker from going."""
    asked = asyncio.Event()

    async def claim(_: int) -> list[str]:
        asked.set()
        await asyncio.Event().wait()
        return []

    async def nothing(*_: object) -> None:
        """Never called."""

    host = SlotHost(redis_url, run_name, claim, nothing, idle=nothing, max_slots=4, poll_delay_s=0.01)
    serving = asyncio.create_task(host.run())
    try:
        await asyncio.wait_for(asked.wait(), 10)
        async with asyncio.timeout(5):
            await host.stop_claiming(0.1)
        assert await host.wait_idle(0)
    finally:
        await stop_tasks([serving])
        await host.close()
