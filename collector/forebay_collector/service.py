"""The collector process: what it takes part in, and its leases.

Every collector beats. With each beat it renews what it holds, and takes what is free: its share of the partitions of
the results (:mod:`forebay_collector.partitions`), and the lead with its duties (:mod:`forebay_collector.duties`). What
it holds in memory can be rebuilt from Redis, and all it changes carries the epoch of the lease that it is done under,
so that a predecessor that comes back to life changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import uuid
from typing import TYPE_CHECKING

import structlog

from forebay.aio import named_task, stop_signal, stop_tasks
from forebay.errors import (
    ConnectionLostError,
    FencedError,
    RedisRefusedError,
    RolledBackError,
    RunNotReadyError,
    SettingsError,
)
from forebay.http_metrics import Listen, MetricsServer
from forebay.loop_lag import watch_loop
from forebay.settings import RunSettings, Settings
from forebay.store.server_check import check_server
from forebay.store.store import Store
from forebay_collector.accept import AcceptFilter
from forebay_collector.committer import Committer
from forebay_collector.dump import Dumper
from forebay_collector.duties import Duties
from forebay_collector.metrics import CollectorMetrics
from forebay_collector.partitions import Partitions

if TYPE_CHECKING:
    from forebay_collector.exposition import Exposition

__all__ = ["Collector", "run_collector"]

log = structlog.get_logger(__name__)

_BEATS_A_LEASE = 5
_LONGEST_BEAT_S = 0.5
_AWAY_S = 0.5


async def run_collector(settings: Settings, rules: RunSettings, listen: Listen | None = None) -> None:
    """Collect for the run that `settings` name until SIGTERM or SIGINT; with `listen`, serve ``/metrics`` there.

    Raises:
        ConnectionLostError: Redis cannot be reached at start.
        SettingsError: a setting of the dump or of the metrics is bad, or Redis drops keys when its memory is full.
        PortInUseError: the port for the metrics is taken.
    """
    store = Store.open(settings)
    try:
        await store.ping()
        await check_server(store)
        async with stop_signal() as stop:
            while True:
                era = store.era
                collector = Collector(store, rules, listen)
                await collector.open()
                try:
                    await collector.serve(stop)
                    return
                except RolledBackError:
                    # What it holds in memory is of a Redis that is no more. It begins anew once that is reconciled.
                    if not await _reconciled(store, stop):
                        return
                except FencedError:
                    if store.era == era:
                        raise
                log.warning("collector.begins_anew", run=settings.run, reason="Redis was reconciled")
    finally:
        await store.close()


async def _reconciled(store: Store, stop: asyncio.Event) -> bool:
    """Wait until the run is reconciled; False: `stop` was set first."""
    log.error("collector.waits_for_reconciliation", run=store.keys.run, remedy="client.reconcile(...) by the trainer")
    while not stop.is_set():
        with contextlib.suppress(RolledBackError, ConnectionLostError):
            await store.check_marks()
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _AWAY_S)
    return False


class Collector:
    """Takes part in the collecting of a run."""

    def __init__(self, store: Store, rules: RunSettings, listen: Listen | None = None) -> None:
        self.name = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
        self._store = store
        self._rules = rules
        self._dumper = Dumper(rules, store.keys.run)
        self._exposition = None if listen is None else _make_exposition(store, self._dumper)
        self._server = None
        if listen is not None and self._exposition is not None:
            self._server = MetricsServer(self._exposition.render, listen)
        metrics = CollectorMetrics(rules, self._exposition)
        committer = Committer(store, AcceptFilter(rules.import_allowlist), self._dumper, rules.shaping, metrics)
        self._partitions = Partitions(store, committer)
        self._duties = Duties(store, rules, metrics, self._dumper)
        self._lead: asyncio.Task[None] | None = None
        """The duties, while this collector leads."""
        self._epoch = 0
        """Of the lead; 0: it does not lead."""
        self._ready = False

    async def open(self) -> None:
        """Check the settings of the dump. Raises SettingsError."""
        await self._dumper.open()

    @property
    def metrics_url(self) -> str:
        """Where the metrics are scraped; "" if they are not served."""
        return self._server.url if self._server is not None else ""

    @property
    def leads(self) -> bool:
        """Whether it leads, as far as it knows."""
        return self._epoch > 0

    @property
    def partitions(self) -> list[int]:
        """The partitions that it owns, as far as it knows."""
        return self._partitions.numbers

    async def serve(self, stop: asyncio.Event) -> None:
        """Take part until `stop` is set, then give up at once all that is held; metrics are served all the while.

        Raises:
            PortInUseError: the port for the metrics is taken.
            SettingsError: the metrics cannot be served there.
        """
        async with self._server or contextlib.nullcontext():
            tasks = [] if self._exposition is None else [named_task("lag", watch_loop(self._exposition.lag))]
            try:
                await self._serve(stop)
            finally:
                await stop_tasks(tasks)
                await self._dumper.close()

    async def _serve(self, stop: asyncio.Event) -> None:
        tasks = [
            named_task("beat", self._beat_forever()),
            named_task("results", self._partitions.run()),
            named_task("stop", _wait(stop)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            if stop.is_set():
                self._store.hurry()
            tasks += [] if self._lead is None else [self._lead]
            await stop_tasks(tasks)
            for task in tasks:
                if task.done() and not task.cancelled():
                    task.exception()  # retrieved: one error is raised, and the others have the same cause
            await self._partitions.close()
            # Where that fails the leases end by themselves.
            with contextlib.suppress(ConnectionLostError, RedisRefusedError, RolledBackError):
                await self._store.resign(self.name)
            log.info("collector.stopped", collector=self.name)

    # -- leases -------------------------------------------------------------------------------------------------------

    async def _beat_forever(self) -> None:
        pause_s = min(_LONGEST_BEAT_S, self._rules.collector_lease_s / _BEATS_A_LEASE)
        while True:
            try:
                await self._beat()
            except ConnectionLostError as error:
                log.warning("lease.not_renewed", reason=str(error))
                await asyncio.sleep(_AWAY_S)
            else:
                await asyncio.sleep(pause_s)

    async def _beat(self) -> None:
        """Renew and take leases, and act on what was won or lost.

        Raises:
            ConnectionLostError: Redis is away.
            Exception: what a duty raised, that ended by a fault.
        """
        lease_s = self._rules.collector_lease_s
        epoch, held = await asyncio.gather(  # one round trip
            self._store.lead(self.name, lease_s), self._store.hold(self.name, lease_s)
        )
        if await self._follow_lead(epoch):
            held = await self._store.hold(self.name, lease_s)  # the rules say anew what there is to be held
        for partition in await self._partitions.own(held):
            await self._store.give_up(self.name, partition)
        if self._exposition is not None:
            self._exposition.holds(leading=self.leads, partitions=self.partitions)
        if not self._ready and await self._agrees():
            self._ready = True
            log.info("collector.ready", collector=self.name, run=self._store.keys.run, leads=self.leads,
                     batch_size=self._rules.batch_size, capacity=self._rules.capacity)  # fmt: skip

    async def _follow_lead(self, epoch: int) -> bool:
        """Begin or end the duties: whether they begin. Raises what one of them raised, unless the lead was lost."""
        if self._lead is not None and (self._lead.done() or epoch != self._epoch):
            lead, self._lead, self._epoch = self._lead, None, 0
            await stop_tasks([lead])
            error = lead.exception() if lead.done() and not lead.cancelled() else None
            if error is not None and not isinstance(error, FencedError):
                raise error
            reason = "another collector leads" if error is None else str(error)
            log.warning("lead.lost", collector=self.name, reason=reason)
        if not epoch or self._lead is not None:
            return False
        try:
            await self._duties.begin(epoch)
        except FencedError:
            return False  # lost in between: the next beat tells
        self._epoch = epoch
        self._lead = named_task("lead", self._duties.run(epoch))
        log.info("lead.taken", collector=self.name, epoch=epoch)
        return True

    async def _agrees(self) -> bool:
        """Whether rules are published, its own or another's: who collects under other ones says so, and goes on."""
        try:
            published = await self._store.run_settings()
        except RunNotReadyError as error:
            log.warning("settings.unreadable", reason=str(error))
            return True
        if published is None:
            return False
        theirs, ours = published.model_dump(mode="json"), self._rules.model_dump(mode="json")
        if differing := sorted(name for name in ours if ours[name] != theirs.get(name)):
            log.warning("settings.differ", settings=differing, remedy="start all collectors with the same settings")
        return True


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


def _make_exposition(store: Store, dumper: Dumper) -> Exposition:
    """What exposes metrics. Raises SettingsError without the library for it."""
    try:
        from forebay_collector.exposition import Exposition
    except ImportError:
        raise SettingsError("FOREBAY_COLLECTOR_HTTP_PORT needs prometheus-client; install forebay[collector]") from None
    return Exposition(store, dumper)
