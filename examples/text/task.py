"""Questions and verifiers of ``reasoning-gym``, an open collection of tasks with answers that can be checked.

A question travels as the name of its data set, a seed and an index: the worker makes the same entry again and asks the
data set's own verifier. ``reasoning_gym`` takes seconds to import, so that happens inside the functions, once in each
process.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

__all__ = ["DATASETS", "questions", "verify"]

DATASETS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "letter_counting": {"min_words": 3, "max_words": 5},
    "calendar_arithmetic": {"tasks": ["is_leap_year", "weekday_of_date"]},
    "gcd": {"max_value": 20},
}
"""The easiest settings: 135 million parameters do not get far."""

_EXAMPLES = 2
"""Solved entries of the same data set that stand before each question: verifiers want the bare answer, and a small
model follows examples better than instructions."""


def questions(seed: int) -> Iterator[dict[str, Any]]:
    """The ``data`` of groups without end, from each data set in turn; the same seed gives the same ones."""
    for index in itertools.count(_EXAMPLES):
        for name in DATASETS:
            entries = _dataset(name, seed)
            yield {
                "messages": [
                    *(message for at in range(_EXAMPLES) for message in _solved(entries[at])),
                    _asked(entries[index]),
                ],
                "dataset": name,
                "seed": seed,
                "index": index,
                "answer": entries[index]["answer"],  # to be shown; what counts is the verifier
            }


def _asked(entry: dict[str, Any]) -> dict[str, str]:
    return {"role": "user", "content": entry["question"].strip()}


def _solved(entry: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    return _asked(entry), {"role": "assistant", "content": entry["answer"]}


def verify(
    prompt: str,  # noqa: ARG001 (every reward function is called with these four)
    completion: str,
    prompt_ids: list[int],  # noqa: ARG001
    completion_ids: list[int],  # noqa: ARG001
    *,
    dataset: str,
    seed: int,
    index: int,
    **_: Any,
) -> float:
    """What the data set's verifier says: 1 for the answer, less for a text that contains it, 0 else."""
    entries = _dataset(dataset, seed)
    return float(entries.score_answer(answer=completion.strip(), entry=entries[index]))


@functools.cache
def _dataset(name: str, seed: int) -> Any:
    import reasoning_gym

    # Entries are made when they are asked for, so a large size costs nothing.
    return reasoning_gym.create_dataset(name, seed=seed, size=1_000_000, **DATASETS[name])
