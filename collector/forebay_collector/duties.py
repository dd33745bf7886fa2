"""The duties that one collector has at a time: publishing the rules, cutting, reaping, sweeping, and two more.

It brings dumps up to date, and says in the log when batches do not come any more.

Invariants, each with its test in ``tests/integration/test_collectors.py``:

- All that they change carries the epoch of the lead: whoever was followed by another leader changes nothing
  (``test_duties_have_one_owner``).
- Losing the lead ends the duties, not the process, which competes for it anew
  (``test_a_lost_lead_ends_the_duties_alone``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from forebay.aio import named_task, stop_tasks
from forebay.errors import ConnectionLostError, FencedError
from forebay.settings import RunSettings
from forebay.store.store import Store
from forebay_collector.cutter import Cutter
from forebay_collector.dump import Dumper
from forebay_collector.metrics import CollectorMetrics
from forebay_collector.stall_watch import StallWatch

__all__ = ["Duties"]

log = structlog.get_logger(__name__)

_BLOCK_S = 0.5
_REWRITES_AT_ONCE = 100
_SWEEP_EVERY_S = 5.0
_AWAY_S = 0.5


class Duties:
    """What a leading collector does, each duty a loop."""

    def __init__(self, store: Store, rules: RunSettings, metrics: CollectorMetrics, dumper: Dumper) -> None:
        self._store = store
        self._rules = rules
        self._metrics = metrics
        self._dumper = dumper
        self._told: str | None = None
        """Why the run has stopped itself, as far as it was logged."""

    async def begin(self, epoch: int) -> None:
        """Publish the rules. Raises FencedError, ConnectionLostError."""
        await self._store.configure(epoch, self._rules)
        self._metrics.begin(await self._store.status())

    async def run(self, epoch: int) -> None:
        """Do them until cancelled, through losses of the connection. Raises FencedError once the lead is lost."""
        cutter = Cutter(self._store, self._rules, self._metrics)
        stalls = StallWatch(self._store, self._rules)
        tasks = [
            named_task("cutter", _forever("cutter", lambda: self._cut(cutter, epoch))),
            named_task("reaper", _forever("reaper", lambda: self._reap(epoch))),
            named_task("dump", _forever("dump", lambda: self._mend_dumps(epoch))),
            named_task("stalls", _forever("stalls", lambda: _watch(stalls))),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await stop_tasks(tasks)
            # Several may fail for one cause: each is looked at, and a fault counts more than a lost lead.
            errors = [error for task in tasks if task.done() and not task.cancelled() and (error := task.exception())]
            errors.sort(key=lambda error: isinstance(error, FencedError))
        if errors:
            raise errors[0]

    async def _cut(self, cutter: Cutter, epoch: int) -> None:
        await cutter.cut(epoch)
        await self._store.wait_for_wake("cutter", _BLOCK_S)

    async def _reap(self, epoch: int) -> None:
        swept = 0.0
        loop = asyncio.get_running_loop()
        while True:
            leases, groups = await self._store.reap(epoch, lease_s=self._rules.lease_s)
            if leases or groups:
                log.warning("reaped", leases_lost=leases, groups_past_deadline=groups)
            if loop.time() - swept > _SWEEP_EVERY_S:
                swept = loop.time()
                if lost := await self._store.sweep(epoch):
                    log.warning("jobs.lost", queued_again=lost)
            await self._tell_if_stopped()
            await asyncio.sleep(min(1.0, self._rules.lease_s / 4))

    async def _tell_if_stopped(self) -> None:
        reason = await self._store.stopped()
        if reason is not None and reason != self._told:
            log.error("run.stopped", run=self._store.keys.run, reason=reason, remedy="mend the cause, `forebay resume`")
        self._told = reason

    async def _mend_dumps(self, epoch: int) -> None:
        """Bring files up to what became of their groups since. Who dies in between is followed by one that does it."""
        evicted = await self._store.evicted_dumps()
        entries = await self._store.dump_rewrites(_REWRITES_AT_ONCE)
        if evicted or entries:  # files know no epoch: another leader may have done these, and more, since
            await self._store.check_lead(epoch)
        for task_id, folder, reason in evicted:
            if folder:
                await self._dumper.mark_evicted(task_id, folder, reason)
            await self._store.forget_evicted_dump(task_id)
        # Those of one group are asked for in the list's order, and done in that order: the last cut's rewards stay.
        await asyncio.gather(*(self._dumper.rewrite_rewards(entry) for entry in entries))
        await self._store.forget_dump_rewrites(entries)
        if len(entries) < _REWRITES_AT_ONCE:
            await asyncio.sleep(_BLOCK_S)


async def _watch(stalls: StallWatch) -> None:
    await stalls.look()
    await asyncio.sleep(stalls.interval_s)


async def _forever(name: str, step: Callable[[], Awaitable[None]]) -> None:
    """Do `step` again and again, through losses of the connection."""
    while True:
        try:
            await step()
        except ConnectionLostError as error:
            log.warning("duty.waits", duty=name, reason=str(error))
            await asyncio.sleep(_AWAY_S)
