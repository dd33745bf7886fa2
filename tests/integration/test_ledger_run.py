"""The drop ledger and the dead letters of a run of real processes, as an operator finds them with the command line."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

from scripted_server import answer
from services import WORKFLOW, Services, read, services

from forebay import AsyncClient
from forebay.cli_ledger import By, tally
from forebay.store.records import RunStatus


async def forebay(running: Services, *words: str, code: int = 0) -> list[str]:
    """Run ``forebay ...`` for the run: its lines."""
    environment = {
        **os.environ,
        "REDIS_URL": running.settings.resolved_redis_url(),
        "FOREBAY_EXPERIMENT_NAME": running.settings.experiment_name,
    }
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "forebay", *words],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout.splitlines()


async def settled(client: AsyncClient, **counts: int) -> RunStatus:
    """The status once the counters are at least so high."""
    async with asyncio.timeout(40):
        while True:
            status = await client.status()
            if all(status.count(name) >= value for name, value in counts.items()):
                return status
            await asyncio.sleep(0.05)


async def test_every_group_that_did_not_arrive(redis_url: str, run_name: str) -> None:
    """4.4, 6: one entry for each end but delivery, by reason, by prompt; the sums are those of the counters."""
    rules: dict[str, Any] = {
        "max_barren_groups": 100,
        "max_contract_errors": 100,
        "max_failed_share_data": 1,
        "max_failed_share_timeout": 1,
        "max_failed_share_contract": 1,
        "group_deadline_s": 2.0,
        "episode_timeout_s": 2.0,
        "requeue_evicted": True,
    }
    ends: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("no_usable_slot", {"action": "raise"}, {}),
        ("no_usable_slot", {"action": "empty"}, {}),
        ("no_usable_slot", {"action": "reject"}, {}),
        ("no_usable_slot", {"action": "hang"}, {}),
        ("incomplete", {"actions": {"0": "reject"}}, {"drop_incomplete_group": True}),
        ("below_minimum", {"actions": {"0": "reject"}}, {"reward_normalization": True}),
        ("filtered", {"rewards": {"0": 0.1, "1": 0.2}}, {"should_accept_fn": "pipeline_workflows.accept_good"}),
        ("accept_error", {}, {"should_accept_fn": "pipeline_workflows.accept_broken"}),
    ]
    async with services(redis_url, run_name, collector=False, worker=False, **rules) as (running, client):
        for at, (reason, data, options) in enumerate(ends):
            key = f"{reason}-{at}"
            await client.submit({"ids": [1], **data}, WORKFLOW, {}, idempotency_key=key, **options)
            await settled(client, submitted=at + 1, rejected=at + 1 if data.get("action") != "hang" else 0)
        await settled(client, rejected=len(ends))
        stale = await client.submit({"ids": [1]}, WORKFLOW, {}, idempotency_key="old")
        await settled(client, accepted=1)
        await client.set_version(5)
        await settled(client, evicted=1, requeued=1)
        running.server.default = answer([7, 8, 9], weight_version="5")
        await client.submit({"ids": [1]}, WORKFLOW, {})
        await client.end_of_data()
        (batch, *_) = await read(client, 1)
        status = await client.status()
        drops = await client.drops()

        assert Counter(drop.outcome for drop in drops) == {
            name: status.count(name) for name in ("rejected", "evicted") if status.count(name)
        }
        by_reason = [json.loads(line) for line in await forebay(running, "drops", "--by", "reason", "--json")]
        counted = {line["reason"]: line["groups"] for line in by_reason}
        for reason in {reason for reason, _, _ in ends}:
            assert counted[f"rejected: {reason}"] == status.count(f"rejected:{reason}")
        assert counted["evicted: stale"] == status.count("evicted")
        assert sum(counted.values()) == status.count("rejected") + status.count("evicted")
        prompts = {name for name, _ in tally(drops, By.PROMPT)}
        assert prompts >= {f"{reason}-{at}" for at, (reason, _, _) in enumerate(ends)} | {"old"}
        assert len({drop.task_id for drop in drops}) == len(drops), "one entry each"
        (old,) = [drop for drop in drops if drop.task_id == stale]
        assert old.child is not None
        assert not {group.task for group in batch.groups} & {drop.task_id for drop in drops}
        assert all(drop.detail for drop in drops)


async def test_dead_letters_are_redriven_while_the_run_goes_on(redis_url: str, run_name: str) -> None:
    """4.2: list, show, redrive one, by reason, all, and twice; what comes again is delivered, and only once."""
    rules = {"max_failed_share_data": 1, "max_staleness": 50, "batch_size": 1}
    async with services(redis_url, run_name, collector=False, worker=False, **rules) as (running, client):
        running.server.default = 400
        tasks = [await client.submit({"ids": [1]}, WORKFLOW, {}, idempotency_key=f"q{at}") for at in range(3)]
        raised = await client.submit({"ids": [1], "action": "raise"}, WORKFLOW, {}, idempotency_key="q3")
        await settled(client, rejected=4)
        listed = await forebay(running, "dead", "list")
        assert len(listed) == 8
        assert all("400" in line and "(group rejected)" in line for line in listed if f"{raised}:" not in line)
        shown = "\n".join(await forebay(running, "dead", "show", f"{raised}:1"))
        assert "RuntimeError: no such puzzle" in shown
        assert "Traceback" in shown
        assert "prompt: q3" in shown

        running.server.default = answer([7, 8, 9], weight_version="0")
        assert await forebay(running, "dead", "redrive", str(tasks[0])) == [f"group {tasks[0]} comes again as 5"]
        assert len(await forebay(running, "dead", "redrive", "--reason", "scripted 400")) == 2
        assert (await client.redrive(raised)).state == "created"
        assert await forebay(running, "dead", "redrive", *map(str, (*tasks, raised)), code=1) == []
        batches = await read(client, 3, timeout_s=30)
        assert sorted(group.parent for batch in batches for group in batch.groups) == tasks
        status = await settled(client, rejected=5)
        assert (status.count("redriven"), status.count("submitted"), status.in_flight) == (4, 8, 0)
