"""Who is hit, how and when: a sequence that the seed alone decides."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["Action", "Blow", "Target", "blows"]


class Target(StrEnum):
    """Kinds of process."""

    WORKER = "worker"
    COLLECTOR = "collector"
    TRAINER = "trainer"
    PRODUCER = "producer"
    SERVER = "server"
    REDIS = "redis"


class Action(StrEnum):
    """What is done to it."""

    KILL = "SIGKILL"
    TERM = "SIGTERM"
    STOP = "SIGSTOP"
    """And SIGCONT after a while that is shorter or longer than the leases."""


_TARGETS = {
    Target.WORKER: 4,
    Target.COLLECTOR: 2,
    Target.TRAINER: 2,
    Target.REDIS: 2,
    Target.SERVER: 1,
    Target.PRODUCER: 1,
}
"""A deck that is dealt and shuffled anew, so that every kind is hit in every dozen blows."""
_ACTIONS = {Action.KILL: 5, Action.TERM: 1, Action.STOP: 2}
"""A deck of each target's own, so that every kind is killed, asked to end and stopped within eight blows to it."""
_GAP_S = (0.8, 3.2)
_SHORT = (0.1, 0.8)
"""Of a lease: whoever was stopped for so long still holds it."""
_LONG = (1.3, 3.0)


@dataclass(frozen=True, slots=True)
class Blow:
    """One hit."""

    gap_s: float
    """Since the one before."""
    target: Target
    place: float
    """In [0, 1): which of the processes of that kind that are up."""
    action: Action
    hold_s: float
    """From SIGSTOP to SIGCONT; 0 for the other actions."""


def blows(seed: int, lease_s: float) -> Iterator[Blow]:
    """The endless sequence of `seed`, on average one blow in 2 s."""
    rng = random.Random(seed)
    targets: list[Target] = []
    actions: dict[Target, list[Action]] = {target: [] for target in Target}

    def dealt(deck: list[Any], counts: Mapping[Any, int]) -> Any:
        if not deck:
            deck += [card for card, count in counts.items() for _ in range(count)]
            rng.shuffle(deck)
        return deck.pop()

    while True:
        target = dealt(targets, _TARGETS)
        action = dealt(actions[target], _ACTIONS)
        gap_s, place = rng.uniform(*_GAP_S), rng.random()
        # Redis that is away for less than a lease is what its restarts are: when it is stopped, it is for longer.
        hold_s = lease_s * rng.uniform(*(_LONG if target is Target.REDIS else rng.choice((_SHORT, _LONG))))
        yield Blow(gap_s, target, place, action, hold_s if action is Action.STOP else 0.0)
