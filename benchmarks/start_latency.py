"""Time from enqueueing a slot's job to its start: our host against arq, and what the looks at the queue cost.

Compared: our host, which claims by a script every 0.02 s; a plain arq worker with its defaults, which looks every
0.5 s; and one that is told to look every 0.02 s, since most of the difference is that number. For our host there is
also the whole way from ``submit``, with the admission of the group in between. The clock starts before the call that
enqueues and stops at the first line of the job.

Why it is fair: all workers run in one event loop against one server, so they meet the same disturbances. Jobs come at
random times (exponential pauses), so they meet the looks at any phase; each way gets as many. The cost of an idle
worker is measured with only that worker running.

What it does not show: a worker under load, which looks at the queue later than it would like to; more workers, which
shorten the wait; a server across a network. An episode takes seconds to minutes: half a second is a matter for short
episodes and tests, not for long ones.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from benchmarks.measure import Report, Say
from benchmarks.server import Server, running_server
from benchmarks.sides import DEFAULTS, POLL_S, SLOTS, arq_side, idle_of, opened_store
from forebay import RunSettings, load
from forebay.aio import stop_tasks
from forebay.store import Store
from forebay.store.keys import Keys
from forebay_workers.admission import admit_groups
from forebay_workers.arq_host import SlotHost

__all__ = ["run"]

_OURS = "forebay"
_WHOLE = "forebay, from submit"
_ARQ = "arq, defaults"
_ARQ_ALIKE = f"arq, poll {POLL_S:g} s"
_ROUNDS = 5
_JOBS = 40
"""Of each way in each round."""
_PAUSE_S = 0.015
_IDLE_S = 1.0
_DEADLINE_S = 600.0

Enqueue = Callable[[], Awaitable[None]]
"""Enqueues one job and records how long it took to start."""


class _Clock:
    """When each job was enqueued, and how long it then took to start."""

    def __init__(self) -> None:
        self.began: dict[Any, float] = {}
        self.waits_ms: list[float] = []

    def start(self, job: Any) -> None:
        self.began[job] = time.perf_counter()

    def stop(self, job: Any) -> None:
        self.waits_ms.append((time.perf_counter() - self.began.pop(job)) * 1000)


@asynccontextmanager
async def _host(store: Store, url: str, on_start: Callable[[int], None]) -> AsyncIterator[None]:
    async def claim(most: int) -> list[str]:
        return [lease.job_id for lease in await store.claim("benchmark", most, 60)]

    async def run_slot(job_id: str) -> None:
        on_start(Keys.parse_job_id(job_id)[0])

    host = SlotHost(
        url, store.keys.jobs, claim, run_slot, idle=idle_of(store), max_slots=SLOTS, poll_delay_s=POLL_S
    )  # fmt: skip
    running = asyncio.create_task(host.run())
    try:
        yield
    finally:
        await stop_tasks([running])
        await host.close()


async def _forebay(stack: AsyncExitStack, url: str, clock: _Clock, *, whole: bool) -> Enqueue:
    rules = load(RunSettings, batch_size=1_000_000, max_concurrent=1_000_000, group_size=1)
    store, _ = await stack.enter_async_context(opened_store(url, "latency", rules))
    await stack.enter_async_context(_host(store, url, clock.stop))
    numbers = iter(range(1, 1_000_000))  # task ids, which this run counts from 1

    async def queue_to_start() -> None:
        task = next(numbers)
        await store.submit(b"spec", b"rules", 1, str(task))
        clock.start(task)
        await store.admit(1, _DEADLINE_S)

    async def submit_to_start() -> None:
        task = next(numbers)
        clock.start(task)
        await store.submit(b"spec", b"rules", 1, str(task))

    if not whole:
        return queue_to_start
    admission = asyncio.create_task(admit_groups(store, _DEADLINE_S))
    stack.push_async_callback(stop_tasks, [admission])
    return submit_to_start


async def _arq(stack: AsyncExitStack, url: str, clock: _Clock, options: dict[str, Any]) -> Enqueue:
    async def job(_: dict[str, Any], number: int) -> None:
        clock.stop(number)

    side = await stack.enter_async_context(arq_side(url, job, options))
    numbers = iter(range(1_000_000))

    async def enqueue() -> None:
        number = next(numbers)
        clock.start(number)
        await side.enqueue(number)

    return enqueue


_WAYS: dict[str, Callable[[AsyncExitStack, str, _Clock], Awaitable[Enqueue]]] = {
    _ARQ: lambda stack, url, clock: _arq(stack, url, clock, DEFAULTS),
    _ARQ_ALIKE: lambda stack, url, clock: _arq(stack, url, clock, {"poll_delay": POLL_S}),
    _OURS: lambda stack, url, clock: _forebay(stack, url, clock, whole=False),
    _WHOLE: lambda stack, url, clock: _forebay(stack, url, clock, whole=True),
}


async def _waits(server: Server, say: Say) -> dict[str, list[list[float]]]:
    """Waits in ms, by way and round."""
    rng = random.Random(1)
    found: dict[str, list[list[float]]] = {way: [] for way in _WAYS}
    async with AsyncExitStack() as stack:
        clocks = {way: _Clock() for way in _WAYS}
        enqueue = {
            way: await make(stack, server.database(at), clocks[way]) for at, (way, make) in enumerate(_WAYS.items())
        }
        for at in range(-1, _ROUNDS):  # the first loads scripts and opens connections
            jobs = [way for way in _WAYS for _ in range(_JOBS if at >= 0 else 2)]
            rng.shuffle(jobs)
            if at >= 0:
                say(f"round {at + 1} of {_ROUNDS}: {_JOBS} jobs, each of {len(_WAYS)} ways")
            for way in jobs:
                await enqueue[way]()
                await asyncio.sleep(rng.expovariate(1 / _PAUSE_S))
            async with asyncio.timeout(30):
                while any(clock.began for clock in clocks.values()):  # noqa: ASYNC110 -- a poll is exact enough here
                    await asyncio.sleep(POLL_S)
            for way, clock in clocks.items():
                if at >= 0:
                    found[way].append(clock.waits_ms)
                clock.waits_ms = []
    return found


async def _idle(server: Server, way: str) -> tuple[float, float]:
    """CPU ms per second of an idle worker of `way`, and of the server meanwhile."""
    await server.empty(0)
    async with AsyncExitStack() as stack:
        await _WAYS[way](stack, server.database(0), _Clock())
        await asyncio.sleep(0.2)  # what is done once
        began, here, there = time.perf_counter(), time.process_time(), server.cpu_s()
        await asyncio.sleep(_IDLE_S)
        seconds = time.perf_counter() - began
        return (time.process_time() - here) * 1000 / seconds, (server.cpu_s() - there) * 1000 / seconds


async def _measure(server: Server, say: Say) -> Report:
    report = Report("Start of a slot job", reference=_ARQ)
    waits = await _waits(server, say)
    report.add("median wait", "ms", {way: [statistics.median(one) for one in rounds] for way, rounds in waits.items()})
    report.add(
        "wait, 95th percentile",
        "ms",
        {way: [statistics.quantiles(one, n=20)[-1] for one in rounds] for way, rounds in waits.items()},
    )
    idle: dict[str, list[tuple[float, float]]] = {way: [] for way in (_ARQ, _ARQ_ALIKE, _OURS)}
    for at in range(3):
        say(f"idle workers, round {at + 1} of 3")
        for way, found in idle.items():
            found.append(await _idle(server, way))
    for place, what in enumerate(("idle worker, CPU", "server of an idle worker, CPU")):
        report.add(what, "ms/s", {way: [one[place] for one in found] for way, found in idle.items()})
    report.notes.append(f"{_JOBS} jobs of each way in each round, at random times")
    return report


def run(say: Say) -> Report:
    """Run the benchmark."""
    with running_server() as server:
        return asyncio.run(_measure(server, say))
