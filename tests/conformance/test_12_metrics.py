"""Contract, section 12 (metrics), in the page's order: what each is, in batches, for Prometheus.

``docs/metrics.md`` lists every name; a test here holds it against what is emitted, both ways.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from driver import Driver
from helpers.building import group_of, row
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr
from scripted_server import answer
from services import WORKFLOW, Services, read, services

from forebay import AsyncClient, RunSettings, Settings
from forebay.errors import PortInUseError, SettingsError
from forebay.http_metrics import Listen, MetricsServer, is_loopback
from forebay.metrics import GroupTally, batch_metrics, scope_metrics
from forebay.outcomes import RejectReason
from forebay.pools import PoolUse
from forebay.store import Store
from forebay.store.records import Channel, RunStatus
from forebay.wire.envelopes import GroupSummary
from forebay_collector.dump import Dumper
from forebay_collector.exposition import Exposition
from forebay_collector.metrics import CollectorMetrics
from forebay_collector.service import Collector
from forebay_workers.metrics import WorkerMetrics, WorkerState
from forebay_workers.publication import Held

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def group(*sizes: int, target: int | None = None, head: int = 3, **values: Any) -> GroupSummary:
    """A group of one row for each of `sizes`, its trained tokens, with that many slots asked for."""
    made, _ = group_of(
        {
            idx: [row([1] * (2 + size), [0, 0] + [1] * size, [-1, -1] + [head] * size, float(idx))]
            for idx, size in enumerate(sizes)
        }
    )
    made.group_size = len(sizes) if target is None else target
    for name, value in values.items():
        setattr(made, name, value)
    return made


def status(**values: Any) -> RunStatus:
    """The status of a run in which nothing happened but `values`."""
    empty: dict[str, Any] = {
        "version": 0, "delivered_ahead": 0, "capacity": 8, "queued": 0, "running": 0, "ready": 0, "cut": 0,
        "queued_jobs": 0, "leased": 0, "collector_alive": True, "counters": {}, "workers": {}, "servers": (),
    }  # fmt: skip
    return RunStatus(**{**empty, **values})


class TestGroups:
    """target_slot_count n, usable_slot_count u, trainable_slot_count t, their yields, and outcomes."""

    def test_worked_example(self) -> None:
        """12: n = 4: one accepted of u = 4, one filtered of 2, one below its minimum of 1, one of 0."""
        tally = GroupTally()
        tally.add(group(1, 1, 1, 1), None)
        tally.add(group(1, 1, target=4), RejectReason.FILTERED)
        tally.add(group(1, target=4), RejectReason.BELOW_MINIMUM)
        tally.add(group(target=4), RejectReason.NO_USABLE_SLOT)
        assert tally.metrics("rollout") == {
            "rollout/target_slot_count": 4.0,
            "rollout/usable_slot_count": (4 + 2 + 1 + 0) / 4,
            "rollout/trainable_slot_count": (4 + 2 + 0 + 0) / 4,
            "rollout/fully_masked_group": 0.25,
            "rollout/singleton_slot_group": 0.25,
            "rollout/pre_filter_usable_slot_yield": (1 + 0.5 + 0.25 + 0) / 4,
            "rollout/pre_filter_trainable_slot_yield": (1 + 0.5) / 4,
            "rollout/accepted": 1.0,
            "rollout/rejected": 3.0,
            "rollout/rejected/filtered": 1.0,
            "rollout/rejected/below_minimum": 1.0,
            "rollout/rejected/no_usable_slot": 1.0,
        }

    @pytest.mark.parametrize("reason", [None, *RejectReason])
    def test_trainable(self, reason: RejectReason | None) -> None:
        """12: t is u if the group survives all filters before should_accept_fn, else 0."""
        tally = GroupTally()
        tally.add(group(1, 1, target=3), reason)
        survives = reason in {None, RejectReason.FILTERED, RejectReason.ACCEPT_ERROR}
        assert tally.trainable_slots == (2 if survives else 0)

    def test_nothing_decided(self) -> None:
        """12: no mean of nothing."""
        assert GroupTally().metrics("rollout") == {"rollout/accepted": 0.0, "rollout/rejected": 0.0}

    def test_scopes(self) -> None:
        """12: the prefix is the scope's; groups of which no summary is left count with their slots."""
        found = scope_metrics(
            [group(1, 1)], "eval-rollout", rejected=[(4, 3, "filtered"), (4, 1, "below_minimum")], evicted=[(2, 1)]
        )
        assert all(name.startswith("eval-rollout/") for name in found)
        want = {
            "accepted": 2, "rejected": 2, "rejected/filtered": 1, "rejected/below_minimum": 1, "evicted": 1,
            "target_slot_count": (2 + 4 + 4 + 2) / 4, "usable_slot_count": (2 + 3 + 1 + 1) / 4,
            "trainable_slot_count": (2 + 3 + 0 + 1) / 4, "fully_masked_group": 0, "singleton_slot_group": 0.5,
            "pre_filter_usable_slot_yield": (1 + 0.75 + 0.25 + 0.5) / 4,
            "pre_filter_trainable_slot_yield": (1 + 0.75 + 0 + 0.5) / 4, "usable_group_size": 2,
        }  # fmt: skip
        assert {name: found[f"eval-rollout/{name}"] for name in want} == pytest.approx(want)
        assert not [name for name in found if "staleness" in name]
        assert scope_metrics([], "rollout") == {
            "rollout/accepted": 0.0, "rollout/rejected": 0.0, "rollout/evicted": 0.0,
        }  # fmt: skip

    def test_decided_by_an_older_release(self) -> None:
        """12: where the slots of a rejected group are not known, it is counted all the same."""
        found = scope_metrics([], "rollout", rejected=[(0, 0, "filtered")])
        assert (found["rollout/rejected"], found["rollout/pre_filter_usable_slot_yield"]) == (1.0, 0.0)


class TestCalls:
    """Evaluations, groups that are asked for by their ids, and groups in other numbers than batches have."""

    async def test_of_an_evaluation(self, redis_url: str, run_name: str) -> None:
        """12: groups that were rejected count with their slots: of 2 slots each, 2, 0, 1 and 0 are usable."""
        reject, fail = {"0": "reject", "1": "reject"}, {"0": "raise", "1": "raise"}
        actions: list[dict[str, str]] = [{}, reject, {"1": "reject"}, fail]
        async with services(redis_url, run_name, max_staleness=0) as (_, client):
            data = [{"ids": [1, 2], "actions": each} for each in actions]
            found = (await client.evaluate(data, WORKFLOW, {}, timeout_s=30)).metrics
        want = {
            "accepted": 2, "rejected": 2, "rejected/no_usable_slot": 2, "evicted": 0, "target_slot_count": 2,
            "usable_slot_count": 0.75, "trainable_slot_count": 0.75, "fully_masked_group": 0.5,
            "singleton_slot_group": 0.25, "pre_filter_usable_slot_yield": 0.375,
            "pre_filter_trainable_slot_yield": 0.375, "usable_group_size": 1.5, "tokens": 15,
        }  # fmt: skip
        assert {name: found[f"eval-rollout/{name}"] for name in want} == pytest.approx(want)

    async def test_of_groups_that_went_stale(self, redis_url: str, run_name: str) -> None:
        """12, 6: one that is stale when it is asked for was accepted, and is evicted: its slots count."""
        async with services(redis_url, run_name, max_staleness=0) as (_, client):
            data = {"ids": [1, 2], "actions": {"0": "reject"}}
            stale = await client.submit(data, WORKFLOW, {}, batched=False)
            await reached(client, accepted=1)
            await client.set_version(1)
            found = await client.wait_for_task(stale, timeout_s=20)
        assert found.ended == {stale: "evicted: stale: head version 0, training at version 1"}
        assert found.metrics == {
            "rollout/accepted": 1.0, "rollout/rejected": 0.0, "rollout/evicted": 1.0,
            "rollout/target_slot_count": 2.0, "rollout/usable_slot_count": 1.0, "rollout/trainable_slot_count": 1.0,
            "rollout/fully_masked_group": 0.0, "rollout/singleton_slot_group": 1.0,
            "rollout/pre_filter_usable_slot_yield": 0.5, "rollout/pre_filter_trainable_slot_yield": 0.5,
        }  # fmt: skip

    async def test_of_wait(self, redis_url: str, run_name: str) -> None:
        """12, 13: groups in any number have the metrics of what is in them, and tell nothing of others."""
        async with services(redis_url, run_name, max_staleness=9) as (_, client):
            for at in range(4):
                await submit(client, 1, rewards={"0": float(at), "1": float(at)})
            got = []
            for count in (3, 1):  # across two batches, and a part of one
                found = await client.wait(count, timeout_s=20)
                assert found is not None
                assert found.metrics == batch_metrics(found.groups, "rollout")
                got.append(found)
        assert got[0].metrics["rollout/tokens"] == 3 * 2 * 5
        assert got[1].metrics["rollout/group_loss_weight/max"] == 6.0
        rewards = [reward for found in got for row in found.rows if (reward := row.reward) is not None]
        assert got[0].metrics["rollout/reward"] == pytest.approx(sum(rewards[:6]) / 6)
        assert got[1].metrics["rollout/reward"] == pytest.approx(sum(rewards[6:]) / 2)
        assert not [name for name in got[0].metrics if "staleness" in name or "accepted" in name]


class TestBatches:
    """Per batch: usable_group_size, group_loss_weight, and what else a trainer logs."""

    def test_worked_example(self) -> None:
        """12: two groups of 2 rollouts with 3 + 5 and 1 + 1 trained tokens, one of 1 with 10."""
        groups = [
            group(3, 5, head=3, seconds=1.0, phases={"reward": 0.5}),
            group(1, 1, head=5, seconds=3.0, phases={"reward": 1.5, "judge": 4.0}),
            group(10, head=-1, seconds=2.0),
        ]
        groups[0].rollouts[0].rows[0].truncated = True
        groups[0].rollouts[1].rows[0].truncated = False
        groups[0].rollouts[1].rows[0].turns = 6
        groups[1].rollouts[1].rows[0].original_reward = 7.0
        groups[2].rollouts[0].rows[0].reward = None
        assert batch_metrics(groups, "rollout", 5) == {
            "rollout/usable_group_size": pytest.approx(5 / 3),
            "rollout/group_loss_weight/avg": pytest.approx(20 / 3),
            "rollout/group_loss_weight/min": 2.0,
            "rollout/group_loss_weight/max": 10.0,
            "rollout/group_loss_weight_size_1": 10.0,
            "rollout/group_loss_weight_size_2": 5.0,
            "rollout/reward": pytest.approx((0 + 1 + 0 + 7) / 4),
            "rollout/num_turns": 2.0,
            "rollout/truncated": 0.5,
            "rollout/tokens": 20.0 + 5 * 2,
            "rollout/trained_tokens": 20.0,
            "rollout/group_seconds/avg": 2.0,
            "rollout/group_seconds/max": 3.0,
            "rollout/seconds/reward": 1.0,
            "rollout/seconds/judge": 4.0,
            "rollout/staleness/avg": pytest.approx(2 / 3),
            "rollout/staleness/max": 2.0,
            "rollout/staleness_0": 2.0,
            "rollout/staleness_2": 1.0,
        }

    def test_usable_group_size_counts_rollouts(self) -> None:
        """4.8: a rollout of many rows is one."""
        made, _ = group_of({0: [row([1, 2])] * 5, 1: [row([1, 2])]})
        assert batch_metrics([made], "rollout")["rollout/usable_group_size"] == 2.0

    async def test_a_group_counts_into_the_next_cut(self, redis_url: str, run_name: str) -> None:
        """12: groups decided since the batch before are in the next; a cut that failed delivers nothing twice."""
        store = Store.open(Settings(REDIS_URL=SecretStr(redis_url), experiment_name=run_name.split("/", maxsplit=1)[0]))
        driver = Driver(store)
        await driver.lead(max_staleness=20)
        accepted = await driver.finish(2)
        evaluated, filtered = await driver.submit(1, channel=Channel.EVAL), await driver.submit(1)
        await driver.admit()
        for attempt in await driver.claim():
            await driver.publish(attempt)
        await driver.commit(evaluated[0])
        await driver.commit(filtered[0], reason="filtered")
        assert await store.tally() == {"2:2:": 2, "2:2:filtered": 1}
        told = await store.tally()
        (late,) = await driver.finish(1)  # while the cut is under way
        assert await store.cut(driver.epoch, b"index", [99], None, told) is None
        assert await store.tally() == {"2:2:": 3, "2:2:filtered": 1}, "a cut that failed has told nothing"
        assert await store.cut(driver.epoch, b"index", accepted, None, told) is not None
        assert await store.tally() == {"2:2:": 1}
        assert await store.cut(driver.epoch, b"index", [late], None, await store.tally()) is not None
        assert await store.tally() == {}
        await store.close()

    def test_the_metrics_of_what_was_decided(self) -> None:
        """12: the tally's groups, and those evicted since the batch before; a cut that failed tells again."""
        metrics = CollectorMetrics(RunSettings(batch_size=2))
        metrics.begin(status(counters={"evicted": 3}))
        tally = {"2:2:": 2, "2:1:filtered": 1, "4:0:no_usable_slot": 1, "odd": 3}
        for _ in range(2):
            found = metrics.of_batch([group(1, 1)], status(counters={"evicted": 5}), tally)
            assert (found["rollout/accepted"], found["rollout/rejected"], found["rollout/evicted"]) == (2.0, 2.0, 2.0)
            assert found["rollout/rejected/filtered"] == found["rollout/rejected/no_usable_slot"] == 1.0
            assert found["rollout/target_slot_count"] == (2 * 2 + 2 + 4) / 4
            assert found["rollout/usable_slot_count"] == found["rollout/trainable_slot_count"] == (2 * 2 + 1 + 0) / 4
            assert found["rollout/pre_filter_usable_slot_yield"] == (1 + 1 + 0.5 + 0) / 4
            assert (found["rollout/fully_masked_group"], found["rollout/singleton_slot_group"]) == (0.25, 0.25)
        metrics.cut([group(1, 1)], status())
        last = metrics.of_batch([group(1, 1)], status(counters={"evicted": 6}), {})
        assert (last["rollout/accepted"], last["rollout/rejected"], last["rollout/evicted"]) == (0.0, 0.0, 1.0)

    @pytest.mark.parametrize(("ahead", "cut", "staleness"), [(0, 0, 1), (2, 0, 1), (2, 1, 2), (4, 2, 3)])
    def test_staleness_is_that_of_the_training(self, ahead: int, cut: int, staleness: int) -> None:
        """12, 6: the version at training counts what is handed over or cut ahead of the batch: B = 2, k = 2."""
        metrics = CollectorMetrics(RunSettings(batch_size=2, batches_per_version=2))
        found = metrics.of_batch([group(1, head=3)], status(version=4, delivered_ahead=ahead, cut_batches=cut), {})
        assert found["rollout/staleness/max"] == staleness

    async def test_delivered_with_each_batch(self, redis_url: str, run_name: str) -> None:
        """12: through the pipeline: what was rejected and evicted since the batch before is told with the next."""
        async with services(redis_url, run_name, max_staleness=0, group_size=3) as (running, client):
            await submit(client, 1)  # goes stale while it waits
            await reached(client, accepted=1)
            await client.set_version(1)
            await reached(client, evicted=1)
            await submit(client, 1, action="reject")
            await submit(client, 1, rewards={"0": 0.1, "1": 0.2, "2": 0.3}, should_accept_fn=FILTER)
            await reached(client, rejected=2)
            running.server.default = answer([7, 8, 9], weight_version="1")
            await submit(client, 1)
            await submit(client, 1, actions={"1": "reject"})
            (batch,) = await read(client, 1)
            found = batch.metrics
        want = {
            "accepted": 3, "rejected": 2, "rejected/no_usable_slot": 1, "rejected/filtered": 1, "evicted": 1,
            "target_slot_count": 3, "usable_slot_count": (3 + 0 + 3 + 3 + 2) / 5,
            "trainable_slot_count": (3 + 0 + 3 + 3 + 2) / 5, "fully_masked_group": 0.2, "singleton_slot_group": 0,
            "usable_group_size": 2.5, "tokens": 25, "trained_tokens": 15, "reward": 1, "num_turns": 1,
            "group_loss_weight/min": 6, "group_loss_weight/max": 9, "staleness/max": 0, "staleness_0": 2,
        }  # fmt: skip
        assert {name: found[f"rollout/{name}"] for name in want} == pytest.approx(want)
        assert found["rollout/group_seconds/max"] >= found["rollout/group_seconds/avg"] > 0


class TestPrometheus:
    """And as Prometheus metrics: the real processes, scraped over HTTP."""

    async def test_scraped_from_the_processes(
        self, redis_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """12: what a collector and a worker expose agrees with the run's status, and is listed in the documents."""
        collector, worker = free_port(), free_port()
        monkeypatch.setenv("FOREBAY_COLLECTOR_HTTP_PORT", str(collector))
        monkeypatch.setenv("FOREBAY_WORKER_METRICS_PORT", str(worker))
        async with services(redis_url, run_name, collector=False, worker=False, max_staleness=9) as (_, client):
            await submit(client, 2)
            await submit(client, 1, action="raise")
            await read(client, 1)
            await reached(client, rejected=1)
            run = await client.status()
            told = await scrape(f"http://127.0.0.1:{collector}/metrics")
            assert told["forebay_redis_up"] == told["forebay_collector_leading"] == 1
            assert told["forebay_capacity_groups"] == run.capacity == 20
            assert told["forebay_delivered_ahead_groups"] == run.delivered_ahead == 2
            assert told["forebay_workers_alive"] == told["forebay_servers_registered"] == 1
            assert told['forebay_groups_in_flight{state="ready"}'] == 0
            for name in ("submitted", "started", "accepted", "rejected", "delivered"):
                assert told[f'forebay_groups_total{{event="{name}"}}'] == run.count(name) > 0
            assert told['forebay_groups_rejected_total{reason="no_usable_slot"}'] == 1
            assert told['forebay_slots_total{outcome="usable"}'] == 4
            assert told['forebay_attempt_failures_total{kind="data"}'] == 2
            assert told['forebay_batches_total{event="acked"}'] == 1
            assert told['forebay_groups_decided_total{outcome="accepted",scope="rollout"}'] == 2
            assert told['forebay_usable_group_size_sum{scope="rollout"}'] == 4
            assert told['forebay_group_loss_weight_tokens_sum{scope="rollout"}'] == 12
            assert told["forebay_staleness_versions_count"] == 2
            assert told["forebay_event_loop_lag_seconds_count"] > 0
            there = await scrape(f"http://127.0.0.1:{worker}/metrics")
            assert there["forebay_worker_slots"] == 128
            assert there["forebay_worker_slots_busy"] == 0
            assert there['forebay_worker_attempts_total{kind="",outcome="usable"}'] == 4
            assert there['forebay_worker_attempts_total{kind="data",outcome="failed"}'] == 2
            assert there["forebay_worker_servers"] == there["forebay_worker_servers_healthy"] == 1
            assert there["forebay_event_loop_lag_seconds_count"] > 0

    async def test_evaluation_groups_are_exposed(self, redis_url: str, run_name: str) -> None:
        """12: groups of evaluations, which are in no batch, count under their own scope."""
        async with exposition(redis_url, run_name) as made:
            metrics = CollectorMetrics(RunSettings(), made)
            metrics.decided(group(2, 3, is_eval=True, phases={"judge": 2.0}), None)
            metrics.decided(group(is_eval=True), RejectReason.NO_USABLE_SLOT)
            told = samples((await made.render()).decode())
        assert told['forebay_groups_decided_total{outcome="accepted",scope="eval-rollout"}'] == 1
        assert told['forebay_groups_decided_total{outcome="no_usable_slot",scope="eval-rollout"}'] == 1
        assert told['forebay_group_loss_weight_tokens_sum{scope="eval-rollout"}'] == 5
        assert told['forebay_phase_seconds_sum{phase="judge",scope="eval-rollout"}'] == 2

    async def test_phases_are_bounded(self, redis_url: str, run_name: str) -> None:
        """12: a workflow that names a phase after each prompt does not make a series of each."""
        async with exposition(redis_url, run_name) as made:
            for at in range(1000):
                made.decided(group(1, phases={f"phase {at}": 1.0}), None)
            told = samples((await made.render()).decode())
        counts = {name: value for name, value in told.items() if name.startswith("forebay_phase_seconds_count")}
        assert len(counts) == 33
        assert counts['forebay_phase_seconds_count{phase="other",scope="rollout"}'] == 1000 - 32

    async def test_without_redis(self, run_name: str) -> None:
        """12: while Redis is away a scrape answers within seconds and says so."""
        async with exposition(f"redis://127.0.0.1:{free_port()}", run_name) as made:
            async with asyncio.timeout(10):
                told = samples((await made.render()).decode())
            assert told["forebay_redis_up"] == 0
            assert "forebay_version" not in told

    async def test_a_collector_stops_listening(self, redis_url: str, run_name: str) -> None:
        """12: the port is free once the collector has ended, and a standby is scraped too."""
        async with services(redis_url, run_name) as (running, _):
            store = Store.open(running.settings)
            standby = Collector(store, running.rules, Listen(0))
            stop = asyncio.Event()
            serving = asyncio.create_task(standby.serve(stop))
            async with asyncio.timeout(10):
                while not standby.metrics_url:  # noqa: ASYNC110 (set by another task)
                    await asyncio.sleep(0.01)
            assert (await scrape(standby.metrics_url))["forebay_collector_leading"] == 0
            stop.set()
            await serving
            with pytest.raises(aiohttp.ClientConnectorError):
                await scrape(standby.metrics_url)
            await store.close()


class TestListening:
    """Off by default, on loopback unless told otherwise, and then with a token."""

    @pytest.mark.parametrize(
        ("command", "port"), [("collector", "FOREBAY_COLLECTOR_HTTP_PORT"), ("worker", "FOREBAY_WORKER_METRICS_PORT")]
    )
    async def test_port_in_use(self, redis_url: str, run_name: str, command: str, port: str) -> None:
        """12: a taken port is one line that names the setting and the remedy; the service does not start."""
        async with services(redis_url, run_name) as (running, _), _taken() as number:
            code, text = await asyncio.to_thread(forebay, running, command, {port: str(number)})
        assert code == 2
        assert re.search(
            rf"^error: {port}={number}: the port is in use on 127\.0\.0\.1; choose another, or 0", text, re.MULTILINE
        )
        assert "Traceback" not in text

    @pytest.mark.parametrize(("command", "kind"), [("collector", "COLLECTOR_HTTP"), ("worker", "WORKER_METRICS")])
    async def test_off_loopback_without_a_token(self, redis_url: str, run_name: str, command: str, kind: str) -> None:
        """12: a host that others can reach is refused without a token, before anything listens."""
        environment = {f"FOREBAY_{kind}_PORT": "0", f"FOREBAY_{kind}_HOST": "0.0.0.0"}
        async with services(redis_url, run_name) as (running, _):
            code, text = await asyncio.to_thread(forebay, running, command, environment)
        assert code == 2
        assert f"error: FOREBAY_{kind}_HOST=0.0.0.0 can be reached from other machines: set FOREBAY_HTTP_TOKEN" in text
        assert "metrics.listening" not in text

    async def test_the_token_is_asked_for_and_never_told(
        self, redis_url: str, run_name: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """12: with a token only who sends it is answered; it is in no log line and in no repr."""
        listen = Listen(0, "0.0.0.0", SecretStr("hunter2-and-more"))
        async with exposition(redis_url, run_name) as made, MetricsServer(made.render, listen) as server:
            url = server.url.replace("0.0.0.0", "127.0.0.1")
            for given in (None, "Bearer", "Bearer hunter2", "hunter2-and-more", "Bearer hunter2-and-moreX", "Bearer é"):
                async with aiohttp.ClientSession() as session:
                    headers = {} if given is None else {"Authorization": given}
                    async with session.get(url, headers=headers) as reply:
                        assert reply.status == 401, given
                        assert "hunter2" not in await reply.text()
            told = await scrape(url, "hunter2-and-more")
            assert told["forebay_redis_up"] == 1
            assert "hunter2" not in repr(listen)
        shown = capfd.readouterr()
        assert "hunter2" not in shown.out + shown.err

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.5.5.5", "::1", "localhost"])
    def test_loopback(self, host: str) -> None:
        """12: these need no token."""
        assert is_loopback(host)
        MetricsServer(_nothing, Listen(0, host))

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "", "127.0.0.1.example.org"])
    def test_not_loopback(self, host: str) -> None:
        """12: these do."""
        assert not is_loopback(host)
        with pytest.raises(SettingsError, match="FOREBAY_HTTP_TOKEN"):
            MetricsServer(_nothing, Listen(0, host))
        MetricsServer(_nothing, Listen(0, host, SecretStr("x")))

    async def test_a_host_that_is_not_ours(self) -> None:
        """12: an address of another machine is a clear error, not a port in use."""
        with pytest.raises(SettingsError, match=r"host=192\.0\.2\.1, port=0: cannot listen there"):
            async with MetricsServer(_nothing, Listen(0, "192.0.2.1", SecretStr("x"))):
                pass

    async def test_port_in_use_in_process(self) -> None:
        """12: PortInUseError, which is an OSError."""
        async with MetricsServer(_nothing, Listen(0)) as first:
            port = int(first.url.rsplit(":", 1)[1].split("/", maxsplit=1)[0])
            with pytest.raises(PortInUseError):
                async with MetricsServer(_nothing, Listen(port)):
                    pass


class TestDocuments:
    """Every metric that is emitted is in ``docs/metrics.md``, and the other way round."""

    def test_with_each_batch(self) -> None:
        """12: the names of a batch that has everything are those of the two tables."""
        metrics = CollectorMetrics(RunSettings())
        tally = dict.fromkeys(["2:2:", *(f"2:2:{reason.value}" for reason in RejectReason)], 1)
        full = group(1, 1, phases={"reward": 1.0})
        full.rollouts[0].rows[0].truncated = True
        emitted = set(metrics.of_batch([full], status(), tally))
        listed = table("## With each batch", "## Prometheus")
        patterns = {name: pattern(name) for name in listed}
        short = {name.removeprefix("rollout/") for name in emitted}
        assert {name for name in short if not any(one.fullmatch(name) for one in patterns.values())} == set()
        assert {name for name, one in patterns.items() if not any(one.fullmatch(other) for other in short)} == set()
        text = DOCS.read_text(encoding="utf-8")
        assert all(f"`{reason.value}`" in text for reason in RejectReason)

    async def test_of_the_collector(self, redis_url: str, run_name: str) -> None:
        """12: a collector's families are those of its table."""
        async with exposition(redis_url, run_name) as made:
            made.decided(group(1, phases={"reward": 1.0}), None)
            assert families((await made.render()).decode()) == set(table("### Collector", "### Worker"))

    async def test_of_a_worker(self) -> None:
        """12: a worker's families are those of its table."""
        pools = {"rewards": PoolUse(1, 0, 2)}
        state = WorkerState(4, 1, {("usable", ""): 1}, 1, 1, pools, Held())
        async with (
            WorkerMetrics(lambda: state, Listen(0)) as made,
            aiohttp.ClientSession() as session,
            session.get(made.url) as reply,
        ):
            text = await reply.text()
        assert families(text) == set(table("### Worker", "Both also"))


# -- helpers -----------------------------------------------------------------------------------------------------------

FILTER = "pipeline_workflows.accept_good"


async def _nothing() -> bytes:
    return b""


@asynccontextmanager
async def exposition(redis_url: str, run_name: str) -> AsyncIterator[Exposition]:
    """What a collector of a run would expose."""
    name = run_name.split("/", maxsplit=1)[0]
    settings = Settings(
        REDIS_URL=SecretStr(redis_url), experiment_name=name, redis_timeout_s=1.0, redis_away_s=1.0
    )  # fmt: skip
    store = Store.open(settings)
    yield Exposition(store, Dumper(RunSettings(), run_name))
    await store.close()


@asynccontextmanager
async def _taken() -> AsyncIterator[int]:
    """A port on which something listens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def forebay(running: Services, command: str, environment: dict[str, str]) -> tuple[int, str]:
    """Run a command of the program to its end: its exit code, and all it printed."""
    given = {
        **os.environ,
        "REDIS_URL": running.settings.resolved_redis_url(),
        "FOREBAY_EXPERIMENT_NAME": running.settings.experiment_name,
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-m", "forebay", command], env=given, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


async def submit(client: AsyncClient, count: int, **fields: Any) -> None:
    """Submit groups of the echo workflow."""
    options = {name: fields.pop(name) for name in list(fields) if name not in {"action", "actions", "rewards"}}
    for _ in range(count):
        await client.submit({"ids": [1, 2], **fields}, WORKFLOW, {}, **options)


async def reached(client: AsyncClient, **counts: int) -> None:
    """Wait until the run's counters are so high."""
    async with asyncio.timeout(30):
        while True:
            run = await client.status()
            if all(run.count(name) >= value for name, value in counts.items()):
                return
            await asyncio.sleep(0.02)


async def scrape(url: str, token: str | None = None) -> dict[str, float]:
    """The samples at `url`, by name with labels in order."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as reply:
        assert reply.status == 200
        assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return samples(await reply.text())


def samples(text: str) -> dict[str, float]:
    """The samples of a scrape, by name with labels in alphabetical order."""
    out = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            out[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return out


def families(text: str) -> set[str]:
    """The names of the families in a scrape, as they are written: counters with ``_total``."""
    return {
        f"{family.name}_total" if family.type == "counter" and not family.name.endswith("_total") else family.name
        for family in text_string_to_metric_families(text)
        if not family.name.startswith(("process_", "python_")) and not family.name.endswith("_created")
    }


def table(begin: str, end: str) -> list[str]:
    """The names in the first column of the tables between two lines of the documents that begin so."""
    text = DOCS.read_text(encoding="utf-8")
    part = text[text.index(f"\n{begin}") : text.index(f"\n{end}")]
    return re.findall(r"^\| `([^`]+)` \|", part, re.MULTILINE)


def pattern(name: str) -> re.Pattern[str]:
    """What a listed name stands for."""
    parts: Iterable[str] = re.split(r"(<N>|<\w+>)", name)
    return re.compile(
        "".join(r"\d+" if part == "<N>" else ".+" if part[:1] == "<" else re.escape(part) for part in parts)
    )
