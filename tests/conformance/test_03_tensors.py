"""Contract, section 3: the tensor dict, in the page's order.

Proved elsewhere, and not written twice: wider types become the table's, wrong ones are contract errors
(``tests/unit/test_wire_rows.py``: TestTypes, TestShapes); rows come back to the bit, damaged frames are errors
(``tests/unit/test_wire_codec.py``, ``tests/unit/test_multi_modal.py``); pad values of each key
(``tests/unit/test_tensors.py``: TestPadding); NaN, infinite and short logprobs and rewards fail the slot as ``data``
(``tests/unit/test_wire_rows.py``: TestBadValues, ``tests/unit/test_attempts.py``: TestOutcomes); what a missing reward
does to its group (section 4).
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from helpers.building import group_of, result, row
from hypothesis import given
from hypothesis import strategies as st
from services import read, services

from forebay import ForebayWarning, RolloutGroup, TrajBatchMeta, concat_padded_tensors
from forebay.batches import BatchData
from forebay.errors import SlotDataError, WorkflowContractError
from forebay.store.records import BatchEntry
from forebay.wire.codec import decode_rows, encode_rows
from forebay.wire.rows import Row, rows_from_tensors
from forebay.wire.tensors import pad_rows, to_torch

Tensors = dict[str, Any]


def batch_of(*groups: dict[int, list[Row]]) -> BatchData:
    """A batch of groups, each ``{sample_idx: rows}``."""
    made = [group_of(rollouts, task=at) for at, rollouts in enumerate(groups)]
    rows = [one for _, own in made for one in own]
    entry = BatchEntry("1-0", 1, b"", 0, redelivered=False)
    summaries = [summary for summary, _ in made]
    return BatchData(
        batch_id=1, version=0, groups=summaries, partial=False, redelivered=False, rows=rows, entry=entry
    )  # fmt: skip


class TestTable:
    """3: the keys of the tensor dict."""

    def test_a_mask_may_come_as_integers(self) -> None:
        """3: attention_mask is bool; integers are taken as one, and it comes back bool."""
        rows, _ = rows_from_tensors(result(attention_mask=np.array([[1, 1, 1, 0]])))
        assert (rows[0].seqlen, pad_rows(rows)["attention_mask"].dtype) == (3, np.bool_)

    @pytest.mark.parametrize(
        "value", [0.5, np.float32(0.5), torch.tensor(0.5), np.array([0.5]), torch.full((3,), 0.5), np.full(3, 0.5)]
    )
    def test_rollout_reward(self, value: Any) -> None:
        """3: rollout_reward is one finite float for each rollout: as such, as one element, or [B] equal ones."""
        rows, reference = rows_from_tensors(result(rows=3, rollout_reward=value))
        assert reference == 0.5
        assert all("rollout_reward" not in one.tokens for one in rows)

    @pytest.mark.parametrize(
        ("value", "error", "why"),
        [
            (np.array([0.5, 0.5, 0.25]), WorkflowContractError, "values from 0.25 to 0.5; it is one number"),
            (np.full(2, 0.5), WorkflowContractError, "expected one finite number, or one for each of the 3 rows"),
            (np.full((3, 1), 0.5), WorkflowContractError, "expected one finite number"),
            (np.array(["1"]), WorkflowContractError, "expected one finite number"),
            (np.array([0.5, np.nan, 0.5]), SlotDataError, "rollout_reward is nan"),
            (torch.tensor(float("inf")), SlotDataError, "rollout_reward is inf"),
        ],
    )
    def test_a_bad_rollout_reward(self, value: Any, error: type[Exception], why: str) -> None:
        """3: values that disagree or are no number break the contract; one that is not finite is bad data."""
        with pytest.raises(error, match=why):
            rows_from_tensors(result(rows=3, rollout_reward=value))

    def test_original_rewards_of_a_batch(self) -> None:
        """3: where some rewards of a batch were changed, the raw reward of the others is their reward."""
        changed, same = row([1, 2], reward=0.0), row([3, 4], reward=7.0)
        changed.original_reward = 2.0
        assert pad_rows([changed, same])["original_rewards"].tolist() == [2.0, 7.0]
        assert "original_rewards" not in pad_rows([same])

    async def test_multi_modal_input(self, redis_url: str, run_name: str) -> None:
        """3: through the pipeline: a list of B dicts of tensors, and mm_token_type_ids [B, S]."""
        pixels = torch.arange(24, dtype=torch.float32).reshape(2, 12)
        entry = {"pixel_values": pixels, "image_grid_thw": np.array([[1, 2, 2]])}
        image = result(multi_modal_input=[entry], mm_token_type_ids=np.array([[0, 1, 1, 0]]))
        async with services(redis_url, run_name, batch_size=1, import_allowlist=["helpers"]) as (_, client):
            await client.submit({"slots": [image, result()]}, "helpers.workflows:BySlot", {})
            (batch,) = await read(client, 1)
        tensors = batch.tensors()
        assert torch.equal(tensors["multi_modal_input"][0]["pixel_values"], pixels)
        assert tensors["multi_modal_input"][0]["image_grid_thw"].tolist() == [[1, 2, 2]]
        assert tensors["multi_modal_input"][1] == {}
        assert tensors["mm_token_type_ids"].tolist() == [[0, 1, 1, 0], [0, 0, 0, 0]]


class TestVersions:
    """3: versions of prompt tokens."""

    def test_prompt_versions_may_come_as_0(self) -> None:
        """3: where loss_mask is 0 they are set to -1."""
        (one,), _ = rows_from_tensors(result(versions=np.array([[0, 7, 7, 8]])))
        assert one.tokens["versions"].tolist() == [-1, 7, 7, 8]


class TestPadding:
    """3: only real tokens cross the wire; padding exists only in tensors handed to user code."""

    def test_no_padding_on_the_wire(self) -> None:
        """3: a row of 2 tokens in a tensor of 5000 is as large on the wire as alone; versions are padded with -1."""
        mask = np.zeros((1, 5000), np.bool_)
        mask[0, :2] = True
        padded, _ = rows_from_tensors(result(width=5000, attention_mask=mask))
        alone, _ = rows_from_tensors(result(width=2))
        assert len(encode_rows(padded)) == len(encode_rows(alone))
        wide = pad_rows([*decode_rows(encode_rows(padded)), row([1, 2, 3])])
        assert wide["versions"][0].tolist() == [-1, 3, -1]


def trajectory(rows: int, width: int, start: int = 1, *, as_torch: bool = False, **more: Any) -> Tensors:
    """A trajectory whose ids are unlike any other's: counted from `start`."""
    ids = np.arange(start, start + rows * width, dtype=np.int32).reshape(rows, width)
    made: Tensors = {
        "input_ids": ids,
        "attention_mask": np.ones((rows, width), np.bool_),
        "versions": np.full((rows, width), start, np.int32),
        "rewards": np.arange(rows, dtype=np.float32) + start,
    }
    made = to_torch(made) if as_torch else made
    return made | {"multi_modal_input": [{"n": start + at} for at in range(rows)]} | more


class TestConcatPaddedTensors:
    """3: ``concat_padded_tensors(list)``."""

    def test_nothing(self) -> None:
        """3: ``[]`` gives ``{}``."""
        assert concat_padded_tensors([]) == {}

    def test_differing_key_sets(self) -> None:
        """3: differing key sets are a ValueError that names the keys."""
        with pytest.raises(ValueError, match="different keys: a, b in some of 2 only"):
            concat_padded_tensors([trajectory(1, 2, a=1), trajectory(1, 2, b=1)])

    @pytest.mark.parametrize("as_torch", [False, True])
    def test_pad_values_and_lists(self, as_torch: bool) -> None:
        """3: ids are padded with 0 or the tokenizer's pad, masks with False, versions with -1; lists are joined."""
        more = {"turn_ids": np.zeros((1, 1), np.int32), "logprobs": np.ones((1, 1), np.float32)}
        wide = {name: np.repeat(value, 3, axis=1) for name, value in more.items()}
        narrow: Tensors = trajectory(1, 1, 5, as_torch=as_torch, **(to_torch(more) if as_torch else more))
        both = concat_padded_tensors(
            [narrow, trajectory(1, 3, 6, as_torch=as_torch, **(to_torch(wide) if as_torch else wide))], pad_token_id=9
        )
        assert all(isinstance(value, (torch.Tensor if as_torch else np.ndarray, list)) for value in both.values())
        assert {name: value[0].tolist() for name, value in both.items() if name != "multi_modal_input"} == {
            "input_ids": [5, 9, 9],
            "attention_mask": [True, False, False],
            "versions": [5, -1, -1],
            "turn_ids": [0, -1, -1],
            "logprobs": [1, 0, 0],
            "rewards": 5.0,
        }
        assert both["multi_modal_input"] == [{"n": 5}, {"n": 6}]
        assert both["attention_mask"].dtype == (torch.bool if as_torch else np.bool_)

    def test_other_values(self) -> None:
        """3: a rollout_group becomes an entry of a list; a rollout_reward stays if all agree, else it is named."""
        group = RolloutGroup((1,), (None,), (0,))
        one = trajectory(1, 2, rollout_group=group, rollout_reward=0.5)
        both = concat_padded_tensors([one, one])
        assert (both["rollout_group"], both["rollout_reward"]) == ([group, group], 0.5)
        for other in (one | {"rollout_reward": 1.0}, one | {"rollout_reward": np.ones(1)}, one | {"rewards": [1.0]}):
            with pytest.raises(ValueError, match=r"rollout_reward has values|rewards has values"):
                concat_padded_tensors([one, other])
        with pytest.raises(ValueError, match=r"rewards has tensors of \[1, 2\] dimensions"):
            concat_padded_tensors([one, one | {"rewards": np.ones((1, 2))}])


@st.composite
def trajectories(draw: st.DrawFn, least: int = 1) -> list[Tensors]:
    """Trajectories of several rows, widths and rollouts, no id of which occurs twice."""
    as_torch = draw(st.booleans())
    out: list[Tensors] = []
    start = 1
    for at in range(draw(st.integers(least, 6))):
        counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        width = draw(st.integers(1, 5))
        group = RolloutGroup(tuple(counts), (float(at),) * len(counts), tuple(range(len(counts))))
        out.append(trajectory(sum(counts), width, start, as_torch=as_torch, rollout_group=group))
        start += sum(counts) * width
    return out


def plain(one: Tensors) -> Tensors:
    """A trajectory as plain values with its types, to compare."""
    return {
        name: (str(value.dtype), value.tolist()) if hasattr(value, "dtype") else value for name, value in one.items()
    }


class TestTrajBatchMeta:
    """3 and 4.8: ``TrajBatchMeta`` through batching, splitting and shuffling."""

    @given(trajectories())
    def test_batch_and_back(self, made: list[Tensors]) -> None:
        """4.8: trajectories that are batched and taken apart are the same, each cut to its own width."""
        tensors, meta = TrajBatchMeta.batch(made)
        assert meta.n_trajs == len(made)
        assert meta.traj_group_sizes == tuple(len(one["input_ids"]) for one in made)
        assert meta.traj_seqlens == tuple(one["input_ids"].shape[1] for one in made)
        assert "rollout_group" not in tensors
        assert [plain(one) for one in meta.trajectories(tensors)] == [plain(one) for one in made]

    @given(st.data())
    def test_batch_shuffle_split_rebatch(self, data: st.DataObject) -> None:
        """Case 19, 4.8: batch -> shuffle -> split -> rebatch loses and mixes nothing."""
        made = data.draw(trajectories())
        order = data.draw(st.permutations(range(len(made))))
        tensors, meta = TrajBatchMeta.batch(made)
        shuffled, shuffled_meta = meta.reorder(tensors, order)
        parts = shuffled_meta.split(shuffled, data.draw(st.integers(1, len(made))))
        sizes = [part_meta.n_trajs for _, part_meta in parts]
        assert (sum(sizes), min(sizes) >= 1, max(sizes) - min(sizes) <= 1) == (len(made), True, True)
        for part, part_meta in parts:
            assert part["input_ids"].shape == (sum(part_meta.traj_group_sizes), max(part_meta.traj_seqlens))
        apart = [one for part, part_meta in parts for one in part_meta.trajectories(part)]
        again, again_meta = TrajBatchMeta.batch(apart)
        assert [plain(one) for one in apart] == [plain(made[place]) for place in order]
        assert [plain(one) for one in again_meta.trajectories(again)] == [plain(one) for one in apart]

    def test_nothing(self) -> None:
        """4.8: an empty batch is one of no trajectories."""
        tensors, meta = TrajBatchMeta.batch([])
        assert (tensors, meta.n_trajs, meta.trajectories(tensors)) == ({}, 0, [])

    def test_what_does_not_fit_is_refused(self) -> None:
        """4.8: counts that disagree, too many parts, an order that is none, and another batch's tensors."""
        tensors, meta = TrajBatchMeta.batch([trajectory(2, 3), trajectory(1, 2, 9)])
        for parts in (0, 3):
            with pytest.raises(ValueError, match=f"2 trajectories cannot be split into {parts} parts"):
                meta.split(tensors, parts)
        for order in ([0], [0, 0], [1, 2]):
            with pytest.raises(ValueError, match="no permutation of the 2 trajectories"):
                meta.reorder(tensors, order)
        with pytest.raises(ValueError, match="input_ids has 2 rows, but the trajectories have 3"):
            meta.trajectories(trajectory(2, 3))
        with pytest.raises(ValueError, match=r"trajectory 0 has 2 rows, but its rollout_group counts 3"):
            TrajBatchMeta.batch([trajectory(2, 3, rollout_group=RolloutGroup((1, 2), (None, None), (0, 1)))])
        with pytest.raises(ValueError, match="n_trajs=2, but there are 1"):
            TrajBatchMeta(2, (1,), (1,), (None,))
        with pytest.raises(ValueError, match="at least 1"):
            TrajBatchMeta(1, (0,), (1,), (None,))

    def test_of_a_batch(self) -> None:
        """4.8: a delivered batch's meta takes its tensors apart into its trajectories, groups and rollouts kept."""
        batch = batch_of(
            {0: [row([1, 2, 3])], 2: [row([4, 5]), row([6])]},
            {1: [row([7, 8, 9, 10], reward=0.5, truncated=True)]},
        )
        batch.rows[1].multi_modal = {"pixel_values": np.ones((2, 2), np.float32)}
        with pytest.warns(ForebayWarning, match="is_truncated"):
            tensors = batch.tensors()
        with pytest.warns(ForebayWarning, match="is_truncated"):
            own = batch.trajectories()
        meta = batch.meta
        assert (meta.n_trajs, meta.traj_group_sizes, meta.traj_seqlens) == (2, (3, 1), (3, 4))
        assert [group.sample_idx for group in batch.rollout_groups] == [(0, 2), (1,)]
        apart = meta.trajectories(tensors)
        assert [one["rollout_group"] for one in own] == [one["rollout_group"] for one in apart] == batch.rollout_groups
        for one, other in zip(own, apart, strict=True):
            assert set(one) == set(other)
            assert all(torch.equal(one[name], other[name]) for name in one if isinstance(one[name], torch.Tensor))
        assert [len(one["multi_modal_input"]) for one in own] == [3, 1]
        assert own[0]["multi_modal_input"][1]["pixel_values"].shape == (2, 2)


class TestMissingKeys:
    """3 and 2: keys that not all rows of a batch carry."""

    def test_left_out_with_a_warning_that_names_them(self) -> None:
        """2: left out of the batch's tensors; Python's filter shows the warning once for each set of keys."""
        one, other = row([1, 2]), row([3, 4])
        one.tokens["own"] = np.zeros(2, np.float32)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            batch = batch_of({0: [one]}, {1: [other]})
            assert all("own" not in batch.arrays() for _ in range(3))
            other.tokens["more"] = np.zeros(2, np.float32)
            batch.arrays()
        lacks = "(missing in task_id 1)"
        assert [str(item.message).partition(": ")[2] for item in caught] == [
            f"own {lacks}",
            f"more (missing in task_id 0); own {lacks}",
        ]
        assert {item.category for item in caught} == {ForebayWarning}

    @pytest.mark.parametrize("given_as", ["absent", "None"])
    def test_a_reward_that_is_missing(self, given_as: str) -> None:
        """3: a reward that is None or absent leaves the slot usable; the row has none, and nothing is filled in."""
        values = result(rewards=None) | ({"rewards": None} if given_as == "None" else {})
        (one,), _ = rows_from_tensors(values)
        assert one.reward is None
        assert "rewards" not in pad_rows([one])

    def test_rewards_of_a_batch_that_some_rows_lack(self) -> None:
        """3: they are NaN where there are none, in the batch and its trajectories; the warning names the groups."""
        batch = batch_of({0: [row([1, 2], reward=2.0)]}, {0: [row([3], reward=None)], 1: [row([4], reward=3.0)]})
        batch.rows[0].original_reward = 5.0
        with pytest.warns(ForebayWarning, match=r"rewards are NaN .* \(in task_id 1\)"):
            tensors = batch.tensors()
        with pytest.warns(ForebayWarning, match=r"\(in task_id 1\)"):
            own = batch.trajectories()
        for name, want in (("rewards", [2.0, np.nan, 3.0]), ("original_rewards", [5.0, np.nan, 3.0])):
            assert np.array_equal(tensors[name].numpy(), want, equal_nan=True)
            assert np.array_equal(torch.cat([one[name] for one in own]).numpy(), want, equal_nan=True)

    def test_what_only_some_groups_carry(self) -> None:
        """3: keys that a group lacks are left out for all; the warning names them and the groups, the first ten."""
        groups = [{0: [row([1, 2])], 1: [row([3])]} for _ in range(14)]
        for group in groups[1:]:
            for name in ("loss_mask", "logprobs", "versions"):
                del group[1][0].tokens[name]
        said = r"logprobs, loss_mask, versions \(missing in task_ids 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 3 more\)"
        with pytest.warns(ForebayWarning, match=said):
            assert set(batch_of(*groups).arrays()) == {"input_ids", "attention_mask", "rewards"}


class TestOwnKeys:
    """3 and 2: keys of the workflow's own."""

    async def test_values_of_rows_and_of_tokens(self, redis_url: str, run_name: str) -> None:
        """2: [B], a value for each row, and [B, S] come through the pipeline in their types; more dimensions fail."""
        slots = [
            result(rows=2, difficulty=np.array([0.25, 0.5], np.float32), solved=torch.tensor([True, False])),
            result(difficulty=np.array([4.0], np.float32), solved=torch.tensor([True])),
            result(difficulty=np.ones((1, 4, 2), np.float32)),
        ]
        slots[2]["solved"] = torch.tensor([True])
        rules = {"batch_size": 1, "check_trajectory_format": True, "import_allowlist": ["helpers"]}
        async with services(redis_url, run_name, **rules) as (_, client):
            await client.submit({"slots": slots}, "helpers.workflows:BySlot", {}, group_size=3)
            (batch,) = await read(client, 1)
        assert [rollout.sample_idx for rollout in batch.groups[0].rollouts] == [0, 1]
        tensors = batch.tensors()
        assert torch.equal(tensors["difficulty"], torch.tensor([0.25, 0.5, 4.0]))
        assert torch.equal(tensors["solved"], torch.tensor([True, False, True]))
        (own,) = batch.trajectories()
        assert torch.equal(own["difficulty"], tensors["difficulty"])
        (apart,) = batch.meta.trajectories(tensors)
        assert torch.equal(concat_padded_tensors([apart, own])["difficulty"], tensors["difficulty"].repeat(2))
