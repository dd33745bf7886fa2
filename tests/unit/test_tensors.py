"""Padded tensors for user code, and which rows belong to which rollout (contract 3 and 4.8)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.building import row

from forebay import ForebayWarning, RolloutGroup
from forebay.errors import ContractError
from forebay.wire.rows import Row
from forebay.wire.tensors import pad_rows, to_torch


class TestPadding:
    """contract 3: right-padded; ids 0 or the tokenizer's pad, masks 0, logprobs 0, versions -1, turn_ids -1."""

    def padded(self, pad_token_id: int = 0) -> dict[str, np.ndarray]:
        """A row of four tokens and one of two."""
        long, short = row([5, 6, 7, 8], truncated=True), row([9, 10], reward=2.0, truncated=False)
        for one in (long, short):
            one.tokens["turn_ids"] = np.zeros(one.seqlen, dtype=np.int32)
            one.tokens["token_rewards"] = np.ones(one.seqlen, dtype=np.float32)
            one.original_reward = 7.0
        return pad_rows([long, short], pad_token_id=pad_token_id)

    def test_every_key_has_its_own_padding(self) -> None:
        """The short row is filled up as the contract says."""
        arrays = self.padded()
        assert {name: array[1].tolist() for name, array in arrays.items() if array.ndim == 2} == {
            "input_ids": [9, 10, 0, 0],
            "attention_mask": [True, True, False, False],
            "loss_mask": [0, 1, 0, 0],
            "logprobs": [0.0, -0.5, 0.0, 0.0],
            "versions": [-1, 0, -1, -1],
            "turn_ids": [0, 0, -1, -1],
            "token_rewards": [1, 1, 0, 0],
        }

    def test_values_of_rows(self) -> None:
        """What each row has one of is [B]."""
        arrays = self.padded()
        assert arrays["rewards"].tolist() == [1.0, 2.0]
        assert arrays["original_rewards"].tolist() == [7.0, 7.0]
        assert arrays["is_truncated"].tolist() == [True, False]

    def test_the_tokenizers_pad_pads_ids_only(self) -> None:
        """pad_token_id is for input_ids alone."""
        arrays = self.padded(pad_token_id=99)
        assert arrays["input_ids"][1].tolist() == [9, 10, 99, 99]
        assert arrays["versions"][1].tolist() == [-1, 0, -1, -1]

    def test_types_are_the_tables(self) -> None:
        """The dtypes are those of the contract's table, as torch tensors too."""
        want = {
            "input_ids": torch.int32,
            "attention_mask": torch.bool,
            "loss_mask": torch.int32,
            "logprobs": torch.float32,
            "versions": torch.int32,
            "turn_ids": torch.int32,
            "token_rewards": torch.float32,
            "rewards": torch.float32,
            "original_rewards": torch.float32,
            "is_truncated": torch.bool,
        }
        assert {name: tensor.dtype for name, tensor in to_torch(self.padded()).items()} == want

    def test_no_rows_are_no_keys(self) -> None:
        """Nothing in, nothing out."""
        assert pad_rows([]) == {}

    @pytest.mark.parametrize("first", [0, 1])
    def test_keys_that_not_all_rows_carry_are_left_out(self, first: int) -> None:
        """A key or a flag that some row lacks is absent, whichever row comes first; the warning says which lacks it."""
        full, bare = row([1, 2], truncated=True), row([3, 4])
        full.tokens["turn_ids"] = np.zeros(2, dtype=np.int32)
        full.values["own"] = np.float32(0.5)
        lacks = rf"carry them: is_truncated, own, turn_ids \(missing in row {1 - first}\)$"
        with pytest.warns(ForebayWarning, match=lacks):
            arrays = pad_rows([full, bare] if first == 0 else [bare, full])
        assert set(arrays) == {"input_ids", "attention_mask", "loss_mask", "logprobs", "versions", "rewards"}

    @pytest.mark.parametrize("first", [0, 1])
    def test_a_reward_that_some_row_lacks_is_nan(self, first: int) -> None:
        """Contract 3: a missing reward is the trainer's to handle: NaN, with a warning, and the others' are there."""
        full, bare = row([1, 2], reward=2.0), row([3, 4], reward=None)
        with pytest.warns(ForebayWarning, match=rf"rewards are NaN .* \(in row {1 - first}\)"):
            arrays = pad_rows([full, bare] if first == 0 else [bare, full])
        assert arrays["rewards"][first] == 2.0
        assert np.isnan(arrays["rewards"][1 - first])
        assert arrays["rewards"].dtype == np.float32
        assert "rewards" not in pad_rows([bare, bare])

    def test_own_values_of_rows(self) -> None:
        """A value of each row is [B], of a type that holds all of them."""
        rows = [row([1, 2, 3]), row([4]), row([5, 6])]
        for one, value in zip(rows, (np.int8(3), np.float32(0.5), np.bool_(True)), strict=True):
            one.values["own"] = value
        arrays = pad_rows(rows)
        assert (arrays["own"].tolist(), arrays["own"].dtype) == ([3.0, 0.5, 1.0], np.float32)
        assert to_torch(arrays)["own"].shape == (3,)

    @pytest.mark.parametrize("first", [0, 1])
    def test_a_key_of_rows_here_and_of_tokens_there(self, first: int) -> None:
        """A key that is [B] in some rows and [B, S] in others is left out, with a warning that says so."""
        of_row, of_tokens = row([1, 2]), row([3, 4])
        of_row.values["own"] = np.float32(0.5)
        of_tokens.tokens["own"] = np.zeros(2, np.float32)
        with pytest.warns(ForebayWarning, match=r"they are \[B\] in some rows and \[B, S\] in others: own$"):
            arrays = pad_rows([of_row, of_tokens] if first == 0 else [of_tokens, of_row])
        assert "own" not in arrays

    def test_original_rewards_that_some_rows_lack(self) -> None:
        """Where some rows have an original reward, that of the others, which nothing has changed, is their reward."""
        changed, same, without = row([1, 2], reward=-1.0), row([3, 4], reward=2.0), row([5, 6], reward=None)
        changed.original_reward = 9.0
        assert pad_rows([same, changed])["original_rewards"].tolist() == [2.0, 9.0]
        assert "original_rewards" not in pad_rows([same, same])
        with pytest.warns(ForebayWarning, match="rewards are NaN"):
            arrays = pad_rows([changed, without, same])
        assert [str(value) for value in arrays["rewards"].tolist()] == ["-1.0", "nan", "2.0"]
        assert [str(value) for value in arrays["original_rewards"].tolist()] == ["9.0", "nan", "2.0"]
        changed.original_reward = 0.0
        assert pad_rows([changed, same])["original_rewards"].tolist() == [0.0, 2.0]

    @pytest.mark.parametrize("first", [0, 1])
    def test_no_value_is_lost_to_another_rows_type(self, first: int) -> None:
        """A key of the workflow's own that is of integers in one row and of floats in another keeps its fractions."""
        rows = [
            Row({"input_ids": np.zeros(1, np.int32), "own": np.array([3], np.int16)}),
            Row({"input_ids": np.zeros(1, np.int32), "own": np.array([0.5], np.float32)}),
        ]
        assert sorted(pad_rows(rows if first == 0 else rows[::-1])["own"][:, 0].tolist()) == [0.5, 3.0]

    def test_tensors_are_copies_of_the_rows(self) -> None:
        """What user code does to the tensors does not reach the rows."""
        one = row([1, 2])
        to_torch(pad_rows([one]))["input_ids"][:] = 0
        assert one.tokens["input_ids"].tolist() == [1, 2]


class TestRolloutGroup:
    """contract 4.8: row counts strict ints >= 1; rewards None or finite floats; one entry for each usable rollout."""

    def test_usable_size_counts_rollouts(self) -> None:
        """The usable size is the number of rollouts, not of rows."""
        assert RolloutGroup(row_counts=(2, 3), rewards=(1.0, None), sample_idx=(0, 2)).usable_size == 2

    @pytest.mark.parametrize("counts", [(0,), (-1,), (1.0,), (True,), ("1",), (np.int64(1),)])
    def test_row_counts_are_strict(self, counts: tuple[int, ...]) -> None:
        """Anything but an int of at least 1 is refused."""
        with pytest.raises(ContractError, match="row_counts"):
            RolloutGroup(counts, (None,), (0,))

    @pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
    def test_rewards_are_finite(self, reward: float) -> None:
        """A reference is None or finite."""
        with pytest.raises(ContractError, match="rewards"):
            RolloutGroup((1,), (reward,), (0,))

    @pytest.mark.parametrize(("rewards", "slots"), [((), (0,)), ((None,), ()), ((None, None), (0,))])
    def test_one_entry_each(self, rewards: tuple[None, ...], slots: tuple[int, ...]) -> None:
        """The three have the same length."""
        with pytest.raises(ContractError, match="one entry"):
            RolloutGroup((1,), rewards, slots)
