"""Batches and rows that cannot be read are set aside with the reason, or are a clear error, and the rest flows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from driver import Driver, a_row
from hypothesis import assume, given
from hypothesis import strategies as st
from poison import FUZZ, JUNK, VALUES, add, collecting, ended, in_a_run, outcome, store_of, until
from structlog.testing import capture_logs

from forebay.batches import AsyncBatchStream
from forebay.errors import FrameError
from forebay.settings import RunSettings
from forebay.store import Store
from forebay.store.records import Cursor
from forebay.wire.codec import decode_rows, encode_rows
from forebay.wire.envelopes import BatchIndex, GroupRules, GroupSummary


async def batch_of_one(driver: Driver, index: bytes | None = None, rows: bytes | None = None) -> int:
    """A batch of one group of two slots, with an index or with rows that are damaged: its task id."""
    (task,) = await driver.finish()
    ((_, summary),) = await driver.store.ready(1)
    own = BatchIndex([GroupSummary.unpack(summary)]).pack()
    assert await driver.store.cut(driver.epoch, own if index is None else index, [task]) is not None
    if rows is not None:
        await driver.store._ask(("SET", driver.store.keys.rows(task, 1, 1), rows))
    return task


def reader_of(driver: Driver) -> AsyncBatchStream:
    """A trainer's reader."""
    return AsyncBatchStream(driver.store, RunSettings(), Cursor("trainer"), timeout_s=10)


FRAME = encode_rows([a_row()])
ROWS = st.integers(0, len(FRAME) - 1).map(lambda end: FRAME[:end]) | JUNK | st.just(encode_rows([a_row(), a_row()]))


def unreadable(decode: Callable[[bytes], Any], frame: bytes) -> bool:
    """Whether the codec refuses a frame."""
    try:
        decode(frame)
    except FrameError:
        return True
    return False


class TestBatches:
    def test_rows(self, redis_url: str, runner: asyncio.Runner) -> None:
        """9: a batch with rows that cannot be read is set aside, its groups evicted with the reason; the next comes."""

        @FUZZ
        @given(ROWS)
        def examples(rows: bytes) -> None:
            assume(unreadable(decode_rows, rows) or len(decode_rows(rows)) != 1)
            self.set_aside_and_on(redis_url, runner, rows=rows)

        examples()

    def test_indexes(self, redis_url: str, runner: asyncio.Runner) -> None:
        """9: so is one whose index cannot be read."""

        @FUZZ
        @given(JUNK | st.fixed_dictionaries({"groups": VALUES}, optional={"metrics": VALUES}).map(msgpack.packb))
        def examples(index: bytes) -> None:
            assume(unreadable(BatchIndex.unpack, index))
            self.set_aside_and_on(redis_url, runner, index=index)

        examples()

    @staticmethod
    def set_aside_and_on(redis_url: str, runner: asyncio.Runner, **damage: bytes) -> None:
        """A damaged batch before a good one."""

        async def example(driver: Driver) -> None:
            store = driver.store
            bad = await batch_of_one(driver, **damage)
            good = await batch_of_one(driver)
            with capture_logs() as logs:
                batch = await reader_of(driver).next()
            assert batch is not None
            assert [group.task for group in batch.groups] == [good]
            assert [line["event"] for line in logs] == ["batch.set_aside"]
            (drop,) = await store.drops()
            assert (drop.task_id, drop.outcome, drop.place, drop.reason) == (bad, "evicted", "hand-over", "unreadable")
            status = await store.status()
            assert (status.count("delivered"), status.count("evicted"), status.delivered_ahead) == (1, 1, 1)
            assert status.count("poison:batches") == 1
            assert await batch.ack()

        in_a_run(redis_url, runner, example)

    def test_foreign_entries(self, redis_url: str, runner: asyncio.Runner) -> None:
        """9: entries of the batches stream that are no batch's own are set aside; no count moves for them."""
        fields = st.dictionaries(
            st.sampled_from([b"b", b"x", b"y"]), st.sampled_from([b"1", b"2", b"77"]) | JUNK, min_size=1
        )

        @FUZZ
        @given(st.lists(fields, max_size=3), st.lists(fields, max_size=3))
        def examples(before: list[dict[bytes, bytes]], after: list[dict[bytes, bytes]]) -> None:
            async def example(driver: Driver) -> None:
                store = driver.store
                for entry in before:
                    await add(store, store.keys.batches, entry)
                first = await batch_of_one(driver)
                for entry in after:
                    await add(store, store.keys.batches, entry)
                second = await batch_of_one(driver)
                await store.end_of_data()
                reader = reader_of(driver)
                found = []
                while (batch := await reader.next()) is not None:
                    found += [group.task for group in batch.groups]
                assert found == [first, second]
                status = await store.status()
                assert status.count("poison:batches") == len(before) + len(after)
                assert (status.count("batches_delivered"), status.cut_batches) == (2, 0)

            in_a_run(redis_url, runner, example)

        examples()

    async def test_not_all_are_thrown_away(self, any_redis_url: str) -> None:
        """9: the third unreadable batch in a row is kept, and is an error: another release may read it."""
        store = store_of(any_redis_url)
        driver = Driver(store)
        await driver.lead(batch_size=1, batches_per_version=100)
        tasks = [await batch_of_one(driver, rows=b"\x09" + FRAME[1:]) for _ in range(3)]
        good = await batch_of_one(driver)
        reader = reader_of(driver)
        for _ in range(2):
            with capture_logs(), pytest.raises(FrameError, match=r"batch 3 cannot be read.*of version 9.*same release"):
                await reader.next()
        assert [drop.task_id for drop in await store.drops()] == tasks[1::-1]
        await store._ask(("SET", store.keys.rows(tasks[2], 1, 1), FRAME))
        again, last = await reader.next(), await reader.next()
        assert again is not None
        assert last is not None
        assert [again.groups[0].task, last.groups[0].task] == [tasks[2], good]
        assert again.redelivered
        await driver.check()
        await store.close()

    async def test_repeating_the_call_changes_nothing(self, any_redis_url: str) -> None:
        """9: a batch is set aside once, whatever is repeated; an ack says that it is gone."""
        store = store_of(any_redis_url)
        driver = Driver(store)
        await driver.lead(batch_size=1, batches_per_version=100)
        await batch_of_one(driver, rows=b"")
        batch, _ = await driver.take_batch()
        assert [await store.spoil_batch("trainer", batch, "no") for _ in range(3)] == [1, 0, 0]
        assert not await store.ack("trainer", batch)
        assert (await driver.check()).count("batches_set_aside") == 1
        await store.close()

    async def test_the_rest_of_the_run_is_as_before_it(self, any_redis_url: str) -> None:
        """9: of a batch that is set aside nothing is kept, and it takes no place ahead of the version."""
        store = store_of(any_redis_url)
        driver = Driver(store)
        await driver.lead(batch_size=1, batches_per_version=1, retain_batches=5)
        await batch_of_one(driver, rows=b"")
        reader = reader_of(driver)
        with capture_logs():
            waiting = asyncio.create_task(reader.next())
            await until(lambda: counted(store, "batches_set_aside", 1))
            good = await batch_of_one(driver)  # blocked, if the first had been counted as ahead
            batch = await waiting
        assert batch is not None
        assert [group.task for group in batch.groups] == [good]
        assert await store._ask(("ZRANGE", store.keys.prefix + "batches:kept", 0, -1)) == [[b"2"]]
        assert (await driver.check()).delivered_ahead == 1
        await store.close()

    async def test_a_follower_decides_nothing(self, any_redis_url: str) -> None:
        """9: what a follower cannot read is an error to it; the driver's batch stays as it is."""
        store = store_of(any_redis_url)
        driver = Driver(store)
        await driver.lead(batch_size=1, batches_per_version=100)
        task = await batch_of_one(driver)
        batch = await reader_of(driver).next()
        await store._ask(("SET", store.keys.rows(task, 1, 1), b""))
        follower = AsyncBatchStream(store, RunSettings(), Cursor("watcher", follows=True), timeout_s=10)
        for _ in range(2):
            with pytest.raises(FrameError, match="resume_after=1"):
                await follower.next()
        assert batch is not None
        assert await batch.ack()
        status = await driver.check()
        assert (status.count("batches_set_aside"), status.count("batches_acked"), status.count("evicted")) == (0, 1, 0)
        await store.close()

    async def test_a_batch_that_another_rank_has(self, any_redis_url: str) -> None:
        """9: ranks step together: a batch that one has is not set aside by another, and all can pass over it."""
        store = store_of(any_redis_url)
        driver = Driver(store)
        await driver.lead(batch_size=1, batches_per_version=100)
        await batch_of_one(driver, index=b"\x90")
        await batch_of_one(driver, index=b"\x90")
        good = await batch_of_one(driver)
        ranks = [Cursor("trainer", rank, 2) for rank in range(2)]
        for cursor in ranks:
            await store.join(cursor)
        taken = [(await store.take(cursor, "reader", "0")).batch for cursor in ranks]
        assert taken[0] is not None
        assert taken[1] is not None
        assert [await store.spoil_batch(*pair, "no") for pair in zip(ranks, taken, strict=True)] == [None, None]
        for cursor in ranks:
            await store.resume_after(cursor, taken[0].batch_id)
        second = (await store.take(ranks[1], "reader", "0")).batch
        assert second is not None
        assert await store.spoil_batch(ranks[1], second, "no") == 1  # no other has it yet: none will
        for cursor in ranks:
            last = (await store.take(cursor, "reader", "0")).batch
            assert last is not None
            assert [group.task for group in BatchIndex.unpack(last.index).groups] == [good]
        await driver.check()
        await store.close()


async def counted(store: Store, name: str, value: int) -> bool:
    """Whether a counter of the run has reached a value."""
    return (await store.status()).count(name) >= value


@pytest.mark.parametrize(
    "rows", [b"", b"\x09\x90", FRAME[:-5], b"\x01\xdd\xff\xff\xff\xff", encode_rows([a_row()] * 2)]
)
async def test_rows_that_a_filter_would_see(redis_url: str, rows: bytes) -> None:
    """9: a group whose rows the collector cannot read, or that are not as many as its header says, is rejected."""
    store = store_of(redis_url)
    driver = Driver(store)
    packed = GroupRules(1, should_accept_fn="forebay.wire.codec:encode_rows").pack()
    async with collecting(store, RunSettings(batch_size=1)):
        task, _ = await store.submit(b"spec", packed, 2)
        await driver.admit()
        first, second = sorted(await driver.claim())
        await driver.publish(first)
        await store._ask(("SET", store.keys.rows(*first), rows))
        await driver.publish(second)
        await until(ended(store, task))
        assert await outcome(store, task) == ("rejected", "rows_lost")
    (drop,) = await store.drops()
    assert drop.detail.startswith("the rows of slot 0 cannot be read: ")
    (aside,) = await store.poison()
    assert (aside.where, aside.name, aside.sample) == ("rows", f"rows:{task}:0:1", rows[:64])
    await store.close()
