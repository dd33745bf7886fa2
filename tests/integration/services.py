"""A collector and workers in the test's own event loop, against a real Redis and a real HTTP server."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from scripted_server import ScriptedServer, answer, fast_settings

from forebay import AsyncBatch, AsyncClient, RunSettings, Settings, load
from forebay.store import Store
from forebay_collector.service import Collector
from forebay_workers.service import Worker
from forebay_workers.settings import WorkerSettings

WORKFLOW = "pipeline_workflows.EchoWorkflow"


def run_settings(**changes: Any) -> RunSettings:
    """Rules with short times."""
    base: dict[str, Any] = {
        "batch_size": 2,
        "group_size": 2,
        "retry_backoff_s": 0.01,
        "lease_s": 1.0,
        "collector_lease_s": 1.0,
        "import_allowlist": ["pipeline_workflows"],
    }
    return load(RunSettings, **{**base, **changes})


class Services:
    """What runs, and the ways to stop and start it again."""

    def __init__(self, settings: Settings, rules: RunSettings, server: ScriptedServer) -> None:
        self.settings = settings
        self.rules = rules
        self.server = server
        self.store = Store.open(settings)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stops: dict[str, tuple[asyncio.Event, asyncio.Task[None], Store]] = {}
        self.collectors: dict[str, Collector] = {}
        """Those of this event loop, by the names given here."""

    async def start_collector(self, name: str = "collector", **changes: Any) -> None:
        """Start a collector, under the rules or with changes to them."""
        store = Store.open(self.settings)
        collector = Collector(store, self.rules.model_copy(update=changes))
        await collector.open()
        self.collectors[name] = collector
        self._start(name, collector.serve, store)

    async def start_worker(self, name: str = "worker", *, slots: int = 64, drain_s: float = 1.0) -> None:
        """Start a worker."""
        store = Store.open(self.settings)
        rules = await store.wait_for_settings(10, asyncio.sleep)
        settings = WorkerSettings(max_slots=slots, drain_timeout_s=drain_s)
        worker = Worker(store, self.settings, rules, fast_settings(), settings)
        self._start(name, worker.serve, store)

    def _start(self, name: str, serve: Any, store: Store) -> None:
        stop = asyncio.Event()
        self._stops[name] = (stop, asyncio.create_task(serve(stop)), store)

    async def stop(self, name: str) -> None:
        """End a service in good order, as SIGTERM would."""
        stop, task, store = self._stops.pop(name)
        stop.set()
        await asyncio.wait_for(task, 20)
        await store.close()

    def start_process(self, name: str, command: str, *, stderr: Path | None = None, **variables: str) -> None:
        """Start ``forebay COMMAND`` as a process of its own, to be killed; its log is appended to `stderr`."""
        paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = {
            **os.environ,
            "PYTHONPATH": paths,
            "REDIS_URL": self.settings.resolved_redis_url(),
            "FOREBAY_EXPERIMENT_NAME": self.settings.experiment_name,
            "FOREBAY_TRIAL_NAME": self.settings.trial_name,
            "FOREBAY_ENGINE_HEALTH_INTERVAL_S": "0.1",
            **{
                f"FOREBAY_{field.upper()}": ",".join(value) if isinstance(value, list) else str(value)
                for field, value in self.rules.model_dump(exclude_none=True).items()
            },
            **variables,
        }
        with (stderr or Path(os.devnull)).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", "forebay", command], env=environment, stderr=log
            )

    def ended(self, name: str) -> int | None:
        """The exit code of a process that has ended by itself, else None."""
        return self._processes[name].poll()

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process."""
        self._processes[name].send_signal(number)

    async def kill(self, name: str) -> None:
        """SIGKILL a process."""
        process = self._processes.pop(name)
        process.kill()
        await asyncio.to_thread(process.wait, 10)

    async def close(self) -> None:
        """Stop everything."""
        for name in list(self._processes):
            await self.kill(name)
        for name in list(self._stops):
            await self.stop(name)
        await self.store.close()


@asynccontextmanager
async def services(
    redis_url: str, run_name: str, *, collector: bool = True, worker: bool = True, **changes: Any
) -> AsyncIterator[tuple[Services, AsyncClient]]:
    """A collector and a worker (as processes where False), a scripted server, and a client of theirs."""
    server = ScriptedServer()
    server.default = answer([7, 8, 9], weight_version="0")
    await server.start()
    settings = Settings(REDIS_URL=redis_url, experiment_name=run_name.split("/", maxsplit=1)[0], servers=[server.url])
    running = Services(settings, run_settings(**changes), server)
    try:
        await running.store.add_servers([server.url])
        if collector:
            await running.start_collector()
        else:
            running.start_process("collector", "collector")
        client = await AsyncClient.connect(settings, wait_s=30)
        if worker:
            await running.start_worker()
        else:
            running.start_process("worker", "worker")
        try:
            yield running, client
        finally:
            await client.close()
    finally:
        await running.close()
        await server.stop()


async def read(client: AsyncClient, batches: int, timeout_s: float = 20.0, *, step: bool = False) -> list[AsyncBatch]:
    """The next batches, acknowledged; the version moves after each if `step`."""
    found = []
    async with client.batches(timeout_s=timeout_s) as stream:
        while len(found) < batches and (batch := await stream.next()) is not None:
            found.append(batch)
            await batch.ack()
            if step:
                await client.set_version(await client.version() + 1)
    return found
