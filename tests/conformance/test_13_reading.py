"""Contract, section 13: what ``docs/trainers.md`` says of reading, and no test of ``test_13_batch_stream.py`` shows."""

from __future__ import annotations

import asyncio
import time

import pytest
from driver import Driver
from services import WORKFLOW, services

from forebay import Client
from forebay.batches import AsyncBatchStream
from forebay.errors import CollectorUnavailableError, RunStoppedError
from forebay.settings import RunSettings
from forebay.store import Store
from forebay.store.records import Cursor


def stream_of(store: Store, cursor: Cursor) -> AsyncBatchStream:
    """What ``client.batches`` makes."""
    return AsyncBatchStream(store, RunSettings(batch_size=2), cursor, timeout_s=10)


async def batches(driver: Driver, count: int) -> None:
    """Cut so many batches of two groups."""
    for _ in range(count):
        await driver.finish(2)
        assert await driver.cut() is not None


async def test_a_late_follower_begins_with_the_oldest_that_is_there(store: Store) -> None:
    """13: several trainers read independently; one that joins late gets what has not gone yet, in order."""
    driver = Driver(store)
    await driver.lead(max_staleness=20)
    await batches(driver, 3)
    trainer = stream_of(store, Cursor("trainer"))
    for at in range(3):
        batch = await trainer.next()
        assert batch is not None
        if at == 0:
            await batch.ack()
    follower = stream_of(store, Cursor("late", follows=True))
    found = [await follower.next(), await follower.next()]
    assert [batch.batch_id for batch in found if batch] == [2, 3]


async def test_what_was_cut_before_the_run_stopped_comes_first(store: Store) -> None:
    """4.5, 13: a run that has stopped itself hands over what it had cut, then says why it stopped."""
    driver = Driver(store)
    await driver.lead(max_staleness=20)
    await batches(driver, 2)
    await store._ask(("HSET", store.keys.state, "stopped", "8 slots in a row broke the contract"))
    trainer = stream_of(store, Cursor("trainer"))
    found = [await trainer.next(), await trainer.next()]
    assert [batch.batch_id for batch in found if batch] == [1, 2]
    with pytest.raises(RunStoppedError, match="8 slots in a row"):
        await trainer.next()


async def test_a_killed_collector_is_an_error_within_seconds(redis_url: str, run_name: str) -> None:
    """13: where the only collector is SIGKILLed plain code gets a clear error; the same stream goes on afterwards."""
    async with services(redis_url, run_name, collector=False, collector_lease_s=2.0, max_staleness=9) as (
        running,
        client,
    ):
        for _ in range(4):
            await client.submit({"ids": [5, 6]}, WORKFLOW, {})

        def read_on(trainer: Client) -> list[int]:
            with trainer.batches(timeout_s=40) as stream:
                first = stream.next()
                assert first is not None
                first.ack()
                asyncio.run_coroutine_threadsafe(running.kill("collector"), loop).result(20)
                second = stream.next()  # it was cut before
                assert second is not None
                second.ack()
                began = time.monotonic()
                with pytest.raises(CollectorUnavailableError, match="no collector serves run"):
                    stream.next()
                assert time.monotonic() - began < 2.0 + 4.0 + 4.0, "the lease, the time to take over, and a little"
                asyncio.run_coroutine_threadsafe(running.start_collector(), loop).result(20)
                for _ in range(2):
                    trainer.submit({"ids": [5, 6]}, WORKFLOW, {})
                third = stream.next()
                assert third is not None
                return [batch.batch_id for batch in (first, second, third)]

        loop = asyncio.get_running_loop()
        with await asyncio.to_thread(Client.connect, running.settings) as trainer:
            async with asyncio.timeout(20):
                while (await client.status()).count("batches_cut") < 2:  # noqa: ASYNC110 (it happens in another process)
                    await asyncio.sleep(0.05)
            assert await asyncio.to_thread(read_on, trainer) == [1, 2, 3]
