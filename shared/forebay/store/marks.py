"""Whether Redis has gone back in time: restored from older data, a replica without the last writes, or emptied.

Some numbers of a run only grow. A store remembers the largest that it has been told; Redis must never say less. They
are asked for on each new connection before anything else is sent on it, which is where such a Redis is first met, and
with each pipeline of scripts, so that what this client has written itself is remembered too. Neither costs a round trip
of its own. An answer is compared with what was known when it was asked for: answers may overtake each other.

``reconciled`` counts how often the run was reconciled. Whoever meets a larger one takes all marks as they are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError

from forebay.errors import ForebayError
from forebay.store.keys import Keys

__all__ = ["GoneBackError", "Marks", "Seen", "read_marks"]

_STATE = ("task_seq", "commit_seq", "batch_seq", "epoch", "recoveries")
_COUNTERS = (
    "submitted",
    "started",
    "slots:usable",
    "rejected",
    "evicted",
    "batches_delivered",
    "batches_acked",
)
_ABOUT = ("reconciled", "incarnation", "version")


@dataclass(frozen=True, slots=True)
class Seen:
    """What Redis has said of the run, at the latest."""

    reconciled: int = 0
    incarnation: str = ""
    """Drawn when a collector first led the run here; another one is another run's data, or none."""
    version: int = 0
    numbers: Mapping[str, int] = field(default_factory=dict)
    """Field of the state, or ``counters:FIELD`` -> value."""

    def fallen(self, there: Seen) -> list[str]:
        """What is less `there`; nothing where the run was reconciled since."""
        if there.reconciled > self.reconciled:
            return []
        if there.reconciled < self.reconciled:
            return [f"it was reconciled {self.reconciled} times, and {there.reconciled} times there"]
        out = []
        if self.incarnation and self.incarnation != there.incarnation:
            out.append("it is not the same run" if there.incarnation else "nothing of the run is there")
        for name, value in self.numbers.items():
            if (now := there.numbers.get(name, 0)) < value:
                out.append(f"{name} was {value} and is {now}")
        if self.numbers.get("recoveries", 0) == there.numbers.get("recoveries", 0) and there.version < self.version:
            out.append(f"version was {self.version} and is {there.version}")
        return out

    def arguments(self) -> list[Any]:
        """As ``rolled_back.lua`` takes them."""
        out: list[Any] = [self.reconciled, self.incarnation]
        for name, value in self.numbers.items():
            counter = name.startswith("counters:")
            out += ["counters" if counter else "state", name.removeprefix("counters:"), value]
        return [*out, "version", self.numbers.get("recoveries", 0), self.version]


class GoneBackError(ForebayError, RedisError):  # redis-py closes a connection whose greeting raises a RedisError
    """Redis says less than it has said before. Carries what was `seen`; the text names the differences."""

    def __init__(self, text: str, seen: Seen) -> None:
        super().__init__(text)
        self.seen = seen


class Marks:
    """The marks of one store."""

    def __init__(self, keys: Keys) -> None:
        self.seen = Seen()
        self.commands: tuple[tuple[Any, ...], ...] = (
            ("HMGET", keys.state, *_ABOUT, *_STATE),
            ("HMGET", keys.counters, *_COUNTERS),
        )
        """What asks for them."""

    def compare(self, before: Seen, answers: Sequence[Any]) -> None:
        """Take in what was answered to `commands`, asked for when `before` was `seen`. Raises GoneBackError."""
        there = read_marks(answers)
        if fallen := before.fallen(there):
            raise GoneBackError("; ".join(fallen), before)
        now = self.seen
        if there.reconciled > now.reconciled:
            self.seen = there
        elif there.reconciled == now.reconciled:
            self.seen = _larger(now, there)

    async def greet(self, connection: Any) -> None:
        """Greet the server over a new connection as redis-py would, and ask for the marks. Raises GoneBackError."""
        await connection.on_connect()
        before = self.seen
        answers = []
        for command in self.commands:
            await connection.send_command(*command)
            answers.append(await connection.read_response())
        self.compare(before, answers)


def _larger(one: Seen, other: Seen) -> Seen:
    names = {**one.numbers, **other.numbers}
    numbers = {name: max(one.numbers.get(name, 0), other.numbers.get(name, 0)) for name in names}
    newer = other if _order(other) >= _order(one) else one
    return Seen(one.reconciled, other.incarnation or one.incarnation, newer.version, numbers)


def _order(seen: Seen) -> tuple[int, int]:
    return seen.numbers.get("recoveries", 0), seen.version


def read_marks(answers: Sequence[Any]) -> Seen:
    """What was answered to the commands of :class:`Marks`."""
    about, counters = answers
    reconciled, incarnation, version = about[: len(_ABOUT)]
    numbers = {name: _int(value) for name, value in zip(_STATE, about[len(_ABOUT) :], strict=True)}
    numbers |= {f"counters:{name}": _int(value) for name, value in zip(_COUNTERS, counters, strict=True)}
    return Seen(_int(reconciled), (incarnation or b"").decode(errors="replace"), _int(version), numbers)


def _int(value: bytes | None) -> int:
    """As the scripts read a field: what is no integer counts as absent."""
    try:
        return 0 if value is None else int(value)
    except ValueError:
        return 0
