"""What is bounded in bytes, on real servers: rows, waiting prompts, unread results (contract, sections 6 and 13).

Invariants: ``rows_bytes`` is at every instant the length of the rows that groups count and no trainer has acknowledged;
``queued_bytes`` that of the prompts that wait. That ``max_queued_groups`` refuses is proved in ``test_store.py``.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest
from driver import Driver, a_row, reap_until

from forebay.errors import QueueFullError
from forebay.outcomes import FailureKind
from forebay.settings import RunSettings, Settings
from forebay.stalls import diagnose
from forebay.store import Store
from forebay.store.records import Channel, RunStatus
from forebay.wire.codec import encode_rows

SLOT = len(encode_rows([a_row()]))
"""Bytes of rows that a slot of the driver brings."""
PROMPT = len(b"spec") + len(b"rules")


@pytest.fixture
async def store(any_redis_url: str, run_name: str) -> AsyncIterator[Store]:
    """The store of a run of one's own, on Valkey and on Redis."""
    opened = Store.open(Settings(REDIS_URL=any_redis_url, experiment_name=run_name.split("/", maxsplit=1)[0]))
    yield opened
    await opened.close()


@pytest.fixture
async def driver(store: Store) -> Driver:
    """A driver that leads, with batches of 2 groups, one per version, staleness 1: a capacity of 4 groups."""
    made = Driver(store)
    await made.lead()
    return made


async def used(store: Store, name: str) -> int:
    """How much there is of what `name` bounds."""
    bound = (await store.status()).bound(name)
    assert bound is not None
    return bound.used


async def with_a_worker(driver: Driver) -> RunStatus:
    """The status of a run that has a live worker and a server."""
    await driver.store.add_servers(["http://localhost:1"])
    await driver.store.heartbeat(driver.worker, {}, 5, [])
    return await driver.check()


async def rows_in_redis(store: Store) -> int:
    """Bytes of all rows of the run that are not about to expire."""
    total = 0
    async for key in store._redis.scan_iter(match=f"{store.keys.prefix}rows:*"):
        if await store._redis.ttl(key) == -1:
            total += await store._redis.strlen(key)
    return total


class TestRows:
    async def test_are_counted_until_they_are_acknowledged(self, store: Store, driver: Driver) -> None:
        """6: what runs, waits, is cut or is in the trainer's hands counts; rejected and acknowledged groups do not."""

        async def counted(slots: int) -> None:
            assert await used(store, "rows_bytes") == await rows_in_redis(store) == slots * SLOT

        await driver.submit(3)
        await driver.admit()
        attempts = await driver.claim()
        for done, attempt in enumerate(attempts, start=1):
            await driver.publish(attempt)
            await driver.publish(attempt)  # repeated after a lost answer
            await counted(done)
        await driver.commit(1, reason="filtered")
        await driver.commit(1, reason="filtered")
        await counted(4)
        await driver.commit(2)
        await driver.commit(3)
        await driver.cut()
        batch, _ = await driver.take_batch()
        await counted(4)
        await store.ack("trainer", batch)
        await store.ack("trainer", batch)
        await counted(0)

    async def test_a_repeated_publication_leaves_them_for_good(self, store: Store, driver: Driver) -> None:
        """13: rows that are written again after a lost answer do not expire under a group that counts them."""
        await driver.submit(1, size=1)
        await driver.admit()
        (attempt,) = await driver.claim()
        await driver.publish(attempt)
        await driver.publish(attempt)
        assert await store._redis.ttl(store.keys.rows(*attempt)) == -1

    async def test_of_duplicates_and_late_results_are_not(self, store: Store, driver: Driver) -> None:
        """4: a result that does not count leaves no byte behind."""
        await driver.submit(1, size=1)
        await driver.admit()
        (first,) = await driver.claim(lease_s=0.001)
        await reap_until(driver, lambda status: status.count("leases_lost") == 1)
        (second,) = await driver.claim()
        await driver.publish(second)
        assert await driver.publish(first) == "duplicate"
        assert await used(store, "rows_bytes") == await rows_in_redis(store) == SLOT
        await driver.commit(1, size=1, reason="filtered")
        assert await driver.publish((1, 0, 3)) == "late"
        assert await used(store, "rows_bytes") == await rows_in_redis(store) == 0

    async def test_of_evicted_groups_are_not(self, store: Store, driver: Driver) -> None:
        """6: an eviction releases bytes as it releases capacity."""
        await driver.finish(2)
        await driver.cut()
        await store.set_version(5)
        assert (await driver.take()).batch is None
        assert (await driver.check()).count("evicted") == 2
        assert await used(store, "rows_bytes") == await rows_in_redis(store) == 0

    async def test_of_retained_batches_have_their_own_budget(self, store: Store, driver: Driver) -> None:
        """13: an acknowledged batch that is kept counts there, and no more where admission looks."""
        await driver.lead(retain_batches=1)
        await driver.finish(2)
        await driver.cut()
        batch, _ = await driver.take_batch()
        await store.ack("trainer", batch)
        assert await used(store, "rows_bytes") == 0
        assert await used(store, "retained_bytes") == await rows_in_redis(store) == 4 * SLOT

    async def test_of_collected_groups_are_until_they_are_read(self, store: Store, driver: Driver) -> None:
        """13: groups that are asked for by their id count until whoever asked has them."""
        (task,) = await driver.submit(1, channel=Channel.EVAL)
        await driver.run_admitted()
        await store.collect(task)
        assert await used(store, "rows_bytes") == await rows_in_redis(store) == 2 * SLOT
        await store.discard([task])
        await store.discard([task])
        assert await used(store, "rows_bytes") == await rows_in_redis(store) == 0


class TestAdmission:
    async def test_stops_at_the_bound_and_goes_on(self, store: Store, driver: Driver) -> None:
        """Case 32: with a trainer that pauses rows stay below the bound, what runs included; an ack lets more start."""
        await driver.lead(max_staleness=9, max_stored_bytes=1024)
        await driver.finish(2)
        await driver.cut()
        await driver.submit(20)
        assert await driver.admit() == 1024 // (2 * SLOT) - 2
        assert await driver.admit() == 0
        await with_a_worker(driver)
        assert "at its bound: rows_bytes" in diagnose(await driver.store.look(), RunSettings(batch_size=2)).verdict
        await driver.run_admitted()
        assert await used(store, "rows_bytes") <= 1024
        batch, _ = await driver.take_batch()
        await store.ack("trainer", batch)
        assert await driver.admit() > 0

    async def test_starts_what_the_next_batch_needs(self, store: Store, driver: Driver) -> None:
        """6: where nothing is cut, the groups of the next batch start although the bound is far below them."""
        await driver.lead(max_staleness=9, max_stored_bytes=1)
        await driver.submit(6)
        for _ in range(3):
            assert await driver.admit() == 2
            await driver.run_admitted()
            await driver.cut()
            assert await driver.admit() == 0, "there is a batch to read"
            batch, _ = await driver.take_batch()
            await store.ack("trainer", batch)
        assert (await driver.check()).count("delivered") == 6

    async def test_never_stops_what_is_asked_for(self, driver: Driver) -> None:
        """13: evaluations go on by a batch's worth, since whoever waits for them reads no batch meanwhile."""
        await driver.lead(max_stored_bytes=1)
        await driver.finish(2)
        await driver.cut()
        tasks = await driver.submit(6, channel=Channel.EVAL)
        for at in range(0, 6, 2):
            assert await driver.admit() == 2
            for attempt in await driver.claim():
                await driver.publish(attempt)
            for task_id in tasks[at : at + 2]:
                await driver.commit(task_id)

    async def test_stops_while_results_are_not_committed(self, driver: Driver) -> None:
        """Case 32: with a collector that is away no group starts past max_unread_results; what runs may end."""
        await driver.lead(max_staleness=9, max_unread_results=3)
        await driver.submit(4)
        await driver.admit()
        for attempt in await driver.claim():
            await driver.publish(attempt)
        await driver.submit(2)
        assert await driver.admit() == 0
        await with_a_worker(driver)
        assert (
            "at its bound: unread_results 8 of 3"
            in diagnose(await driver.store.look(), RunSettings(batch_size=2)).verdict
        )
        assert await used(driver.store, "unread_results_bytes") > 0
        for task_id in range(1, 5):
            await driver.commit(task_id)
        assert await used(driver.store, "unread_results_bytes") == 0
        assert await driver.admit() == 2

    async def test_bounds_of_0_are_none(self, driver: Driver) -> None:
        """13: 0 lifts a bound."""
        await driver.lead(max_stored_bytes=0, max_unread_results=0, max_queued_bytes=0)
        await driver.submit(4)
        assert await driver.admit() == 4


class TestQueue:
    async def test_refuses_bytes_beyond_its_bound(self, store: Store, driver: Driver) -> None:
        """Case 32: a prompt too many is refused with the bound, what waits and what to do; later it fits."""
        await driver.lead(max_queued_bytes=2 * PROMPT)
        await driver.submit(2)
        with pytest.raises(
            QueueFullError,
            match=rf"2 groups with {2 * PROMPT} bytes of prompts wait .* this one has {PROMPT}: .*max_queued_bytes",
        ):
            await driver.submit(1)
        await driver.submit(2, channel=Channel.EVAL)  # those have their own
        await driver.admit()
        assert await used(store, "queued_bytes") == await used(store, "direct_queued_bytes") == 0
        await driver.submit(1)
        assert await used(store, "queued_bytes") == PROMPT

    async def test_one_prompt_may_always_wait(self, store: Store, driver: Driver) -> None:
        """13: a prompt above the bound is taken by an empty queue, so that it does not wait for ever."""
        await driver.lead(max_queued_bytes=1)
        await driver.submit(1)
        with pytest.raises(QueueFullError, match="max_queued_bytes=1"):
            await driver.submit(1)

    async def test_counts_prompts_that_come_again(self, store: Store, driver: Driver) -> None:
        """6: a requeued prompt waits like any other."""
        await driver.lead(requeue_evicted=True)
        await driver.finish(2)
        await store.set_version(5)
        await store.evict_stale(driver.epoch)
        assert (await driver.check()).count("requeued") == 2
        assert await used(store, "queued_bytes") == 2 * PROMPT

    async def test_a_redriven_prompt_is_refused_too(self, store: Store, driver: Driver) -> None:
        """13: dead letters come again through the same bound."""
        await driver.lead(max_queued_bytes=1, attempts_infra=1)
        (task,) = await driver.submit(1, size=1)
        await driver.admit()
        (attempt,) = await driver.claim()
        await driver.fail(attempt, FailureKind.INFRA)
        await driver.commit(task, size=1, reason="no_usable_slot")
        await driver.submit(1)
        with pytest.raises(QueueFullError, match="redrive again"):
            await store.redrive(task)

    async def test_bytes_of_a_lost_entry_do_not_stay(self, store: Store, driver: Driver) -> None:
        """Case 41: a queue that somebody trimmed is empty, and so is its count."""
        await driver.submit(3)
        await store._redis.xtrim(store.keys.prompts, maxlen=1, approximate=False)
        await driver.admit()
        await driver.admit()
        assert await used(store, "queued_bytes") == 0


class TestTrimmedStreams:
    async def test_a_reader_survives_a_trimmed_entry_that_it_holds(self, store: Store, driver: Driver) -> None:
        """Case 41: a batch whose entry was trimmed while it was pending is acknowledged by who has it in hand."""
        await driver.finish(4)
        await driver.cut()
        await driver.cut()
        first, _ = await driver.take_batch()
        await store._redis.xtrim(store.keys.batches, maxlen=1, approximate=False)
        second, _ = await driver.take_batch()
        assert await store.ack("trainer", first)
        assert await store.ack("trainer", second)
        assert await used(store, "rows_bytes") == await rows_in_redis(store) == 0
        pending = await store._redis.xpending(store.keys.batches, "trainer")
        assert pending["pending"] == 0

    async def test_a_reader_that_begins_anew_passes_over_it(self, store: Store, driver: Driver) -> None:
        """Case 41: a trimmed entry lingers in the pending list; a restarted reader gets the next batch all the same."""
        await driver.finish(4)
        await driver.cut()
        await driver.cut()
        await driver.take_batch()
        await store._redis.xtrim(store.keys.batches, maxlen=1, approximate=False)
        driver.after = "0"
        batch, _ = await driver.take_batch()
        assert batch.batch_id == 2
        await store.ack("trainer", batch)
        pending = await store._redis.xpending(store.keys.batches, "trainer")
        assert pending["pending"] == 0

    async def test_admission_survives_a_trimmed_entry(self, store: Store, driver: Driver) -> None:
        """Case 41: what is left of a trimmed queue starts."""
        await driver.submit(3)
        await store._redis.xreadgroup("admission", "a stranger", {store.keys.prompts: ">"}, count=1)
        await store._redis.xtrim(store.keys.prompts, maxlen=2, approximate=False)
        assert await driver.admit() == 2


async def test_of_a_key_that_was_given_before(store: Store, driver: Driver) -> None:
    """13: repeating a submit is no further prompt, also where the queue is full."""
    await driver.lead(max_queued_bytes=1)
    key = uuid.uuid4().hex
    first, _ = await store.submit(b"spec", b"rules", 2, key)
    again, created = await store.submit(b"spec", b"rules", 2, key)
    assert (again, created) == (first, False)
