"""Contract, section 13: the trainer's calls, through real Redis and real HTTP.

Proved elsewhere: idempotency and back-pressure of ``submit``, redelivery, end of data, a dead collector
(``tests/integration/test_store.py``, ``test_pipeline.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from services import WORKFLOW, read, services

from forebay import AsyncClient, NormConfig
from forebay.errors import GroupNotDeliveredError, RunStoppedError, StallError, SubmitError


def prompts(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Prompts of two tokens, numbered."""
    return [{"ids": [1, 2], "number": number, **fields} for number in range(count)]


async def step(client: AsyncClient) -> None:
    """The trainer has stepped: what the scripted server serves stays fresh, since nothing ahead of it counts."""
    await client.recover(0)


class TestWaitForTask:
    """13: wait_for_task."""

    async def test_one_group(self, redis_url: str, run_name: str) -> None:
        """13: the group that was submitted, with its rows, once it has ended; a second time it is gone."""
        async with services(redis_url, run_name) as (_, client):
            task = await client.submit(prompts(1)[0], WORKFLOW, {}, batched=False)
            found = await client.wait_for_task(task, timeout_s=20)
            assert [group.task for group in found.groups] == [task]
            assert found.tensors()["input_ids"].tolist() == [[1, 2, 7, 8, 9]] * 2
            with pytest.raises(GroupNotDeliveredError, match=f"group {task} is not known: .* was collected before"):
                await client.wait_for_task(task, timeout_s=5)

    async def test_a_rejected_group(self, redis_url: str, run_name: str) -> None:
        """13: one that was rejected is no error: it says why."""
        async with services(redis_url, run_name) as (_, client):
            task = await client.submit(prompts(1, action="reject")[0], WORKFLOW, {}, batched=False)
            found = await client.wait_for_task(task, timeout_s=20)
            assert (found.groups, found.ended) == ([], {task: "rejected: no_usable_slot"})
            assert found.metrics["rollout/rejected/no_usable_slot"] == 1

    async def test_time_out(self, redis_url: str, run_name: str) -> None:
        """13: a wait is bounded, and its error says what is going on."""
        async with services(redis_url, run_name) as (_, client):
            task = await client.submit(prompts(1, action="hang")[0], WORKFLOW, {}, batched=False)
            with pytest.raises(StallError, match=r"in 0.5 s: .*1 groups to be collected by id"):
                await client.wait_for_task(task, timeout_s=0.5)

    async def test_in_a_batch(self, redis_url: str, run_name: str) -> None:
        """13: a group that is in a batch is not handed over twice: the error names the batch."""
        async with services(redis_url, run_name, batch_size=1) as (_, client):
            task = await client.submit(prompts(1)[0], WORKFLOW, {})
            await read(client, 1)
            with pytest.raises(GroupNotDeliveredError):
                await client.wait_for_task(task, timeout_s=5)


class TestRolloutBatch:
    """13: rollout_batch: submit all, collect all."""

    async def test_more_than_the_capacity(self, redis_url: str, run_name: str) -> None:
        """13: all groups come back, in the order of the data, however few may run for the batches at once."""
        async with services(redis_url, run_name, batch_size=1, max_staleness=0) as (_, client):
            found = await client.rollout_batch(prompts(9), WORKFLOW, {}, timeout_s=30)
            assert [group.task for group in found.groups] == sorted(group.task for group in found.groups)
            assert (len(found.groups), len(found.rows), found.ended) == (9, 18, {})
            status = await client.status()
            assert (status.count("delivered"), status.in_flight, status.delivered_ahead) == (9, 0, 0)

    async def test_back_pressure(self, redis_url: str, run_name: str) -> None:
        """13: a full queue slows the producer, it fails nothing."""
        async with services(redis_url, run_name, max_queued_groups=2) as (_, client):
            found = await client.rollout_batch(prompts(12), WORKFLOW, {}, timeout_s=30)
            assert len(found.groups) == 12

    async def test_statistics_of_the_batch(self, redis_url: str, run_name: str) -> None:
        """5: batch-level statistics are those of the groups that the call asked for."""
        norm = NormConfig(mean_level="batch", std_level=None)
        async with services(redis_url, run_name) as (_, client):
            data = [{"ids": [1, 2], "rewards": {"0": low, "1": low + 1}} for low in (0.0, 4.0)]
            found = await client.rollout_batch(data, WORKFLOW, {}, reward_normalization=norm, timeout_s=20)
            assert [row.reward for row in found.rows] == [-2.5, -1.5, 1.5, 2.5]
            assert [row.original_reward for row in found.rows] == [0.0, 1.0, 4.0, 5.0]

    async def test_a_bad_prompt_among_good_ones(self, redis_url: str, run_name: str) -> None:
        """2: what cannot be submitted is refused with its place."""
        async with services(redis_url, run_name) as (_, client):
            with pytest.raises(SubmitError, match=r"data\['number'\]"):
                await client.rollout_batch([{"ids": [1], "number": object()}], WORKFLOW, {}, timeout_s=5)


class TestEvaluation:
    """13: evaluation, with its own results and dump folder."""

    async def test_own_results_and_dumps(self, redis_url: str, run_name: str, tmp_path: Path) -> None:
        """13, 11, 8: episodes know that they are evaluated; results come to the caller, dumps to eval-rollout."""
        from forebay_ops.tiny_model import create_tiny_model

        model = create_tiny_model(tmp_path / "model")
        dump = {"dump_to_file": True, "fileroot": tmp_path / "dumps", "tokenizer_path": str(model)}
        async with services(redis_url, run_name, batch_size=1, **dump) as (_, client):
            training = await client.submit(prompts(1)[0], WORKFLOW, {})
            found = await client.evaluate(prompts(3, action="reward_is_eval"), WORKFLOW, {}, timeout_s=20)
            assert [row.reward for row in found.rows] == [1.0] * 6
            assert found.metrics["eval-rollout/accepted"] == 3
            assert found.metrics["eval-rollout/reward"] == 1.0
            (batch,) = await read(client, 1)
            assert [group.task for group in batch.groups] == [training], "evaluations never come in a batch"
            evaluated = {group.task for group in found.groups}
        root = tmp_path / "dumps" / run_name
        assert {int(path.stem) for path in (root / "eval-rollout").rglob("*.jsonl")} == evaluated
        assert {int(path.stem) for path in (root / "rollout").rglob("*.jsonl")} == {training}

    async def test_while_the_trainer_has_all_it_may(self, redis_url: str, run_name: str) -> None:
        """6: evaluations run while the capacity is used up, and after any number of versions."""
        async with services(redis_url, run_name, batch_size=1, max_staleness=0) as (_, client):
            await client.submit(prompts(1, action="hang")[0], WORKFLOW, {})
            found = await client.evaluate(prompts(2), WORKFLOW, {}, timeout_s=20)
            assert len(found.groups) == 2


class TestWait:
    """13: wait."""

    async def test_any_number_of_groups(self, redis_url: str, run_name: str) -> None:
        """13: groups come in the numbers that are asked for, each once, whatever the batch size; fewer at the end."""
        async with services(redis_url, run_name, batch_size=4, max_staleness=9) as (_, client):
            for prompt in prompts(10):
                await client.submit(prompt, WORKFLOW, {})
            await client.end_of_data()
            sizes, tasks = [], []
            while (found := await client.wait(3, timeout_s=20)) is not None:
                sizes.append(len(found.groups))
                tasks += [group.task for group in found.groups]
                assert len(found.rows) == 2 * len(found.groups)
            assert sizes == [3, 3, 3, 1]
            assert sorted(tasks) == list(range(1, 11))
            assert (await client.status()).count("batches_acked") == 3

    async def test_a_batch_is_kept_until_its_groups_are_trained_on(self, redis_url: str, run_name: str) -> None:
        """13: what was not followed by another call is not acknowledged, and comes again to the next reader."""
        async with services(redis_url, run_name, batch_size=2, max_staleness=9) as (running, client):
            for prompt in prompts(4):
                await client.submit(prompt, WORKFLOW, {})
            first = await client.wait(2, timeout_s=20)
            assert first is not None
            other = await AsyncClient.connect(running.settings)
            async with other:
                again = await other.wait(2, timeout_s=20)
                assert again is not None
                assert [group.task for group in again.groups] == [group.task for group in first.groups]

    async def test_more_than_can_be_handed_over(self, redis_url: str, run_name: str) -> None:
        """More groups than the capacity cannot come before the version moves, which nobody does meanwhile."""
        async with services(redis_url, run_name, batch_size=2, max_staleness=1) as (_, client):
            with pytest.raises(SubmitError, match="count=5 is above the capacity of 4"):
                await client.wait(5)

    @pytest.mark.parametrize("count", [0, -1, 1.5, True])
    async def test_bad_counts(self, redis_url: str, run_name: str, count: Any) -> None:
        """A count that is none is refused with its value."""
        async with services(redis_url, run_name) as (_, client):
            with pytest.raises(SubmitError, match=f"count={count}"):
                await client.wait(count)


class _Loader:
    """Two epochs of a dataloader, in lists of two."""

    def __init__(self, items: list[dict[str, Any]]) -> None:
        self.items = items
        self.epochs = 0

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        self.epochs += 1
        for at in range(0, len(self.items), 2):
            yield self.items[at : at + 2]


class TestPrepareBatch:
    """13: prepare_batch."""

    async def test_keeps_the_queue_full(self, redis_url: str, run_name: str) -> None:
        """13: batch after batch from a dataloader, epoch after epoch, with no call to submit; each is acknowledged."""
        loader = _Loader(prompts(6))
        async with services(redis_url, run_name, batch_size=4, max_staleness=1) as (_, client):
            tasks: list[int] = []
            for _ in range(4):
                batch = await client.prepare_batch(loader, WORKFLOW, {}, timeout_s=20)
                assert len(batch.groups) == 4
                tasks += [group.task for group in batch.groups]
                await step(client)
            assert len(set(tasks)) == 16
            assert loader.epochs >= 3
            status = await client.status()
            assert status.count("batches_acked") == 3
            assert status.queued <= 4, "no further ahead than a batch"

    async def test_later_arguments_count(self, redis_url: str, run_name: str) -> None:
        """13: what a later call says is honoured, not what the first one said."""
        loader = _Loader(prompts(4))
        async with services(redis_url, run_name, batch_size=2, max_staleness=0) as (_, client):
            sizes = []
            for at in range(8):  # what was submitted before comes first
                batch = await client.prepare_batch(loader, WORKFLOW, {}, group_size=2 if at < 2 else 3, timeout_s=20)
                sizes.append({group.group_size for group in batch.groups})
                await step(client)
            assert sizes[0] == {2}
            assert sizes[-1] == {3}

    async def test_dynamic_batch_size(self, redis_url: str, run_name: str) -> None:
        """13: with dynamic_bs a batch is cut once accepted and rejected groups reach batch_size: it may be smaller."""
        items = prompts(2) + prompts(2, action="reject")
        async with services(redis_url, run_name, batch_size=4) as (_, client):
            batch = await client.prepare_batch(items, WORKFLOW, {}, dynamic_bs=True, timeout_s=20)
            assert 1 <= len(batch.groups) < 4
            await step(client)
            batch = await client.prepare_batch(items, WORKFLOW, {}, dynamic_bs=False, timeout_s=20)
            await step(client)
            batch = await client.prepare_batch(items, WORKFLOW, {}, dynamic_bs=False, timeout_s=20)
            assert len(batch.groups) == 4, "and not any more when it is switched off"

    @pytest.mark.parametrize("items", [[], [[]]])
    async def test_an_empty_dataloader(self, redis_url: str, run_name: str, items: list[Any]) -> None:
        """A dataloader that gives nothing is an error, not an endless loop."""
        async with services(redis_url, run_name) as (_, client):
            with pytest.raises(SubmitError, match="gave no prompt in a whole epoch"):
                await client.prepare_batch(items, WORKFLOW, {}, timeout_s=5)

    async def test_a_bad_workflow(self, redis_url: str, run_name: str) -> None:
        """2: what a worker could not run is refused at once."""
        async with services(redis_url, run_name) as (_, client):
            with pytest.raises(ValueError, match="no_such_module"):
                await client.prepare_batch(prompts(1), "no_such_module.Workflow", {}, timeout_s=5)

    async def test_callers_at_once(self, redis_url: str, run_name: str) -> None:
        """Calls at the same time get a batch each, and no prompt is submitted twice or lost."""
        items = prompts(64)
        async with services(redis_url, run_name, batch_size=2, max_staleness=9) as (_, client):
            got = await asyncio.gather(*(client.prepare_batch(items, WORKFLOW, {}, timeout_s=30) for _ in range(4)))
            groups = [group.task for batch in got for group in batch.groups]
            assert len(set(groups)) == 8
            waited = await asyncio.gather(*(client.wait(1, timeout_s=30) for _ in range(2)))
            tasks = [group.task for part in waited if part is not None for group in part.groups]
            assert len(set(tasks)) == 2

    async def test_loaders_in_turn_go_on_where_they_were(self, redis_url: str, run_name: str) -> None:
        """13: a dataloader that was passed before goes on where it was."""
        first, second = _Loader(prompts(64)), _Loader(prompts(64))
        async with services(redis_url, run_name, batch_size=2, max_staleness=9) as (_, client):
            for loader in (first, second) * 3:
                await client.prepare_batch(loader, WORKFLOW, {}, timeout_s=20)
            assert (first.epochs, second.epochs) == (1, 1)

    async def test_an_iterator_that_ends(self, redis_url: str, run_name: str) -> None:
        """What a one-shot iterator gave is handed over before its end is an error."""
        async with services(redis_url, run_name, batch_size=2, max_staleness=9) as (_, client):
            once = iter(prompts(4))
            for _ in range(2):
                assert len((await client.prepare_batch(once, WORKFLOW, {}, timeout_s=20)).groups) == 2
            with pytest.raises(SubmitError, match="gave no prompt in a whole epoch"):
                await client.prepare_batch(once, WORKFLOW, {}, timeout_s=20)

    async def test_a_prompt_that_cannot_travel_is_left_out(self, redis_url: str, run_name: str) -> None:
        """A bad prompt is an error once; the next call goes on after it."""
        items = [{"ids": [1, 2], "number": object()}, *prompts(8)]
        async with services(redis_url, run_name, batch_size=2) as (_, client):
            with pytest.raises(SubmitError, match=r"data\['number'\]"):
                await client.prepare_batch(items, WORKFLOW, {}, timeout_s=20)
            assert len((await client.prepare_batch(items, WORKFLOW, {}, timeout_s=20)).groups) == 2

    @pytest.mark.parametrize("loader", [None, 5, "text", {"ids": [1]}, [1, 2]])
    async def test_bad_dataloaders(self, redis_url: str, run_name: str, loader: Any) -> None:
        """What gives no prompts is named with its type."""
        async with services(redis_url, run_name) as (_, client):
            with pytest.raises(SubmitError, match=r"dataloader (is|gave) an? \w+; it must give prompts"):
                await client.prepare_batch(loader, WORKFLOW, {}, timeout_s=5)


class TestStoppedRun:
    """4.5: past its budget a run stops loudly."""

    async def test_the_trainer_is_told_the_first_cause(self, redis_url: str, run_name: str) -> None:
        """4.5: a workflow that always breaks the contract: reads and submits raise the reason, and resume mends it."""
        async with services(redis_url, run_name, max_contract_errors=4) as (_, client):
            for prompt in prompts(2, action="empty"):
                await client.submit(prompt, WORKFLOW, {})

            with pytest.raises(RunStoppedError, match=r"4 slots in a row .* returned an empty dict"):
                await client.batches(timeout_s=10).next()
            with pytest.raises(RunStoppedError, match="forebay resume"):
                await client.submit(prompts(1)[0], WORKFLOW, {})
            assert await client.resume()
            for prompt in prompts(2):
                await client.submit(prompt, WORKFLOW, {})
            assert len(await read(client, 1)) == 1


async def test_the_blocking_client_has_the_same_calls(redis_url: str, run_name: str) -> None:
    """13: a trainer of plain code calls the same."""
    from forebay import Client

    async with services(redis_url, run_name, batch_size=2) as (running, _):

        def train() -> tuple[int, int, int]:
            with Client.connect(running.settings) as client:
                batch = client.prepare_batch(prompts(4), WORKFLOW, {}, timeout_s=20)
                batch.ack()
                client.set_version(1)
                evaluated = client.evaluate(prompts(3), WORKFLOW, {}, timeout_s=20)
                task = client.submit(prompts(1)[0], WORKFLOW, {}, batched=False)
                return len(batch.groups), len(evaluated.groups), len(client.wait_for_task(task, timeout_s=20).groups)

        assert await asyncio.to_thread(train) == (2, 3, 1)
