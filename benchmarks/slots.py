"""Slots that do nothing, per second through one worker: our host against plain arq.

Compared: 240 slots, in groups of 8, from the first call that enqueues one until all have ended and are recorded.
``forebay`` is all that our worker does around an episode: submit, admission, claim with a lease, the workflow's (fixed)
result checked and encoded as a row of 64 tokens, row and header published. ``forebay, host and store`` leaves the
workflow and the row's making out and publishes a fixed row. ``forebay, unpipelined`` is the first without the store's
gathering of simultaneous calls: each is a round trip of its own. arq does less: a job is enqueued, found, run and
removed; it has no lease that another worker could take over within seconds, no row, no header, no exactly-once result.

Why it is fair: producer and worker share one event loop in all ways, the server is the same (every write on disk before
it is acknowledged), ways take turns, and each begins with an empty database. ``arq, set alike`` has our number of slots
and our poll interval, keeps no results and uses msgpack; the ratios are to it, not to ``arq, defaults``, whose pace is
set by its poll interval too. As many jobs are enqueued at once as slots may run.

What decides: arq starts jobs one after the other, each with two round trips, of which one writes to disk; our script
claims all that are due in one. So the pace of arq is that of the disk, which differs between machines more than the
CPU times do.

What it does not show: episodes that do something; several workers, among which arq's optimistic claims collide more
often the more there are; the collector's part (see ``pipeline``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.measure import Report, Say
from benchmarks.server import Server, running_server
from benchmarks.sides import ALIKE, DEFAULTS, POLL_S, SLOTS, UnpipelinedStore, arq_side, idle_of, opened_store
from forebay import RolloutWorkflow, RunSettings, load
from forebay.aio import stop_tasks
from forebay.generation import InferenceEngine, ModelRequest, ModelResponse
from forebay.outcomes import SlotOutcome
from forebay.store import Store
from forebay.store.keys import Keys
from forebay.wire.codec import encode_rows
from forebay.wire.envelopes import GroupRules, GroupSpec, RowSummary, SlotHeader
from forebay.wire.rows import rows_from_tensors
from forebay_workers.arq_host import SlotHost
from forebay_workers.leases import Leases
from forebay_workers.settings import WorkerSettings
from forebay_workers.slots import SlotRunner

__all__ = ["NoOp", "run"]

_GROUP = 8
_GROUPS = 30
_COUNT = _GROUP * _GROUPS
_TOKENS = 64
_ROUNDS = 4
_LIMIT_S = 60.0

_OURS = "forebay"
_BARE = "forebay, host and store"
_UNPIPELINED = "forebay, unpipelined"
_ARQ = "arq, defaults"
_ARQ_ALIKE = "arq, set alike"


def _result() -> dict[str, Any]:
    mask = np.ones((1, _TOKENS), dtype=np.int32)
    mask[:, : _TOKENS // 4] = 0
    return {
        "input_ids": np.arange(_TOKENS, dtype=np.int32)[None, :],
        "attention_mask": np.ones((1, _TOKENS), dtype=np.bool_),
        "loss_mask": mask,
        "logprobs": np.linspace(-1, 0, _TOKENS, dtype=np.float32)[None, :] * mask,
        "versions": np.where(mask == 1, 0, -1).astype(np.int32),
        "rewards": np.ones(1, dtype=np.float32),
    }


_FIXED = _result()


class NoOp(RolloutWorkflow):
    """Generates nothing."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:  # noqa: ARG002
        """The same row every time."""
        return _FIXED


class _NoEngine(InferenceEngine):
    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        raise NotImplementedError

    def get_version(self) -> int:
        return 0


class _Countdown:
    """Set when so many slots have ended."""

    def __init__(self, count: int) -> None:
        self._left = count
        self.reached = asyncio.Event()

    def one(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.reached.set()


Slot = Callable[[str], Awaitable[None]]
Claim = Callable[[int], Awaitable[list[str]]]
Produce = Callable[[_Countdown], Awaitable[None]]
"""Enqueues all slots and waits until they have ended and are recorded."""


async def _gather(calls: list[Callable[[], Awaitable[Any]]]) -> None:
    """Make all `calls`, as many at once as slots may run."""
    gate = asyncio.Semaphore(SLOTS)

    async def one(call: Callable[[], Awaitable[Any]]) -> None:
        async with gate:
            await call()

    await asyncio.gather(*(one(call) for call in calls))


_RULES = load(RunSettings, batch_size=1_000_000, max_concurrent=1_000_000, import_allowlist=["benchmarks"])


def _whole(store: Store) -> tuple[Claim, Slot, Leases]:
    """Claim and run as a worker of ours does."""
    leases = Leases(store, "benchmark", _RULES.lease_s, dict)
    runner = SlotRunner(store, _NoEngine(), leases, "benchmark", _RULES, load(WorkerSettings))
    return runner.claim, runner.run, leases


def _bare(store: Store) -> tuple[Claim, Slot, Leases]:
    """Claim and publish alone."""
    rows, _ = rows_from_tensors(_FIXED)
    frame, summary = encode_rows(rows), RowSummary.of(rows[0])
    header = SlotHeader(1, 0, 1, SlotOutcome.USABLE.value, rows=[summary], rows_bytes=len(frame)).pack()

    async def claim(most: int) -> list[str]:
        return [lease.job_id for lease in await store.claim("benchmark", most, _RULES.lease_s)]

    async def slot(job_id: str) -> None:
        attempt = Keys.parse_job_id(job_id)
        await store.publish(
            *attempt, outcome=SlotOutcome.USABLE, kind=None, header=header, rows=frame, rows_ttl_s=_RULES.rows_ttl_s
        )

    return claim, slot, Leases(store, "benchmark", _RULES.lease_s, dict)


@asynccontextmanager
async def _forebay(
    url: str, make: Callable[[Store], tuple[Claim, Slot, Leases]], kind: type[Store] = Store
) -> AsyncIterator[Produce]:
    spec = GroupSpec(workflow="benchmarks.slots:NoOp", kwargs={}, data={}).pack()
    rules = GroupRules(min_usable_group_size=1).pack()
    async with opened_store(url, "slots", _RULES, kind) as (store, _):
        claim, slot, leases = make(store)
        countdowns: list[_Countdown] = []

        async def counted(job_id: str) -> None:
            await slot(job_id)
            countdowns[-1].one()

        host = SlotHost(
            url, store.keys.jobs, claim, counted, idle=idle_of(store), max_slots=SLOTS, poll_delay_s=POLL_S
        )  # fmt: skip
        tasks = [asyncio.create_task(host.run()), asyncio.create_task(leases.run())]

        async def produce(countdown: _Countdown) -> None:
            countdowns.append(countdown)
            await _gather([lambda at=at: store.submit(spec, rules, _GROUP, str(at)) for at in range(_GROUPS)])  # type: ignore[misc]
            await store.admit(_GROUPS, _LIMIT_S * 2)
            await countdown.reached.wait()
            await host.wait_idle(_LIMIT_S)

        try:
            yield produce
        finally:
            await stop_tasks(tasks)
            await host.close()


@asynccontextmanager
async def _arq(url: str, options: dict[str, Any]) -> AsyncIterator[Produce]:
    countdowns: list[_Countdown] = []

    async def job(_: dict[str, Any]) -> None:
        countdowns[-1].one()

    async with arq_side(url, job, options) as side:

        async def produce(countdown: _Countdown) -> None:
            countdowns.append(countdown)
            await _gather([side.enqueue] * _COUNT)
            await countdown.reached.wait()
            await side.wait_idle()

        yield produce


_WAYS: dict[str, Callable[[str], Any]] = {
    _ARQ_ALIKE: lambda url: _arq(url, ALIKE),
    _OURS: lambda url: _forebay(url, _whole),
    _BARE: lambda url: _forebay(url, _bare),
    _UNPIPELINED: lambda url: _forebay(url, _whole, UnpipelinedStore),
    _ARQ: lambda url: _arq(url, DEFAULTS),
}


@dataclass(frozen=True, slots=True)
class _Cost:
    rate: float
    client_ms: float
    server_ms: float


async def _once(server: Server, way: str) -> _Cost:
    await server.empty(0)
    async with _WAYS[way](server.database(0)) as produce:
        await asyncio.sleep(POLL_S)  # the worker's first look
        began, here, there = time.perf_counter(), time.process_time(), server.cpu_s()
        async with asyncio.timeout(_LIMIT_S):
            await produce(_Countdown(_COUNT))
        return _Cost(
            rate=_COUNT / (time.perf_counter() - began),
            client_ms=(time.process_time() - here) * 1000 / _COUNT,
            server_ms=(server.cpu_s() - there) * 1000 / _COUNT,
        )


async def _measure(server: Server, say: Say) -> Report:
    for way in _WAYS:  # loads scripts and modules
        await _once(server, way)
    costs: dict[str, list[_Cost]] = {way: [] for way in _WAYS}
    for at in range(_ROUNDS):
        say(f"round {at + 1} of {_ROUNDS}: {_COUNT} slots, each of {len(_WAYS)} ways")
        for way, found in costs.items():
            found.append(await _once(server, way))
    report = Report("Slots that do nothing", reference=_ARQ_ALIKE)
    report.add("slots per second", "1/s", {way: [one.rate for one in found] for way, found in costs.items()})
    report.add(
        "CPU of producer and worker", "ms/slot", {way: [one.client_ms for one in found] for way, found in costs.items()}
    )
    report.add("CPU of the server", "ms/slot", {way: [one.server_ms for one in found] for way, found in costs.items()})
    report.notes.append(f"{_COUNT} slots a round in groups of {_GROUP}; up to {SLOTS} at once")
    return report


def run(say: Say) -> Report:
    """Run the benchmark."""
    with running_server() as server:
        return asyncio.run(_measure(server, say))
