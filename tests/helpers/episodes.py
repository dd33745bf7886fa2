"""Episodes by hand: a workflow on a fleet of real HTTP servers, with scripted rewards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from scripted_server import fast_settings, until

from forebay_ops.tiny_server.app import create_runner
from forebay_ops.tiny_server.engine import Engine
from forebay_ops.tiny_server.engine import EngineSettings as ServerSettings
from forebay_ops.tiny_server.model import ServedModel
from forebay_workers.engines import Fleet


class Rewards:
    """A coroutine reward of scripted values that keeps its calls."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    async def __call__(self, /, *args: Any, **kwargs: Any) -> float:
        """The next value; the last one for ever."""
        self.calls.append((args, kwargs))
        return self.values[min(len(self.calls), len(self.values)) - 1]


@asynccontextmanager
async def fleet_of(*urls: str) -> AsyncIterator[Fleet]:
    """A fleet whose servers are all healthy."""
    async with Fleet(fast_settings(no_server_timeout_s=30, request_timeout_s=60)) as fleet:
        fleet.set_servers(urls)
        await until(lambda: all(stat.healthy for stat in fleet.stats().values()), 30)
        yield fleet


@asynccontextmanager
async def tiny_fleet(folder: Path) -> AsyncIterator[Fleet]:
    """A fleet on one development server, of weights with the label 2."""
    runner = create_runner(Engine(ServedModel.load(folder), ServerSettings(), "2"))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with fleet_of(f"http://127.0.0.1:{runner.addresses[0][1]}") as fleet:
            yield fleet
    finally:
        await runner.cleanup()


async def run(workflow: Any, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
    """One episode's result."""
    result: dict[str, Any] | None = await workflow.arun_episode(engine, dict(data))
    assert result is not None
    return result
