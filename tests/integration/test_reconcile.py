"""Redis has gone back in time: that is found, nothing is handed out, and the trainer's checkpoint brings it in line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from driver import Driver
from going_back import OwnRedis, Snapshot, reconnect
from services import services

from forebay import AsyncClient, Client, Settings, load
from forebay.errors import ConnectionLostError, RolledBackError, SubmitError
from forebay.reconciling import Reconciliation, known_of, reconcile
from forebay.store import Store
from forebay.store.records import BatchEntry, Channel
from forebay.wire.envelopes import BatchIndex
from forebay_ops.ports import find_free_port

Opener = Callable[[], Store]


@pytest.fixture
async def opened(any_redis_url: str, run_name: str) -> AsyncIterator[Opener]:
    """Opens stores of the test's run, on Valkey and on Redis."""
    stores: list[Store] = []

    def one() -> Store:
        settings = Settings(REDIS_URL=any_redis_url, experiment_name=run_name.split("/", maxsplit=1)[0])
        stores.append(Store.open(settings))
        return stores[-1]

    yield one
    for store in stores:
        await store.close()


async def led(opened: Opener, **settings: Any) -> Driver:
    """A driver that leads, with room for a few batches."""
    driver = Driver(opened())
    await driver.lead(**{"max_staleness": 5, **settings})
    return driver


async def submit(store: Store, *keys: str, channel: Channel = Channel.BATCHES) -> dict[str, int]:
    """Submit a group of two slots for each key."""
    return {key: (await store.submit(b"spec", b"rules", 2, key, channel))[0] for key in keys}


async def conserved(store: Store) -> None:
    """No group is counted twice, or not at all."""
    status = await store.status()
    ended = status.count("delivered") + status.count("rejected") + status.count("evicted")
    assert status.count("submitted") + status.count("requeued") == ended + status.in_flight, status


async def train(driver: Driver, batches: int) -> tuple[list[int], int]:
    """Take, train on and acknowledge: the task ids, and the last batch's id."""
    tasks: list[int] = []
    last = 0
    for _ in range(batches):
        batch, found = await driver.take_batch()
        await driver.store.ack("trainer", batch)
        tasks += found
        last = batch.batch_id
    return tasks, last


async def finish_run(driver: Driver) -> list[int]:
    """As a trainer that begins again: lead, run all there is, and the task ids of all batches that come."""
    await driver.lead(max_staleness=5)
    driver.after = "0"
    await driver.store.end_of_data()
    tasks: list[int] = []
    for _ in range(50):
        await driver.run_admitted()
        for task_id in sorted({entry.task_id for entry in await driver.store.read_results({0: "0"}, 500, 0.001)}):
            await driver.commit(task_id)  # what an earlier collector had read
        while (rule := await driver.store.cut_rule()).ready:
            assert await driver.cut(min(2, rule.ready)) is not None
        taken = await driver.take()
        if taken.end:
            return tasks
        if taken.batch is not None:
            tasks += [group.task for group in BatchIndex.unpack(taken.batch.index).groups]
            await driver.store.ack("trainer", taken.batch)
            await driver.store.set_version(await driver.store.version())
    raise TimeoutError("the run did not end")


class TestDetection:
    """13: a rolled-back Redis is found by whoever has seen more, and stops the run."""

    async def test_on_a_new_connection_before_anything_is_sent(self, opened: Opener) -> None:
        """13: who has seen more finds it when it connects again; nothing of what it asked for is done."""
        driver = await led(opened)
        await submit(driver.store, "a")
        before = await Snapshot.of(driver.store)
        await submit(driver.store, "b")
        await before.restore(driver.store)
        await reconnect(driver.store)
        with pytest.raises(RolledBackError, match="task_seq was 2 and is 1"):
            await submit(driver.store, "c")
        async with driver.store.unmarked() as plain:
            status = await plain.status()
            assert (status.queued, status.count("submitted")) == (1, 1)
            assert (status.stopped or "").startswith("Redis has gone back in time")

    async def test_over_a_connection_that_held(self, opened: Opener) -> None:
        """13: a run that is emptied under an open connection is found with the next script."""
        driver = await led(opened)
        await submit(driver.store, "a", "b")
        await Snapshot().restore(driver.store)
        with pytest.raises(RolledBackError, match="nothing of the run is there"):
            await submit(driver.store, "c")

    @pytest.mark.parametrize("lost", ["ack", "cut", "take", "version", "publish"])
    async def test_each_lost_write_is_found(self, opened: Opener, lost: str) -> None:
        """13: the loss of any single transition that a trainer or a producer relies on is found."""
        driver = await led(opened)
        await driver.finish(2)
        await driver.submit(1)
        await driver.admit()
        (attempt, _) = await driver.claim()
        taken: list[BatchEntry] = []

        async def take() -> None:
            taken.append((await driver.take_batch())[0])

        steps: dict[str, Callable[[], Awaitable[Any]]] = {
            "publish": lambda: driver.publish(attempt),
            "cut": driver.cut,
            "take": take,
            "ack": lambda: driver.store.ack("trainer", taken[0]),
            "version": lambda: driver.store.set_version(3),
        }
        for name, step in steps.items():
            before = await Snapshot.of(driver.store)
            await step()
            if name == lost:
                break
        await before.restore(driver.store)
        await reconnect(driver.store)
        with pytest.raises(RolledBackError):
            await driver.store.ping()

    async def test_others_learn_of_it(self, opened: Opener) -> None:
        """13: once one process has found it, a fresh one is handed nothing, admits nothing and cuts nothing."""
        driver = await led(opened)
        await driver.finish(2)
        await driver.cut()
        before = await Snapshot.of(driver.store)
        await driver.take_batch()
        await before.restore(driver.store)
        await reconnect(driver.store)
        with pytest.raises(RolledBackError):
            await driver.store.ping()
        fresh = Driver(opened(), epoch=driver.epoch)
        assert ((await fresh.take()).stopped or "").startswith("Redis has gone back in time")
        assert await fresh.admit() == 0
        assert (await fresh.store.cut_rule()).ready == 0
        with pytest.raises(RolledBackError):
            await submit(fresh.store, "b")
        with pytest.raises(RolledBackError):
            await fresh.store.resume()

    async def test_answers_that_overtake_each_other_are_no_roll_back(self, opened: Opener) -> None:
        """13: many connections at once, each with answers of its own age, never look like one."""
        driver = await led(opened, max_queued_groups=10_000)

        async def connect_anew() -> None:
            for _ in range(30):
                await driver.store._redis.connection_pool.disconnect(inuse_connections=False)
                await asyncio.gather(*(driver.store._redis.ping() for _ in range(4)))

        await asyncio.gather(connect_anew(), *(driver.submit(20) for _ in range(10)))
        assert (await driver.store.status()).queued == 200

    async def test_a_restart_that_loses_nothing_is_none(self, tmp_path: Path, run_name: str) -> None:
        """13: the same data under a new server process is the same run."""
        redis = OwnRedis(tmp_path, find_free_port())
        await redis.start()
        store = Store.open(Settings(REDIS_URL=redis.url, experiment_name=run_name.split("/", maxsplit=1)[0]))
        try:
            driver = Driver(store)
            await driver.lead()
            await driver.submit(3)
            await redis.kill()
            await redis.start()
            assert await driver.submit(1) == [4]
        finally:
            await store.close()
            await redis.stop()


async def go_on(store: Store, trained: Any, submitted: Any, **more: Any) -> Reconciliation:
    """Reconcile at version 0."""
    known = known_of(0, more.pop("last_batch", 0), trained, submitted)
    return await reconcile(store, known, "trainer")


class TestReconcile:
    """13: the checkpoint is the truth on what was trained on, the producer on what was submitted."""

    @pytest.mark.parametrize("state", ["queued", "running", "published", "ready", "cut", "delivered", "emptied"])
    @pytest.mark.parametrize("by", ["id", "key"])
    async def test_every_prompt_is_trained_on_once(self, opened: Opener, state: str, by: str) -> None:
        """16: wherever Redis believes the groups to be, what was trained on comes no more, and all else comes."""
        driver = await led(opened)
        if state == "emptied":
            before = Snapshot()
        keys = await submit(driver.store, *"abcdef")
        steps: list[tuple[str, Callable[[], Awaitable[Any]]]] = [
            ("queued", lambda: asyncio.sleep(0)),
            ("running", driver.admit),
            ("published", lambda: publish_all(driver)),
            ("ready", lambda: commit_all(driver, keys)),
            ("cut", lambda: cut_all(driver)),
            ("delivered", driver.take_batch),
        ]
        for name, step in steps:
            await step()
            if name == state:
                before = await Snapshot.of(driver.store)
        driver.after = "0"
        trained, last = await train(driver, 2)
        keys |= await submit(driver.store, "g", "h")
        await before.restore(driver.store)
        await reconnect(driver.store)
        with pytest.raises(RolledBackError):
            await driver.take()
        by_key = {task: key for key, task in keys.items()}
        said = [by_key[task] for task in trained] if by == "key" else trained
        report = await go_on(driver.store, said, keys, last_batch=last)
        await conserved(driver.store)
        assert report.rolled_back
        expected = set("abcdefgh") if state == "emptied" else set("gh")
        assert set(report.missing) == expected - {by_key[task] for task in trained}
        reissued = await submit(driver.store, *report.missing)
        assert all(task > 1_000_000 for task in reissued.values())
        again = await go_on(driver.store, said, keys, last_batch=last)
        assert (again.rolled_back, again.taken_back, again.missing) == (False, (), ())
        assert (again.next_task, again.next_batch) == (report.next_task + len(reissued), report.next_batch)
        names = by_key | {task: key for key, task in reissued.items()}
        rest = [names[task] for task in await finish_run(driver)]
        assert sorted([by_key[task] for task in trained] + rest) == sorted("abcdefgh")
        await conserved(driver.store)

    async def test_nothing_was_lost(self, opened: Opener) -> None:
        """13: on a Redis that lost nothing, it is what a trainer that begins again does: later batches come again."""
        driver = await led(opened, retain_batches=3)
        await driver.finish(6)
        await cut_all(driver)
        trained, last = await train(driver, 1)
        later, _ = await train(driver, 1)
        report = await go_on(driver.store, trained, (), last_batch=last)
        assert (report.rolled_back, report.taken_back, report.returned) == (False, (), ())
        driver.after = "0"
        assert (await driver.take_batch())[1] == later
        assert report.next_batch == 3

    async def test_a_batch_that_is_not_kept_is_made_anew(self, opened: Opener) -> None:
        """16: what was acknowledged after the checkpoint, and is kept no more, is missing and is submitted again."""
        driver = await led(opened)
        keys = await submit(driver.store, *"abcd")
        await driver.run_admitted()
        await cut_all(driver)
        trained, last = await train(driver, 1)
        await train(driver, 1)
        report = await go_on(driver.store, trained, keys, last_batch=last)
        assert report.missing == ("c", "d")
        assert (await submit(driver.store, "c"))["c"] not in keys.values()
        assert (await go_on(driver.store, trained, keys, last_batch=last)).missing == ("d",)

    async def test_without_single_groups_batches_count_whole(self, opened: Opener) -> None:
        """13: a checkpoint that knows its last batch alone ends those up to it, as resume_after does."""
        driver = await led(opened)
        keys = await submit(driver.store, *"abcd")
        await driver.run_admitted()
        await cut_all(driver)
        batch, first = await driver.take_batch()
        report = await go_on(driver.store, None, keys, last_batch=batch.batch_id)
        assert (report.missing, report.pending) == ((), 2)
        driver.after = "0"
        assert set((await driver.take_batch())[1]) == set(keys.values()) - set(first)

    async def test_a_rejected_prompt_is_not_run_again(self, opened: Opener) -> None:
        """13: what has ended otherwise stays ended, also when nothing is left of it but the drop ledger."""
        driver = await led(opened)
        keys = await submit(driver.store, "a")
        await driver.admit()
        for attempt in await driver.claim():
            await driver.publish(attempt)
        await driver.commit(keys["a"], reason="filtered")
        assert (await go_on(driver.store, [], keys)).ended == 1
        await driver.store._redis.delete(driver.store.keys.group(keys["a"]))
        assert (await go_on(driver.store, [], keys)).missing == ()

    async def test_cut_off_anywhere_it_is_made_again(self, opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
        """13: after a crash between any two of its steps, a second call ends as one that was not cut off."""
        driver = await led(opened)
        keys = await submit(driver.store, *"abcd")
        before = await Snapshot.of(driver.store)
        await driver.run_admitted()
        await cut_all(driver)
        trained, last = await train(driver, 1)
        whole = Store._run
        for at in range(1, 8):
            await before.restore(driver.store)
            fresh, count = opened(), 0

            async def dying(self: Store, name: str, *args: Any, limit: int = at, **more: Any) -> Any:
                nonlocal count
                count += 1
                if count > limit:
                    raise ConnectionLostError("it died here")
                return await whole(self, name, *args, **more)

            monkeypatch.setattr(Store, "_run", dying)
            try:
                await go_on(fresh, trained, keys, last_batch=last)
            except ConnectionLostError:
                pass
            else:
                break
            finally:
                monkeypatch.setattr(Store, "_run", whole)
            await go_on(fresh, trained, keys, last_batch=last)
            assert set(await finish_run(Driver(fresh))) == set(keys.values()) - set(trained)
            await conserved(fresh)
        else:
            raise AssertionError("it was cut off every time")
        assert at > 2

    async def test_other_processes_go_on(self, opened: Opener) -> None:
        """13: a process that had seen more than the trainer takes the reconciled run for what it is."""
        driver, other = await led(opened), opened()
        await submit(driver.store, "a")
        before = await Snapshot.of(driver.store)
        await submit(other, "b", "c")
        await before.restore(driver.store)
        await go_on(driver.store, [99], ["a", "b", "c"])
        await reconnect(other)
        assert (await submit(other, "d"))["d"] > 1_000_000

    async def test_an_old_collector_is_fenced(self, opened: Opener) -> None:
        """13: the epoch too is above all that were ever given, so a collector of before changes nothing."""
        driver = await led(opened)
        await go_on(driver.store, [5], ())
        assert await Driver(opened()).store.lead("collector-2", 60) > driver.epoch + 900

    def test_bad_arguments(self) -> None:
        """13: what is no checkpoint is refused before anything is touched."""
        bad: list[tuple[Any, Any, Any]] = [
            (-1, None, ()),
            (0, "ab", ()),
            (0, [0], ()),
            (0, None, "ab"),
            (0, [True], ()),
        ]
        for last_batch, trained, submitted in bad:
            with pytest.raises(SubmitError):
                known_of(0, last_batch, trained, submitted)


async def publish_all(driver: Driver) -> None:
    """Run all that was admitted."""
    for attempt in await driver.claim():
        await driver.publish(attempt)


async def commit_all(driver: Driver, keys: dict[str, int]) -> None:
    """Accept all groups."""
    for task_id in keys.values():
        await driver.commit(task_id)


async def cut_all(driver: Driver) -> None:
    """Cut all batches that can be."""
    while (await driver.store.cut_rule()).ready >= 2:
        await driver.cut()


class TestWholePipeline:
    """16: every process lives on while Redis is restored from an older copy."""

    @pytest.mark.parametrize("kind", ["async", "plain"])
    async def test_every_prompt_is_trained_on_exactly_once(self, tmp_path: Path, run_name: str, kind: str) -> None:
        """16: compared by key and by number, over a kill of Redis and a return to older data."""
        redis = OwnRedis(tmp_path, find_free_port())
        await redis.start()
        try:
            async with services(
                redis.url, run_name, collector=False, worker=False, max_staleness=50, collector_lease_s=2.0
            ) as (running, client):
                trainer = Trainer(client, redis.url, run_name, kind)
                await trainer.submit(range(12))
                await trainer.train(2)
                await asyncio.to_thread(redis.keep, "old")
                await trainer.submit(range(12, 18))
                await trainer.train(3)
                await redis.kill()
                redis.go_back("old")
                await redis.start()
                with pytest.raises(RolledBackError):
                    await trainer.train(1)
                report = await trainer.reconcile()
                assert report.rolled_back
                assert report.taken_back, "what was trained on since the copy was pending there"
                assert report.missing == ()
                await trainer.client.end_of_data()
                await trainer.train(None)
                assert len(trainer.keys) == 18
                assert sorted(trainer.keys) == sorted(trainer.submitted)
                await conserved(running.store)
        finally:
            await redis.stop()


class Trainer:
    """A trainer that is its own producer; its books are its checkpoint."""

    def __init__(self, client: AsyncClient, url: str, run_name: str, kind: str) -> None:
        self.client = client
        self.settings = load(Settings, redis_url=url, experiment_name=run_name.split("/", maxsplit=1)[0])
        self.kind = kind
        self.stream = client.batches(timeout_s=60)
        self.submitted: dict[str, int] = {}
        self.names: dict[int, str] = {}
        """The key of each task id that submit ever gave."""
        self.trained: list[int] = []
        self.last_batch = 0
        self.version = 0

    async def submit_one(self, key: str) -> int:
        """Submit the prompt of a key."""
        task = await self.client.submit(
            {"ids": [1, 2, 3]}, "pipeline_workflows.EchoWorkflow", {}, group_size=2, idempotency_key=key
        )
        self.submitted[key] = task
        self.names[task] = key
        return task

    async def submit(self, numbers: range) -> None:
        """Submit a prompt for each number."""
        for number in numbers:
            await self.submit_one(f"p{number}")

    async def train(self, batches: int | None) -> None:
        """Train on so many batches, or on all there are."""
        done = 0
        while done != batches and (batch := await self.stream.next()) is not None:
            self.trained += batch.task_ids
            self.last_batch = batch.batch_id
            await batch.ack()
            done += 1

    @property
    def keys(self) -> list[str]:
        """The keys of all that was trained on, those of before the roll-back included."""
        return [self.names[task] for task in self.trained]

    async def reconcile(self) -> Reconciliation:
        """Reconcile from the books, with the client of either kind."""
        about: dict[str, Any] = {
            "version": self.version,
            "last_batch": self.last_batch,
            "trained": list(self.trained),
            "submitted": dict(self.submitted),
        }
        if self.kind == "async":
            return await self.client.reconcile(resubmit=self.submit_one, **about)
        loop = asyncio.get_running_loop()

        def plainly() -> Reconciliation:
            with Client.connect(self.settings) as plain:

                def resubmit(key: str) -> int:
                    return asyncio.run_coroutine_threadsafe(self.submit_one(key), loop).result(30)

                return plain.reconcile(resubmit=resubmit, **about)

        return await asyncio.to_thread(plainly)
