"""Whatever stands in Redis, no reader crashes or loops: what cannot be read is set aside once, and the rest flows.

Each reader is given what a fault, another release or a stranger could have left: truncated frames, wrong versions,
claims of huge sizes, random bytes, missing fields, foreign types. Here: waiting groups, jobs, leases, workers,
settings; ``test_poison_results.py``, ``test_poison_prompts.py`` and ``test_poison_batches.py`` have the other readers.
The codec alone is fuzzed in ``tests/unit/test_wire_codec.py`` and ``test_wire_envelopes.py``.
"""

from __future__ import annotations

import asyncio

import msgpack
import pytest
from driver import Driver
from hypothesis import given
from hypothesis import strategies as st
from poison import FUZZ, JUNK, VALUES, in_a_run, store_of
from structlog.testing import capture_logs

from forebay.errors import RunNotReadyError
from forebay.settings import RunSettings
from forebay_collector.cutter import Cutter


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
