"""How full a pool is: connections, processes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PoolUse"]


@dataclass(frozen=True, slots=True)
class PoolUse:
    """One pool, at one instant."""

    in_use: int
    waiting: int
    """Callers that wait for their turn."""
    limit: int
    """The most that may be in use at once."""

    @classmethod
    def of(cls, wanted: int, limit: int) -> PoolUse:
        """Of a pool of `limit` that `wanted` callers want."""
        return cls(min(wanted, limit), max(0, wanted - limit), limit)
