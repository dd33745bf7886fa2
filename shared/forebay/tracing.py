"""Phases of an episode and how long they took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["trace_session"]


@contextmanager
def trace_session(phase: str) -> Iterator[None]:  # noqa: ARG001 -- measures nothing yet
    """Record the block as one `phase` of the running episode."""
    yield
