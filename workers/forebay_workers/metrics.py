"""Serves a worker's metrics; without a port there is nothing of it (contract, section 12)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from forebay.aio import named_task, stop_tasks
from forebay.errors import SettingsError
from forebay.http_metrics import Listen, MetricsServer
from forebay.loop_lag import watch_loop
from forebay.pools import PoolUse
from forebay_workers.publication import Held

__all__ = ["WorkerMetrics", "WorkerState"]


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker is doing, at one instant."""

    slots: int
    busy: int
    ended: Mapping[tuple[str, str], int]
    """Attempts that ended here, by outcome and, of failures, kind."""
    servers: int
    servers_healthy: int
    pools: Mapping[str, PoolUse]
    """``servers``, ``rewards``, and the HTTP clients that workflows share: ``aiohttp``, ``httpx``."""
    held: Held
    """Results that wait for memory in Redis."""


class WorkerMetrics:
    """``/metrics`` of one worker, as an async context manager."""

    def __init__(self, look: Callable[[], WorkerState], listen: Listen) -> None:
        """Serve what `look` sees at each scrape.

        Raises:
            SettingsError: the library for it is not installed, or the host needs a token that is not set.
        """
        try:
            from forebay_workers.exposition import Exposition
        except ImportError:
            raise SettingsError(
                "FOREBAY_WORKER_METRICS_PORT needs prometheus-client; install forebay[workers]"
            ) from None
        self._exposition = Exposition(look)
        self._server = MetricsServer(self._exposition.render, listen)
        self._lag: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where it is scraped, once it listens."""
        return self._server.url

    async def __aenter__(self) -> Self:
        """Listen. Raises PortInUseError, SettingsError."""
        await self._server.__aenter__()
        self._lag = named_task("lag", watch_loop(self._exposition.lag))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening."""
        if self._lag is not None:
            await stop_tasks([self._lag])
        await self._server.__aexit__()
