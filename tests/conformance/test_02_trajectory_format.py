"""Contract, section 2: the format of results, and keys that not all rollouts of a group carry."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from helpers.building import result, usable
from services import read, services

from forebay import AsyncClient, ForebayWarning, Interaction, Settings
from forebay.errors import SlotDataError, WorkflowContractError
from forebay.store import Store
from forebay.wire.rows import rows_from_tensors
from forebay.wire.trajectory_format import check_keys, check_trajectory
from forebay_collector.uneven_keys import UnevenKeys, uneven_keys
from forebay_workers.format_check import FormatCheck

IMAGE = {"pixel_values": np.ones((4, 3), np.float32)}


async def ended(client: AsyncClient, groups: int) -> None:
    """Wait until so many groups are rejected."""
    async with asyncio.timeout(30):
        while (await client.status()).count("rejected") < groups:  # noqa: ASYNC110 (it happens in Redis)
            await asyncio.sleep(0.02)


class TestTrajectoryFormat:
    """2: check_trajectory_format."""

    @pytest.mark.parametrize("passing", [None, {"c": Interaction([1], [2], [0.0], [0])}])
    def test_what_has_no_keys_passes(self, passing: Any) -> None:
        """2: None passes, and so does a dict of Interactions alone."""
        assert check_trajectory(passing) is None

    @pytest.mark.parametrize("torch_made", [False, True])
    def test_a_right_result_passes(self, torch_made: bool) -> None:
        """2: the table's types pass, of numpy and of torch; the key set is without rollout_reward and rollout_group."""
        values = result(rows=2, is_truncated=np.zeros(2, np.bool_), own=np.zeros((2, 4), np.int16), of_rows=np.zeros(2))
        made: dict[str, Any] = {name: torch.from_numpy(v) for name, v in values.items()} if torch_made else dict(values)
        made |= {"multi_modal_input": [IMAGE, IMAGE], "rollout_reward": 1.0, "rollout_group": None}
        assert check_trajectory(made) == {*values, "multi_modal_input"}

    @pytest.mark.parametrize(
        ("found", "why"),
        [
            ([1], "the result is a list; expected a dict or None"),
            ({}, "empty dict"),
            ({"rewards": np.ones(1)}, "no input_ids; it has rewards"),
            (result(attention_mask=None), "no attention_mask"),
            (result(input_ids=np.zeros(4, np.int32)), r"input_ids has shape \[4\], expected \[B, S\]"),
            (result(loss_mask=np.zeros((2, 4), np.int32)), r"loss_mask has shape \[2, 4\], expected \[1, 4\]"),
            (result(rewards=np.zeros(3, np.float32)), r"rewards has shape \[3\], expected \[1\]"),
            (result(versions=np.zeros((1, 5), np.int32)), r"versions has shape \[1, 5\], expected \[1, 4\]"),
            (result(own=np.zeros((1, 5))), r"own has shape \[1, 5\], expected \[1\], .* or \[1, 4\]"),
            (result(own=np.float32(1)), r"own has shape \[\]"),
            (result(own=[[1, 2, 3, 4]]), "own is a list, expected a tensor"),
            (result(c=Interaction([1], [2], [0.0], [0])), "c is a Interaction, expected a tensor"),
            (result(attention_mask=np.ones((1, 4), np.int64)), "attention_mask has dtype int64, expected bool"),
            (result(loss_mask=np.ones((1, 4), np.bool_)), "loss_mask has dtype bool, expected int32"),
            (result(logprobs=np.ones((1, 4))), "logprobs has dtype float64, expected float32"),
            (result(versions=torch.ones((1, 4), dtype=torch.int64)), "versions has dtype int64, expected int32"),
            (result(rewards=torch.ones(1, dtype=torch.float16)), "rewards has dtype float16, expected float32"),
            (result(is_truncated=np.zeros(1, np.int32)), "is_truncated has dtype int32, expected bool"),
            (result(turn_ids=np.ones((1, 4))), "turn_ids has dtype float64"),
            (result(multi_modal_input=[]), "must be a list of dicts that is not empty"),
            (result(multi_modal_input=(IMAGE,)), "must be a list of dicts"),
            (result(multi_modal_input=[IMAGE, IMAGE]), "has 2 entries for 1 rows"),
            (result(multi_modal_input=[{"image_grid_thw": 1}]), r"\[0\] must be a dict with pixel_values"),
        ],
    )
    def test_what_is_wrong_is_said(self, found: Any, why: str) -> None:
        """2: each rule of format, shape and type, with the key, what it has and what is expected."""
        with pytest.raises(WorkflowContractError, match=why):
            check_trajectory(found)

    @pytest.mark.parametrize("name", ["input_ids", "loss_mask", "logprobs", "rewards", "is_truncated", "own"])
    @pytest.mark.parametrize("shape", [(), (1,), (2,), (1, 1), (1, 4), (2, 4), (1, 5), (1, 3), (1, 4, 1), (1, 4, 2)])
    def test_it_agrees_with_what_is_taken(self, name: str, shape: tuple[int, ...]) -> None:
        """2: of every key, each shape that the check passes makes rows, and none that it refuses; in the same words."""
        dtypes = {"input_ids": np.int32, "loss_mask": np.int32, "is_truncated": np.bool_}
        made = result(**{name: np.zeros(shape, dtypes.get(name, np.float32))})
        said: list[str] = []
        for look in (check_trajectory, rows_from_tensors):
            try:
                look(made)
                said.append("")
            except (WorkflowContractError, SlotDataError) as error:
                said.append(f"{type(error).__name__}: {error}")
        assert said[0] == said[1]

    def test_the_key_set(self) -> None:
        """2: a missing key is an error that names it; extra keys are allowed."""
        check_keys({"a", "b", "extra"}, {"a", "b"})
        with pytest.raises(WorkflowContractError, match="lacks b, c, which the first result of this workflow"):
            check_keys({"a"}, {"a", "b", "c"})

    async def test_the_first_result_of_the_run_counts(self, redis_url: str, run_name: str) -> None:
        """2: the first tensor result of the same workflow, on whatever worker; other workflows have their own."""
        settings = Settings(REDIS_URL=redis_url, experiment_name=run_name.split("/", maxsplit=1)[0])
        stores = [Store.open(settings), Store.open(settings)]
        one, other = (FormatCheck(store) for store in stores)
        try:
            await one("m:A", frozenset({"a", "own"}))
            await other("m:A", frozenset({"a", "own", "more"}))
            for check in (one, other):
                with pytest.raises(WorkflowContractError, match="lacks own"):
                    await check("m:A", frozenset({"a"}))
                await check("m:B", frozenset({"a"}))
        finally:
            for store in stores:
                await store.close()

    async def test_a_failed_first_result_is_no_reference(self, redis_url: str, run_name: str) -> None:
        """2: what fails for its values does not set the keys that later results are held to."""
        bad = result(rewards=np.array([np.nan], np.float32), extra=np.zeros((1, 4)))
        rules = {"check_trajectory_format": True, "batch_size": 1, "import_allowlist": ["helpers"]}
        async with services(redis_url, run_name, **rules) as (_, client):
            await client.submit({"slots": [bad]}, "helpers.workflows:BySlot", {}, group_size=1)
            await ended(client, 1)
            await client.submit({"slots": [result(), result()]}, "helpers.workflows:BySlot", {})
            (batch,) = await read(client, 1)
            await client.submit({"slots": [result(versions=None), result()]}, "helpers.workflows:BySlot", {})
            (later,) = await read(client, 1)
        assert [rollout.sample_idx for rollout in batch.groups[0].rollouts] == [0, 1]
        assert [rollout.sample_idx for rollout in later.groups[0].rollouts] == [1]

    @pytest.mark.parametrize("on", [True, False])
    async def test_a_failure_fails_that_slot_only(self, redis_url: str, run_name: str, on: bool) -> None:
        """2: with the check on, a mask of integers fails its slot as contract and its sibling counts; off, both do."""
        loose = result(attention_mask=np.ones((1, 4), np.int64))
        rules = {"check_trajectory_format": on, "batch_size": 1, "import_allowlist": ["helpers"]}
        async with services(redis_url, run_name, **rules) as (_, client):
            await client.submit({"slots": [result(), loose]}, "helpers.workflows:BySlot", {})
            (batch,) = await read(client, 1)
            status = await client.status()
        assert [rollout.sample_idx for rollout in batch.groups[0].rollouts] == ([0] if on else [0, 1])
        assert status.count("slots:failed") == (1 if on else 0)


class TestUnevenKeys:
    """2: optional keys that not all rollouts of a group carry are dropped with a warning that names them."""

    def headers(self, *keys: list[str]) -> Any:
        """Usable slots with these key sets."""
        made = [usable(7, idx) for idx in range(len(keys))]
        for header, names in zip(made, keys, strict=True):
            header.keys = names
        return made

    def test_which(self) -> None:
        """2: what some carry and others do not; rollout_reward is no key of rows, images and rewards are kept."""
        full = ["input_ids", "multi_modal_input", "own", "rewards", "rollout_reward", "turn_ids"]
        assert uneven_keys(self.headers(full, ["input_ids", "turn_ids"], full)) == ("own",)
        assert uneven_keys(self.headers(full, full)) == ()
        assert uneven_keys([]) == ()

    def test_the_warning(self) -> None:
        """2: the collector's warning names the keys and the group, once for each set of keys."""
        warner = UnevenKeys()
        with structlog.testing.capture_logs() as logs:
            for task_id in (1, 2):
                warner.warn(task_id, self.headers(["a", "b"], ["a"]))
            warner.warn(3, self.headers(["a", "c"], ["a"]))
        assert [(log["event"], log["task_id"], log["keys"]) for log in logs] == [
            ("group.keys_dropped", 1, ["b"]),
            ("group.keys_dropped", 3, ["c"]),
        ]

    async def test_they_are_dropped(self, redis_url: str, run_name: str) -> None:
        """2: through the pipeline: the trainer's tensors lack the key, and a warning names it."""
        odd = result(own=np.zeros((1, 4)))
        async with services(redis_url, run_name, batch_size=1, import_allowlist=["helpers"]) as (_, client):
            with structlog.testing.capture_logs() as logs:
                await client.submit({"slots": [result(), odd]}, "helpers.workflows:BySlot", {})
                (batch,) = await read(client, 1)
        with pytest.warns(ForebayWarning, match=r"not all rows carry them: own \(missing in task_id 1\)"):
            assert "own" not in batch.arrays()
        assert [log["keys"] for log in logs if log["event"] == "group.keys_dropped"] == [["own"]]
