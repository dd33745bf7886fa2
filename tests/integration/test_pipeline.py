"""Groups from submit to the trainer through real Redis and real HTTP (contract, sections 2 to 6 and 13)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from conditions import eventually
from scripted_server import answer
from services import WORKFLOW, read, services

from forebay import AsyncClient
from forebay.errors import (
    CollectorUnavailableError,
    ImportNotAllowedError,
    StallError,
    SubmitError,
    VersionError,
    WorkflowError,
)
from forebay.store.records import RunStatus


def prompt(**fields: Any) -> dict[str, Any]:
    """A prompt of two tokens."""
    return {"ids": [1, 2], **fields}


async def submit(client: AsyncClient, count: int = 1, **fields: Any) -> list[int]:
    """Submit that many groups of the echo workflow."""
    options = {name: fields.pop(name) for name in list(fields) if name not in {"action", "actions", "rewards"}}
    return [await client.submit(prompt(**fields), WORKFLOW, {}, **options) for _ in range(count)]


async def settled(client: AsyncClient, **counts: int) -> RunStatus:
    """The status once the counters are at least so high."""
    async with asyncio.timeout(20):
        while True:
            status = await client.status()
            if all(status.count(name.replace("__", ":")) >= value for name, value in counts.items()):
                return status
            await asyncio.sleep(0.02)


async def test_groups_become_batches_of_tensors(redis_url: str, run_name: str) -> None:
    """What a workflow returned reaches the trainer as padded tensors, grouped, with versions only where generated."""
    async with services(redis_url, run_name) as (_, client):
        tasks = await submit(client, 2)
        (batch,) = await read(client, 1)
        assert sorted(group.task for group in batch.groups) == tasks
        tensors = batch.tensors()
        assert tensors["input_ids"].tolist() == [[1, 2, 7, 8, 9]] * 4
        assert tensors["input_ids"].dtype == torch.int32
        assert tensors["attention_mask"].dtype == torch.bool
        assert tensors["versions"].tolist() == [[-1, -1, 0, 0, 0]] * 4, "case 23: prompt versions are ignored"
        assert tensors["loss_mask"].tolist() == [[0, 0, 1, 1, 1]] * 4
        assert torch.allclose(tensors["logprobs"][:, 2:], torch.tensor([[-0.507, -0.508, -0.509]]))
        assert tensors["rewards"].tolist() == [1.0] * 4
        assert batch.group_index.tolist() == [0, 0, 1, 1]
        assert [group.sample_idx for group in batch.rollout_groups] == [(0, 1), (0, 1)]
        assert all(group.head == 0 for group in batch.groups)


async def test_normalization_min_size_and_partial_groups(redis_url: str, run_name: str) -> None:
    """Case 14: each group is centred alone by its usable rollouts, which keep their sample_idx and raw rewards."""
    async with services(redis_url, run_name, group_size=3, max_staleness=9) as (_, client):
        await submit(client, 1, rewards={"0": 1.0, "1": 3.0, "2": 5.0}, reward_normalization=True)
        await submit(client, 1, rewards={"0": 0.0, "2": 2.0}, actions={"1": "reject"}, reward_normalization=True)
        (batch,) = await read(client, 1)
        by_task = {group.task: group for group in batch.groups}
        raw = {task: [r.rows[0].original_reward for r in group.rollouts] for task, group in by_task.items()}
        shaped = {task: [r.rows[0].reward for r in group.rollouts] for task, group in by_task.items()}
        assert raw == {1: [1.0, 3.0, 5.0], 2: [0.0, 2.0]}
        assert shaped[1] == pytest.approx([-1.2247449, 0.0, 1.2247449], abs=1e-6)
        assert shaped[2] == pytest.approx([-1.0, 1.0], abs=1e-6)
        assert [rollout.sample_idx for rollout in by_task[2].rollouts] == [0, 2]
        rewards = batch.tensors()["rewards"].tolist()
        assert sorted(rewards) == pytest.approx(sorted(shaped[1] + shaped[2]), abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"action": "reject"}, "no_usable_slot"),
        ({"action": "raise"}, "no_usable_slot"),
        ({"action": "empty"}, "no_usable_slot"),
        ({"action": "cancel"}, "no_usable_slot"),
        ({"actions": {"0": "reject"}, "drop_incomplete_group": True}, "incomplete"),
        ({"actions": {"0": "reject"}, "reward_normalization": True}, "below_minimum"),
        ({"rewards": {"0": 0.1, "1": 0.2}, "should_accept_fn": "pipeline_workflows.accept_good"}, "filtered"),
        ({"should_accept_fn": "pipeline_workflows.accept_broken"}, "accept_error"),
    ],
)
async def test_rejected_groups_are_counted_by_reason(
    redis_url: str, run_name: str, fields: dict[str, Any], reason: str
) -> None:
    """A group that is not trained on is rejected once, for its reason, and the others are delivered."""
    async with services(redis_url, run_name) as (_, client):
        await submit(client, 1, **fields)
        good = await submit(client, 2)
        (batch,) = await read(client, 1)
        assert sorted(group.task for group in batch.groups) == good
        status = await settled(client, rejected=1)
        assert (status.count("rejected"), status.count(f"rejected:{reason}")) == (1, 1)
        assert status.in_flight == 0


async def test_accepted_by_the_filter(redis_url: str, run_name: str) -> None:
    """should_accept_fn sees the assembled group as tensors with its rollout_group, and may accept it."""
    async with services(redis_url, run_name) as (_, client):
        await submit(client, 2, should_accept_fn="pipeline_workflows.accept_good")
        (batch,) = await read(client, 1)
        assert len(batch.groups) == 2


async def test_one_500_in_a_hundred_slots(redis_url: str, run_name: str) -> None:
    """Case 17: a single HTTP 500 costs a retry, not a slot: all hundred are delivered."""
    async with services(redis_url, run_name, batch_size=10, group_size=10) as (running, client):
        running.server.script.extend([running.server.default] * 50 + [500])
        await submit(client, 10)
        (batch,) = await read(client, 1)
        assert len(batch.rows) == 100


async def test_permanent_400_is_terminal_and_names_the_cause(redis_url: str, run_name: str) -> None:
    """Cases 5 and 7: a prompt that always gets HTTP 400 is tried once for each slot; all others flow."""
    async with services(redis_url, run_name) as (running, client):
        running.server.default = 400
        await submit(client, 1)
        await settled(client, rejected=1)
        calls = len(running.server.requests)
        assert calls == 2, "once for each slot"
        running.server.default = answer([7], weight_version="0")
        await submit(client, 2)
        (batch,) = await read(client, 1)
        assert len(batch.groups) == 2


async def test_transient_failure_is_retried(redis_url: str, run_name: str) -> None:
    """A slot whose tool server went away runs again and counts as attempt 2."""
    async with services(redis_url, run_name) as (_, client):
        await submit(client, 2, actions={"0": "raise_once"})
        (batch,) = await read(client, 1)
        assert [[rollout.attempt for rollout in group.rollouts] for group in batch.groups] == [[2, 1], [2, 1]]


async def test_hung_slot_is_closed_by_the_deadline(redis_url: str, run_name: str) -> None:
    """Cases 1 and 2: a slot that hangs for ever holds up neither its group, past the deadline, nor the others."""
    async with services(redis_url, run_name, group_deadline_s=2.0, episode_timeout_s=2.0) as (_, client):
        await submit(client, 1, actions={"1": "hang"})
        quick = await submit(client, 2)
        first, second = await _two(client)
        assert sorted(group.task for group in first) == quick
        assert [[r.sample_idx for r in group.rollouts] for group in second] == [[0]]


async def _two(client: AsyncClient) -> tuple[list[Any], list[Any]]:
    async with client.batches(timeout_s=20) as stream:
        first = await stream.next()
        await client.end_of_data()
        second = await stream.next()
        assert first is not None
        assert second is not None
        assert second.partial
        return first.groups, second.groups


async def test_servers_that_start_late_burn_no_attempt(redis_url: str, run_name: str) -> None:
    """Case 36: while no inference server answers nothing is claimed; every slot's first attempt counts."""
    async with services(redis_url, run_name) as (running, client):
        await running.server.stop()
        await submit(client, 2)
        await settled(client, started=2)
        await running.server.start()
        (batch,) = await read(client, 1)
        assert {rollout.attempt for group in batch.groups for rollout in group.rollouts} == {1}


async def test_killed_collector_loses_nothing(redis_url: str, run_name: str) -> None:
    """A collector killed between results and commits is followed by one that reads them again: all groups, once."""
    async with services(redis_url, run_name, collector=False, max_staleness=20, group_size=3) as (running, client):
        gate = asyncio.Event()
        default = running.server.default

        async def half(_: dict[str, Any]) -> Any:
            if len(running.server.requests) > 12:
                await gate.wait()
            return web.json_response(default)

        running.server.default = half
        await submit(client, 8)
        await settled(client, slots__usable=12)
        await running.kill("collector")
        gate.set()
        await settled(client, slots__usable=24)
        await running.start_collector()
        batches = await read(client, 4)
        tasks = [group.task for batch in batches for group in batch.groups]
        assert sorted(tasks) == list(range(1, 9))
        assert sum(len(batch.rows) for batch in batches) == 24


async def test_reader_fails_within_seconds_without_a_collector_and_goes_on(redis_url: str, run_name: str) -> None:
    """Case 4: no collector is a clear error within seconds; the same reader goes on once there is one."""
    async with services(redis_url, run_name) as (running, client):
        await running.stop("collector")
        stream = client.batches()
        began = time.monotonic()
        with pytest.raises(CollectorUnavailableError, match="no collector serves run"):
            await stream.next()
        assert time.monotonic() - began < 15
        await submit(client, 2)
        await running.start_collector()
        batch = await stream.next()
        assert batch is not None
        assert len(batch.groups) == 2


async def test_waiting_reader_says_why(redis_url: str, run_name: str) -> None:
    """A read that times out names what the batch waits for."""
    async with services(redis_url, run_name) as (_, client):
        await submit(client, 1)
        await settled(client, accepted=1)
        with pytest.raises(StallError, match="1 of 2 ready"):
            await client.batches(timeout_s=0.3).next()


@pytest.mark.parametrize("version", [-1, 1.5, "x", True, 10**30])
async def test_bad_versions_change_nothing(redis_url: str, run_name: str, version: Any) -> None:
    """A version that is no small integer is refused before anything is touched, by set_version and by the push."""
    async with services(redis_url, run_name) as (running, client):
        with pytest.raises(VersionError, match="must be an integer"):
            await client.set_version(version)
        with pytest.raises(VersionError, match="must be an integer"):
            await client.update_weights_from_disk("/nowhere", version)
        assert await client.version() == 0
        assert running.server.updates == []


async def test_trainer_that_never_steps_gets_a_reason(redis_url: str, run_name: str) -> None:
    """A reader past what staleness allows gets an error that names the remedy, not a hang (contract 6)."""
    async with services(redis_url, run_name, max_staleness=0, stall_timeout_s=0.3) as (_, client):
        await submit(client, 4)
        await read(client, 1)
        with pytest.raises(StallError, match="push the next version"):
            await read(client, 1)


async def test_drained_worker_hands_back(redis_url: str, run_name: str) -> None:
    """Case 18: a worker that is told to stop hands its running slots back; another finishes them, no attempt burned."""
    async with services(redis_url, run_name, attempts_infra=1, attempts_timeout=1) as (running, client):
        gate = asyncio.Event()
        default = running.server.default

        async def wait_then_answer(_: dict[str, Any]) -> Any:
            await gate.wait()
            return web.json_response(default)

        running.server.default = wait_then_answer
        await submit(client, 2)
        await eventually(lambda: len(running.server.requests) == 4, "four requests in flight")
        await running.stop("worker")
        gate.set()
        running.server.default = default
        await running.start_worker("worker-2")
        (batch,) = await read(client, 1)
        assert len(batch.rows) == 4
        status = await client.status()
        assert (status.count("handed_back"), status.count("slots:failed")) == (4, 0)


async def test_killed_worker_loses_nothing(redis_url: str, run_name: str) -> None:
    """Cases 18 and 38: the slots of a SIGKILLed worker run again within lease + 5 s, on another worker."""
    async with services(redis_url, run_name, worker=False, lease_s=3.0) as (running, client):
        default = running.server.default
        running.server.default = _never
        await submit(client, 2)
        await eventually(lambda: len(running.server.requests) == 4, "four requests in flight")
        await running.start_worker("worker-2")
        running.server.default = default
        await running.kill("worker")
        killed = time.monotonic()
        (batch,) = await read(client, 1)
        assert time.monotonic() - killed < running.rules.lease_s + 5
        assert len(batch.rows) == 4
        assert min(rollout.attempt for group in batch.groups for rollout in group.rollouts) >= 2
        assert (await client.status()).count("leases_lost") >= 4


async def _never(_: dict[str, Any]) -> Any:
    await asyncio.Event().wait()


async def test_redis_killed_and_restarted(run_name: str, tmp_path: Path) -> None:
    """Case 39: Redis is SIGKILLed in mid-run and started again: the same processes go on, nothing lost or doubled."""
    from forebay_ops.embedded_redis import RedisHandle, ensure_redis
    from forebay_ops.ports import find_free_port

    port = find_free_port()
    killed: list[RedisHandle] = []
    handle = await asyncio.to_thread(ensure_redis, tmp_path, port=port)
    try:
        async with services(handle.url, run_name, max_staleness=20, group_size=4) as (running, client):
            gate = asyncio.Event()
            default = running.server.default

            async def wait_then_answer(_: dict[str, Any]) -> Any:
                await gate.wait()
                return web.json_response(default)

            await submit(client, 4)
            await settled(client, accepted=4)
            running.server.default = wait_then_answer
            await submit(client, 12)
            await eventually(lambda: len(running.server.requests) == 64, "all slots in flight")
            os.kill(handle.pid, signal.SIGKILL)
            gate.set()
            await asyncio.to_thread(handle.wait, 10)
            killed.append(handle)
            handle = await asyncio.to_thread(ensure_redis, tmp_path, port=port)
            batches = await read(client, 8, timeout_s=30)
            tasks = [group.task for batch in batches for group in batch.groups]
            assert sorted(tasks) == list(range(1, 17))
            assert sum(len(batch.rows) for batch in batches) == 64
            status = await client.status()
            assert (status.count("delivered"), status.in_flight) == (16, 0)
    finally:
        for ended in [*killed, handle]:
            await asyncio.to_thread(ended.stop)


async def test_all_slots_of_a_fleet_are_busy_at_once(redis_url: str, run_name: str) -> None:
    """Case 40: every place of every replica runs a slot, however many run already and stay at the queue's head."""
    replicas, slots = 8, 20
    async with services(redis_url, run_name, worker=False, max_staleness=99, group_size=8) as (running, client):
        await running.kill("worker")
        for replica in range(replicas):
            await running.start_worker(f"worker-{replica}", slots=slots)
        gate = asyncio.Event()

        async def wait_then_answer(_: dict[str, Any]) -> Any:
            await gate.wait()
            return web.json_response(answer([7, 8, 9], weight_version="0"))

        running.server.default = wait_then_answer
        await submit(client, 30)
        await eventually(lambda: len(running.server.requests) == replicas * slots, "all slots of the fleet busy")
        gate.set()
        await settled(client, accepted=30)


class TestRefusedAtSubmit:
    @pytest.mark.parametrize(
        ("options", "error", "text"),
        [
            ({"workflow": "os.path.join"}, ImportNotAllowedError, "not in the run's import allowlist"),
            ({"workflow": "pipeline_workflows.Missing"}, WorkflowError, "pipeline_workflows.Missing"),
            ({"workflow": "pipeline_workflows:accept_good"}, WorkflowError, "no RolloutWorkflow"),
            ({"workflow_kwargs": {"unknown": 1}}, WorkflowError, "do not fit"),
            ({"workflow_kwargs": None}, WorkflowError, "needs workflow_kwargs"),
            ({"data": {"x": object()}}, SubmitError, r"data\['x'\]"),
            ({"group_size": 0}, SubmitError, "group_size=0"),
            ({"group_size": 99_999_999_999}, SubmitError, "from 1 to 4096"),
            ({"min_usable_group_size": 3}, SubmitError, "min_usable_group_size=3"),
            ({"min_usable_group_size": 1, "reward_normalization": True}, SubmitError, "at least 2"),
            ({"should_accept_fn": lambda group: True}, WorkflowError, "lambda"),
        ],
    )
    async def test_bad_groups_enqueue_nothing(
        self, redis_url: str, run_name: str, options: dict[str, Any], error: type[Exception], text: str
    ) -> None:
        """What a worker could not run is refused at once, as a ValueError that says why; nothing is submitted."""
        async with services(redis_url, run_name) as (_, client):
            call: dict[str, Any] = {"data": prompt(), "workflow": WORKFLOW, "workflow_kwargs": {}, **options}
            with pytest.raises(error, match=text) as caught:
                await client.submit(**call)
            assert isinstance(caught.value, ValueError)
            assert (await client.status()).count("submitted") == 0


async def test_dump_of_accepted_and_rejected_groups(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """Every group with rows has one file: outcome, reason, versions and texts (contract 11)."""
    from forebay_ops.tiny_model import create_tiny_model

    model = create_tiny_model(tmp_path / "model")
    dump = {"dump_to_file": True, "fileroot": tmp_path / "dumps", "tokenizer_path": str(model)}
    async with services(redis_url, run_name, **dump) as (_, client):
        await submit(client, 2)
        await submit(client, 1, actions={"0": "reject"}, drop_incomplete_group=True)
        await read(client, 1)
        await settled(client, rejected=1)
    folder = tmp_path / "dumps" / run_name / "rollout" / "0"
    lines = [json.loads(line) for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]
    assert [(line["task_id"], line["sample_idx"], line["outcome"]) for line in lines] == [
        (1, 0, "accepted"), (1, 1, "accepted"), (2, 0, "accepted"), (2, 1, "accepted"), (3, 1, "rejected"),
    ]  # fmt: skip
    assert lines[4]["reason"] == "incomplete"
    assert all(line["version_rle"] == [[0, 3]] and line["prompt_len"] == 2 and line["seqlen"] == 5 for line in lines)
