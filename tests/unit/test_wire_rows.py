"""From a workflow's tensors to ragged rows (contract 3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.building import result, row
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import SlotDataError, WorkflowContractError
from forebay.wire.rows import rows_from_tensors
from forebay.wire.tensors import pad_rows


def only(**changes: Any) -> Any:
    """The single row of a result of one row and four tokens with `changes`."""
    (found,), _ = rows_from_tensors(result(**changes))
    return found


class TestRagged:
    """contract 3: only real tokens cross the wire."""

    def test_padding_is_cut(self) -> None:
        """Each row ends where its attention mask does."""
        mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], dtype=np.bool_)
        rows, reference = rows_from_tensors(result(rows=2, attention_mask=mask))
        assert [one.seqlen for one in rows] == [4, 2]
        assert rows[1].tokens["input_ids"].tolist() == [4, 5]
        assert all(len(array) == 2 for array in rows[1].tokens.values())
        assert "attention_mask" not in rows[1].tokens
        assert reference is None

    @given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    def test_padding_comes_back(self, lengths: list[int]) -> None:
        """Rows that are padded and read again are the same rows."""
        rows = [row(list(range(1, length + 1))) for length in lengths]
        again, _ = rows_from_tensors(pad_rows(rows))
        assert [one.tokens["input_ids"].tolist() for one in again] == [one.tokens["input_ids"].tolist() for one in rows]
        assert [one.tokens["versions"].tolist() for one in again] == [one.tokens["versions"].tolist() for one in rows]

    @pytest.mark.parametrize(
        ("mask", "said"), [([1, 0, 1, 1], "holes"), ([0, 1, 1, 1], "holes"), ([0, 0, 0, 0], "all zero")]
    )
    def test_left_padding_holes_and_emptiness_are_refused(self, mask: list[int], said: str) -> None:
        """A mask that is not ones and then zeros is a contract error."""
        with pytest.raises(WorkflowContractError, match=said):
            only(attention_mask=np.array([mask], dtype=np.bool_))

    def test_torch_and_numpy_give_the_same(self) -> None:
        """Tensors, also with gradient, give what arrays give."""
        arrays = result()
        tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
        tensors["logprobs"].requires_grad_()
        (one,), _ = rows_from_tensors(tensors)
        for name, array in only().tokens.items():
            assert np.array_equal(one.tokens[name], array), name


class TestVersions:
    """contract 1 and 3: versions of trained tokens only."""

    def test_case_23_prompt_versions_are_ignored(self) -> None:
        """Case 23: prompt versions may come as 0; they become -1, and head is that of the trained tokens."""
        one = only(versions=np.array([[0, 5, 6, 5]]))
        assert one.tokens["versions"].tolist() == [-1, 5, 6, 5]
        assert one.head_tail == (5, 6)

    def test_head_and_tail_without_trained_tokens_or_versions(self) -> None:
        """Without trained tokens, or without versions, both are -1."""
        assert only(loss_mask=np.zeros((1, 4), dtype=np.int32)).head_tail == (-1, -1)
        assert only(versions=None).head_tail == (-1, -1)
        assert only(loss_mask=None).head_tail == (-1, -1)

    def test_prompt_len_is_the_first_trained_token(self) -> None:
        """prompt_len is the index of the first trained token; the row's length if there is none."""
        assert only(loss_mask=np.array([[0, 0, 1, 0]], dtype=np.int32)).prompt_len == 2
        assert only(loss_mask=np.zeros((1, 4), dtype=np.int32)).prompt_len == 4


class TestTypes:
    """contract 3: the table of dtypes."""

    def test_types_are_as_in_the_table(self) -> None:
        """Wider types are accepted and become the table's."""
        one = only(
            input_ids=np.array([[1, 2, 3, 4]], dtype=np.int64),
            attention_mask=np.ones((1, 4), dtype=np.int64),
            loss_mask=np.array([[False, True, True, True]]),
            logprobs=np.zeros((1, 4), dtype=np.float64),
            versions=np.zeros((1, 4), dtype=np.int64),
            turn_ids=np.zeros((1, 4), dtype=np.int64),
            token_rewards=np.zeros((1, 4), dtype=np.float64),
            is_truncated=np.array([True]),
            own_key=np.zeros((1, 4), dtype=np.float64),
        )
        assert {name: array.dtype.str[1:] for name, array in one.tokens.items()} == {
            "input_ids": "i4",
            "loss_mask": "i4",
            "logprobs": "f4",
            "versions": "i4",
            "turn_ids": "i4",
            "token_rewards": "f4",
            "own_key": "f8",
        }
        assert one.is_truncated is True

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"input_ids": np.ones((1, 4))}, "input_ids has dtype float64"),
            ({"loss_mask": np.ones((1, 4))}, "loss_mask has dtype float64"),
            ({"logprobs": np.zeros((1, 4), dtype=np.int32)}, "logprobs has dtype int32"),
            ({"rewards": np.array(["1"])}, "rewards has dtype"),
            ({"own_key": np.array([["a"] * 4])}, "own_key has dtype"),
            ({"own_key": np.zeros((1, 4), dtype=np.longdouble)}, "own_key has dtype"),
            ({"own_key": np.zeros(1, dtype=np.longdouble)}, "own_key has dtype"),
            ({"own_key": np.array(["a"])}, "own_key has dtype"),
            ({"logprobs": torch.zeros((1, 4), dtype=torch.float8_e4m3fn)}, "logprobs has a type that does not travel"),
            ({"input_ids": [[1, 2, 3, 4]]}, "input_ids is a list; a workflow returns tensors"),
            ({"is_truncated": True}, "is_truncated is a bool"),
        ],
    )
    def test_wrong_types_are_contract_errors(self, changes: dict[str, Any], said: str) -> None:
        """A wrong type is a contract error that names the key."""
        with pytest.raises(WorkflowContractError, match=said):
            only(**changes)

    @pytest.mark.parametrize("name", ["logprobs", "token_rewards", "own_key"])
    def test_bfloat16_becomes_float32(self, name: str) -> None:
        """bfloat16 values of tokens arrive as float32, which holds each of them; rewards do too."""
        exact = torch.tensor([[0.0, -0.1, -3.14159, 1e-30]], dtype=torch.bfloat16)
        one = only(**{name: exact}, rewards=torch.tensor([0.1], dtype=torch.bfloat16))
        assert one.tokens[name].dtype == np.float32
        assert one.tokens[name].tolist() == exact[0].tolist()
        assert one.reward == float(torch.tensor(0.1, dtype=torch.bfloat16))

    @pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint8, np.int32, np.int64, np.uint64])
    def test_a_loss_mask_of_any_integers(self, dtype: Any) -> None:
        """A loss_mask of 0 and 1, of bools or any integers, is int32."""
        mask = only(loss_mask=np.array([[0, 1, 0, 1]], dtype=dtype)).tokens["loss_mask"]
        assert (mask.tolist(), mask.dtype) == ([0, 1, 0, 1], np.int32)

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"input_ids": np.array([[1, 2, 3, 2**31]])}, "input_ids has a value that does not fit int32"),
            ({"versions": np.array([[0, 2**40, 0, 0]])}, "versions has a value that does not fit int32"),
            ({"input_ids": np.array([[1, -2, 3, 4]])}, "negative id -2"),
        ],
    )
    def test_integers_never_wrap(self, changes: dict[str, Any], said: str) -> None:
        """An integer out of range fails the slot; it does not become another one."""
        with pytest.raises(SlotDataError, match=said):
            only(**changes)


class TestShapes:
    """contract 2: check_trajectory_format, the part that always holds."""

    @pytest.mark.parametrize("name", ["input_ids", "attention_mask"])
    def test_required_keys(self, name: str) -> None:
        """input_ids and attention_mask are required; the error says what there is."""
        with pytest.raises(WorkflowContractError, match=rf"no {name}; it has .*loss_mask"):
            only(**{name: None})

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"input_ids": np.array([1, 2, 3, 4])}, r"input_ids has shape \[4\].*unsqueeze"),
            ({"input_ids": np.zeros((1, 0), dtype=np.int32)}, r"shape \[1, 0\]"),
            ({"loss_mask": np.zeros((2, 4), dtype=np.int32)}, r"loss_mask has shape \[2, 4\], expected \[1, 4\]"),
            ({"versions": np.zeros((1, 5), dtype=np.int32)}, r"versions has shape \[1, 5\]"),
            ({"logprobs": np.zeros((1, 5), dtype=np.float32)}, r"logprobs has shape \[1, 5\]"),
            ({"rewards": np.zeros((1, 1), dtype=np.float32)}, r"rewards has shape \[1, 1\], expected \[1\]"),
            ({"rewards": np.zeros((1, 4), dtype=np.float32)}, r"rewards has shape \[1, 4\], expected \[1\]"),
            ({"loss_mask": np.ones(1, dtype=np.int32)}, r"loss_mask has shape \[1\], expected \[1, 4\]"),
            ({"own_key": np.zeros((1, 1), dtype=np.float32)}, r"own_key has shape \[1, 1\], expected \[1\], a value"),
            ({"own_key": np.zeros(2)}, r"own_key has shape \[2\], expected \[1\], .* or \[1, 4\], one for each token"),
            ({"own_key": np.zeros((1, 4, 2))}, r"own_key has shape \[1, 4, 2\].*put it into multi_modal_input"),
            ({"own_key": np.array(1.0)}, r"own_key has shape \[\], expected"),
        ],
    )
    def test_mismatched_shapes_are_contract_errors(self, changes: dict[str, Any], said: str) -> None:
        """A shape that does not match is an error with both shapes."""
        with pytest.raises(WorkflowContractError, match=said):
            only(**changes)

    def test_keys_are_strings(self) -> None:
        """A key that is no text is a contract error."""
        with pytest.raises(WorkflowContractError, match="the key 5; keys are strings"):
            rows_from_tensors(result() | {5: np.zeros((1, 4))})

    @pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.int64, np.float16, np.float32, np.float64])
    def test_own_keys_of_rows(self, dtype: Any) -> None:
        """A key of the workflow's own that is [B] is a value of each row, in its own type, and no key of tokens."""
        rows, _ = rows_from_tensors(result(rows=3, own=np.array([0, 1, 1], dtype=dtype)))
        assert [one.values["own"] for one in rows] == [0, 1, 1]
        assert {one.values["own"].dtype for one in rows} == {np.dtype(dtype)}
        assert all("own" not in one.tokens for one in rows)

    def test_one_row_of_one_token(self) -> None:
        """Where B and S are both 1 the number of dimensions tells which an own key is."""
        one = only(**result(width=1), of_row=np.array([0.5]), of_token=np.array([[0.5]]))
        assert (list(one.values), one.tokens["of_token"].tolist()) == (["of_row"], [0.5])

    def test_rollout_group_is_exempt(self) -> None:
        """A rollout_group in a result is the collector's to make; it is left out."""
        assert "rollout_group" not in only(rollout_group=object()).tokens


class TestBadValues:
    """contract 3: NaN or infinite values, missing logprobs: failed(data), zeros are never filled in."""

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
    def test_logprobs(self, bad: float) -> None:
        """A logprob that is not finite in float32 fails the slot, with its place."""
        values = np.array([[0.0, -1.0, bad, -1.0]])
        with pytest.raises(SlotDataError, match=r"row 0: logprobs\[2\] is"):
            only(logprobs=values)

    def test_case_25_missing_logprobs(self) -> None:
        """Case 25: fewer logprobs than tokens fail the slot as bad data."""
        with pytest.raises(SlotDataError, match="logprobs are missing: 3 for 4 tokens"):
            only(logprobs=np.zeros((1, 3), dtype=np.float32))

    @pytest.mark.parametrize("name", ["rewards", "original_rewards"])
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e39, -1e300])
    def test_rewards(self, name: str, bad: float) -> None:
        """A reward that is not finite in float32 fails the slot."""
        with pytest.raises(SlotDataError, match=f"row 0: {name} is"):
            only(**{name: np.array([bad])})

    @pytest.mark.parametrize("bad", [7, -1, 2, 255])
    def test_loss_masks(self, bad: int) -> None:
        """A loss_mask of another value than 0 and 1, a weight in disguise, fails the slot with the value."""
        with pytest.raises(SlotDataError, match=rf"row 0: loss_mask\[2\] is {bad}; it is 1 where"):
            only(loss_mask=np.array([[0, 1, bad, 1]]))

    def test_padding_is_not_looked_at(self) -> None:
        """NaN beyond the attention mask is padding, and so is any number in the loss mask there."""
        one = only(
            attention_mask=np.array([[True, True, True, False]]),
            logprobs=np.array([[0, -1, -1, np.nan]], dtype=np.float32),
            loss_mask=np.array([[0, 1, 1, -100]]),
        )
        assert one.seqlen == 3

    @pytest.mark.parametrize("given_as", ["absent", "none"])
    def test_no_reward_leaves_the_slot_usable(self, given_as: str) -> None:
        """A reward that is None or absent leaves the row without one."""
        values = result(rewards=None)
        if given_as == "none":
            values["rewards"] = None
        (one,), _ = rows_from_tensors(values)
        assert one.reward is None


class TestReference:
    """contract 3 and 5: ``rollout_reward`` is one finite number for each rollout."""

    @pytest.mark.parametrize("value", [1, 1.0, np.float32(1), np.array([1.0]), torch.tensor(1.0)])
    def test_any_single_number_is_taken(self, value: Any) -> None:
        """A number, or an array or a tensor of one, is the reference and is not a key of the rows."""
        rows, reference = rows_from_tensors(result(rows=2, rollout_reward=value))
        assert reference == 1.0
        assert all("rollout_reward" not in one.tokens for one in rows)

    @pytest.mark.parametrize("value", ["1", b"1", [1.0], np.zeros(2), torch.zeros(2), object()])
    def test_what_is_no_number_is_a_contract_error(self, value: Any) -> None:
        """Several numbers, text and objects are contract errors."""
        with pytest.raises(WorkflowContractError, match="rollout_reward is"):
            rows_from_tensors(result(rollout_reward=value))

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
    def test_it_is_finite(self, value: float) -> None:
        """A reference that is not finite fails the slot."""
        with pytest.raises(SlotDataError, match="rollout_reward is"):
            rows_from_tensors(result(rollout_reward=value))
