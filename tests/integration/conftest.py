"""Fixtures of the integration tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    """An event loop that lives as long as the test, whatever number of examples it runs."""
    with asyncio.Runner() as made:
        yield made
