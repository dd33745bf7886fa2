"""Which server takes which request (contract, section 7, routing).

Invariants (each with its test in ``tests/unit/test_router.py``):

- Requests of one rid go to one server for as long as it is healthy (``test_affinity``).
- An unhealthy or removed server is never picked, whatever the affinity (``test_affinity_to_unhealthy_is_dropped``).
- A new rid goes to a healthy server with the fewest requests in flight; among equals, to the one that has waited
  longest for a request (``test_ties_are_fair``).
- Remembered rids are bounded; the least recently used goes first (``test_affinity_is_bounded``).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

__all__ = ["Router"]


@dataclass(slots=True)
class _Load:
    healthy: bool = False
    paused: bool = False
    in_flight: int = 0
    picked: int = 0
    """Number of the pick that chose it last."""


class Router:
    """Keeps loads and affinities; does no I/O and knows no time."""

    def __init__(self, affinity_entries: int) -> None:
        self._limit = affinity_entries
        self._affinity: OrderedDict[str, str] = OrderedDict()
        self._servers: dict[str, _Load] = {}
        self._picks = 0

    @property
    def any_healthy(self) -> bool:
        """Whether :meth:`acquire` would find a server."""
        return any(load.healthy for load in self._servers.values())

    def add(self, url: str) -> None:
        """Know a server; it is unhealthy until :meth:`set_health` says otherwise."""
        self._servers.setdefault(url, _Load())

    def remove(self, url: str) -> None:
        """Forget a server. Its requests may still be released."""
        self._servers.pop(url, None)

    def set_health(self, url: str, *, healthy: bool, paused: bool = False) -> None:
        """Record a check's result; a paused server gets new rids only where all others are paused too."""
        load = self._servers.get(url)
        if load is not None:
            load.healthy = healthy
            load.paused = paused

    def is_healthy(self, url: str) -> bool:
        """Whether `url` may be picked."""
        load = self._servers.get(url)
        return load is not None and load.healthy

    def in_flight(self, url: str) -> int:
        """Requests that hold the server now."""
        load = self._servers.get(url)
        return 0 if load is None else load.in_flight

    def acquire(self, rid: str) -> str | None:
        """Pick the server for a request of `rid` and count it there; None where no server is healthy."""
        url = self._affinity.pop(rid, None)
        if url is None or not self.is_healthy(url):
            url = self._least_loaded()
        if url is None:
            return None
        self._affinity[rid] = url
        while len(self._affinity) > self._limit:
            self._affinity.popitem(last=False)
        self._picks += 1
        load = self._servers[url]
        load.in_flight += 1
        load.picked = self._picks
        return url

    def release(self, url: str) -> None:
        """End a request that :meth:`acquire` counted."""
        load = self._servers.get(url)
        if load is not None and load.in_flight > 0:
            load.in_flight -= 1

    def _least_loaded(self) -> str | None:
        ranked = [
            (load.paused, load.in_flight, load.picked, url) for url, load in self._servers.items() if load.healthy
        ]
        return min(ranked)[-1] if ranked else None
