"""Prompts and rewards of the demos."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from typing import Any

import pytest

from examples.grpo.task import DIGITS, MAX_NEW_TOKENS, STOP_ID, copy_prompts, copy_reward
from forebay_ops.tiny_model import VOCABULARY


def _reward(text: str, *, stop: bool, answer: str = "1234") -> float:
    ids = [VOCABULARY.index(symbol) for symbol in text] + [STOP_ID] * stop
    return copy_reward("c:1234=", text, [], ids, answer=answer, messages=[])


def test_stop_id_is_the_end_symbol_of_the_tiny_model() -> None:
    """The reward's stop is the token that ends a text of the tiny model."""
    assert VOCABULARY[STOP_ID] == "<eos>"


@pytest.mark.parametrize(
    ("text", "stop", "reward"),
    [
        ("1234", True, 1.0),
        ("1234", False, 0.7),  # cut off by the length limit right there
        ("1239", True, 0.825),
        ("4321", True, 0.3),  # the right digits at wrong places are wrong digits
        ("12345", True, 0.7),  # one token too many: the stop came late
        ("123", True, 0.525),  # the stop came early
        ("", True, 0.0),
        ("", False, 0.0),
        ("12341234", False, 0.7),
    ],
)
def test_copy_reward(text: str, stop: bool, reward: float) -> None:
    """0.7 for digits at their places, 0.3 for a stop right after the last of them."""
    assert _reward(text, stop=stop) == pytest.approx(reward)


def test_copy_prompts_are_the_same_for_the_same_seed() -> None:
    """A seed decides the prompts; another seed gives others."""
    first, again, other = (list(islice(copy_prompts(seed), 20)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_copy_prompts_fit_the_tiny_model() -> None:
    """Each prompt asks for its own digits, in symbols that the model has, with room for answer and stop."""
    for data in islice(copy_prompts(3), 50):
        text = data["messages"][0]["content"]
        assert text == f"c:{data['answer']}="
        assert len(data["answer"]) == DIGITS < MAX_NEW_TOKENS
        assert set(text) <= set(VOCABULARY)


@pytest.mark.parametrize("module", ["examples.grpo.task", "examples.text.task"])
def test_tasks_import_nothing_heavy(module: str) -> None:
    """Workers import the tasks to score completions: no torch, transformers or reasoning_gym comes with them."""
    heavy = {"torch", "transformers", "reasoning_gym", "numpy"}
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"


class TestText:
    """The questions of reasoning-gym."""

    @pytest.fixture(autouse=True)
    def _needs_reasoning_gym(self) -> None:
        pytest.importorskip("reasoning_gym")

    def _some(self, seed: int, count: int = 8) -> list[dict[str, Any]]:
        from examples.text.task import questions

        return list(islice(questions(seed), count))

    def test_questions_are_the_same_for_the_same_seed(self) -> None:
        """A seed decides the questions; another seed gives others."""
        assert self._some(1) == self._some(1)
        assert self._some(1) != self._some(2)

    def test_questions_come_from_every_data_set(self) -> None:
        """The data sets take turns."""
        from examples.text.task import DATASETS

        assert [data["dataset"] for data in self._some(1)] == [*DATASETS, *DATASETS]

    def test_verifier_knows_its_own_answers(self) -> None:
        """The answer scores 1, nonsense nearly nothing, for every data set, from name, seed and index alone."""
        from examples.text.task import verify

        for data in self._some(5):
            assert verify("", f" {data['answer']}\n", [], [], **data) == 1.0
            assert verify("", "nonsense", [], [], **data) < 0.1
