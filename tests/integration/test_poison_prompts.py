"""Prompts, specs and rules that cannot be read: the group is set aside or rejected, and the next one runs."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
from driver import Driver
from hypothesis import given, settings
from hypothesis import strategies as st
from poison import FUZZ, JUNK, RULES, TASK, VALUES, add, ended, in_a_run, outcome, store_of, until
from services import services
from structlog.testing import capture_logs

from forebay.wire.envelopes import GroupSpec


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
