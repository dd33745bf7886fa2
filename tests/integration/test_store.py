"""The transitions of the store against real servers (contract, sections 4 and 6)."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
from driver import Driver

from forebay.errors import FencedError, QueueFullError, VersionError
from forebay.outcomes import FailureKind
from forebay.settings import Settings
from forebay.store import Store
from forebay.store.records import Cursor


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


class TestSubmit:
    async def test_task_ids_grow_and_a_key_enqueues_once(self, store: Store, driver: Driver) -> None:
        """A second submit under the same idempotency key returns the first group and enqueues nothing."""
        first, created = await store.submit(b"spec", b"rules", 2, "key")
        again, created_again = await store.submit(b"other", b"rules", 2, "key")
        other, _ = await store.submit(b"spec", b"rules", 2, "other key")
        assert (created, created_again) == (True, False)
        assert again == first
        assert other > first
        assert (await driver.check()).queued == 2

    async def test_full_queue_refuses_and_recovers(self, store: Store, driver: Driver) -> None:
        """Case 32: past max_queued_groups submit raises, and works again when groups have started."""
        await driver.lead(max_queued_groups=2)
        await driver.submit(2)
        with pytest.raises(QueueFullError, match="2 groups wait"):
            await driver.submit(1)
        await driver.admit()
        await driver.submit(1)
        assert (await driver.check()).count("submitted") == 3


class TestAdmission:
    async def test_admission_honours_capacity(self, store: Store, driver: Driver) -> None:
        """Running + ready + cut + delivered_ahead stays within (s + 1) * k * B at every step (contract 6)."""
        await driver.submit(12)
        assert await driver.admit() == 4
        assert await driver.admit() == 0
        for attempt in await driver.claim():
            await driver.publish(attempt)
            await driver.check()
        for task_id in (1, 2, 3, 4):
            await driver.commit(task_id)
            assert await driver.admit() == 0
        await driver.cut()
        await driver.take_batch()
        assert await driver.admit() == 0, "handed over ahead of the version counts"
        await store.set_version(1)
        assert await driver.admit() == 2
        await driver.check()

    async def test_staleness_zero_progresses(self, store: Store, driver: Driver) -> None:
        """Case 10: with max_staleness 0 every version gets its batch."""
        await driver.lead(max_staleness=0)
        await driver.submit(8)
        for version in range(1, 5):
            await driver.run_admitted(version - 1)
            await driver.cut()
            batch, tasks = await driver.take_batch()
            assert len(tasks) == 2
            await store.ack("trainer", batch)
            await store.set_version(version)
        assert (await driver.check()).count("delivered") == 8

    async def test_max_concurrent_bounds_running_groups(self, driver: Driver) -> None:
        """No more than max_concurrent groups run at once."""
        await driver.lead(max_concurrent=1)
        await driver.submit(3)
        assert await driver.admit() == 1
        assert await driver.admit() == 0

    async def test_no_burst_at_a_high_version(self, store: Store, driver: Driver) -> None:
        """Case 20: a run that begins at version 100 starts no more groups than one that begins at 0."""
        await store.set_version(100)
        await driver.submit(50)
        assert await driver.admit() == 4


class TestSlots:
    async def test_claim_gives_each_slot_once(self, store: Store, driver: Driver) -> None:
        """Two workers never get the same attempt, and a claimed one leaves arq's queue."""
        await driver.submit(2, size=3)
        await driver.admit()
        mine = await driver.claim(2)
        theirs = [lease.attempt for lease in await store.claim("w2", 100, 5)]
        assert len(mine) == 2
        assert sorted(mine + theirs) == [(task, idx, 1) for task in (1, 2) for idx in range(3)]
        assert (await store.status()).queued_jobs == 0

    async def test_first_valid_result_wins(self, store: Store, driver: Driver) -> None:
        """Cases 12 and 13: attempt 1 ends after attempt 2; one result counts, and no count moves twice."""
        await driver.submit(1, size=1)
        await driver.admit()
        (first,) = await driver.claim(lease_s=0.001)
        assert await _reap_until(driver, leases=1)
        (second,) = await driver.claim()
        assert second == (1, 0, 2)
        assert await driver.publish(second) == "accepted"
        assert await driver.publish(first) == "duplicate"
        status = await driver.check()
        assert (status.count("slots:usable"), status.count("duplicates")) == (1, 1)
        assert await store.read_rows([first]) == [None], "the loser's rows are gone"
        assert len(await store.read_results({0: "0"}, 10, 0.01)) == 1

    async def test_late_first_attempt_still_wins_while_open(self, store: Store, driver: Driver) -> None:
        """A superseded attempt that brings the first valid result counts, and cancels its successor."""
        await driver.submit(1, size=1)
        await driver.admit()
        (first,) = await driver.claim(lease_s=0.001)
        assert await _reap_until(driver, leases=1)
        assert await driver.publish(first) == "accepted"
        assert await driver.claim() == [], "attempt 2 is not wanted any more"

    async def test_failures_use_up_the_budget_of_their_kind(self, driver: Driver) -> None:
        """Case 7: a slot that keeps failing has its attempts, no more, and then failed with its kind."""
        await driver.lead(attempts_infra=3)
        await driver.submit(1, size=1)
        await driver.admit()
        verdicts = []
        for _ in range(3):
            (attempt,) = await driver.claim()
            verdicts.append(await driver.fail(attempt))
        assert verdicts == ["retry", "retry", "accepted"]
        assert await driver.claim() == []
        assert (await driver.check()).count("slots:failed") == 1

    async def test_data_failure_is_not_retried(self, driver: Driver) -> None:
        """Case 5: a permanent failure is terminal at once, and the group's other slot still runs."""
        await driver.submit(1, size=2)
        await driver.admit()
        first, second = await driver.claim()
        assert await driver.fail(first, FailureKind.DATA) == "accepted"
        assert await driver.publish(second) == "accepted"

    async def test_handed_back_attempt_runs_again_at_once(self, store: Store, driver: Driver) -> None:
        """A worker that drains hands an attempt back without burning one of the slot's budget."""
        await driver.lead(attempts_infra=1)
        await driver.submit(1, size=1)
        await driver.admit()
        for number in (1, 2, 3):
            (attempt,) = await driver.claim()
            assert attempt == (1, 0, number)
            assert await store.release(*attempt)
            assert not await store.release(*attempt), "once"
        assert (await driver.check()).count("handed_back") == 3

    async def test_heartbeat_renews_and_names_what_is_lost(self, store: Store, driver: Driver) -> None:
        """A heart-beat keeps held leases and returns those that are gone."""
        await driver.submit(1, size=2)
        await driver.admit()
        kept, lost = await driver.claim()
        await store.release(*lost)
        assert await store.heartbeat("w1", {"slots": 2}, 5, [kept, lost]) == [lost]
        assert (await store.status()).workers["w1"]["slots"] == 2


class TestReaper:
    async def test_expired_lease_queues_the_next_attempt(self, driver: Driver) -> None:
        """Case 38: the slot of a silent worker is queued again as soon as its lease has ended."""
        await driver.submit(1, size=1)
        await driver.admit()
        await driver.claim(lease_s=0.001)
        assert await _reap_until(driver, leases=1)
        assert await driver.claim() == [(1, 0, 2)]

    async def test_lost_leases_end_as_failed(self, store: Store, driver: Driver) -> None:
        """A slot whose workers keep dying has failed(infra) once its attempts are used up, naming the worker."""
        await driver.lead(attempts_infra=1)
        await driver.submit(1, size=1)
        await driver.admit()
        await driver.claim(lease_s=0.001)
        assert await _reap_until(driver, leases=1)
        (entry,) = await store.read_results({0: "0"}, 10, 0.01)
        assert b"w1" in entry.header
        assert b"infra" in entry.header

    async def test_deadline_closes_the_group(self, store: Store, driver: Driver) -> None:
        """Case 1: a slot that hangs for ever is closed by the group's deadline; the others count."""
        await driver.submit(1, size=2)
        await driver.admit(deadline_s=0.05)
        done, hung = await driver.claim()
        await driver.publish(done)
        assert await _reap_until(driver, groups=1)
        assert [entry.sample_idx for entry in await store.read_results({0: "0"}, 10, 0.01)] == [done[1], hung[1]]
        assert await driver.publish(hung) == "duplicate", "too late"
        assert await driver.commit(1)
        assert await driver.publish(hung) == "late", "case 9: a late slot never recreates the group"

    async def test_lost_job_is_queued_again(self, store: Store, driver: Driver) -> None:
        """A slot that is neither queued nor leased is found by the sweep, and its next attempt is queued."""
        await driver.submit(1, size=2)
        await driver.admit()
        await store._redis.delete(store.keys.jobs)
        assert await store.sweep(driver.epoch) == 2
        assert await store.sweep(driver.epoch) == 0
        assert await driver.claim() == [(1, 0, 2), (1, 1, 2)]

    async def test_a_lost_lease_never_mixes_two_results(self, store: Store, driver: Driver) -> None:
        """A worker whose lease Redis has lost, and the one that runs the slot instead: header and rows are of one."""
        await driver.submit(1, size=1)
        await driver.admit()
        (first,) = await driver.claim()
        await store._redis.delete(store.keys.leases)
        assert await store.sweep(driver.epoch) == 1
        (second,) = await driver.claim()
        assert await driver.publish(first, reward=1.0) == "accepted"
        (rows,) = await store.read_rows([first])
        assert await driver.publish(second, reward=2.0) == "duplicate"
        assert await store.read_rows([first, second]) == [rows, None]


class TestBatches:
    async def test_surplus_groups_are_all_delivered(self, driver: Driver, store: Store) -> None:
        """Case 11: ten ready groups and batches of two are five batches, no group twice."""
        await driver.lead(max_staleness=4)
        tasks = await driver.finish(10)
        seen: list[int] = []
        for _ in range(5):
            await driver.cut()
            batch, of_batch = await driver.take_batch()
            seen += of_batch
            await store.ack("trainer", batch)
        assert sorted(seen) == tasks
        assert (await driver.check()).count("delivered") == 10

    async def test_stale_group_is_evicted_at_the_cut(self, store: Store, driver: Driver) -> None:
        """Case 21: a group that finished fast and waited too long is evicted when the batch is cut."""
        await driver.finish(2, version=0)
        await store.set_version(2)
        assert await driver.cut() is None
        status = await driver.check()
        assert (status.ready, status.count("evicted")) == (0, 2)

    async def test_group_that_is_stale_on_arrival_is_evicted(self, store: Store, driver: Driver) -> None:
        """A group whose slots ended too late is evicted at its commit."""
        await driver.submit(1)
        await driver.admit()
        claimed = await driver.claim()
        await store.set_version(5)
        for attempt in claimed:
            await driver.publish(attempt, version=0)
        await driver.commit(1, version=0)
        assert (await driver.check()).count("evicted") == 1

    async def test_stale_batch_is_dissolved(self, store: Store, driver: Driver) -> None:
        """A batch that goes stale before its first reader comes is dissolved: the fresh group is delivered later."""
        await driver.finish(1, version=0)
        await store.set_version(1)
        await driver.finish(1, version=1)
        assert await driver.cut() == 1
        await store.set_version(2)
        assert (await driver.take()).batch is None
        status = await driver.check()
        assert (status.ready, status.cut, status.count("evicted"), status.count("batches_dissolved")) == (1, 0, 1, 1)
        await driver.finish(1, version=2)
        assert await driver.cut() == 2
        _, tasks = await driver.take_batch()
        assert tasks == [2, 3]

    async def test_batch_is_handed_over_again_until_acked(self, store: Store, driver: Driver) -> None:
        """An unacknowledged batch comes again unchanged, even when it has gone stale; an acknowledged one does not."""
        await driver.finish(2)
        await driver.cut()
        first, tasks = await driver.take_batch()
        await store.set_version(9)
        driver.after = "0"  # the reader restarts
        again, same = await driver.take_batch()
        assert (again.batch_id, same, again.redelivered) == (first.batch_id, tasks, True)
        assert await store.ack("trainer", again)
        assert not await store.ack("trainer", again)
        driver.after = "0"
        assert (await driver.take()).batch is None
        status = await driver.check()
        assert (status.count("delivered"), status.count("batches_delivered")) == (2, 1)
        assert await store.read_rows([(task, idx, 1) for task in tasks for idx in (0, 1)]) == [None] * 4

    async def test_a_follower_does_not_move_the_version_of_a_batch(self, store: Store, driver: Driver) -> None:
        """A follower that reads a batch twice leaves what the trainer's ranks are told of it as it was."""
        await driver.finish(2)
        await driver.cut()
        ranks = [Cursor("trainer", rank, 2) for rank in (0, 1)]
        follower = Cursor("watcher", follows=True)
        for cursor in (*ranks, follower):
            await store.join(cursor)
        assert (await store.take(ranks[0], "reader", "0")).batch is not None
        await store.set_version(1)
        for _ in range(2):
            assert (await store.take(follower, "reader", "0")).batch is not None
        other = (await store.take(ranks[1], "reader", "0")).batch
        assert other is not None
        assert other.version == 0, "all ranks are told the same"

    async def test_blocked_reader_is_told(self, store: Store, driver: Driver) -> None:
        """A reader that has all that staleness allows is told that the version must move."""
        await driver.finish(4)
        for _ in range(2):
            await driver.cut()
            await driver.take_batch()
        assert (await driver.take()).blocked_at_version == 0
        await store.set_version(1)
        assert (await driver.take()).blocked_at_version is None

    async def test_end_of_data(self, store: Store, driver: Driver) -> None:
        """Case 3: readers end once the data has, everything was handed over, and not before."""
        await driver.finish(3)
        await driver.cut()
        await store.end_of_data()
        assert (await store.cut_rule()).partial
        await driver.take_batch()
        assert not (await driver.take()).end, "one group is still ready"
        await driver.cut(1)
        await driver.take_batch()
        assert (await driver.take()).end
        await driver.submit(1)
        assert not (await driver.take()).end, "a later submit opens the data again"

    async def test_version_never_goes_backwards(self, store: Store, driver: Driver) -> None:
        """Setting an older version is refused and changes nothing; setting the same again is no step."""
        await store.set_version(3)
        await store.set_version(3)
        with pytest.raises(VersionError, match="version 2 is below the run's version 3"):
            await store.set_version(2)
        assert await store.version() == 3


class TestFencing:
    async def test_fencing(self, store: Store, driver: Driver) -> None:
        """A collector that lost its lease to another one can change nothing."""
        await driver.finish(2)
        await store.resign("collector-1")
        successor = await store.lead("collector-2", 60)
        assert successor > driver.epoch
        before = await store.status()
        with pytest.raises(FencedError):
            await driver.cut()
        with pytest.raises(FencedError):
            await store.reap(driver.epoch)
        with pytest.raises(FencedError):
            await store.commit(driver.epoch, 1, "rejected", reason="x")
        with pytest.raises(FencedError):
            await driver.lead() if await store.lead("collector-1", 60) else await _configure(driver)
        assert await store.evict_stale(driver.epoch) == []
        after = await store.status()
        assert (after.counters, after.ready) == (before.counters, before.ready)

    async def test_one_leader(self, store: Store, driver: Driver) -> None:
        """While one collector holds the lease another gets none, and renewing keeps the epoch."""
        assert await store.lead("collector-2", 60) == 0
        assert await store.lead("collector-1", 60) == driver.epoch


class TestInvariants:
    async def test_repeating_any_call_changes_nothing(self, store: Store, driver: Driver) -> None:
        """Every transition may be repeated after a lost answer (contract, invariant 5)."""
        await driver.submit(2, size=1)
        await driver.admit()
        claimed = await driver.claim()
        for attempt in claimed:
            assert await driver.publish(attempt) == "accepted"
            assert await driver.publish(attempt) == "accepted"
        assert await store.read_rows(claimed) != [None, None], "repeating must not drop the rows that count"
        for attempt in claimed:
            assert await store._redis.ttl(store.keys.rows(*attempt)) == -1, "nor let them vanish after a time"
        assert await driver.commit(1, size=1)
        assert not await driver.commit(1, size=1)
        assert not await driver.commit(1, size=1, reason="filtered")
        await driver.commit(2, size=1)
        assert await driver.cut() == 1
        assert await driver.cut() is None
        await store.join("trainer")
        first = await store.take("trainer", "reader", "0")
        again = await store.take("trainer", "reader", "0")
        assert first.batch is not None
        assert again.batch is not None
        assert first.batch.batch_id == again.batch.batch_id, "a lost answer loses no batch"
        status = await driver.check()
        assert status.count("slots:usable") == 2
        assert status.count("accepted") == 2
        assert status.delivered_ahead == 2

    async def test_commit_waits_for_every_slot(self, driver: Driver) -> None:
        """A group with an open slot cannot be committed."""
        await driver.submit(1, size=2)
        await driver.admit()
        first, _ = await driver.claim()
        await driver.publish(first)
        assert not await driver.commit(1)
        assert (await driver.check()).running == 1

    @pytest.mark.parametrize("seed", range(3))
    async def test_conservation(self, store: Store, driver: Driver, seed: int) -> None:
        """Invariants 1 to 3: random interleavings never lose, double or over-admit a group, nor deliver a stale one."""
        rng = random.Random(seed)
        await driver.lead(attempts_infra=2)
        open_attempts: list[tuple[int, int, int]] = []
        delivered: list[int] = []
        version = 0
        heads: dict[int, int] = {}
        for _ in range(500):
            match rng.randrange(8):
                case 0:
                    await driver.submit(rng.randrange(1, 4))
                case 1:
                    await driver.admit()
                case 2:
                    open_attempts += await driver.claim(rng.randrange(1, 5))
                case 3 if open_attempts:
                    attempt = open_attempts.pop(rng.randrange(len(open_attempts)))
                    heads[attempt[0]] = min(version, heads.get(attempt[0], version))
                    await (driver.publish(attempt, version) if rng.random() < 0.8 else driver.fail(attempt))
                case 4:
                    for task_id in list(heads):
                        if await driver.commit(
                            task_id, heads[task_id], reason="filtered" if rng.random() < 0.2 else ""
                        ):
                            del heads[task_id]
                case 5:
                    if len(await store.ready(2)) == 2:
                        await driver.cut()
                case 6:
                    taken = await driver.take()
                    if taken.batch is not None:
                        from forebay.wire.envelopes import BatchIndex

                        groups = BatchIndex.unpack(taken.batch.index).groups
                        delivered += [group.task for group in groups]
                        status = await store.status()
                        trained_at = version + (status.delivered_ahead - len(groups)) // 2
                        assert all(trained_at - group.head <= 1 for group in groups), "stale at the hand-over"
                case 7 if rng.random() < 0.15:
                    version += 1
                    await store.set_version(version)
                case _:
                    pass
            status = await driver.check()
        assert len(delivered) == len(set(delivered)) == status.count("delivered")
        assert delivered, "the walk must reach deliveries to mean anything"


async def _reap_until(driver: Driver, *, leases: int = 0, groups: int = 0) -> bool:
    """Reap until that many have been handled, within 5 s."""
    import asyncio

    async with asyncio.timeout(5):
        while leases > 0 or groups > 0:
            found = await driver.store.reap(driver.epoch)
            leases -= found[0]
            groups -= found[1]
            await asyncio.sleep(0)
    return leases == 0 and groups == 0


async def _configure(driver: Driver) -> None:
    from forebay.settings import RunSettings

    await driver.store.configure(driver.epoch, RunSettings())
