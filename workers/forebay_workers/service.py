"""A worker process: engine, leases, admission, slots, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import uuid
from typing import Any

import structlog

from forebay import workflow_context
from forebay.aio import named_task, stop_signal, stop_tasks
from forebay.errors import ConnectionLostError, SettingsError
from forebay.http_metrics import Listen
from forebay.settings import EngineSettings, RunSettings, Settings
from forebay.store.store import Store
from forebay.trace_files import TraceWriter
from forebay_workers.admission import admit_groups
from forebay_workers.arq_host import SlotHost
from forebay_workers.engines.fleet import Fleet
from forebay_workers.leases import Attempt, Leases
from forebay_workers.metrics import WorkerMetrics, WorkerState
from forebay_workers.rescue import Rescue
from forebay_workers.settings import WorkerSettings
from forebay_workers.slots import SlotRunner
from forebay_workers.watchdog import watched

__all__ = ["Worker", "run_worker"]

log = structlog.get_logger(__name__)

_REFRESH_S = 1.0
_NO_SERVER_S = 0.05
_CLOSE_S = 3.0


async def run_worker(
    settings: Settings,
    engine_settings: EngineSettings,
    worker_settings: WorkerSettings,
    listen: Listen | None = None,
) -> None:
    """Serve the run that `settings` name until SIGTERM or SIGINT; with `listen`, serve ``/metrics`` there.

    Raises:
        PortInUseError: the port for the metrics is taken.
        SettingsError: a setting of the metrics is bad.
        ConnectionLostError: Redis cannot be reached at start.
        RunNotReadyError: no collector published the run's settings within ``wait_for_run_s``.
        SettingsError: ``trace_dir`` cannot be written to.
    """
    store = Store.open(settings, max_connections=worker_settings.max_slots + 32, waits_for_reconciliation=True)
    try:
        await store.ping()
        log.info("worker.waiting_for_run", run=settings.run)
        rules = await store.wait_for_settings(worker_settings.wait_for_run_s, asyncio.sleep)
        await store.add_servers(settings.servers)
        async with stop_signal() as stop:
            worker = Worker(store, settings, rules, engine_settings, worker_settings, listen)
            with watched(worker_settings.watchdog_s, worker.held, worker.rescue(), rules.lease_s):
                await worker.serve(stop)
    finally:
        await store.close()


class Worker:
    """The loops of a worker, and their orderly end."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        rules: RunSettings,
        engine_settings: EngineSettings,
        worker_settings: WorkerSettings,
        listen: Listen | None = None,
    ) -> None:
        self.name = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
        self._store = store
        self._rules = rules
        self._settings = worker_settings
        self._run_settings = settings
        self._fleet = Fleet(engine_settings)
        self._leases = Leases(store, self.name, rules.lease_s, self._about)
        self._traces = _trace_writer(worker_settings, self.name)
        self._runner = SlotRunner(store, self._fleet, self._leases, self.name, rules, worker_settings, self._traces)
        self._host = SlotHost(
            settings.resolved_redis_url(),
            store.keys.jobs,
            self._claim,
            self._runner.run,
            idle=self._idle,
            max_slots=worker_settings.max_slots,
            poll_delay_s=worker_settings.poll_delay_s,
        )
        self._metrics = None if listen is None else WorkerMetrics(self._state, listen)
        self._era = store.era

    async def _claim(self, most: int) -> list[str]:
        # Without a server nothing is claimed: no attempt is burned on a fleet that is still loading its model.
        if not self._fleet.ready:
            return []
        return await self._runner.claim(most)

    async def _idle(self) -> None:
        if self._fleet.ready:
            await self._store.wait_for_wake("jobs", self._settings.idle_poll_s)
        else:
            await asyncio.sleep(_NO_SERVER_S)  # the wake-up is for a worker that can use it

    def _about(self) -> dict[str, Any]:
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "slots": self._settings.max_slots,
            "busy": self._host.busy,
            "ended": dict(self._runner.ended),
            "servers": len(self._fleet.stats()),
            "servers_healthy": sum(server.healthy for server in self._fleet.stats().values()),
        }

    def _state(self) -> WorkerState:
        servers = self._fleet.stats()
        return WorkerState(
            slots=self._settings.max_slots,
            busy=self._host.busy,
            ended=dict(self._runner.ended_by_kind),
            servers=len(servers),
            servers_healthy=sum(server.healthy for server in servers.values()),
        )

    def held(self) -> list[Attempt]:
        """The attempts that run here."""
        return self._leases.held()

    def rescue(self) -> Rescue:
        """What the watchdog does for them while this event loop is blocked."""
        return Rescue(self._run_settings, self._leases, asyncio.get_running_loop())

    async def serve(self, stop: asyncio.Event) -> None:
        """Run slots until `stop` is set; then let them finish for a while, and hand back what does not."""
        async with self._metrics or contextlib.nullcontext():
            await self._serve(stop)

    async def _serve(self, stop: asyncio.Event) -> None:
        await self._refresh()
        await self._fleet.start()
        await self._leases.beat()
        tasks = [
            named_task("heartbeat", self._leases.run()),
            named_task("admission", admit_groups(self._store, self._rules.group_deadline_s)),
            named_task("slots", self._host.run()),
            named_task("refresh", self._keep_refreshing()),
        ]
        stopped = named_task("stop", stop.wait())
        log.info("worker.ready", worker=self.name, slots=self._settings.max_slots, run=self._store.keys.run)
        try:
            done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a loop that ended without being asked to is a fault: raise it
        finally:
            await self._shut_down(tasks, stopped)

    async def _shut_down(self, tasks: list[asyncio.Task[Any]], stopped: asyncio.Task[Any]) -> None:
        heartbeat, *others = tasks
        self._host.stop_claiming()
        others[0].cancel()  # admission: other workers go on with it
        log.info("worker.draining", running=len(self._leases))
        if not await self._host.wait_idle(self._settings.drain_timeout_s):
            self._runner.draining = True
            self._store.hurry()
            await stop_tasks(self._leases.tasks())
        self._store.hurry()
        await stop_tasks([heartbeat, *others, stopped])
        with contextlib.suppress(ConnectionLostError):
            await self._store.sign_off(self.name)
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._fleet.close()
                await self._host.close()
                await workflow_context.aclose()
        except TimeoutError:
            log.warning("worker.connections_left_open", worker=self.name)  # the end of the process closes them
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)
        log.info("worker.stopped", worker=self.name)

    async def _refresh(self) -> None:
        if self._era != self._store.era:  # the run was reconciled: its registry of servers may be an old one, or empty
            await self._store.add_servers(self._run_settings.servers)
            self._era = self._store.era
        self._fleet.set_servers(await self._store.servers())
        self._fleet.set_version(await self._store.version())

    async def _keep_refreshing(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH_S)
            try:
                await self._refresh()
            except ConnectionLostError as error:
                log.warning("refresh.failed", reason=str(error))


def _trace_writer(settings: WorkerSettings, worker: str) -> TraceWriter | None:
    if settings.trace_dir is None:
        return None
    try:
        return TraceWriter(settings.trace_dir, worker, settings.trace_max_bytes)
    except OSError as error:
        raise SettingsError(
            f"FOREBAY_WORKER_TRACE_DIR={settings.trace_dir}: cannot be made a folder ({error}); name one that this "
            "process may write to, or unset it"
        ) from None
