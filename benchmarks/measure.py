"""What is measured, and how often: figures by round, and ratios of figures of the same round.

A shared machine changes its speed from one second to the next. So the ways that are compared take turns, several
rounds long, and a ratio is taken within each round before the median is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Report", "Say", "Series"]

Say = Callable[[str], None]
"""Takes one line about the progress."""


@dataclass(frozen=True, slots=True)
class Series:
    """One figure of one way, measured once a round."""

    what: str
    """The figure: ``encode``, ``slots per second``."""
    way: str
    unit: str
    values: tuple[float, ...]
    """One for each round."""
    base: tuple[float, ...] | None = None
    """The same figure of the way that this one is compared with, by the same rounds; None: it is that way."""

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.values)

    @property
    def ratios(self) -> tuple[float, ...]:
        """This figure divided by its base, round by round; empty without a base, or where a base is 0."""
        if self.base is None or not all(self.base):
            return ()
        return tuple(value / base for value, base in zip(self.values, self.base, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        ratios = self.ratios
        return {
            "what": self.what,
            "way": self.way,
            "unit": self.unit,
            "rounds": list(self.values),
            "median": self.median,
            "ratios": list(ratios),
            "ratio": statistics.median(ratios) if ratios else None,
        }


@dataclass(slots=True)
class Report:
    """The figures of one benchmark."""

    title: str
    reference: str
    """The way that ratios are to."""
    series: list[Series] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, what: str, unit: str, ways: dict[str, list[float]]) -> None:
        """Add figure `what` of all `ways`, each compared with the reference if that is among them."""
        base = ways.get(self.reference)
        for way, values in ways.items():
            compared = None if base is None or values is base else tuple(base)
            self.series.append(Series(what, way, unit, tuple(values), compared))
