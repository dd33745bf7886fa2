"""Whatever stands in the results stream, the collector neither crashes nor loops; each group has its own results."""

from __future__ import annotations

import asyncio
from typing import Any

from driver import Driver, a_row
from hypothesis import given
from hypothesis import strategies as st
from poison import FUZZ, JUNK, RULES, TASK, add, collecting, ended, outcome, store_of, until
from structlog.testing import capture_logs

from forebay.settings import RunSettings
from forebay.wire.envelopes import GroupSummary, RowSummary, SlotHeader

FORGED = -5.0
"""The reward in forged headers."""
SLOT = st.sampled_from([b"0", b"1", b"2", b"99999999999999999999", b"-1", b"", b"x", b"1.0"])
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
    await add(store, store.keys.results(tasks[0] % 4), forged)
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
