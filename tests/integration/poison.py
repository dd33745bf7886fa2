"""What the tests of unreadable entries share: strategies of junk, and a run to put it into."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgpack
from driver import Driver
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from forebay.settings import RunSettings, Settings
from forebay.store import Store
from forebay.wire.envelopes import GroupRules
from forebay_collector.service import Collector

FUZZ = settings(
    max_examples=25,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
RULES = GroupRules(1).pack()
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5).filter(lambda text: text.isascii())
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abtrowsid"), inner, max_size=3),
    max_leaves=6,
)
HUGE = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\x7f\xff\xff\xff"]
"""The beginnings of msgpack lists, maps, bytes and strings that claim gigabytes."""
JUNK = (
    st.binary(max_size=40)
    | VALUES.map(msgpack.packb)
    | st.sampled_from(HUGE)
    | st.integers(0, 255).map(lambda version: bytes([version]) + b"\x90")
)
TASK = st.sampled_from(["own", b"77", b"0", b"-3", b"", b"one", b"\xff", b"99999999999999999999", b" 1"])


def store_of(redis_url: str) -> Store:
    """The store of a new run."""
    return Store.open(Settings(REDIS_URL=redis_url, experiment_name=f"poison-{uuid.uuid4().hex[:12]}"))


def in_a_run(
    redis_url: str, runner: asyncio.Runner, example: Callable[[Driver], Awaitable[None]], **rules: Any
) -> None:
    """Run one example with a driver that leads a new run."""

    async def run() -> None:
        store = store_of(redis_url)
        try:
            driver = Driver(store)
            await driver.lead(**{"batch_size": 1, "batches_per_version": 1000, **rules})
            async with asyncio.timeout(30):
                await example(driver)
            await driver.check()
        finally:
            await store.close()

    runner.run(run())


async def add(store: Store, stream: str, fields: dict[bytes, Any]) -> None:
    """Add an entry to a stream."""
    await store._ask(("XADD", stream, "*", *(part for item in fields.items() for part in item)))


async def until(done: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition, within 10 s."""
    async with asyncio.timeout(10):
        while not await done():  # noqa: ASYNC110 (what is waited for is in Redis)
            await asyncio.sleep(0.01)


@asynccontextmanager
async def collecting(store: Store, rules: RunSettings) -> AsyncIterator[asyncio.Task[None]]:
    """A collector at work."""
    collector = Collector(store, rules)
    await collector.open()
    stop = asyncio.Event()
    task = asyncio.create_task(collector.serve(stop))
    try:
        await store.wait_for_settings(10, asyncio.sleep)
        yield task
    finally:
        stop.set()
        await asyncio.wait_for(task, 20)


async def outcome(store: Store, task: int) -> tuple[str, str]:
    """``(state, reason)`` of a group."""
    ((state, why),) = await store._ask(("HMGET", store.keys.group(task), "st", "why"))
    return (state or b"").decode(), (why or b"").decode()


def ended(store: Store, task: int) -> Callable[[], Awaitable[bool]]:
    """Whether a group has ended."""

    async def ask() -> bool:
        return (await outcome(store, task))[0] in ("rejected", "evicted", "ready", "batched")

    return ask
