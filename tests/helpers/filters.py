"""Filters for groups (``should_accept_fn``) that decide, fail and look."""

from __future__ import annotations

import sys
from typing import Any

from forebay import RolloutGroup

SEEN: list[dict[str, Any]] = []
"""What :func:`look` was given; tests empty it."""


def look(group: dict[str, Any]) -> bool:
    """Keep what it sees."""
    SEEN.append(group)
    return True


def any_positive(group: dict[str, Any]) -> bool:
    """Accept a group with a positive raw reward; the answer is a torch scalar."""
    answer: bool = (group["original_rewards"] > 0).any()
    return answer


def spoil(group: dict[str, Any]) -> bool:
    """Change everything in place."""
    for value in group.values():
        if not isinstance(value, RolloutGroup):
            value.zero_()
    return True


def explode(group: dict[str, Any]) -> bool:
    """Fail alike each time."""
    raise KeyError("absent")


def explode_anew(group: dict[str, Any]) -> bool:
    """Fail with another text each time."""
    raise ValueError(group["rollout_group"].row_counts)


def leave(group: dict[str, Any]) -> bool:
    """End the program."""
    sys.exit(1)


def ambiguous(group: dict[str, Any]) -> Any:
    """Answer for each row."""
    return group["rewards"] > 0


async def eventually(group: dict[str, Any]) -> bool:
    """A coroutine, which as a truth value is always true."""
    return False


NUMBER = 3
