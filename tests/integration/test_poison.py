"""Whatever stands in Redis, no reader crashes or loops: what cannot be read is set aside once, and the rest flows.

Each reader is given what a fault, another release or a stranger could have left: truncated frames, wrong versions,
claims of huge sizes, random bytes, missing fields, foreign types. The codec alone is fuzzed in
``tests/unit/test_wire_codec.py`` and ``test_wire_envelopes.py``.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import pytest
from driver import Driver, a_row
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from services import services
from structlog.testing import capture_logs

from forebay.batches import AsyncBatchStream
from forebay.errors import FrameError, RunNotReadyError
from forebay.settings import RunSettings, Settings
from forebay.store import Store
from forebay.store.records import Cursor
from forebay.wire.codec import decode_rows, encode_rows
from forebay.wire.envelopes import BatchIndex, GroupRules, GroupSpec, GroupSummary, RowSummary, SlotHeader
from forebay_collector.cutter import Cutter
from forebay_collector.service import Collector

FUZZ = settings(
    max_examples=25,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
RULES = GroupRules(1).pack()
FORGED = -5.0
"""The reward in forged headers."""

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


def store_of(redis_url: str) -> Store:
    """The store of a new run."""
    return Store.open(Settings(REDIS_URL=redis_url, experiment_name=f"poison-{uuid.uuid4().hex[:12]}"))


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    """An event loop that lives as long as the test, whatever number of examples it runs."""
    with asyncio.Runner() as made:
        yield made


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


# -- results: the collector ------------------------------------------------------------------------------------------

SLOT = st.sampled_from([b"0", b"1", b"2", b"99999999999999999999", b"-1", b"", b"x", b"1.0"])
TASK = st.sampled_from(["own", b"77", b"0", b"-3", b"", b"one", b"\xff", b"99999999999999999999", b" 1"])
HEADER = st.sampled_from(["forged", "truncated"]) | JUNK
ENTRY = st.dictionaries(st.binary(max_size=3), st.binary(max_size=9), min_size=1, max_size=4) | st.fixed_dictionaries(
    {}, optional={b"t": TASK, b"i": SLOT, b"h": HEADER}
).filter(bool)


def resolved(entry: dict[bytes, Any], task: int) -> dict[bytes, Any]:
    """The entry with the words that stand for a group that there is."""
    out = dict(entry)
    if out.get(b"t") == "own":
        out[b"t"] = b"%d" % task
    if out.get(b"h") in ("forged", "truncated"):
        idx = int(out[b"i"]) if out.get(b"i") in (b"0", b"1") else 0
        header = SlotHeader(task, idx, 1, "usable", rows=[RowSummary.of(a_row(0, FORGED))]).pack()
        out[b"h"] = header if out[b"h"] == "forged" else header[:-9]
    return out


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


async def one_group(driver: Driver, before: list[Any], between: list[Any], after: list[Any]) -> None:
    """A good group of two slots whose results come between entries of any kind: it is accepted, with its own."""
    store = driver.store
    accepted = (await store.status()).count("accepted")
    task, _ = await store.submit(b"spec", RULES, 2)
    await driver.admit()
    first, second = await driver.claim()
    for entries, attempt in ((before, first), (between, second), (after, None)):
        for entry in entries:
            await add(store, store.keys.results(task % 4), resolved(entry, task))
        if attempt is not None:
            await driver.publish(attempt)

    async def decided() -> bool:
        status = await store.status()
        left = sum(one.unread for one in status.owners.partitions)
        return status.count("accepted") == accepted + 1 and left == 0

    await until(decided)
    (packed,) = await store._ask(("HGET", store.keys.group(task), "sum"))
    summary = GroupSummary.unpack(packed)
    assert [[row.reward for row in rollout.rows] for rollout in summary.rollouts] == [[1.0], [1.0]]


def test_results(redis_url: str, runner: asyncio.Runner) -> None:
    """9: no entry of the results stream stops the collector, takes a slot's place, or stays; each is counted."""
    store = store_of(redis_url)
    rules = RunSettings(batch_size=1, batches_per_version=1000)
    driver = Driver(store)

    @FUZZ
    @given(st.lists(ENTRY, max_size=4), st.lists(ENTRY, max_size=4), st.lists(ENTRY, max_size=4))
    def examples(before: list[Any], between: list[Any], after: list[Any]) -> None:
        async def run() -> None:
            injected = len(before) + len(between) + len(after)
            poison = (await store.status()).count("poison")
            with capture_logs():
                await one_group(driver, before, between, after)
            assert (await store.status()).count("poison") == poison + injected
            await driver.check()

        runner.run(run())

    async def all_examples(stack: list[Any]) -> None:
        stack.append(collecting(store, rules))
        stack.append(await stack[0].__aenter__())

    stack: list[Any] = []
    runner.run(all_examples(stack))
    try:
        examples()
        assert not stack[1].done()
    finally:
        runner.run(stack[0].__aexit__(None, None, None))
        runner.run(store.close())


async def test_forged_results_of_a_whole_group(redis_url: str) -> None:
    """9: entries that claim to be all the results of a group that still runs do not end it, nor hide its own."""
    store = store_of(redis_url)
    driver = Driver(store)
    forged = [{b"t": "own", b"i": b"%d" % idx, b"h": "forged"} for idx in (0, 1)]
    async with collecting(store, RunSettings(batch_size=1)):
        await one_group(driver, forged, [], [])
        assert {item.reason for item in await store.poison()} == {
            "it is not the result of slot 0 of group 1",
            "it is not the result of slot 1 of group 1",
        }
    await store.close()


async def test_second_results_of_a_slot(redis_url: str) -> None:
    """9: further entries for a slot that has its own leave the stream, while the group is open and while it ends."""
    store = store_of(redis_url)
    driver = Driver(store)
    forged = [{b"t": "own", b"i": b"%d" % idx, b"h": header} for idx in (0, 1) for header in ("forged", b"\x90")]
    async with collecting(store, RunSettings(batch_size=1, batches_per_version=100)):
        for _ in range(5):
            await one_group(driver, [], forged, forged)
        status = await driver.check()
        assert status.count("poison:results") == 5 * len(forged) * 2
    await store.close()


async def test_a_group_that_is_to_be_committed_when_all_begins_anew(redis_url: str) -> None:
    """9: a commit that never began, as a forged result made the collector read anew, is made then."""
    store = store_of(redis_url)
    driver = Driver(store)
    await driver.lead(batch_size=1, batches_per_version=100)
    tasks = [(await store.submit(b"spec", RULES, 2))[0] for _ in range(20)]
    assert await driver.admit() == 20
    forged = resolved({b"t": "own", b"i": b"0", b"h": "forged"}, tasks[0])
    await add(store, store.keys.results(0), forged)
    for attempt in sorted(await driver.claim(100)):  # one reading has them all, and ends with a whole group
        await driver.publish(attempt)
    await store.resign("collector-1")
    async with collecting(store, RunSettings(batch_size=1, batches_per_version=100, max_concurrent=100)):
        for task in tasks:
            await until(ended(store, task))
    await store.close()


async def test_an_unreadable_header_of_a_slots_own(redis_url: str) -> None:
    """9: a slot whose own header cannot be read fails, a group with unreadable rules is rejected; both are noted."""
    store = store_of(redis_url)
    driver = Driver(store)
    async with collecting(store, RunSettings(batch_size=1)):
        good, bad = [(await store.submit(b"spec", rules, 2))[0] for rules in (RULES, b"rules")]
        await driver.admit()
        for attempt in await driver.claim():
            if attempt == (good, 0, 1):
                await store._run("publish", *attempt, "usable", "", b"\xdd\xff\xff\xff\xff", -1, "")
            else:
                await driver.publish(attempt)
        for task in (good, bad):
            await until(ended(store, task))
        states = [await outcome(store, task) for task in (good, bad)]
        assert states[0][0] in ("ready", "batched")
        assert states[1] == ("rejected", "contract_error")
    found = {item.where: item.sample for item in await store.poison()}
    assert found == {"results": b"\xdd\xff\xff\xff\xff", "rules": b"rules"}
    await store.close()


async def outcome(store: Store, task: int) -> tuple[str, str]:
    """``(state, reason)`` of a group."""
    ((state, why),) = await store._ask(("HMGET", store.keys.group(task), "st", "why"))
    return (state or b"").decode(), (why or b"").decode()


def ended(store: Store, task: int) -> Callable[[], Awaitable[bool]]:
    """Whether a group has ended."""

    async def ask() -> bool:
        return (await outcome(store, task))[0] in ("rejected", "evicted", "ready", "batched")

    return ask


# -- prompts: admission ------------------------------------------------------------------------------------------------


def test_prompts(redis_url: str, runner: asyncio.Runner) -> None:
    """9: entries of the prompts stream that name no group are set aside, and groups before and after them start."""

    @FUZZ
    @given(
        st.lists(st.dictionaries(st.sampled_from([b"t", b"u", b""]), TASK | JUNK, min_size=1), min_size=1, max_size=5)
    )
    def examples(entries: list[dict[bytes, Any]]) -> None:
        junk = [{name: b"nobody" if value == "own" else value for name, value in one.items()} for one in entries]

        async def example(driver: Driver) -> None:
            store = driver.store
            await driver.submit()
            for fields in junk:
                await add(store, store.keys.prompts, fields)
            await store._ask(("SET", store.keys.group(77), "a string"))
            await driver.submit()
            assert await driver.admit() == 2
            status = await store.status()
            assert (status.queued, status.count("poison")) == (0, len(junk))
            (pending,) = await store._ask(("XPENDING", store.keys.prompts, "admission"))
            assert pending["pending"] == 0

        in_a_run(redis_url, runner, example)

    examples()


async def test_a_group_without_a_size(any_redis_url: str) -> None:
    """6: a submitted group that cannot be started has ended: rejected, at admission, in the ledger."""
    store = store_of(any_redis_url)
    driver = Driver(store)
    await driver.lead()
    task, other = await driver.submit(2)
    await store._ask(("HSET", store.keys.group(task), "n", "many"))
    assert await driver.admit() == 1
    assert [attempt[0] for attempt in await driver.claim()] == [other, other]
    (drop,) = await store.drops()
    assert (drop.task_id, drop.outcome, drop.place, drop.detail) == (
        task, "rejected", "admission", "its group has no size",
    )  # fmt: skip
    await driver.check()
    await store.close()


# -- specs and rules ---------------------------------------------------------------------------------------------------


def test_specs(redis_url: str, runner: asyncio.Runner, run_name: str) -> None:
    """9: a group whose spec or rules no worker or collector can read is rejected, and the next one runs."""

    async def start(holder: list[Any]) -> None:
        holder.append(services(redis_url, run_name, batch_size=1, batches_per_version=9999, max_contract_errors=9999,
                               failure_window=1, max_failed_share_data=1))  # fmt: skip
        holder.append(await holder[0].__aenter__())

    holder: list[Any] = []
    runner.run(start(holder))
    running, client = holder[1]
    good = GroupSpec("pipeline_workflows:EchoWorkflow", {}, {"ids": [1]}).pack()
    odd_spec = JUNK | st.fixed_dictionaries(
        {}, optional={"workflow": VALUES, "kwargs": VALUES, "data": VALUES, "is_eval": VALUES}
    ).map(msgpack.packb)
    odd_rules = JUNK | st.fixed_dictionaries(
        {}, optional={"min_usable_group_size": VALUES, "reward_normalization": VALUES, "should_accept_fn": VALUES}
    ).map(msgpack.packb)

    @settings(FUZZ, max_examples=15)
    @given(st.lists(st.tuples(odd_spec, odd_rules), min_size=1, max_size=4))
    def examples(pairs: list[tuple[bytes, bytes]]) -> None:
        async def run() -> None:
            store = running.store
            with capture_logs():
                tasks = [(await store.submit(spec, RULES, 2))[0] for spec, _ in pairs]
                tasks += [(await store.submit(good, rules, 2))[0] for _, rules in pairs]
                for task in tasks:
                    await until(ended(store, task))
                found = await client.rollout_batch([{"ids": [1]}], "pipeline_workflows:EchoWorkflow", {}, group_size=2,
                                                   timeout_s=20)  # fmt: skip
            assert len(found.groups) == 1
            assert [(await outcome(store, task))[0] for task in tasks[: len(pairs)]] == ["rejected"] * len(pairs)

        runner.run(run())

    try:
        examples()
    finally:
        runner.run(holder[0].__aexit__(None, None, None))


# -- batches and rows: the trainer -------------------------------------------------------------------------------------


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


# -- ready groups: the cutter ------------------------------------------------------------------------------------------


def test_summaries(redis_url: str, runner: asyncio.Runner) -> None:
    """9: a waiting group whose summary cannot be read is evicted, strange members leave, and the others are cut."""

    @FUZZ
    @given(JUNK | st.fixed_dictionaries({"task": VALUES, "rollouts": VALUES}).map(msgpack.packb), st.booleans())
    def examples(summary: bytes, missing: bool) -> None:
        async def example(driver: Driver) -> None:
            store = driver.store
            odd, good = await driver.finish(2)
            await store._ask(
                ("HDEL", store.keys.group(odd), "sum") if missing
                else ("HSET", store.keys.group(odd), "sum", summary),
                ("ZADD", store.keys.ready, "-1", b"\xff", "-2", b"x 1", "-3", 12345),
            )  # fmt: skip
            rules = RunSettings(batch_size=1, batches_per_version=1000)
            with capture_logs():
                assert await Cutter(store, rules).cut(driver.epoch) == 1
            _, tasks = await driver.take_batch()
            assert tasks == [good]
            (drop,) = await store.drops()
            assert (drop.task_id, drop.place, drop.reason) == (odd, "cut", "unreadable")
            assert (await store.status()).count("poison:ready") == 4

        in_a_run(redis_url, runner, example)

    examples()


# -- what workers and status read --------------------------------------------------------------------------------------


async def test_strange_jobs_and_leases(any_redis_url: str) -> None:
    """9: ids in the job queue and in the leases that are none of ours vanish, and the slots run."""
    store = store_of(any_redis_url)
    driver = Driver(store)
    await driver.lead()
    await driver.submit()
    await driver.admit()
    await store._ask(
        ("ZADD", store.keys.jobs, 1, b"\xff:1:0:1", 1, "x", 1, "other:1:1:1"),
        ("ZADD", store.keys.leases, 1, "x", 1, b"\xff:1", 1, "1:2"),
        ("LPUSH", store.keys.evicted, "x", b"\xff"),
    )
    assert await driver.claim() == [(1, 0, 1), (1, 1, 1)]
    await store.reap(driver.epoch)
    status = await driver.check()
    assert (status.queued_jobs, status.leased, status.count("poison:leases")) == (0, 2, 3)
    assert await store.evicted_dumps() == []
    assert await store._ask(("LLEN", store.keys.evicted)) == [0]
    await store.close()


def test_status(redis_url: str, runner: asyncio.Runner) -> None:
    """9: status tells what it can read, whatever workers, counters and servers hold, and says what it cannot."""

    @FUZZ
    @given(st.dictionaries(st.binary(min_size=1, max_size=5), JUNK, max_size=3), JUNK, JUNK)
    def examples(workers: dict[bytes, bytes], number: bytes, url: bytes) -> None:
        async def example(driver: Driver) -> None:
            store = driver.store
            now = (await store._ask(("TIME",)))[0][0] * 1000
            await store.heartbeat("good", {"slots": 2, "busy": 1}, 5, [])
            for name, about in workers.items():
                await store._ask(
                    ("HSET", store.keys.workers, name, about), ("ZADD", store.keys.workers_seen, now, name)
                )
            await store._ask(("HSET", store.keys.counters, b"\xff", number), ("SADD", store.keys.servers, url))
            status = await store.status()
            assert status.workers["good"]["slots"] == 2
            assert len(status.workers) == len({name.decode(errors="replace") for name in workers} | {"good"})
            assert sum(about.get("slots", 0) for about in status.workers.values()) == 2
            assert len(await store.servers()) == 1
            await store._ask(("HDEL", store.keys.counters, b"\xff"))

        in_a_run(redis_url, runner, example)

    examples()


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"[1]", b"null", b"{", b'{"batch_size": "x"}', b"[" * 100_000])
async def test_settings(redis_url: str, text: bytes) -> None:
    """9: published settings that cannot be read are a clear error, not a crash."""
    store = store_of(redis_url)
    await store._ask(("SET", store.keys.settings, text))
    with pytest.raises(RunNotReadyError, match="do not fit this release"):
        await store.run_settings()
    await store.close()


async def test_bounded_and_once(any_redis_url: str) -> None:
    """7: what is set aside is kept once for each name, the newest thousand, with the first bytes only."""
    store = store_of(any_redis_url)
    driver = Driver(store)
    await driver.lead()
    for name in range(1005):
        await store.note_unreadable(driver.epoch, str(name), "rows", "r" * 1000, b"\xff" * 1000)
    assert not await store.note_unreadable(driver.epoch, "1004", "rows", "again", b"")
    found = await store.poison()
    assert len(found) == 1000
    assert {len(item.sample) for item in found} == {64}
    assert {len(item.reason) for item in found} == {300}
    assert (await store.status()).count("poison:rows") == 1005
    await store.close()
