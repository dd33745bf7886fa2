"""The collector process.

One collector leads at a time, by a lease; others stand by. What it holds in memory can be rebuilt from Redis, and all
it changes carries the epoch of its lease, so that a predecessor that comes back to life changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import uuid
from typing import TYPE_CHECKING, Any

import structlog

from forebay.aio import named_task, stop_signal, stop_tasks
from forebay.errors import ConnectionLostError, FencedError, FrameError, RolledBackError, SettingsError
from forebay.http_metrics import Listen, MetricsServer
from forebay.loop_lag import watch_loop
from forebay.settings import RunSettings, Settings
from forebay.store.records import ResultEntry
from forebay.store.store import Store
from forebay.wire.envelopes import GroupRules
from forebay_collector.accept import AcceptFilter
from forebay_collector.assembler import Assembled, Assembler
from forebay_collector.committer import Committer
from forebay_collector.cutter import Cutter
from forebay_collector.dump import Dumper
from forebay_collector.metrics import CollectorMetrics

if TYPE_CHECKING:
    from forebay_collector.exposition import Exposition

__all__ = ["Collector", "run_collector"]

log = structlog.get_logger(__name__)

_READ_COUNT = 500
_BLOCK_S = 0.5
_COMMITS_AT_ONCE = 16
_REWRITES_AT_ONCE = 100
_SWEEP_EVERY_S = 5.0
_AWAY_S = 0.5


async def run_collector(settings: Settings, rules: RunSettings, listen: Listen | None = None) -> None:
    """Collect for the run that `settings` name until SIGTERM or SIGINT; with `listen`, serve ``/metrics`` there.

    Raises:
        ConnectionLostError: Redis cannot be reached at start.
        SettingsError: a setting of the dump or of the metrics is bad.
        PortInUseError: the port for the metrics is taken.
        FencedError: another collector took the lease while this one was silent.
    """
    store = Store.open(settings)
    try:
        await store.ping()
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
    """The duties of a collector, each a loop."""

    def __init__(self, store: Store, rules: RunSettings, listen: Listen | None = None) -> None:
        self.name = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
        self._store = store
        self._rules = rules
        self._dumper = Dumper(rules, store.keys.run)
        self._exposition = None if listen is None else _make_exposition(store, self._dumper)
        self._server = None
        if listen is not None and self._exposition is not None:
            self._server = MetricsServer(self._exposition.render, listen)
        self._metrics = CollectorMetrics(rules, self._exposition)
        self._assembler = Assembler(self._note_unreadable)
        self._unreadable: list[tuple[ResultEntry, str]] = []
        self._begin_anew = False
        """An entry that is no slot's result was counted in: the assembler's groups are not to be trusted."""
        self._committer = Committer(
            store, AcceptFilter(rules.import_allowlist), self._dumper, rules.shaping, self._metrics
        )
        self._cutter = Cutter(store, rules, self._metrics)
        self._epoch = 0
        self._told: str | None = None
        """Why the run has stopped itself, as far as it was logged."""
        self._commits: dict[int, asyncio.Task[None]] = {}
        """The commits under way, by task id."""

    async def open(self) -> None:
        """Check the settings of the dump. Raises SettingsError."""
        await self._dumper.open()

    @property
    def metrics_url(self) -> str:
        """Where the metrics are scraped; "" if they are not served."""
        return self._server.url if self._server is not None else ""

    async def serve(self, stop: asyncio.Event) -> None:
        """Wait for the lease, then lead until `stop` is set; metrics are served all the while.

        Raises:
            FencedError: another collector took the lease.
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
        stopped = asyncio.create_task(stop.wait())
        lead = asyncio.create_task(self._acquire())
        await asyncio.wait([lead, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not lead.done():
            await stop_tasks([lead])
            return
        self._epoch = lead.result()
        await self._store.configure(self._epoch, self._rules)
        self._metrics.begin(await self._store.status())
        if self._exposition is not None:
            self._exposition.lead(True)
        tasks = [
            named_task("lease", self._keep_lease()),
            named_task("results", self._forever(self._collect)),
            named_task("cutter", self._forever(self._cut)),
            named_task("reaper", self._forever(self._reap)),
            named_task("dump", self._forever(self._mend_dumps)),
        ]
        log.info("collector.ready", collector=self.name, run=self._store.keys.run, epoch=self._epoch,
                 batch_size=self._rules.batch_size, capacity=self._rules.capacity)  # fmt: skip
        try:
            done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            if stop.is_set():
                self._store.hurry()
            await stop_tasks([*tasks, *self._commits.values(), stopped])
            with contextlib.suppress(ConnectionLostError, RolledBackError):
                await self._store.resign(self.name)
            log.info("collector.stopped", collector=self.name)

    async def _acquire(self) -> int:
        told = False
        while not (epoch := await self._store.lead(self.name, self._rules.collector_lease_s)):
            if not told:
                log.info("collector.standby", collector=self.name, run=self._store.keys.run)
                told = True
            await asyncio.sleep(self._rules.collector_lease_s / 10)
        return epoch

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(self._rules.collector_lease_s / 3)
            try:
                epoch = await self._store.lead(self.name, self._rules.collector_lease_s)
            except ConnectionLostError as error:
                log.warning("lease.not_renewed", reason=str(error))
                continue
            if epoch != self._epoch:
                raise FencedError("another collector took the lease of this run while this one was silent; it stops")

    async def _forever(self, step: Any) -> None:
        """Run `step` again and again, through losses of the connection."""
        while True:
            try:
                await step()
            except ConnectionLostError as error:
                log.warning("duty.waits", duty=step.__name__.strip("_"), reason=str(error))
                await asyncio.sleep(_AWAY_S)

    # -- results ------------------------------------------------------------------------------------------------------

    async def _collect(self) -> None:
        # From the start of the stream: what is in it has not been committed, whoever read it before.
        await self._cancel_commits()
        self._assembler = Assembler(self._note_unreadable)
        self._begin_anew = False
        after = "0"
        while not self._begin_anew:
            self._forget_done_commits()
            entries = await self._store.read_results(after, _READ_COUNT, _BLOCK_S)
            for entry in entries:
                after = entry.entry_id
                await self._add(entry)

    async def _cancel_commits(self) -> None:
        await stop_tasks(self._commits.values())
        self._commits.clear()

    def _forget_done_commits(self) -> None:
        """Forget what is done. Raises what a commit raised: then all begins anew from the stream."""
        for task_id in [task_id for task_id, commit in self._commits.items() if commit.done()]:
            self._commits.pop(task_id).result()

    def _note_unreadable(self, entry: ResultEntry, reason: str) -> None:
        self._unreadable.append((entry, reason))

    async def _set_aside(self, entry: ResultEntry, reason: str) -> None:
        # False: the entry left the stream meanwhile, by a commit of its group. Then nothing was wrong with it.
        if await self._store.set_aside_result(self._epoch, entry, reason):
            log.error("result.set_aside", entry=entry.entry_id, task_id=entry.task_id, reason=reason)

    async def _open(self, task_id: int) -> bool:
        """Begin a group; False: it does not run."""
        known = await self._store.group_rules(task_id)
        if known is None:
            return False
        packed, size, parent = known
        rules, fault = _rules(task_id, packed)
        if fault:
            await self._store.note_unreadable(self._epoch, str(task_id), "rules", fault, packed)
        self._assembler.open(task_id, rules, size, parent, fault)
        return True

    async def _add(self, entry: ResultEntry) -> None:
        if entry.fault:
            await self._set_aside(entry, entry.fault)
            return
        if (commit := self._commits.get(entry.task_id)) is not None and not commit.done():
            await self._set_aside_foreign(entry)
            return
        if not self._assembler.knows(entry.task_id) and not await self._open(entry.task_id):
            await self._set_aside(entry, f"group {entry.task_id} has ended, or never was")
            return
        if entry.sample_idx >= (size := self._assembler.size(entry.task_id)):
            await self._set_aside(entry, f"slot {entry.sample_idx} of group {entry.task_id}, which has {size}")
            return
        if self._assembler.holds(entry.task_id, entry.sample_idx):
            await self._set_aside_foreign(entry)
            return
        assembled = self._assembler.add(entry)
        while self._unreadable:
            odd, reason = self._unreadable.pop()
            await self._store.note_unreadable(self._epoch, odd.entry_id, "results", reason, odd.header)
        if assembled is not None:
            while len(self._commits) >= _COMMITS_AT_ONCE:
                await asyncio.wait(self._commits.values(), return_when=asyncio.FIRST_COMPLETED)
                self._forget_done_commits()
            self._commits[assembled.task_id] = named_task("commit", self._commit(assembled))

    async def _set_aside_foreign(self, entry: ResultEntry) -> None:
        # A second entry for a slot. Where it is the slot's own, the first is not, which the commit finds out.
        if await self._store.foreign_results(entry.task_id, {entry.sample_idx: entry.entry_id}):
            await self._set_aside(entry, _not_its_own(entry.task_id, entry.sample_idx))

    async def _commit(self, group: Assembled) -> None:
        if not await self._committer.commit(self._epoch, group):
            # The group is not forgotten: what is in the stream is read anew, without the entries that are not its own.
            for idx in await self._store.foreign_results(group.task_id, group.entries):
                entry = ResultEntry(group.entries[idx], group.task_id, idx, group.headers[idx].reason.encode())
                await self._set_aside(entry, _not_its_own(group.task_id, idx))
            self._begin_anew = True

    # -- the other duties ---------------------------------------------------------------------------------------------

    async def _cut(self) -> None:
        await self._cutter.cut(self._epoch)
        await self._store.wait_for_wake("cutter", _BLOCK_S)

    async def _reap(self) -> None:
        swept = 0.0
        loop = asyncio.get_running_loop()
        while True:
            leases, groups = await self._store.reap(self._epoch, lease_s=self._rules.lease_s)
            if leases or groups:
                log.warning("reaped", leases_lost=leases, groups_past_deadline=groups)
            if loop.time() - swept > _SWEEP_EVERY_S:
                swept = loop.time()
                if lost := await self._store.sweep(self._epoch):
                    log.warning("jobs.lost", queued_again=lost)
            await self._tell_if_stopped()
            await asyncio.sleep(min(1.0, self._rules.lease_s / 4))

    async def _tell_if_stopped(self) -> None:
        reason = await self._store.stopped()
        if reason is not None and reason != self._told:
            log.error("run.stopped", run=self._store.keys.run, reason=reason, remedy="mend the cause, `forebay resume`")
        self._told = reason

    async def _mend_dumps(self) -> None:
        """Bring files up to what became of their groups since. Who dies in between is followed by one that does it."""
        for task_id, folder, reason in await self._store.evicted_dumps():
            if folder:
                await self._dumper.mark_evicted(task_id, folder, reason)
            await self._store.forget_evicted_dump(task_id)
        entries = await self._store.dump_rewrites(_REWRITES_AT_ONCE)
        # Those of one group are asked for in the list's order, and done in that order: the last cut's rewards stay.
        await asyncio.gather(*(self._dumper.rewrite_rewards(entry) for entry in entries))
        await self._store.forget_dump_rewrites(entries)
        if len(entries) < _REWRITES_AT_ONCE:
            await asyncio.sleep(_BLOCK_S)


def _not_its_own(task_id: int, idx: int) -> str:
    return f"it is not the result of slot {idx} of group {task_id}"


def _make_exposition(store: Store, dumper: Dumper) -> Exposition:
    """What exposes metrics. Raises SettingsError without the library for it."""
    try:
        from forebay_collector.exposition import Exposition
    except ImportError:
        raise SettingsError("FOREBAY_COLLECTOR_HTTP_PORT needs prometheus-client; install forebay[collector]") from None
    return Exposition(store, dumper)


def _rules(task_id: int, packed: bytes) -> tuple[GroupRules, str]:
    """The rules of a group, and what is wrong with them: it is rejected once it has ended."""
    try:
        return GroupRules.unpack(packed), ""
    except FrameError as error:
        log.error("rules.unreadable", task_id=task_id, reason=str(error))
        return GroupRules(min_usable_group_size=1), f"its rules are unreadable: {error}"
