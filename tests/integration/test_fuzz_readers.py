"""The readers that `test_poison.py` has not: ledgers, groups by their id, dumps to mend, settings, other protocols.

Whatever stands where they read, each gives what is good, and of the rest an error of the tree or nothing; in bounded
time and memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from driver import Driver
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from forebay import AsyncClient, RunSettings, Settings
from forebay.backends.base import ServerError
from forebay.backends.sglang_answer import AnswerParser
from forebay.errors import ForebayError, FrameError, GenerationError, RunNotReadyError, SlotDataError
from forebay.settings import EngineSettings
from forebay.store import Store
from forebay.store.records import Channel
from forebay.wire.envelopes import DumpRewrite, GroupSummary
from forebay_collector.dump import Dumper
from forebay_collector.duties import Duties
from forebay_collector.metrics import CollectorMetrics
from forebay_ops.control import ControlServer

FUZZ = settings(
    max_examples=25,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([b"where", b"reason", b"sample", b"at"]), inner, max_size=4)
    ),
    max_leaves=6,
)
BYTES = st.binary(max_size=20) | st.sampled_from([b"1", b"0", b"-1", b"99999999999999999999", b"1.5", b" 1", b"\xff"])
PACKED = BYTES | PLAIN.map(msgpack.packb) | st.sampled_from([b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["meta_info", "output_ids", "finish_reason", "type", "output_token_logprobs", "weight_version",
                 "weight_versions", "start", "end", "version", "message", "status_code", "batch_size", "workers"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)  # fmt: skip
DEEP = "[" * 50_000


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    """An event loop for all examples of a test."""
    with asyncio.Runner() as made:
        yield made


def in_a_run(redis_url: str, runner: asyncio.Runner, work: Callable[[Driver], Awaitable[None]]) -> None:
    """Run one example with a driver that leads a new run."""

    async def run() -> None:
        store = Store.open(Settings(REDIS_URL=redis_url, experiment_name=f"fuzz-{uuid.uuid4().hex[:12]}"))
        try:
            driver = Driver(store)
            await driver.lead(batch_size=1, batches_per_version=1000)
            async with asyncio.timeout(30):
                await work(driver)
        finally:
            await store.close()

    runner.run(run())


def test_ledgers(redis_url: str, runner: asyncio.Runner) -> None:
    """9: whatever stands in the ledgers, what is good among it is told, and none is endless."""

    @FUZZ
    @given(
        st.lists(st.dictionaries(st.sampled_from([b"t", b"o", b"parent", b"key"]), BYTES, min_size=1), max_size=3),
        st.dictionaries(BYTES, st.dictionaries(st.sampled_from([b"n", b"k0", b"h0", b"a0", b"t0", b"k"]), PACKED)),
        st.dictionaries(BYTES, PACKED, max_size=3),
    )
    @example([], {b"77": {b"n": b"999999999999999999", b"k3": b"data"}}, {})
    @example([], {}, {b"x": msgpack.packb({b"where": b"", b"reason": b"", b"sample": 2**40, b"at": 1})})
    def examples(drops: list[Any], dead: dict[bytes, Any], poison: dict[bytes, bytes]) -> None:
        async def work(driver: Driver) -> None:
            store, keys = driver.store, driver.store.keys
            for fields in drops:
                await store._ask(("XADD", keys.drops, "*", *(part for item in fields.items() for part in item)))
            await store._ask(("XADD", keys.drops, "*", "t", 5, "o", "evicted", "r", "stale"))
            for task, fields in dead.items():
                await store._ask(("ZADD", keys.dead, 1, task))
                name = keys.prefix.encode() + b"dead:" + task
                for field, value in fields.items():
                    await store._ask(("HSET", name, field, value))
            for name, about in poison.items():
                await store._ask(("ZADD", keys.poison, 1, name), ("HSET", keys.poison_about, name, about))
            assert 5 in [drop.task_id for drop in await store.drops()]
            groups = await store.dead_groups()
            assert all(len(group.slots) <= 1 for group in groups)
            assert len(await store.poison()) == len(poison)

        in_a_run(redis_url, runner, work)

    examples()


def test_groups_by_their_id(redis_url: str, runner: asyncio.Runner) -> None:
    """9: a group that is asked for by its id and cannot be read is an error to who asks; the others come."""

    @FUZZ
    @given(PACKED, st.none() | PACKED)
    def examples(summary: bytes, rows: bytes | None) -> None:
        async def work(driver: Driver) -> None:
            store = driver.store
            client = AsyncClient(store, Settings(), RunSettings(), EngineSettings())
            tasks = []
            for _ in range(2):
                tasks.append((await store.submit(b"spec", b"rules", 1, uuid.uuid4().hex, Channel.DIRECT))[0])
                await driver.admit()
                for attempt in await driver.claim():
                    await driver.publish(attempt)
            good = await _summary(store, tasks[0])
            for task, packed in zip(tasks, (good, summary), strict=True):
                await store.commit(driver.epoch, task, "ready", summary=packed, head=0)
            if rows is not None:
                await store._ask(("SET", store.keys.rows(tasks[1], 0, 1), rows))
            collected = await client.wait_for_task(tasks[0], timeout_s=5)
            assert [group.task for group in collected.groups] == [tasks[0]]
            with pytest.raises(ForebayError):
                await client.wait_for_task(tasks[1], timeout_s=0.2)

        in_a_run(redis_url, runner, work)

    examples()


async def _summary(store: Store, task: int) -> bytes:
    from driver import a_row

    from forebay.wire.envelopes import RolloutSummary, RowSummary

    return GroupSummary(task, 1, [RolloutSummary(0, 1, [RowSummary.of(a_row())])]).pack()


def test_dumps_to_be_mended(redis_url: str, runner: asyncio.Runner, tmp_path: Path) -> None:
    """9: no entry of the lists of dumps to mend ends that duty, stays, or leads out of the run's folder."""
    outside = tmp_path / "outside"
    outside.mkdir()
    victim = outside / "1.jsonl"
    victim.write_text('{"sample_idx": 0, "row": 0, "reward": 7.0}\n')

    @FUZZ
    @given(st.lists(PACKED, max_size=3), st.lists(PACKED, max_size=3), BYTES)
    def examples(rewrites: list[bytes], evicted: list[bytes], folder: bytes) -> None:
        async def work(driver: Driver) -> None:
            store, keys = driver.store, driver.store.keys
            summary = GroupSummary.unpack(await _summary(store, 1))
            ways = [str(outside), "../outside", "rollout/../../outside"]
            asked = [*rewrites, *(DumpRewrite(1, way, summary).pack() for way in ways)]
            for name, entries in ((keys.rewrites, asked), (keys.evicted, [*evicted, b"1"])):
                for entry in entries:
                    await store._ask(("RPUSH", name, entry))
            await store._ask(("HSET", keys.group(1), "dump", folder or str(outside), "why", b"\xff"))
            rules = RunSettings(dump_to_file=False, fileroot=tmp_path / "root")
            dumper = Dumper(rules, "e/t")
            dumper._root = tmp_path / "root"
            dumper._lanes = []
            with capture_logs():
                await Duties(store, rules, CollectorMetrics(rules, None), dumper)._mend_dumps(driver.epoch)
            assert await store._ask(("LLEN", keys.rewrites), ("LLEN", keys.evicted)) == [0, 0]
            await dumper.close()

        in_a_run(redis_url, runner, work)

    examples()
    assert victim.read_text() == '{"sample_idx": 0, "row": 0, "reward": 7.0}\n'


def test_published_settings(redis_url: str, runner: asyncio.Runner) -> None:
    """9: whatever stands where the run's settings do, they are read or said to be of another release."""

    @FUZZ
    @given(BYTES | JSON.map(lambda value: json.dumps(value).encode()))
    @example(DEEP.encode())
    def examples(text: bytes) -> None:
        async def work(driver: Driver) -> None:
            await driver.store._ask(("SET", driver.store.keys.settings, text))
            with contextlib.suppress(RunNotReadyError):
                assert isinstance(await driver.store.run_settings(), RunSettings)

        in_a_run(redis_url, runner, work)

    examples()


@settings(deadline=None)
@given(st.text(max_size=40) | JSON.map(json.dumps))
@example(DEEP)
@example('{"meta_info": {"finish_reason": {"type": "stop"}}, "output_ids": ' + "9" * 5000 + "}")
def test_answers_of_servers(text: str) -> None:
    """9: any answer of an inference server is a segment, or an error of a known kind."""
    try:
        segment = AnswerParser("http://s").parse(text, 16, 1000, "http://s")
    except (SlotDataError, GenerationError, ServerError):
        return
    assert len(segment.tokens) == len(segment.logprobs) <= 16


@settings(deadline=None)
@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
@example(DEEP.encode())
def test_commands_to_a_supervisor(line: bytes) -> None:
    """9: any line to a supervisor's socket is answered, and its handler sees objects only."""

    async def handler(request: Any) -> dict[str, Any]:
        assert isinstance(request, dict)
        raise FrameError("no command")

    server = ControlServer(Path("/nowhere"), handler)
    answer = asyncio.run(server._answer(line))
    assert answer["ok"] is False
    assert answer["error"]
