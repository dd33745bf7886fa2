"""Contract, section 13: the batch stream, on Valkey and on Redis.

Proved elsewhere: one reader, its redelivery, the end of the data and the last partial batch
(``tests/integration/test_store.py``); a dead collector is a clear error within seconds
(``tests/integration/test_pipeline.py``).
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from driver import Driver
from hypothesis import given
from hypothesis import strategies as st
from services import WORKFLOW, read, services

from forebay import AsyncClient, Client, load
from forebay.batches import AsyncBatchStream
from forebay.errors import BatchGoneError, ConsumerError
from forebay.settings import RunSettings, Settings
from forebay.shares import deal
from forebay.store import Store
from forebay.store.records import BatchEntry, Cursor, Taken
from forebay.wire.envelopes import BatchIndex


@pytest.fixture
async def driver(store: Store) -> Driver:
    """A driver that leads, with batches of 2 groups and room for many of them."""
    made = Driver(store)
    await made.lead(max_staleness=20)
    return made


@dataclass
class Reader:
    """One rank of one consumer, each step by hand."""

    store: Store
    cursor: Cursor
    after: str = "0"
    last: int = 0
    held: list[BatchEntry] = field(default_factory=list)

    async def ask(self) -> Taken:
        """Ask for a batch."""
        await self.store.join(self.cursor)
        taken = await self.store.take(self.cursor, "reader", self.after)
        if taken.batch is not None:
            self.after = taken.batch.entry_id
            self.last = taken.batch.batch_id
            self.held.append(taken.batch)
        return taken

    async def take(self) -> BatchEntry:
        """The next batch, which must be there."""
        batch = (await self.ask()).batch
        assert batch is not None
        return batch

    async def drain(self) -> list[int]:
        """The ids of all that comes now."""
        ids = []
        while (batch := (await self.ask()).batch) is not None:
            ids.append(batch.batch_id)
        return ids

    async def ack(self, *batch_ids: int) -> list[bool]:
        """Acknowledge those that it holds."""
        entries = {entry.batch_id: entry for entry in self.held}
        return [await self.store.ack(self.cursor, entries[batch_id]) for batch_id in batch_ids]

    def restarted(self) -> Reader:
        """The same rank in a new process."""
        return Reader(self.store, self.cursor)

    async def resume_after(self, batch_id: int) -> Reader:
        """The same rank in a new process that begins after a named batch."""
        await self.store.resume_after(self.cursor, batch_id)
        return self.restarted()


def world(store: Store, size: int, consumer: str = "trainer", *, follows: bool = False) -> list[Reader]:
    """A reader for each rank."""
    return [Reader(store, Cursor(consumer, rank, size, follows)) for rank in range(size)]


async def cut(driver: Driver, batches: int) -> None:
    """Make so many batches of two groups."""
    for _ in range(batches):
        await driver.finish(2)
        assert await driver.cut() is not None


async def rows_left(store: Store) -> int:
    """How many slots' rows are in Redis."""
    return len([key async for key in store._redis.scan_iter(f"{store.keys.prefix}rows:*", count=1000)])


def stream_of(store: Store, cursor: Cursor, **options: Any) -> AsyncBatchStream:
    """What ``client.batches`` makes."""
    return AsyncBatchStream(store, load(RunSettings, batch_size=2), cursor, **options)


class TestShares:
    """13: every data-parallel rank reads its own share of the same batch."""

    @given(tokens=st.lists(st.integers(1, 4000), min_size=7, max_size=7))
    def test_seven_groups_over_four_ranks(self, tokens: list[int]) -> None:
        """Case 37: shares differ by at most one group, and the fullest rank has at most 4/3 - 1/12 of the best deal."""
        shares = deal(tokens, 4)
        assert sorted(len(share) for share in shares) == [1, 2, 2, 2]
        best = min(
            max(tokens[alone], *(tokens[a] + tokens[b] for a, b in pairs))
            for alone in range(7)
            for pairs in _pairs([place for place in range(7) if place != alone])
        )
        assert max(sum(tokens[place] for place in share) for share in shares) <= (4 / 3 - 1 / 12) * best

    @given(tokens=st.lists(st.integers(0, 10**6), max_size=80), ranks=st.integers(1, 17))
    def test_any_number(self, tokens: list[int], ranks: int) -> None:
        """13: each group goes to one rank; group counts differ by one at most, tokens by the longest group at most."""
        shares = deal(tokens, ranks)
        assert sorted(itertools.chain(*shares)) == list(range(len(tokens)))
        assert all(share == sorted(share) for share in shares)
        counts = [len(share) for share in shares]
        assert max(counts) - min(counts) <= 1
        loads = [sum(tokens[place] for place in share) for share in shares]
        assert max(loads) - min(loads) <= max(tokens, default=0)

    def test_one_long_group(self) -> None:
        """The rank with the one very long group gets the shortest ones besides."""
        assert deal([1000, 1, 50, 60, 1, 70], 2) == [[0, 1, 4], [2, 3, 5]]

    def test_fewer_groups_than_ranks(self) -> None:
        """Some ranks get none."""
        assert deal([5, 9], 4) == [[1], [0], [], []]


def _pairs(places: list[int]) -> list[list[tuple[int, int]]]:
    if not places:
        return [[]]
    first, *others = places
    return [
        [(first, other), *rest] for other in others for rest in _pairs([place for place in others if place != other])
    ]


class TestRanks:
    """13: ranks of one trainer."""

    async def test_each_rank_reads_its_own_share(self, store: Store, driver: Driver) -> None:
        """13: the shares are the batch, each group once; a rank loads no rows but its own."""
        for size in (5, 1, 3, 1, 2):
            await driver.finish(1, size=size)
        assert await driver.cut(5) == 1
        batches = [await stream_of(store, Cursor("trainer", rank, 2)).next() for rank in range(2)]
        assert all(batch is not None for batch in batches)
        shares = [[(group.task, len(group.rollouts)) for group in batch.groups] for batch in batches if batch]
        assert sorted(itertools.chain(*shares)) == [(1, 5), (2, 1), (3, 3), (4, 1), (5, 2)]
        assert [len(batch.rows) for batch in batches if batch] == [6, 6]
        for rank, batch in enumerate(batches):
            assert batch is not None
            about = batch.share_of
            assert (about.rank, about.world_size, about.batch_groups) == (rank, 2, 5)
            assert (about.batch_tokens, about.batch_trained_tokens) == (36, 12)
            assert sum(count for _, count in shares[rank]) == len(batch.rows)
        for task, size in shares[1]:
            await store._redis.delete(*(store.keys.rows(task, idx, 1) for idx in range(size)))
        again = await stream_of(store, Cursor("trainer", 0, 2)).next()
        assert again is not None
        assert [group.task for group in again.groups] == [task for task, _ in shares[0]]

    async def test_an_empty_share(self, store: Store, driver: Driver) -> None:
        """13: with fewer groups than ranks a rank may have none: a batch without rows, to be acknowledged like any."""
        await cut(driver, 1)
        batches = [await stream_of(store, Cursor("trainer", rank, 3)).next() for rank in range(3)]
        assert [len(batch.groups) for batch in batches if batch] == [1, 1, 0]
        empty = batches[2]
        assert empty is not None
        assert (empty.tensors(), empty.trajectories(), empty.rows, empty.tokens) == ({}, [], [], 0)
        assert (empty.meta.n_trajs, empty.group_index.tolist(), empty.share_of.batch_groups) == (0, [], 2)
        assert [await batch.ack() for batch in batches if batch] == [True, True, True]
        assert (await driver.check()).count("batches_acked") == 1

    async def test_counted_once(self, store: Store, driver: Driver) -> None:
        """6: the first rank that reads hands the batch over; the others get the same, and nothing counts again."""
        await cut(driver, 1)
        taken = [await rank.take() for rank in world(store, 4)]
        assert len({(entry.batch_id, entry.index, entry.version, entry.redelivered) for entry in taken}) == 1
        status = await driver.check()
        assert (status.count("delivered"), status.count("batches_delivered"), status.delivered_ahead) == (2, 1, 2)

    async def test_frozen_for_the_other_ranks(self, store: Store, driver: Driver) -> None:
        """6: freshness is judged before the first rank reads; a later rank gets the same batch, however old."""
        await cut(driver, 1)
        first, second = world(store, 2)
        there = await first.take()
        await store.set_version(50)
        also = await second.take()
        assert (also.batch_id, also.index, also.version) == (there.batch_id, there.index, 0)

    async def test_done_when_every_rank_is(self, store: Store, driver: Driver) -> None:
        """13: rows stay until the last rank has acknowledged; acknowledging twice changes nothing."""
        await cut(driver, 1)
        ranks = world(store, 3)
        for rank in ranks:
            await rank.take()
        assert await ranks[0].ack(1) + await ranks[0].ack(1) == [True, False]
        assert await ranks[2].ack(1) == [True]
        assert (await rows_left(store), (await driver.check()).count("batches_acked")) == (4, 0)
        assert await ranks[1].ack(1) + await ranks[1].ack(1) == [True, False]
        assert (await rows_left(store), (await driver.check()).count("batches_acked")) == (0, 1)
        assert await store._redis.xlen(store.keys.batches) == 0
        assert [await rank.restarted().drain() for rank in ranks] == [[], [], []]

    async def test_ranks_that_restart_together_get_the_same(self, store: Store, driver: Driver) -> None:
        """13: what not all ranks have acknowledged comes again to all of them: they stay in step."""
        await cut(driver, 3)
        ranks = world(store, 2)
        for rank in ranks:
            assert await rank.drain() == [1, 2, 3]
        await ranks[0].ack(1, 2)
        await ranks[1].ack(1)
        ranks = [rank.restarted() for rank in ranks]
        again = [await rank.take() for rank in ranks]
        assert [(entry.batch_id, entry.redelivered) for entry in again] == [(2, True)] * 2
        assert [await rank.drain() for rank in ranks] == [[3], [3]]
        await ranks[1].ack(2)
        assert (await driver.check()).count("batches_acked") == 2, "both have acknowledged it, in whichever life"

    @pytest.mark.parametrize(("before", "after"), [(4, 3), (2, 4), (1, 2), (3, 1)])
    async def test_a_changed_world_size(self, store: Store, driver: Driver, before: int, after: int) -> None:
        """13: what the old ranks had not all acknowledged comes again, dealt to the new ones; nothing else does."""
        await cut(driver, 4)
        old = world(store, before)
        for rank in old:
            await rank.drain()
            await rank.ack(1)
        for rank in old[1:]:
            await rank.ack(2)
        new = world(store, after)
        for rank in new:
            assert await rank.drain() == [2, 3, 4]
            assert {entry.redelivered for entry in rank.held} == {True}
            await rank.ack(2, 3)
        status = await driver.check()
        assert (status.count("delivered"), status.count("batches_acked"), status.delivered_ahead) == (8, 3, 8)
        for rank in old:
            assert await rank.restarted().drain() == [4], "and back again"

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"rank": 2, "world_size": 2}, "rank=2: must be an integer from 0 to world_size - 1 = 1"),
            ({"rank": -1}, "rank=-1"),
            ({"rank": True}, "rank=True"),
            ({"world_size": 0}, "world_size=0: must be an integer from 1"),
            ({"world_size": "2"}, "world_size='2'"),
            ({"consumer": "a/b"}, "consumer='a/b'"),
            ({"consumer": ""}, "consumer=''"),
            ({"resume_after": -1}, "resume_after=-1"),
            ({"resume_after": "7"}, "resume_after='7'"),
        ],
    )
    async def test_bad_arguments(self, store: Store, options: dict[str, Any], text: str) -> None:
        """A rank, world size, name or batch that is none is refused at once, with its value."""
        client = AsyncClient(store, Settings(), load(RunSettings), None)  # type: ignore[arg-type]
        with pytest.raises(ConsumerError, match=text):
            client.batches(**options)


class TestRetainedBatches:
    """13: a restarted trainer resumes after the batch its checkpoint names."""

    async def test_resume(self, store: Store, driver: Driver) -> None:
        """13: later batches come again in order with the same content, acknowledged ones too; earlier ones do not."""
        await driver.lead(max_staleness=20, retain_batches=3)
        await cut(driver, 6)
        (trainer,) = world(store, 1)
        assert await trainer.drain() == [1, 2, 3, 4, 5, 6]
        await trainer.ack(1, 2, 3, 4, 5)
        before = {entry.batch_id: entry.index for entry in trainer.held}
        trainer = await trainer.resume_after(2)
        assert await trainer.drain() == [3, 4, 5, 6]
        assert {entry.batch_id: entry.index for entry in trainer.held} == {id_: before[id_] for id_ in (3, 4, 5, 6)}
        assert all(entry.redelivered for entry in trainer.held)
        for entry in trainer.held:
            names = [(group.task, idx, 1) for group in BatchIndex.unpack(entry.index).groups for idx in (0, 1)]
            assert None not in await store.read_rows(names)
        assert await trainer.ack(3, 4, 5, 6, 6) == [True, True, True, True, False]
        status = await driver.check()
        assert [status.count(name) for name in ("delivered", "batches_delivered", "batches_acked")] == [12, 6, 6]
        assert await trainer.restarted().drain() == []

    async def test_the_batch_of_the_checkpoint_was_not_acknowledged(self, store: Store, driver: Driver) -> None:
        """13: a trainer that died between its checkpoint and the ack does not get that batch again."""
        await cut(driver, 3)
        (trainer,) = world(store, 1)
        await trainer.drain()
        trainer = await trainer.resume_after(2)
        assert await trainer.drain() == [3]
        assert ((await driver.check()).count("batches_acked"), await rows_left(store)) == (2, 4)

    async def test_a_batch_that_is_gone(self, store: Store, driver: Driver) -> None:
        """13: a later batch that is not kept any more is a clear error that names it, and nothing has changed."""
        await driver.lead(max_staleness=20, retain_batches=2)
        await cut(driver, 5)
        (trainer,) = world(store, 1)
        await trainer.drain()
        await trainer.ack(1, 2, 3, 4)
        with pytest.raises(BatchGoneError, match=r"after batch 1: batch 2 was acknowledged .* retain_batches"):
            await trainer.resume_after(1)
        assert await trainer.restarted().drain() == [5]
        assert await (await trainer.resume_after(2)).drain() == [3, 4, 5]

    async def test_a_batch_that_this_redis_does_not_know(self, store: Store, driver: Driver) -> None:
        """13: a checkpoint of another run, or of writes that Redis has lost, is an error that says so."""
        await cut(driver, 2)
        (trainer,) = world(store, 1)
        await trainer.take()
        with pytest.raises(BatchGoneError, match=r"after batch 9: in this Redis its last batch is 2; .* lost"):
            await trainer.resume_after(9)
        with pytest.raises(BatchGoneError, match="batch 2 is unread"):
            await trainer.resume_after(2)
        assert await trainer.drain() == [2]

    async def test_repeated_calls(self, store: Store, driver: Driver) -> None:
        """13: the call may be repeated after a lost answer."""
        await driver.lead(max_staleness=20, retain_batches=9)
        await cut(driver, 3)
        (trainer,) = world(store, 1)
        await trainer.drain()
        await trainer.ack(1, 2, 3)
        await trainer.resume_after(1)
        trainer = await trainer.resume_after(1)
        assert await trainer.drain() == [2, 3]
        assert await trainer.ack(2, 3) == [True, True]
        assert (await driver.check()).count("batches_acked") == 3

    async def test_each_rank_for_itself(self, store: Store, driver: Driver) -> None:
        """13: a rank that is quick may train and acknowledge before a slow one has begun again."""
        await driver.lead(max_staleness=20, retain_batches=2)
        await cut(driver, 2)
        ranks = world(store, 2)
        for rank in ranks:
            await rank.drain()
            await rank.ack(1, 2)
        quick = await ranks[0].resume_after(0)
        assert await quick.drain() == [1, 2]
        await quick.ack(1)
        slow = await ranks[1].resume_after(0)
        assert await slow.drain() == [1, 2]
        await slow.ack(1, 2)
        await quick.ack(2)
        assert [await rank.restarted().drain() for rank in ranks] == [[], []]
        assert (await driver.check()).count("batches_acked") == 2

    async def test_in_another_world(self, store: Store, driver: Driver) -> None:
        """13: acknowledged batches come again to ranks of another number, and then to the old number again."""
        await driver.lead(max_staleness=20, retain_batches=5)
        await cut(driver, 3)
        old = world(store, 3)
        for rank in old:
            await rank.drain()
            await rank.ack(1, 2, 3)
        new = [await rank.resume_after(1) for rank in world(store, 2)]
        for rank in new:
            assert await rank.drain() == [2, 3]
        await new[0].ack(2)
        again = [rank.restarted() for rank in old]
        for rank in again:
            assert await rank.drain() == [2, 3]
            assert await rank.ack(2, 3) == [True, True]
        assert await new[1].ack(2) == [False], "another world has done it meanwhile"
        assert [await rank.restarted().drain() for rank in (*old, *new)] == [[]] * 5

    async def test_with_recover(self, store: Store, driver: Driver) -> None:
        """6, 13: a trainer that goes back sets its version back, and what comes again counts as ahead of it, once."""
        await driver.lead(max_staleness=20, retain_batches=5)
        await cut(driver, 4)
        ranks = world(store, 2)
        for step in range(1, 4):
            for rank in ranks:
                await rank.take()
                await rank.ack(step)
            await store.set_version(step)
        await store.recover(1)
        ranks = [await rank.resume_after(1) for rank in ranks]
        for rank in ranks:
            assert [(await rank.take()).batch_id for _ in range(2)] == [2, 3]
            assert {entry.version for entry in rank.held} == {1}
        status = await driver.check()
        assert (status.version, status.delivered_ahead, status.count("delivered")) == (1, 4, 6)

    async def test_bounded_in_number(self, store: Store, driver: Driver) -> None:
        """13: no more than retain_batches are kept, however many were acknowledged."""
        await driver.lead(max_staleness=20, retain_batches=2)
        (trainer,) = world(store, 1)
        for batch_id in range(1, 8):
            await cut(driver, 1)
            await trainer.take()
            await trainer.ack(batch_id)
            await store.set_version(batch_id)
            assert await rows_left(store) == 4 * min(batch_id, 2)
            assert await store._redis.xlen(store.keys.batches) == min(batch_id, 2)

    async def test_bounded_in_bytes(self, store: Store, driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
        """13: past max_retained_bytes the oldest kept batches go, with a warning that names them."""
        await driver.lead(max_staleness=20, retain_batches=5)
        await cut(driver, 4)
        (trainer,) = world(store, 1)
        await trainer.drain()
        await trainer.ack(1)
        one = int(await store._redis.hget(store.keys.state, "kept_bytes") or 0)  # type: ignore[misc]
        names = [(task, idx, 1) for task in (1, 2) for idx in (0, 1)]
        assert one == sum(len(rows or b"") for rows in await store.read_rows(names)) > 0
        await driver.lead(max_staleness=20, group_size=2, retain_batches=5, max_retained_bytes=2 * one)
        await trainer.ack(2)
        assert await rows_left(store) == 16
        await trainer.ack(3)
        assert ((await driver.check()).count("batches_dropped"), await rows_left(store)) == (1, 12)
        out = capsys.readouterr()
        assert "batches.dropped" in out.out + out.err
        with pytest.raises(BatchGoneError, match="batch 1 was acknowledged"):
            await trainer.resume_after(0)


class TestFollowers:
    """13: several trainers read independently; one drives the version."""

    async def test_a_second_driver_is_refused(self, store: Store, driver: Driver) -> None:
        """6: one trainer drives the version; a second one is told its name, and what to do."""
        await cut(driver, 1)
        (trainer,), (other,) = world(store, 1), world(store, 1, "other")
        await trainer.take()
        for call in (other.ask(), store.take(other.cursor, "reader", "0"), store.resume_after(other.cursor, 0)):
            with pytest.raises(ConsumerError, match=r"'trainer' drives .* 'other', .* follows=True"):
                await call
        (itself,) = world(store, 1, follows=True)
        with pytest.raises(ConsumerError, match=r"'trainer' drives the version .* choose another name"):
            await itself.ask()

    async def test_after_the_hand_over(self, store: Store, driver: Driver) -> None:
        """6: who follows gets what the driver was handed, the same and frozen; it neither judges nor counts ahead."""
        await cut(driver, 2)
        (trainer,), (follower,) = world(store, 1), world(store, 1, "eval", follows=True)
        assert await follower.drain() == []
        first = await trainer.take()
        await store.set_version(9)
        there = await follower.take()
        assert (there.batch_id, there.index, there.redelivered) == (1, first.index, False)
        await store.set_version(90)
        assert await follower.drain() == [], "stale, but not its to dissolve"
        assert (await store.status()).count("batches_dissolved") == 0
        assert (await trainer.ask()).batch is None
        status = await driver.check()
        assert (status.count("batches_dissolved"), status.delivered_ahead) == (1, 0)
        assert await follower.drain() == []

    async def test_independent_acks(self, store: Store, driver: Driver) -> None:
        """13: an ack ends a batch for one consumer; it goes when all have acknowledged; each has its own place."""
        await cut(driver, 2)
        (trainer,), followers = world(store, 1), world(store, 2, "eval", follows=True)
        await trainer.drain()
        for rank in followers:
            assert await rank.drain() == [1, 2]
            await rank.ack(1)
        assert await trainer.restarted().drain() == [1, 2], "not ended for the driver"
        await trainer.ack(1, 2)
        assert await rows_left(store) == 4, "the second is kept for those that follow"
        for rank in followers:
            assert await rank.restarted().drain() == [2]
            assert await rank.ack(2) == [True]
        assert await rows_left(store) == 0
        assert (await driver.check()).count("batches_acked") == 2

    async def test_a_follower_that_vanished(self, store: Store, driver: Driver) -> None:
        """Memory is bounded: who has been silent for follower_ttl_s keeps nothing; if it comes back it goes on."""
        await cut(driver, 3)
        (trainer,), (follower,) = world(store, 1), world(store, 1, "eval", follows=True)
        await trainer.drain()
        await follower.drain()
        await follower.ack(2)
        await trainer.ack(1)
        assert await rows_left(store) == 12
        await store._redis.zadd(store.keys.followers, {"eval": 0})
        await trainer.ack(2)
        assert await rows_left(store) == 4
        groups = await store._redis.xinfo_groups(store.keys.batches)
        assert [group["name"] for group in groups] == [b"trainer"]
        assert await follower.drain() == [], "what it has in hand does not come twice"
        assert await follower.restarted().drain() == [3]

    async def test_a_slow_follower(self, store: Store, driver: Driver) -> None:
        """Memory is bounded: who is more than max_follower_lag behind misses batches, and is told how many."""
        await driver.lead(max_staleness=20, max_follower_lag=2)
        await cut(driver, 5)
        (trainer,), (follower,) = world(store, 1), world(store, 1, "eval", follows=True)
        await trainer.take()
        assert (await follower.take()).missed == 0
        await trainer.drain()
        await trainer.ack(1, 2, 3, 4)
        assert await rows_left(store) == 12, "two for the follower, one that the trainer has"
        there = await follower.take()
        assert (there.batch_id, there.missed) == (3, 2)
        assert (await driver.check()).count("batches_missed") == 2

    async def test_it_may_go_back_too(self, store: Store, driver: Driver) -> None:
        """13: a follower's resume moves its own cursor only."""
        await driver.lead(max_staleness=20, retain_batches=3)
        await cut(driver, 3)
        (trainer,), (follower,) = world(store, 1), world(store, 1, "eval", follows=True)
        await trainer.drain()
        await follower.drain()
        await follower.ack(1, 2, 3)
        follower = await follower.resume_after(1)
        assert await follower.drain() == [2, 3]
        await trainer.ack(1, 2, 3)
        assert (await driver.check()).count("batches_acked") == 3
        assert await trainer.restarted().drain() == []


class TestCursors:
    """13: consumer groups."""

    async def test_a_lost_cursor_begins_anew(self, store: Store, driver: Driver) -> None:
        """13: where Redis has lost a cursor the reader goes on; what it has in hand comes to its successor only."""
        await cut(driver, 3)
        (trainer,) = world(store, 1)
        await trainer.take()
        await store._redis.xgroup_destroy(store.keys.batches, "trainer")
        taken = await store.take(trainer.cursor, "reader", trainer.after)
        assert taken.batch is not None
        assert taken.batch.batch_id == 2
        assert await trainer.restarted().drain() == [1, 2, 3]

    async def test_entries_deleted_while_they_are_pending(self, store: Store, driver: Driver) -> None:
        """Case 41: entries that are trimmed under a pending reader do not stop it."""
        await cut(driver, 3)
        ranks = world(store, 2)
        for rank in ranks:
            await rank.drain()
        await store._redis.xdel(store.keys.batches, ranks[0].held[0].entry_id)
        assert [await rank.restarted().drain() for rank in ranks] == [[2, 3], [2, 3]]

    async def test_no_pending_entry_outlives_its_batch(self, store: Store, driver: Driver) -> None:
        """Case 41: nothing lingers in any cursor's pending list once a batch has gone."""
        await cut(driver, 2)
        readers = [*world(store, 2), *world(store, 3), *world(store, 1, "eval", follows=True)]
        for reader in readers:
            await reader.drain()
        for reader in (*readers[:2], readers[-1]):
            await reader.ack(1, 2)
        groups = await store._redis.xinfo_groups(store.keys.batches)
        assert [group["pending"] for group in groups] == [0] * 6

    async def test_a_reader_waits_for_what_is_new(self, store: Store, driver: Driver) -> None:
        """A reader that begins again behind kept batches waits for the next one, and does not spin on those."""
        await driver.lead(max_staleness=20, retain_batches=5)
        await cut(driver, 2)
        (trainer,) = world(store, 1)
        await trainer.drain()
        await trainer.ack(1, 2)
        assert (await trainer.restarted().ask()).seen == trainer.held[-1].entry_id


@pytest.mark.parametrize("seed", range(4))
async def test_random_interleavings(store: Store, driver: Driver, seed: int) -> None:
    """13: ranks, worlds and followers that read, acknowledge and die at random: each batch in order, none lost.

    Checked at every step: a batch has one content; a reader's ids grow; conservation and capacity. At the end all is
    acknowledged, nothing is left, and every batch was acknowledged by all ranks of one world.
    """
    rng = random.Random(seed)
    await driver.lead(max_staleness=3, max_follower_lag=1000)
    size = 2
    readers = [*world(store, size), *world(store, 2, "eval", follows=True)]
    content: dict[int, bytes] = {}
    acked: dict[int, set[tuple[int, int]]] = {}
    version = 0

    async def take(reader: Reader) -> bool:
        last = reader.last
        found = (await reader.ask()).batch
        if found is None:
            return False
        assert found.batch_id > last
        assert content.setdefault(found.batch_id, found.index) == found.index
        assert all(rows is not None for rows in await store.read_rows(_names(found)))
        return True

    async def ack(reader: Reader) -> None:
        entry = reader.held.pop(0)
        await store.ack(reader.cursor, entry)
        if not reader.cursor.follows:
            acked.setdefault(entry.batch_id, set()).add((reader.cursor.rank, reader.cursor.world_size))

    for _ in range(400):
        match rng.randrange(8):
            case 0 | 1:
                await driver.finish(rng.randrange(3), version=version)
                if len(await store.ready(2)) == 2:
                    await driver.cut()
            case 2 | 3 | 4:
                await take(rng.choice(readers))
            case 5:
                if (reader := rng.choice(readers)).held:
                    await ack(reader)
            case 6 if rng.random() < 0.3:
                if rng.random() < 0.5:
                    readers = [reader.restarted() for reader in readers]
                else:
                    size = rng.randrange(1, 5)
                    readers = [*world(store, size), *(reader for reader in readers if reader.cursor.follows)]
            case 7 if rng.random() < 0.3:
                version += 1
                await store.set_version(version)
            case _:
                pass
        await driver.check()
    readers = [reader.restarted() for reader in readers]
    for reader in readers:
        while await take(reader):
            pass
    for reader in readers:
        while reader.held:
            await ack(reader)
    status = await driver.check()
    assert len(content) > 5
    assert status.count("batches_acked") == status.count("batches_delivered") == len(content)
    assert all(any({(rank, n) for rank in range(n)} <= ranks for n in range(1, 5)) for ranks in acked.values())
    assert await store._redis.zcard(store.keys.batches_kept) == 0
    groups = await store._redis.xinfo_groups(store.keys.batches)
    assert {group["pending"] for group in groups} == {0}


def _names(entry: BatchEntry) -> list[tuple[int, int, int]]:
    return [
        (group.task, rollout.sample_idx, rollout.attempt)
        for group in BatchIndex.unpack(entry.index).groups
        for rollout in group.rollouts
    ]


class TestEndToEnd:
    """13: through a collector and a worker."""

    async def test_ranks_and_a_follower_until_the_end_of_the_data(self, redis_url: str, run_name: str) -> None:
        """13: two ranks and a second reader get all groups, the last partial batch too, and come to an end."""
        async with services(redis_url, run_name, batch_size=4, max_staleness=9) as (_, client):
            for at in range(10):
                await client.submit({"ids": [5] * (at + 1)}, WORKFLOW, {})
            await client.end_of_data()

            async def train(rank: int) -> list[tuple[int, bool, list[int]]]:
                seen = []
                async with client.batches(rank=rank, world_size=2, timeout_s=20) as stream:
                    async for batch in stream:
                        assert len(batch.rows) == 2 * len(batch.groups)
                        seen.append((batch.batch_id, batch.partial, [group.task for group in batch.groups]))
                        await batch.ack()
                return seen

            async def look() -> list[int]:
                async with client.batches("look", follows=True, timeout_s=20) as stream:
                    return [group.task async for batch in stream if await batch.ack() for group in batch.groups]

            first, second, looked = await asyncio.gather(train(0), train(1), look())
            assert [entry[:2] for entry in first] == [entry[:2] for entry in second]
            assert [partial for _, partial, _ in first] == [False, False, True]
            tasks = [task for _, _, own in (*first, *second) for task in own]
            assert sorted(tasks) == sorted(looked) == list(range(1, 11))
            status = await client.status()
            assert (status.count("delivered"), status.count("batches_acked")) == (10, 3)

    async def test_a_trainer_goes_back_to_its_checkpoint(self, redis_url: str, run_name: str) -> None:
        """13: a new process of plain code resumes after the batch that its checkpoint names, with its version."""
        async with services(redis_url, run_name, retain_batches=4, max_staleness=9) as (running, client):
            for _ in range(6):
                await client.submit({"ids": [5, 6]}, WORKFLOW, {})
            trained = await read(client, 3, step=True)

            def again() -> list[tuple[int, int, list[int]]]:
                with Client.connect(running.settings) as trainer:
                    trainer.recover(1)
                    with trainer.batches(resume_after=1, timeout_s=20) as stream:
                        two = [stream.next(), stream.next()]
                    return [
                        (batch.batch_id, batch.version, batch.tensors()["input_ids"].flatten().tolist())
                        for batch in two
                        if batch is not None
                    ]

            expected = [(b.batch_id, 1, b.tensors()["input_ids"].flatten().tolist()) for b in trained[1:]]
            assert await asyncio.to_thread(again) == expected

    async def test_missed_batches_are_warned_of(
        self, redis_url: str, run_name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """13: a follower that was too slow reads on, with a warning that says how many batches it has missed."""
        async with services(redis_url, run_name, max_follower_lag=0, max_staleness=9) as (_, client):
            for _ in range(6):
                await client.submit({"ids": [5, 6]}, WORKFLOW, {})
            trainer, follower = client.batches(timeout_s=20), client.batches("look", follows=True, timeout_s=20)
            batches = [await trainer.next()]
            assert await follower.next() is not None
            batches += [await trainer.next(), await trainer.next()]
            for batch in batches[:2]:
                assert batch is not None
                await batch.ack()
            found = await follower.next()
            assert found is not None
            assert batches[2] is not None
            assert found.batch_id == batches[2].batch_id
            out = capsys.readouterr()
            assert "batches.missed" in out.out + out.err
