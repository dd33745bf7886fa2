"""What a worker says with each heart-beat of the attempts that it runs, and of the servers as it sees them.

It is read by whoever asks what a batch waits for, and by nobody else; so it travels beside what the worker says of
itself, in few bytes: lists by position, servers by their number, at most `MAX_ATTEMPTS` of the oldest attempts. Times
are seconds before the beat, by the worker's own clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from forebay.wire.values import pack, unpack

__all__ = ["MAX_ATTEMPTS", "AttemptDoing", "Doing", "ServerSeen"]

MAX_ATTEMPTS = 512
_MAX_SERVERS = 256
_MAX_PHASE = 40
_MAX_ERROR = 200
_FOREVER_S = 1e12

Attempt = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class AttemptDoing:
    """What one attempt does."""

    age_s: float
    phase: str
    """``generating``, ``waiting for a server``, ``waiting for a weight update``, ``workflow`` (its own code),
    ``blocking the event loop``, or the traced phase that runs."""
    phase_s: float
    """Since when."""
    server: str = ""
    """The inference server of its oldest open generation; "": none is open."""


@dataclass(frozen=True, slots=True)
class ServerSeen:
    """An inference server, as one worker sees it."""

    healthy: bool
    paused_s: float | None = None
    """For how long it has been paused, as for a weight update; None: it is not."""
    down_s: float | None = None
    """For how long it has not been healthy; None: it is."""
    error: str = ""
    """What it last failed with, while it is down."""


@dataclass(frozen=True, slots=True)
class Doing:
    """All that a worker says of this."""

    attempts: Mapping[Attempt, AttemptDoing] = field(default_factory=dict)
    servers: Mapping[str, ServerSeen] = field(default_factory=dict)

    def pack(self) -> bytes:
        """As bytes."""
        urls = list(self.servers)[:_MAX_SERVERS]
        number = {url: at for at, url in enumerate(urls)}
        oldest: Iterable[tuple[Attempt, AttemptDoing]] = self.attempts.items()
        if len(self.attempts) > MAX_ATTEMPTS:
            oldest = sorted(oldest, key=lambda item: -item[1].age_s)[:MAX_ATTEMPTS]
        return pack(
            {
                "s": [
                    [url, seen.healthy, _short(seen.paused_s), _short(seen.down_s), seen.error[:_MAX_ERROR]]
                    for url, seen in list(self.servers.items())[:_MAX_SERVERS]
                ],
                "a": [
                    [
                        *attempt,
                        round(one.age_s, 1),
                        one.phase[:_MAX_PHASE],
                        round(one.phase_s, 1),
                        number.get(one.server, -1),
                    ]
                    for attempt, one in oldest
                ],
            }
        )

    @classmethod
    def unpack(cls, frame: bytes) -> Doing:
        """What is in `frame`; entries that do not fit are left out, so that releases may differ. Raises FrameError."""
        form = unpack(frame)
        servers: dict[str, ServerSeen] = {}
        names: list[str] = []
        for entry in _entries(form, "s"):
            match entry:
                case [str(url), bool(healthy), paused, down, str(error), *_]:
                    names.append(url)
                    servers[url] = ServerSeen(healthy, _seconds(paused), _seconds(down), error)
                case _:
                    names.append("")  # the numbers of the others stay
        attempts: dict[Attempt, AttemptDoing] = {}
        for entry in _entries(form, "a"):
            match entry:
                case [int(task), int(idx), int(attempt), age, str(phase), since, int(at), *_]:
                    server = names[at] if 0 <= at < len(names) else ""
                    attempts[task, idx, attempt] = AttemptDoing(
                        _seconds(age) or 0.0, phase, _seconds(since) or 0.0, server
                    )
                case _:
                    pass
        return cls(attempts, servers)


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def _seconds(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < _FOREVER_S else None  # NaN is not below it


def _entries(form: Any, name: str) -> list[Any]:
    found = form.get(name) if isinstance(form, dict) else None
    return found if isinstance(found, list) else []
