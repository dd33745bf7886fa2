"""Contract, section 6: capacity, freshness, eviction, on Valkey and on Redis.

Proved elsewhere: a capacity that is honoured at every step, s = 0 progresses, no burst at a high version, a reader that
is blocked is told (``tests/integration/test_store.py``); the blocked reader's error after ``stall_timeout_s``
(``tests/integration/test_pipeline.py``).
"""

from __future__ import annotations

import random

import pytest
from driver import Driver, reap_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.store import Store
from forebay.store.records import Channel, Collected
from forebay.store.scripts import source


@pytest.fixture
async def driver(store: Store) -> Driver:
    """A driver that leads, with batches of 2 groups, one per version, staleness 1: a capacity of 4 groups."""
    made = Driver(store)
    await made.lead()
    return made


async def bring_to_ready(driver: Driver, versions: dict[int, int]) -> list[int]:
    """Submit, admit and commit one group for each entry (its place -> head version), all admitted together."""
    tasks = await driver.submit(len(versions))
    await driver.admit()
    for attempt in await driver.claim():
        await driver.publish(attempt, versions[tasks.index(attempt[0])])
    for place, task in enumerate(tasks):
        await driver.commit(task, versions[place])
    return tasks


class TestVersionAtTraining:
    """6: version at training = current + floor((delivered_ahead + groups before it) / (k * B)), one pure function."""

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        version=st.integers(0, 10**6),
        ahead=st.integers(0, 5000),
        before=st.integers(0, 5000),
        k=st.integers(1, 8),
        size=st.integers(1, 512),
        head=st.integers(-1, 10**6),
        bound=st.integers(0, 8),
    )
    async def test_against_the_formula(
        self, store: Store, version: int, ahead: int, before: int, k: int, size: int, head: int, bound: int
    ) -> None:
        """6: the function that every gate calls equals the page's formula; a head of -1 is never stale."""
        lib = source("ack").text.split("-- The trainer is done with a batch")[0]
        body = (
            "call('HSET', STATE, 'version', ARGV[1], 'ahead', ARGV[2], 'k', ARGV[3], 'B', ARGV[4], 's', ARGV[5])\n"
            "call('HSET', group_key(1), 'head', ARGV[6])\n"
            "local at = version_at_training(tonumber(ARGV[7]))\n"
            "return {at, stale_at(1, at) and 1 or 0}"
        )
        at, stale = await store._redis.eval(
            lib + body, 1, store.keys.prefix, version, ahead, k, size, bound, head, before
        )  # type: ignore[misc]
        expected = version + (ahead + before) // (k * size)
        assert at == expected
        assert bool(stale) == (head >= 0 and expected - head > bound)


class TestCapacity:
    """6: admission."""

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize(("k", "s", "prefetch"), [(1, 1, 0), (1, 0, 0), (2, 1, 1), (1, 3, 3)])
    async def test_equals_the_historical_formula_on_undisturbed_traces(
        self, store: Store, driver: Driver, seed: int, k: int, s: int, prefetch: int
    ) -> None:
        """6: replayed traces, prefetching included: the room is (s + version + 1) k B - (accepted + running)."""
        size = 2
        await driver.lead(batch_size=size, batches_per_version=k, max_staleness=s)
        rng = random.Random(seed)
        version = accepted = taken = 0
        running: list[int] = []
        await driver.submit(400, size=1)
        for _ in range(2000):  # a bound: five versions take some hundred steps
            if version == 5:
                break
            match rng.randrange(5):
                case 0:
                    most = rng.randrange(1, 4)
                    started, left = await store.admit(most, 60)
                    room = (s + version + 1) * k * size - (accepted + len(running))
                    assert started == min(most, max(0, room))
                    running += sorted({attempt[0] for attempt in await driver.claim()})
                    assert left == room - started
                case 1 if running:
                    task = running.pop(rng.randrange(len(running)))
                    await driver.publish((task, 0, 1), version)
                    assert await driver.commit(task, version, size=1)
                    accepted += 1
                case 2:
                    if len(await store.ready(size)) == size:
                        assert await driver.cut(size) is not None
                case 3 if taken < (version + 1) * k + prefetch:
                    if (await driver.take()).batch is not None:
                        taken += 1
                case 4 if taken >= (version + 1) * k:  # the trainer steps on what it has taken
                    version += 1
                    await store.set_version(version)
                case _:
                    pass
            status = await driver.check()
            assert status.count("evicted") == 0, "the trace must be undisturbed to be compared"
        assert version == 5

    async def test_recovery_starts_from_nothing_ahead(self, store: Store, driver: Driver) -> None:
        """6: delivered_ahead is 0 after a recovery, which may go back; a batch that comes again counts again."""
        await store.set_version(7)
        await driver.finish(2, version=7)
        await driver.cut()
        batch, _ = await driver.take_batch()
        assert (await driver.check()).delivered_ahead == 2
        assert await store.recover(5) == 7
        status = await driver.check()
        assert (status.version, status.delivered_ahead) == (5, 0)
        driver.after = "0"
        again, _ = await driver.take_batch()
        assert again.batch_id == batch.batch_id
        assert (await driver.check()).delivered_ahead == 2
        driver.after = "0"
        await driver.take_batch()
        assert (await driver.check()).delivered_ahead == 2, "once for each recovery, however often it is read"

    async def test_a_partial_batch_counts_whole(self, store: Store, driver: Driver) -> None:
        """6: the trainer steps once for a batch, so a smaller one counts as batch_size, unread and handed over."""
        await driver.lead(batch_size=4, max_staleness=1)
        await driver.finish(3)
        assert await driver.cut(3) is not None
        await driver.submit(8)
        assert await driver.admit() == 4, "(1 + 1) * 4 less an unread batch"
        await driver.take_batch()
        status = await driver.check()
        assert status.delivered_ahead == 4

    async def test_a_rest_of_a_batch_is_told_too(self, store: Store, driver: Driver) -> None:
        """6: what is ahead leaves no room for a whole batch: the reader is told, it does not wait for ever."""
        await driver.lead(max_staleness=0, batch_size=4)
        await driver.finish(4)
        await driver.cut(4)
        await driver.take_batch()
        await driver.lead(max_staleness=0, batch_size=3)
        assert (await store.status()).delivered_ahead == 3, "one batch, of the new size"
        await store._redis.hset(store.keys.state, "ahead", 1)  # type: ignore[misc]
        await driver.submit(5)
        await driver.run_admitted()
        assert (await store.status()).ready == 2
        assert (await driver.take()).blocked_at_version == 0
        await store.set_version(1)
        assert (await driver.take()).blocked_at_version is None


class TestEviction:
    """6: eviction at assembly, while a group waits, at the cut, before the first read, and at a hand-over by id."""

    async def test_at_assembly(self, store: Store, driver: Driver) -> None:
        """6: a group that is stale when it is decided on never becomes ready."""
        (task,) = await driver.submit(1)
        await driver.admit()
        for attempt in await driver.claim():
            await driver.publish(attempt, version=0)
        await store.set_version(2)
        await driver.commit(task, version=0)
        status = await driver.check()
        assert (status.ready, status.count("evicted")) == (0, 1)

    async def test_while_it_waits(self, store: Store, driver: Driver) -> None:
        """6: a waiting group goes once it can no longer be fresh, and its room is free again."""
        await driver.finish(1)
        await store.set_version(2)
        assert await store.evict_stale(driver.epoch) == [1]
        await driver.submit(9)
        assert await driver.admit() == 4

    async def test_at_the_cut(self, store: Store, driver: Driver) -> None:
        """Case 21: a group finishes fast and waits five versions: evicted at the cut, which takes the others."""
        tasks = await bring_to_ready(driver, {0: 0, 1: 5, 2: 5})
        await store.set_version(5)
        assert await driver.cut() is None, "the stale one was evicted: read the ready set anew"
        assert await driver.cut() is not None
        _, delivered = await driver.take_batch()
        assert delivered == tasks[1:]
        assert (await driver.check()).count("evicted") == 1

    async def test_before_the_first_read(self, store: Store, driver: Driver) -> None:
        """6: a batch with a stale group is dissolved; the fresh ones go back to ready and come in another."""
        tasks = await bring_to_ready(driver, {0: 0, 1: 2})
        await driver.cut()
        await store.set_version(2)
        assert (await driver.take()).batch is None
        status = await driver.check()
        assert (status.ready, status.cut, status.count("evicted")) == (1, 0, 1)
        await driver.finish(1, version=2)
        await driver.cut()
        _, delivered = await driver.take_batch()
        assert delivered[0] == tasks[1]

    async def test_frozen_after_the_hand_over(self, store: Store, driver: Driver) -> None:
        """6: a batch that was handed over keeps its id and its content, however old it gets."""
        await driver.finish(2)
        await driver.cut()
        batch, tasks = await driver.take_batch()
        await store.set_version(50)
        driver.after = "0"
        again, tasks_again = await driver.take_batch()
        assert (again.batch_id, again.index, tasks_again) == (batch.batch_id, batch.index, tasks)

    async def test_by_its_id(self, store: Store, driver: Driver) -> None:
        """6: a group that is asked for by its id is never stale either, unless it is an evaluation."""
        (first,) = await driver.submit(1, channel=Channel.DIRECT)
        (second,) = await driver.submit(1, channel=Channel.EVAL)
        await driver.run_admitted(version=0)
        await store.set_version(2)
        assert (await store.collect(first)).state == "evicted"
        assert (await store.collect(second)).state == "group"


class TestRequeue:
    """6: requeue_evicted."""

    async def test_under_a_new_id_that_names_its_parent(self, store: Store, driver: Driver) -> None:
        """6: the prompt of an evicted group comes again, at most max_requeues times; every group is accounted for."""
        await driver.lead(requeue_evicted=True, max_requeues=1)
        (first,) = await driver.finish(1)
        await store.set_version(2)
        await store.evict_stale(driver.epoch)
        assert (await driver.check()).queued == 1
        await driver.admit()
        claimed = await driver.claim()
        second = claimed[0][0]
        assert second > first
        assert await store.group_rules(second) == (b"rules", 2, first)
        for attempt in claimed:
            await driver.publish(attempt, version=2)
        await driver.commit(second, version=2)
        await store.set_version(4)
        await store.evict_stale(driver.epoch)
        status = await driver.check()
        assert (status.queued, status.count("requeued"), status.count("evicted")) == (0, 1, 2)

    async def test_off_by_default(self, store: Store, driver: Driver) -> None:
        """6: without the setting nothing comes again."""
        await driver.finish(1)
        await store.set_version(2)
        await store.evict_stale(driver.epoch)
        status = await driver.check()
        assert (status.queued, status.count("requeued")) == (0, 0)

    async def test_from_a_dissolved_batch(self, store: Store, driver: Driver) -> None:
        """6: a group that is evicted from an unread batch comes again too."""
        await driver.lead(requeue_evicted=True)
        await driver.finish(2)
        await driver.cut()
        await store.set_version(2)
        assert (await driver.take()).batch is None
        status = await driver.check()
        assert (status.queued, status.count("requeued"), status.count("evicted")) == (2, 2, 2)


class TestEarlyCancel:
    """6: early cancel saves compute; it never replaces the check at the cut."""

    async def test_running_groups_that_cannot_be_fresh(self, store: Store, driver: Driver) -> None:
        """6: a running group with a slot of an old version is cancelled: its open slots are not wanted any more."""
        doomed, fresh = await driver.submit(2)
        await driver.admit()
        attempts = await driver.claim()
        await driver.publish((doomed, 0, 1), version=0)
        await driver.publish((fresh, 0, 1), version=2)
        await store.set_version(2)
        assert await store.evict_stale(driver.epoch) == [], "off: nothing that runs is touched"
        assert await store.evict_stale(driver.epoch, running_too=True) == []
        assert await store.evict_stale(driver.epoch, running_too=True) == [], "once"
        lost = await store.heartbeat(driver.worker, {}, 5, attempts)
        assert (doomed, 1, 1) in lost
        assert (fresh, 1, 1) not in lost
        assert await driver.publish((doomed, 1, 1), version=2) == "duplicate"
        results = [(entry.task_id, entry.sample_idx) for entry in await store.read_results({0: "0"}, 10, 0.01)]
        assert results == [(doomed, 0), (fresh, 0), (doomed, 1)], "it is assembled, to be dumped"
        await driver.commit(doomed)
        status = await driver.check()
        assert (status.running, status.count("evicted"), status.count("cancelled")) == (1, 1, 1)


class TestEvaluation:
    """6: eval groups are outside the capacity and the eviction; 13: their results are asked for by id."""

    async def test_outside_the_capacity(self, store: Store, driver: Driver) -> None:
        """6: evaluations start while the capacity is used up, up to a bound of their own, and take no room from it."""
        await driver.lead(max_concurrent_direct=3)
        await driver.submit(9)
        await driver.submit(5, channel=Channel.EVAL)
        assert await driver.admit() == 4 + 3
        status = await driver.check()
        assert (status.running, status.direct_running, status.direct_queued) == (4, 3, 2)

    async def test_collected_once_it_has_ended(self, store: Store, driver: Driver) -> None:
        """13: whoever asks is told to wait, then gets the group, again and again until it says that it has the rows."""
        (task,) = await driver.submit(1, channel=Channel.EVAL)
        assert await store.collect(task) == Collected("wait")
        await driver.run_admitted()
        status = await driver.check()
        assert (status.held, status.ready) == (1, 0)
        first, again = await store.collect(task), await store.collect(task)
        assert first == again
        assert first.state == "group"
        assert await store.read_rows([(task, 0, 1)]) != [None]
        assert await store.discard([task]) == 1
        assert await store.discard([task]) == 0
        assert await store.read_rows([(task, 0, 1)]) == [None]
        status = await driver.check()
        assert (status.held, status.count("delivered"), status.in_flight) == (0, 1, 0)
        assert (await store.collect(task)).state == "unknown"

    @pytest.mark.parametrize(("reason", "state"), [("filtered", "rejected")])
    async def test_rejected(self, store: Store, driver: Driver, reason: str, state: str) -> None:
        """13: one that was rejected says why."""
        (task,) = await driver.submit(1, channel=Channel.DIRECT)
        await driver.admit()
        for attempt in await driver.claim():
            await driver.publish(attempt)
        await driver.commit(task, reason=reason)
        assert await store.collect(task) == Collected(state, detail=reason, group_size=2, usable=2)

    async def test_what_nobody_collects_goes(self, store: Store, driver: Driver) -> None:
        """A result that nobody asks for is dropped after rows_ttl_s and counted as evicted: memory is bounded."""
        (task,) = await driver.submit(1, channel=Channel.EVAL)
        await driver.run_admitted()
        await store._redis.hset(store.keys.state, "held_ms", 0)  # type: ignore[misc]
        await reap_until(driver, lambda status: status.held == 0)
        status = await driver.check()
        assert (status.count("evicted"), status.in_flight) == (1, 0)
        assert await store.read_rows([(task, 0, 1)]) == [None]

    async def test_a_ready_group_leaves_the_batches(self, store: Store, driver: Driver) -> None:
        """13: a group that waits for a batch may be asked for by its id; only whole batches count as ahead."""
        first, second = await driver.finish(2)
        assert (await store.collect(first)).state == "group"
        status = await driver.check()
        assert (status.ready, status.delivered_ahead, status.count("delivered")) == (1, 0, 1)
        await driver.finish(1)
        await driver.cut()
        await driver.take_batch()
        assert (await store.collect(second)).state == "batched"


class TestDynamicBatches:
    """13: dynamic_bs: a batch is cut when accepted + rejected reach batch_size."""

    async def test_the_rule_of_the_cut(self, store: Store, driver: Driver) -> None:
        """13: what was accepted and rejected since the last cut is counted; a cut takes batch_size off."""
        await store.set_dynamic(True)
        tasks = await driver.submit(3)
        await driver.admit()
        for attempt in await driver.claim():
            await driver.publish(attempt)
        await driver.commit(tasks[0])
        assert (await store.cut_rule()).settled == 1
        await driver.commit(tasks[1], reason="filtered")
        rule = await store.cut_rule()
        assert (rule.dynamic, rule.settled, rule.ready) == (True, 2, 1)
        await driver.cut(1)
        await driver.commit(tasks[2])
        assert (await store.cut_rule()).settled == 1

    async def test_what_was_rejected_before_does_not_count(self, store: Store, driver: Driver) -> None:
        """13: what was rejected for one batch, or while batches were whole, makes no later one smaller."""
        await driver.lead(max_staleness=9)
        tasks = await driver.submit(6)
        await driver.admit()
        for attempt in await driver.claim():
            await driver.publish(attempt)
        for task in tasks[:4]:
            await driver.commit(task, reason="filtered")
        await store.set_dynamic(True)
        assert (await store.cut_rule()).settled == 0
        await driver.commit(tasks[4], reason="filtered")
        await driver.commit(tasks[5])
        await store.set_dynamic(True)
        assert (await store.cut_rule()).settled == 2, "saying the same again changes nothing"
