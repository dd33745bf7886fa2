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
from forebay.errors import ConnectionLostError, RedisRefusedError, SettingsError, StoreFullError
from forebay.http_clients import clients_of_loop
from forebay.http_metrics import Listen
from forebay.pools import PoolUse
from forebay.reward_pool import shared_processes
from forebay.settings import EngineSettings, RunSettings, Settings
from forebay.store.store import Store
from forebay.trace_files import TraceWriter
from forebay_workers.admission import admit_groups
from forebay_workers.arq_host import SlotHost
from forebay_workers.doing import what_runs
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
_HAND_BACK_S = 10.0
"""Bound on what a workflow that swallows its cancellation may take, and then on the last answers of Redis."""
_RECANCEL_S = 0.2


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
        RedisRefusedError: Redis refuses the credentials, or a command, whenever that is.
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
                await worker.serve(stop, stop.hurry)
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
        self._engine_settings = engine_settings
        self._fleet = Fleet(engine_settings)
        self._leases = Leases(store, self.name, rules.lease_s, self._about, self._doing)
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
        try:
            return await self._runner.claim(most)
        except StoreFullError:
            return []  # what would run now could not be published; admission says so in the log

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
            "held": self._runner.publisher.held.results,
            "servers": len(self._fleet.stats()),
            "servers_healthy": sum(server.healthy for server in self._fleet.stats().values()),
        }

    def _doing(self, culprit: Attempt | None) -> bytes:
        return what_runs(self._runner.sessions, self._fleet, culprit).pack()

    def _state(self) -> WorkerState:
        servers = self._fleet.stats()
        return WorkerState(
            slots=self._settings.max_slots,
            busy=self._host.busy,
            ended=dict(self._runner.ended_by_kind),
            servers=len(servers),
            servers_healthy=sum(server.healthy for server in servers.values()),
            pools={
                "servers": PoolUse.of(
                    sum(server.in_flight for server in servers.values()),
                    len(servers) * self._engine_settings.max_connections_per_server,
                ),
                "rewards": shared_processes().use,
                **clients_of_loop().use,
            },
            held=self._runner.publisher.held,
        )

    def held(self) -> list[Attempt]:
        """The attempts that run here."""
        return self._leases.held()

    def rescue(self) -> Rescue:
        """What the watchdog does for them while this event loop is blocked."""
        return Rescue(self._run_settings, self._leases, asyncio.get_running_loop())

    async def serve(self, stop: asyncio.Event, hurry: asyncio.Event | None = None) -> None:
        """Run slots until `stop` is set; then let them finish for a while, and hand back what does not.

        `hurry` ends that while: what still runs is handed back at once.
        """
        async with self._metrics or contextlib.nullcontext():
            await self._serve(stop, hurry or asyncio.Event())

    async def _serve(self, stop: asyncio.Event, hurry: asyncio.Event) -> None:
        clients_of_loop().max_connections = self._settings.max_http_connections
        shared_processes().limit = self._settings.max_reward_processes
        await self._refresh()
        await self._fleet.start()
        try:
            await self._leases.beat()
        except BaseException:  # nothing runs yet that would close it
            await self._fleet.close()
            raise
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
            await self._shut_down(tasks, stopped, hurry)

    async def _shut_down(
        self, tasks: list[asyncio.Task[Any]], stopped: asyncio.Task[Any], hurry: asyncio.Event
    ) -> None:
        heartbeat, *others = tasks
        others[0].cancel()  # admission: other workers go on with it
        await self._host.stop_claiming(_CLOSE_S)
        log.info("worker.draining", running=len(self._leases), at_most_s=self._settings.drain_timeout_s)
        if not await self._drained(hurry):
            self._store.hurry()
            await self._hand_back()
        self._store.hurry()
        await stop_tasks([heartbeat, *others, stopped])
        with contextlib.suppress(ConnectionLostError, RedisRefusedError, TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
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

    async def _drained(self, hurry: asyncio.Event) -> bool:
        """Let running episodes finish: whether all did, in the time that they have and before `hurry`."""
        idle = named_task("idle", self._host.wait_idle(self._settings.drain_timeout_s))
        impatient = named_task("hurry", hurry.wait())
        try:
            await asyncio.wait((idle, impatient), return_when=asyncio.FIRST_COMPLETED)
            return idle.done() and idle.result()
        finally:
            await stop_tasks((idle, impatient))

    async def _hand_back(self) -> None:
        """Cancel what still runs; each attempt hands itself back, and what is being published gets its answer.

        Again and again, as `stop_tasks` does; but what has let go of its lease meanwhile, to publish or to hand back,
        is left alone: cutting that short would leave the lease to run out, and cost the slot an attempt.
        """
        self._runner.draining = True
        deadline = asyncio.get_running_loop().time() + _HAND_BACK_S
        while (running := self._leases.tasks()) and asyncio.get_running_loop().time() < deadline:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=_RECANCEL_S)
        await self._host.wait_idle(_HAND_BACK_S)

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
