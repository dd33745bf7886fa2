"""Settings and fixtures of the conformance suite: one file a section of the contract, in the page's order."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import settings

from forebay.settings import Settings
from forebay.store import Store

# No deadline for an example: how long one takes says more about the machine's other work than about the code.
settings.register_profile("forebay", deadline=None)
settings.load_profile("forebay")


@pytest.fixture
async def store(any_redis_url: str, run_name: str) -> AsyncIterator[Store]:
    """The store of a run of one's own, on Valkey and on Redis."""
    opened = Store.open(Settings(REDIS_URL=any_redis_url, experiment_name=run_name.split("/", maxsplit=1)[0]))
    yield opened
    await opened.close()
