"""From interactions to rows (contract 4.5 and 9)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.building import result
from hypothesis import given
from hypothesis import strategies as st

from forebay import Interaction, StopReason
from forebay.errors import SlotDataError, WorkflowContractError
from forebay.interactions import rows_from_interactions, rows_from_result
from forebay.outcomes import ResultKind
from forebay.wire.rows import Row


def interaction(**changes: Any) -> Interaction:
    """Two prompt tokens and three generated ones."""
    fields: dict[str, Any] = {
        "input_tokens": [5, 6],
        "output_tokens": [7, 8, 9],
        "output_logprobs": [-0.5, -1.0, 0.0],
        "output_versions": [3, 3, 4],
    }
    return Interaction(**(fields | changes))


def row_of(**changes: Any) -> Row:
    """The row of an interaction."""
    (one,), _ = rows_from_interactions({"c": interaction(**changes)})
    return one


class TestRows:
    """One row for each interaction: prompt and completion, token-exact."""

    def test_a_row(self) -> None:
        """Prompt tokens are not trained on and have no version; types are the table's (contract 3)."""
        one = row_of(reward=1, original_reward=2.0, stop_reason=StopReason.LENGTH)
        assert {name: (array.dtype.str[1:], array.tolist()) for name, array in one.tokens.items()} == {
            "input_ids": ("i4", [5, 6, 7, 8, 9]),
            "loss_mask": ("i4", [0, 0, 1, 1, 1]),
            "logprobs": ("f4", [0, 0, -0.5, -1, 0]),
            "versions": ("i4", [-1, -1, 3, 3, 4]),
        }
        assert (one.reward, one.original_reward, one.is_truncated, one.completion) == (1.0, 2.0, True, "c")
        assert (one.head_tail, one.prompt_len) == ((3, 4), 2)

    @given(st.lists(st.integers(0, 2**31 - 1), min_size=1), st.lists(st.integers(0, 2**31 - 1), min_size=1))
    def test_token_ids_are_kept(self, prompt: list[int], output: list[int]) -> None:
        """Whatever the ids, they come back as they were."""
        one = row_of(
            input_tokens=prompt,
            output_tokens=output,
            output_logprobs=[0.0] * len(output),
            output_versions=[0] * len(output),
        )
        assert one.tokens["input_ids"].tolist() == prompt + output

    def test_arrays_serve_as_lists(self) -> None:
        """Arrays of numpy do as well as lists."""
        fields = ("input_tokens", "output_tokens", "output_logprobs", "output_versions")
        one = row_of(**{name: np.array(getattr(interaction(), name)) for name in fields})
        assert one.tokens["input_ids"].tolist() == [5, 6, 7, 8, 9]

    def test_rows_in_order_with_the_reference(self) -> None:
        """In the order of the result; a reference that some supply and that agrees is the rollout's."""
        made = {
            "b": interaction(),
            "a": interaction(rollout_reward=0.5),
            "c": interaction(rollout_reward=np.float32(0.5)),
        }
        rows, reference = rows_from_interactions(made)
        assert ([one.completion for one in rows], reference) == (["b", "a", "c"], 0.5)
        assert rows_from_interactions({"a": interaction()})[1] is None

    @pytest.mark.parametrize("reward", [None, 0, 1.5, np.float64(2), torch.tensor(3.0)])
    def test_rewards(self, reward: Any) -> None:
        """None leaves the row without one; any number is one."""
        assert row_of(reward=reward).reward == (None if reward is None else float(reward))


class TestRefusals:
    """Bad data and broken contracts, each naming its interaction."""

    @pytest.mark.parametrize(
        ("changes", "error", "why"),
        [
            ({"input_tokens": []}, WorkflowContractError, "0 input and 3 output tokens"),
            ({"output_tokens": []}, WorkflowContractError, "2 input and 0 output tokens"),
            ({"output_logprobs": [0.0]}, SlotDataError, "logprobs are missing: 1 for 3 output tokens"),
            ({"output_logprobs": [0.0] * 4}, WorkflowContractError, "3 output tokens, 4 logprobs and 3 versions"),
            ({"output_versions": [0]}, WorkflowContractError, "3 logprobs and 1 versions"),
            ({"output_logprobs": [0.0, float("nan"), 0.0]}, SlotDataError, r"output_logprobs\[1\] is not finite"),
            ({"output_logprobs": [0.0, 0.0, -1e300]}, SlotDataError, r"output_logprobs\[2\] is not finite"),
            ({"output_logprobs": [0.0, None, "x"]}, WorkflowContractError, "output_logprobs holds something"),
            ({"output_tokens": [7, 8, 2**31]}, SlotDataError, "a token id is 2147483648; it must"),
            ({"input_tokens": [-1, 6]}, SlotDataError, "a token id is -1; it must be at least 0"),
            ({"input_tokens": [1.5, 6]}, WorkflowContractError, "a token id is no integer"),
            ({"output_tokens": [7, 8, 2**70]}, WorkflowContractError, "a token id is no integer of 64 bits"),
            ({"output_versions": [1, 2, None]}, WorkflowContractError, "output_versions is no integer"),
            ({"output_versions": [1, 2, -2]}, SlotDataError, "output_versions is -2"),
            ({"reward": float("nan")}, SlotDataError, "reward is nan"),
            ({"reward": 1e300}, SlotDataError, r"reward is 1e\+300"),
            ({"original_reward": float("inf")}, SlotDataError, "original_reward is inf"),
            ({"reward": "1"}, WorkflowContractError, "reward is '1', expected a number"),
            ({"rollout_reward": [1.0]}, WorkflowContractError, r"rollout_reward is \[1.0\], expected a number"),
            ({"rollout_reward": float("-inf")}, SlotDataError, "rollout_reward is -inf"),
        ],
    )
    def test_each(self, changes: dict[str, Any], error: type[Exception], why: str) -> None:
        """The kind of the error, and a reason with the completion id."""
        with pytest.raises(error, match=f"interaction c: .*{why}"):
            row_of(**changes)

    def test_references_agree(self) -> None:
        """Contract 5: all supplied values of one rollout agree."""
        with pytest.raises(WorkflowContractError, match="rollout_rewards from 1 to 2"):
            rows_from_interactions({"a": interaction(rollout_reward=1), "b": interaction(rollout_reward=2)})

    def test_completion_ids_are_text(self) -> None:
        """A completion id that is no text is refused."""
        with pytest.raises(WorkflowContractError, match="completion id 3 is no text"):
            rows_from_interactions({3: interaction()})  # type: ignore[dict-item]


class TestKinds:
    """Contract 4.5: a result is of tensors, or of Interactions."""

    def test_each_kind(self) -> None:
        """The kind is told by the values."""
        assert rows_from_result({"a": interaction()})[0] is ResultKind.INTERACTIONS
        assert rows_from_result(result())[0] is ResultKind.TENSOR

    def test_a_mixture(self) -> None:
        """A dict that mixes them is a contract error that names what is no Interaction."""
        with pytest.raises(WorkflowContractError, match=r"mixes Interactions with other values \(input_ids, "):
            rows_from_result({"a": interaction(), **result()})
