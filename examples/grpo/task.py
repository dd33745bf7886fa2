"""The task: ``c:1234=`` is answered with ``1234`` and a stop.

Workers import this module to score completions, so it needs the standard library only and is imported in no time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

__all__ = ["DIGITS", "MAX_NEW_TOKENS", "STOP_ID", "copy_prompts", "copy_reward"]

DIGITS = 4
MAX_NEW_TOKENS = 8
"""Room for the answer, its stop, and a few more: where stopping late is impossible, stopping in time is not learnt."""
STOP_ID = 1
"""The id of ``<eos>`` in the vocabulary of the tiny model."""

_FOR_DIGITS = 0.7
_FOR_STOP = 0.3


def copy_prompts(seed: int) -> Iterator[dict[str, Any]]:
    """Prompts without end; the same seed gives the same ones.

    Each is the ``data`` of one group: the chat ``messages`` that the workflow renders, and the ``answer`` that comes
    back to :func:`copy_reward` as a keyword argument.
    """
    rng = random.Random(seed)
    while True:
        digits = "".join(rng.choices("0123456789", k=DIGITS))
        yield {"messages": [{"role": "user", "content": f"c:{digits}="}], "answer": digits}


def copy_reward(
    prompt: str,  # noqa: ARG001 (every reward function is called with these four)
    completion: str,
    prompt_ids: list[int],  # noqa: ARG001
    completion_ids: list[int],
    *,
    answer: str,
    **_: Any,
) -> float:
    """0.7 x the share of digits at their right position + 0.3 if the stop came right after the last digit.

    Both parts matter for learning: a share, unlike all-or-nothing, tells the rollouts of a random policy apart.
    """
    right = sum(given == wanted for given, wanted in zip(completion, answer, strict=False))
    stopped = len(completion_ids) == len(answer) + 1 and completion_ids[-1] == STOP_ID
    return _FOR_DIGITS * right / len(answer) + _FOR_STOP * stopped
