"""Contract, section 11 (dumps), in the page's order.

Proved elsewhere: each field of a line for any masks and versions, texts with every kind of line break, and bad settings
at start, in ``tests/unit/test_dump.py``.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conditions import eventually
from driver import Driver
from helpers.building import group_of, headers_of, row
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from services import WORKFLOW, read, run_settings, services

from forebay import RunSettings, Settings
from forebay.errors import FencedError
from forebay.generation import StopReason
from forebay.interactions import Interaction, rows_from_interactions
from forebay.loop_lag import watch_loop
from forebay.outcomes import SlotOutcome
from forebay.reward_rules import NormConfig, RewardShaping
from forebay.store import Store
from forebay.store.records import Channel
from forebay.wire.codec import encode_rows
from forebay.wire.envelopes import BatchIndex, DumpRewrite, GroupRules, GroupSummary, RowSummary, SlotHeader
from forebay.wire.rows import Row
from forebay_collector.accept import AcceptFilter
from forebay_collector.assembler import Assembled, Assembler
from forebay_collector.committer import Committer
from forebay_collector.cutter import Cutter
from forebay_collector.dump import Dumper
from forebay_collector.metrics import CollectorMetrics
from forebay_collector.service import Collector
from forebay_ops.tiny_model import create_tiny_model

RUN = "exp/trial"
Headers = dict[int, SlotHeader]


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model's tokenizer."""
    return str(create_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
def dump(tokenizer_path: str, tmp_path: Path) -> dict[str, Any]:
    """The settings of a dump."""
    return {"dump_to_file": True, "fileroot": tmp_path / "dumps", "tokenizer_path": tokenizer_path}


@pytest.fixture
async def dumper(dump: dict[str, Any]) -> AsyncIterator[Dumper]:
    """A dumper that is open."""
    made = Dumper(RunSettings(**dump), RUN)
    await made.open()
    yield made
    await made.close()


@pytest.fixture
async def driver(redis_url: str, run_name: str) -> AsyncIterator[Driver]:
    """A run whose steps are done by hand."""
    store = Store.open(Settings(REDIS_URL=redis_url, experiment_name=run_name.split("/", maxsplit=1)[0]))
    made = Driver(store)
    await made.lead()
    yield made
    await store.close()


def lines(root: Path, task: int) -> list[dict[str, Any]]:
    """The lines of the one file of group `task` below `root`; none if there is none, an error if there are several."""
    found = [path for path in root.rglob(f"{task}.jsonl") if not path.name.startswith(".")]
    assert len(found) < 2, found
    return [json.loads(line) for path in found for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def rewards(root: Path, task: int) -> tuple[float, float | None]:
    """Reward and raw reward in the one line of group `task`."""
    (line,) = lines(root, task)
    return line["reward"], line.get("original_reward")


def places(root: Path) -> list[str]:
    """All files below `root`."""
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


class TestFolders:
    """``{fileroot}/{experiment_name}/{trial_name}/{rollout|eval-rollout}/{version}/{task_id}.jsonl``."""

    @pytest.mark.parametrize(("is_eval", "scope"), [(False, "rollout"), (True, "eval-rollout")])
    async def test_scope_and_version(
        self, driver: Driver, dumper: Dumper, tmp_path: Path, *, is_eval: bool, scope: str
    ) -> None:
        """11: evaluation groups have a folder of their own; {version} is the largest of the trained tokens."""
        (task,) = await driver.submit(1, size=2)
        await committed(driver, dumper, task, [versions(2, 5), versions(3, 3)], is_eval=is_eval)
        assert places(tmp_path / "dumps") == [f"{RUN}/{scope}/5/{task}.jsonl"]

    async def test_a_retry_overwrites(self, driver: Driver, dumper: Dumper, tmp_path: Path) -> None:
        """11: a collector that died before its commit is followed by one that writes the same file, not a second."""
        (task,) = await driver.submit(1, size=1)
        headers = await published(driver, task, [versions(1, 1)])
        group = Assembled(task, 1, GroupRules(1), headers)
        with pytest.raises(FencedError):
            await committer(driver, dumper).commit(driver.epoch + 1, group)
        assert len(lines(tmp_path / "dumps", task)) == 1, "the dump comes before the commit"
        await committer(driver, dumper).commit(driver.epoch, group)
        assert len(lines(tmp_path / "dumps", task)) == 1


class TestLines:
    """A line per row."""

    async def test_the_fields(self, driver: Driver, dumper: Dumper, tmp_path: Path) -> None:
        """11: every field, once the group has been decided on: a row of two turns that ends in tool context."""
        one = row([3, 4, 5, 6, 7, 8], [0, 1, 0, 1, 1, 0], [-1, 2, -1, 3, 3, -1], 0.5, truncated=True)
        (task,) = await driver.submit(1, size=1)
        shaping = RewardShaping(bias=1.0)
        await committed(driver, dumper, task, [one], shaping=shaping)
        (line,) = lines(tmp_path / "dumps", task)
        texts = [line.pop(name) for name in ("prompt", "completion")]
        parts = line.pop("segments")
        assert [(part["role"], part["len"]) for part in parts] == [
            ("prompt", 1), ("gen", 1), ("context", 1), ("gen", 2), ("context", 1),
        ]  # fmt: skip
        assert "".join(part["text"] for part in parts) == "".join(texts)
        assert line == {
            "task_id": task,
            "sample_idx": 0,
            "row": 0,
            "seqlen": 6,
            "prompt_len": 1,
            "head_version": 2,
            "tail_version": 3,
            "version_rle": [[2, 1], [3, 2]],
            "reward": 1.5,
            "original_reward": 0.5,
            "outcome": "accepted",
            "reason": "",
            "stop_reason": "length",
            "attempt": 1,
        }

    async def test_interactions(self, driver: Driver, dumper: Dumper, tmp_path: Path) -> None:
        """11, 9: the interactions of a rollout are rows of their slot, in their order."""
        calls = {
            "a": Interaction([3, 4], [5], [-0.5], [1], reward=0.0, stop_reason=StopReason.STOP),
            "b": Interaction([3, 4, 5, 6], [7, 8], [-0.5, -0.5], [1, 2], reward=1.0, stop_reason=StopReason.LENGTH),
        }
        rows, _ = rows_from_interactions(calls)
        (task,) = await driver.submit(1, size=1)
        await committed(driver, dumper, task, [rows], kind="interactions")
        found = lines(tmp_path / "dumps", task)
        assert [(one["sample_idx"], one["row"], one["prompt_len"], one["reward"]) for one in found] == [
            (0, 0, 2, 0.0), (0, 1, 4, 1.0),
        ]  # fmt: skip
        assert [(one["stop_reason"], one["version_rle"]) for one in found] == [
            ("stop", [[1, 1]]), ("length", [[1, 1], [2, 1]]),
        ]  # fmt: skip

    async def test_rejected_groups_are_dumped_and_marked(
        self, redis_url: str, run_name: str, dump: dict[str, Any]
    ) -> None:
        """11: a rejected group's rows are there with the reason; slots without rows have no line."""
        async with services(redis_url, run_name, **dump) as (_, client):
            filtered = await client.submit(
                {"ids": [1, 2], "rewards": {"0": 0.1, "1": 0.2}}, WORKFLOW, {},
                should_accept_fn="pipeline_workflows.accept_good",
            )  # fmt: skip
            half = await client.submit(
                {"ids": [1, 2], "actions": {"0": "reject"}}, WORKFLOW, {}, drop_incomplete_group=True
            )
            none = await client.submit({"ids": [1, 2], "action": "raise"}, WORKFLOW, {})
            await counted(client, rejected=3)
        root = dump["fileroot"]
        assert [(one["sample_idx"], one["outcome"], one["reason"]) for one in lines(root, filtered)] == [
            (0, "rejected", "filtered"), (1, "rejected", "filtered"),
        ]  # fmt: skip
        assert [(one["sample_idx"], one["reason"]) for one in lines(root, half)] == [(1, "incomplete")]
        assert lines(root, none) == []


class TestRewriting:
    """A group evicted or batch-normalized after its file was written has it rewritten."""

    async def test_evicted_while_it_waits(self, redis_url: str, run_name: str, dump: dict[str, Any]) -> None:
        """11: a group that goes stale while it waits for a batch is marked, with the reason; its rows stay."""
        async with services(redis_url, run_name, max_staleness=0, **dump) as (_, client):
            task = await client.submit({"ids": [1, 2]}, WORKFLOW, {})
            await counted(client, accepted=1)
            (before, *_) = lines(dump["fileroot"], task)
            await client.set_version(1)
            await eventually(lambda: lines(dump["fileroot"], task)[0]["outcome"] == "evicted", "the mark")
            (after, second) = lines(dump["fileroot"], task)
        assert before["outcome"] == "accepted"
        assert after == {**before, "outcome": "evicted", "reason": after["reason"]}
        assert after["reason"] == second["reason"] == "stale: head version 0, training at version 1"

    @pytest.mark.parametrize("gate", ["assembly", "waiting", "cut", "hand-over", "held"])
    async def test_the_mark_outlives_a_collector(
        self, driver: Driver, dumper: Dumper, tmp_path: Path, gate: str
    ) -> None:
        """11, 6: evicted at any gate; who is killed before the mark is followed by one that marks."""
        await driver.lead(max_staleness=0, batch_size=1)
        (task,) = await driver.submit(1, size=1, channel=Channel.DIRECT if gate == "held" else Channel.BATCHES)
        if gate == "assembly":
            await driver.store.set_version(1)
        await committed(driver, dumper, task, [versions(0, 0)])
        assert lines(tmp_path / "dumps", task)[0]["outcome"] == "accepted"
        if gate == "hand-over":
            await driver.cut(1)
        await driver.store.set_version(1)
        if gate == "waiting":
            await driver.store.evict_stale(driver.epoch)
        elif gate == "cut":
            await driver.cut(1)
        elif gate == "hand-over":
            assert (await driver.take()).batch is None
        elif gate == "held":  # nobody asks for it
            await driver.store._redis.hset(driver.store.keys.state, "held_ms", 0)  # type: ignore[misc]
            await driver.store.reap(driver.epoch)
        first = await driver.store.evicted_dumps()
        assert await driver.store.evicted_dumps() == first, "until it is done"
        ((found, folder, reason),) = first
        assert found == task
        await dumper.mark_evicted(found, folder, reason)
        await driver.store.forget_evicted_dump(found)
        assert await driver.store.evicted_dumps() == []
        assert lines(tmp_path / "dumps", task)[0]["outcome"] == "evicted"

    async def test_cancelled_early(self, driver: Driver, dumper: Dumper, tmp_path: Path) -> None:
        """11, 6: a running group that is cancelled has a file of what it had, and is marked."""
        (task,) = await driver.submit(1, size=2)
        await driver.admit()
        first, _ = await driver.claim()
        await driver.publish(first, version=0)
        await driver.store.set_version(2)
        await driver.store.evict_stale(driver.epoch, running_too=True)
        assembler = Assembler()
        assembler.open(task, GroupRules(1), 2)
        ended = [assembler.add(entry) for entry in await driver.store.read_results({0: "0"}, 10, 0.01)]
        (group,) = [one for one in ended if one is not None]
        await committer(driver, dumper).commit(driver.epoch, group)
        for found, folder, reason in await driver.store.evicted_dumps():
            await dumper.mark_evicted(found, folder, reason)
        (line,) = lines(tmp_path / "dumps", task)
        assert (line["outcome"], line["reason"]) == ("evicted", "stale: head version 0, training at version 2")

    async def test_rewards_of_a_batch(self, driver: Driver, dumper: Dumper, tmp_path: Path) -> None:
        """11, 5: rewards with statistics of the batch are in the files as in its index, anew where it is re-cut."""
        root = tmp_path / "dumps"
        norm = NormConfig(mean_level="batch", std_level=None)
        rules = RunSettings(batch_size=2)
        cutter = Cutter(driver.store, rules, CollectorMetrics(rules))
        tasks = []
        for version, reward in ((0, 2.0), (1, 6.0)):
            tasks += await driver.submit(1, size=1)
            await committed(driver, dumper, tasks[-1], [versions(version, version, reward=reward)], norm=norm)
            assert rewards(root, tasks[-1]) == (reward, None), "as they are before there is a batch"
        assert await cutter.cut(driver.epoch) == 1
        await rewritten(driver, dumper)
        assert [rewards(root, task) for task in tasks] == [(-2.0, 2.0), (2.0, 6.0)], "mean 4"
        await driver.store.set_version(2)
        assert (await driver.take()).batch is None, "one of the two is stale"
        tasks += await driver.submit(1, size=1)
        await committed(driver, dumper, tasks[2], [versions(2, 2, reward=10.0)], norm=norm)
        assert await cutter.cut(driver.epoch) == 1
        await rewritten(driver, dumper)
        batch, fresh = await driver.take_batch()
        assert fresh == tasks[1:]
        assert [rewards(root, task) for task in fresh] == [(-2.0, 6.0), (2.0, 10.0)], "mean 8"
        for group in BatchIndex.unpack(batch.index).groups:
            ((known,),) = (rollout.rows for rollout in group.rollouts)
            assert rewards(root, group.task) == (known.reward, known.original_reward)
            assert lines(root, group.task)[0]["outcome"] == "accepted"

    async def test_the_rewards_outlive_a_collector(self, driver: Driver, run_name: str, dump: dict[str, Any]) -> None:
        """11, 5: one that is killed after its cuts is followed by one that rewrites, the last cut's rewards last."""
        root = dump["fileroot"]
        rules = run_settings(**dump)
        dumper = Dumper(rules, run_name)
        await dumper.open()
        cutter = Cutter(driver.store, rules)
        tasks: list[int] = []
        for version, reward in ((0, 2.0), (1, 6.0)):
            tasks += await driver.submit(1, size=1)
            await committed(driver, dumper, tasks[-1], [versions(version, version, reward=reward)], norm=BY_BATCH)
        assert await cutter.cut(driver.epoch) == 1
        await driver.store.set_version(2)
        assert (await driver.take()).batch is None, "one of the two is stale"
        tasks += await driver.submit(1, size=1)
        await committed(driver, dumper, tasks[2], [versions(2, 2, reward=10.0)], norm=BY_BATCH)
        assert await cutter.cut(driver.epoch) == 1
        assert [rewards(root, task) for task in tasks[1:]] == [(6.0, None), (10.0, None)], "nobody has rewritten yet"

        await dumper.close()
        await driver.store.resign("collector-1")
        stop = asyncio.Event()
        successor = Collector(driver.store, rules)
        await successor.open()
        serving = asyncio.create_task(successor.serve(stop))
        async with asyncio.timeout(20):
            while await driver.store.dump_rewrites(1):  # noqa: ASYNC110 (in Redis)
                await asyncio.sleep(0.02)
        found = [rewards(root, task) for task in tasks[1:]]
        assert found == [(-2.0, 6.0), (2.0, 10.0)], "mean 8, not that of the batch that was dissolved"
        stop.set()
        await serving

    async def test_rewards_of_groups_collected_by_id(self, redis_url: str, run_name: str, dump: dict[str, Any]) -> None:
        """11, 5, 13: where the batch is what one rollout_batch returns, the files have its rewards too."""
        prompts = [{"ids": [1, 2], "rewards": {"0": low, "1": low + 2}} for low in (1.0, 5.0)]
        async with services(redis_url, run_name, **dump) as (_, client):
            found = await client.rollout_batch(prompts, WORKFLOW, {}, reward_normalization=BY_BATCH, timeout_s=30)
            want = {
                group.task: [(one.reward, one.original_reward) for rollout in group.rollouts for one in rollout.rows]
                for group in found.groups
            }
            assert list(want.values()) == [[(-3.0, 1.0), (-1.0, 3.0)], [(1.0, 5.0), (3.0, 7.0)]]
            for task, known in want.items():
                await eventually(
                    lambda task=task, known=known: [  # type: ignore[misc]
                        (line["reward"], line.get("original_reward")) for line in lines(dump["fileroot"], task)
                    ] == known,
                    f"the rewards of group {task}",
                )  # fmt: skip

    @pytest.mark.parametrize(("norm", "dumped"), [(None, True), ("batch", False), ("batch", True)])
    async def test_nothing_is_kept_in_vain(
        self, driver: Driver, dumper: Dumper, norm: str | None, *, dumped: bool
    ) -> None:
        """11: only a group that has a file, and rewards of its batch, waits to be rewritten: memory is bounded."""
        silent = Dumper(RunSettings(), RUN)
        rule = None if norm is None else BY_BATCH
        for _ in range(2):
            (task,) = await driver.submit(1, size=1)
            await committed(driver, dumper if dumped else silent, task, [versions(0, 0)], norm=rule)
        assert await Cutter(driver.store, RunSettings(batch_size=2)).cut(driver.epoch) == 1
        assert len(await driver.store.dump_rewrites(10)) == (2 if dumped and norm else 0)

    async def test_an_entry_that_cannot_be_read(self, dumper: Dumper, tmp_path: Path) -> None:
        """11: it is counted, and names no other file: the group's own id is what the script knew."""
        summary, rows = group_of({0: [versions(1, 1)]})
        await dumper.write("rollout/1", summary, rows, headers_of(summary), "accepted", "", 1)
        before = lines(tmp_path / "dumps", summary.task)
        foreign = DumpRewrite(summary.task, "rollout/1", summary)
        foreign.task += 1
        for entry in (b"", b"\x83", foreign.pack(), DumpRewrite(summary.task, "rollout/1", summary).pack()[:-1]):
            await dumper.rewrite_rewards(entry)
        assert dumper.skipped == {"reward_failed": 4}
        assert lines(tmp_path / "dumps", summary.task) == before


BY_BATCH = NormConfig(mean_level="batch", std_level=None)

work = st.sampled_from(["write", "mark", "first", "second", "third"])


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(works=st.lists(work, min_size=2, max_size=12), abandoned=st.sets(st.integers(0, 11), max_size=4))
def test_normalize_and_mark_while_dumping(
    works: list[str], abandoned: set[int], tokenizer_path: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Case 34: dumps, marks and new rewards of a group at once: each reading is one whole writing; the last work stays.

    Some callers go away while their work is under way, as those of a collector that lost Redis do.
    """
    root = tmp_path_factory.mktemp("case34")
    dumper = Dumper(RunSettings(dump_to_file=True, fileroot=root, tokenizer_path=tokenizer_path), RUN)
    asyncio.run(_race(works, abandoned, dumper, root))


REWARDS = {"first": 1.5, "second": 2.5, "third": 3.5}


async def _race(works: list[str], abandoned: set[int], dumper: Dumper, root: Path) -> None:
    await dumper.open()
    summary, rows = group_of({idx: [versions(0, 1, reward=0.25)] for idx in range(12)})
    await dumper.write("rollout/1", summary, rows, headers_of(summary), "accepted", "", 1)
    seen: list[list[dict[str, Any]]] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(lines(root, summary.task))

    watcher = threading.Thread(target=watch)
    watcher.start()
    tasks = [asyncio.create_task(_do(one, dumper, summary, rows)) for one in works]
    await asyncio.sleep(0)  # all have been asked for, in this order
    for at in abandoned & set(range(len(tasks))):
        tasks[at].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await dumper.close()
    done.set()
    watcher.join(30)
    seen.append(lines(root, summary.task))
    for found in seen:
        assert len(found) == 12
        assert len({(one["reward"], one.get("original_reward"), one["outcome"], one["reason"]) for one in found}) == 1
        assert found[0]["reward"] == 0.25 or found[0]["original_reward"] == 0.25
    assert not dumper.skipped
    if not abandoned:
        assert (seen[-1][0]["outcome"], seen[-1][0]["reward"]) == _expected(works)


async def _do(what: str, dumper: Dumper, summary: GroupSummary, rows: list[Row]) -> None:
    if what == "write":
        await dumper.write("rollout/1", summary, rows, headers_of(summary), "accepted", "", 1)
    elif what == "mark":
        await dumper.mark_evicted(summary.task, "rollout/1", "stale")
    else:
        changed = GroupSummary.unpack(summary.pack())
        for rollout in changed.rollouts:
            rollout.rows[0].original_reward, rollout.rows[0].reward = rollout.rows[0].reward, REWARDS[what]
        await dumper.rewrite_rewards(DumpRewrite(changed.task, "rollout/1", changed).pack())


def _expected(works: list[str]) -> tuple[str, float]:
    """What one work after the other leaves."""
    outcome, reward = "accepted", 0.25
    for one in works:
        if one == "write":
            outcome, reward = "accepted", 0.25
        elif one == "mark":
            outcome = "evicted"
        else:
            reward = REWARDS[one]
    return outcome, reward


class TestWhatIsMissing:
    """The reason is logged as a warning and counted, the pipeline goes on."""

    @pytest.mark.parametrize(
        ("key", "why", "line"),
        [
            ("rewards", "no_reward", {"reward": None, "tail_version": 1}),
            ("versions", "no_versions", {"reward": 1.0, "head_version": 7, "tail_version": 7, "version_rle": [[7, 3]]}),
            ("loss_mask", "no_loss_mask", None),
        ],
    )
    async def test_keys(
        self, driver: Driver, dumper: Dumper, tmp_path: Path, key: str, why: str, line: dict[str, Any] | None
    ) -> None:
        """11: a row without a required key is counted and told of; the group is committed as if there were no dump."""
        await driver.store.set_version(7)
        await driver.lead(max_staleness=20)
        one = versions(1, 1)
        one.tokens.pop(key, None)
        if key == "rewards":
            one.reward = None
        (task,) = await driver.submit(1, size=1)
        await committed(driver, dumper, task, [one])
        assert dumper.skipped == {why: 1}
        found = lines(tmp_path / "dumps", task)
        assert [line and {name: got[name] for name in line} for got in found] == ([line] if line else [])
        status = await driver.store.status()
        assert (status.count("accepted"), status.ready) == (1, 1)
        if key == "versions":
            assert places(tmp_path / "dumps") == [f"{RUN}/rollout/7/{task}.jsonl"]

    async def test_rows_without_a_trained_token(self, driver: Driver, dumper: Dumper, tmp_path: Path) -> None:
        """11: such rows are skipped; the others are dumped, with their own places."""
        (task,) = await driver.submit(1, size=2)
        await committed(driver, dumper, task, [row([3, 4], [0, 0]), versions(1, 1)])
        assert [one["sample_idx"] for one in lines(tmp_path / "dumps", task)] == [1]
        assert dumper.skipped == {"no_trained_token": 1}

    async def test_a_tokenizer_that_raises_anything(self, driver: Driver, dumper: Dumper) -> None:
        """11: whatever a tokenizer raises costs the file, not the group."""

        class Broken:
            def decode(self, *_: object, **__: object) -> str:
                raise IndexError("piece id is out of range")

        dumper._tokenizer = Broken()
        (task,) = await driver.submit(1, size=1)
        await committed(driver, dumper, task, [versions(1, 1)])
        assert dumper.skipped == {"write_failed": 1}
        assert (await driver.store.status()).count("accepted") == 1
        await driver.store.set_version(3)
        assert await driver.store.evict_stale(driver.epoch) == [task]
        assert await driver.store.evicted_dumps() == [], "there is nothing to mark later"

    async def test_no_tokenizer(self, dump: dict[str, Any]) -> None:
        """11: a dumper whose tokenizer was not loaded skips groups and counts them."""
        made = Dumper(RunSettings(**dump), RUN)
        summary, rows = group_of({0: [versions(1, 1)]})
        assert not await made.write("rollout/1", summary, rows, headers_of(summary), "accepted", "", 1)
        assert made.skipped == {"no_tokenizer": 1}
        await made.close()

    async def test_a_folder_that_cannot_be_written_any_more(
        self, redis_url: str, run_name: str, dump: dict[str, Any]
    ) -> None:
        """11: a disk that fails in mid-run costs the files; batches flow, and files come again once it is well."""
        async with services(redis_url, run_name, max_staleness=9, **dump) as (_, client):
            blocked = dump["fileroot"] / run_name / "rollout"
            blocked.parent.mkdir(parents=True, exist_ok=True)
            blocked.write_text("in the way")  # as an unwritable disk: every write is an OSError
            for _ in range(2):
                await client.submit({"ids": [1, 2]}, WORKFLOW, {})
            (batch,) = await read(client, 1)
            assert len(batch.groups) == 2
            blocked.unlink()
            after = [await client.submit({"ids": [1, 2]}, WORKFLOW, {}) for _ in range(2)]
            await read(client, 1)
            assert places(dump["fileroot"]) == [f"{run_name}/rollout/0/{task}.jsonl" for task in after]


async def test_loop_lag_while_dumping(dumper: Dumper) -> None:
    """Case 33: dumps of large groups leave the event loop free: p99 of its lag is a small part of what they take."""
    mask = [0] + [1] * 19_999
    summary, rows = group_of({idx: [row([5] * 20_000, mask, [1 if on else -1 for on in mask])] for idx in range(40)})
    lags: list[float] = []
    watch = asyncio.create_task(watch_loop(lags.append, 0.005))
    began = asyncio.get_running_loop().time()
    for task in range(4):  # in turn, so that a dump on the loop would stall it for a quarter of the whole
        summary.task = task
        assert await dumper.write("rollout/1", summary, rows, headers_of(summary), "accepted", "", 1)
    took = asyncio.get_running_loop().time() - began
    watch.cancel()
    assert len(lags) > 20
    assert float(np.quantile(lags, 0.99)) < took / 8, (max(lags), took)


# -- groups by hand ----------------------------------------------------------------------------------------------------


def versions(head: int, tail: int, *, reward: float = 1.0) -> Row:
    """A row of one prompt token and three trained tokens, of two versions."""
    return row([3, 4, 5, 6], [0, 1, 1, 1], [-1, head, tail, tail], reward)


async def published(driver: Driver, task: int, slots: Sequence[Row | list[Row]], kind: str = "tensor") -> Headers:
    """Run the group's slots; slot i delivers `slots[i]`: their headers."""
    await driver.admit()
    headers = {}
    for attempt in [one for one in await driver.claim() if one[0] == task]:
        given = slots[attempt[1]]
        rows = given if isinstance(given, list) else [given]
        summaries = [RowSummary.of(one) for one in rows]
        header = SlotHeader(*attempt, outcome="usable", rows=summaries, result_kind=kind)
        await driver.store.publish(
            *attempt, outcome=SlotOutcome.USABLE, kind=None, header=header.pack(), rows=encode_rows(rows),
            rows_ttl_s=600,
        )  # fmt: skip
        headers[attempt[1]] = header
    return headers


def committer(driver: Driver, dumper: Dumper, shaping: RewardShaping | None = None) -> Committer:
    """A committer of its own."""
    metrics = CollectorMetrics(RunSettings())
    return Committer(driver.store, AcceptFilter([]), dumper, shaping or RewardShaping(), metrics)


async def committed(
    driver: Driver,
    dumper: Dumper,
    task: int,
    slots: Sequence[Row | list[Row]],
    *,
    kind: str = "tensor",
    is_eval: bool = False,
    shaping: RewardShaping | None = None,
    norm: NormConfig | None = None,
) -> GroupSummary:
    """Run a group whose slot i delivers `slots[i]`, decide, dump and commit: its summary where it is ready."""
    headers = await published(driver, task, slots, kind)
    rules = GroupRules(1, is_eval=is_eval, reward_normalization=norm)
    await committer(driver, dumper, shaping).commit(driver.epoch, Assembled(task, len(slots), rules, headers))
    found = [summary for name, summary in await driver.store.ready(100) if name == task]
    return GroupSummary.unpack(found[0]) if found else GroupSummary(task, len(slots), [])


async def rewritten(driver: Driver, dumper: Dumper) -> None:
    """Rewrite what is to be rewritten, as the collector does."""
    entries = await driver.store.dump_rewrites(100)
    assert await driver.store.dump_rewrites(100) == entries, "until it is done"
    for entry in entries:
        await dumper.rewrite_rewards(entry)
    await driver.store.forget_dump_rewrites(entries)
    assert await driver.store.dump_rewrites(100) == []


async def counted(client: Any, **counts: int) -> None:
    """Wait until the run's counters are so high."""
    async with asyncio.timeout(30):
        while True:
            status = await client.status()
            if all(status.count(name) >= value for name, value in counts.items()):
                return
            await asyncio.sleep(0.02)
