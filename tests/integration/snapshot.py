"""All keys of a run at one instant, for tests that ask what a call has changed."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from forebay.store import Store

__all__ = ["Snapshot"]

# Undeclared keys: a test's server is never a cluster.
_LOOK = """
local out = {}
for _, pattern in ipairs(ARGV) do
  for _, k in ipairs(redis.call('KEYS', pattern)) do
    local kind, value = redis.call('TYPE', k).ok, nil
    if kind == 'string' then value = redis.call('GET', k)
    elseif kind == 'hash' then value = redis.call('HGETALL', k)
    elseif kind == 'set' then value = redis.call('SMEMBERS', k)
    elseif kind == 'zset' then value = redis.call('ZRANGE', k, 0, -1, 'WITHSCORES')
    elseif kind == 'list' then value = redis.call('LRANGE', k, 0, -1)
    else value = redis.call('XRANGE', k, '-', '+') end
    out[#out + 1] = {k, kind, value, redis.call('PTTL', k)}
  end
end
return out
"""
_LONG_AGO = 1000.0
"""Scores below it are of times that a test has put into the past."""
_CLOCKS = frozenset(
    {"leases", "deadlines", "held", "collected", "followers", "workers:seen", "dead", "poison", "collectors"}
)
"""Sorted sets whose scores are times: all that matters of them is whether they are in the past."""


def _pairs(flat: list[Any]) -> dict[bytes, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


@dataclass(frozen=True)
class Snapshot:
    """What each key held, by its name without the run's prefix; an arq key keeps its whole name."""

    values: dict[str, Any]
    """str: bytes; hash and sorted set: dict; set: frozenset; list: list; stream: ``{entry id: fields}``."""
    expiring: frozenset[str]
    """The keys with a TTL."""

    @classmethod
    async def of(cls, store: Store) -> Snapshot:
        """Look at the run of `store`."""
        prefix, run = store.keys.prefix, store.keys.run
        found = await store._redis.eval(_LOOK, 0, prefix + "*", f"arq:*{{{run}}}:*")  # type: ignore[no-untyped-call]
        values: dict[str, Any] = {}
        expiring = set()
        for name, kind, value, ttl in found:
            short = name.decode().removeprefix(prefix)
            values[short] = _plain(short, kind.decode(), value)
            if ttl >= 0:
                expiring.add(short)
        return cls(values, frozenset(expiring))

    def get(self, name: str, default: Any = None) -> Any:
        """What a key holds."""
        return self.values.get(name, default)

    def names(self, prefix: str) -> list[str]:
        """The keys that begin so."""
        return [name for name in self.values if name.startswith(prefix)]

    def number(self, field: str, default: int = 0) -> int:
        """A field of the run's state."""
        return int(self.values.get("state", {}).get(field.encode(), default))

    def changes(self, later: Snapshot, ignoring: Collection[str] = ()) -> list[str]:
        """What is different later, but for wake-ups, moments, and the fields of counters and state in `ignoring`."""
        mine, theirs = _comparable(self, ignoring), _comparable(later, ignoring)
        return [
            f"{name}: {mine.get(name)!r} -> {theirs.get(name)!r}"
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name)
        ]


def _plain(name: str, kind: str, value: Any) -> Any:
    if kind == "hash":
        return _pairs(value)
    if kind == "set":
        return frozenset(value)
    if kind == "zset":
        scores = {member: float(score) for member, score in _pairs(value).items()}
        return {member: score < _LONG_AGO for member, score in scores.items()} if name in _CLOCKS else scores
    if kind == "stream":
        return {entry.decode(): _pairs(fields) for entry, fields in value}
    return value


def _comparable(snapshot: Snapshot, ignoring: Collection[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in snapshot.values.items():
        if name.startswith("wake:"):
            continue
        kept = value
        if name in {"counters", "state"}:
            kept = {field: one for field, one in value.items() if field.decode() not in ignoring}
        elif name.startswith("arq:"):
            kept = b""  # its record has the moment of its making
        elif name == "jobs":
            kept = frozenset(value)
        elif re.match(r"(dead|group):", name) and isinstance(value, dict):
            kept = {field: one for field, one in value.items() if not re.fullmatch(rb"t\d+|at|run_at|dl", field)}
        out[name] = (kept, name in snapshot.expiring)
    return out
