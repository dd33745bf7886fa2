"""What becomes of a worker's slots while its event loop is blocked: done from the watchdog's thread.

The neighbours of a slot that blocks are innocent. While the watchdog waits whether the loop comes back, it keeps their
leases; before it ends the process it hands them back, which touches no budget. Only the slot that blocks loses an
attempt, so one poisoned group cannot take others with it however often its worker is started anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

from forebay import workflow_context
from forebay.errors import ForebayError
from forebay.settings import Settings
from forebay.store.store import Store
from forebay_workers.leases import Attempt, Leases

__all__ = ["Rescue"]

log = structlog.get_logger(__name__)

_REDIS_S = 3.0
"""For one action; the watchdog has other things to do."""


class Rescue:
    """Keeps and hands back what `leases` hold, over connections and an event loop of its own."""

    def __init__(self, settings: Settings, leases: Leases, loop: asyncio.AbstractEventLoop) -> None:
        self._settings = settings
        self._leases = leases
        self._loop = loop

    def culprit(self) -> Attempt | None:
        """The attempt whose code the blocked loop runs; None if that cannot be told."""
        task = asyncio.current_task(self._loop)
        if task is None:
            return None
        found = self._leases.attempt_of(task)
        if found is None and hasattr(task, "get_context"):  # a task that an episode started; from Python 3.12 on
            context = workflow_context.of_task(task)
            found = (context.task_id, context.sample_idx, context.attempt) if context is not None else None
        return found

    def keep(self) -> None:
        """Renew the leases in the blocked loop's stead."""
        self._do(self._keep)

    def hand_back(self) -> None:
        """Hand back all attempts but the one that blocks. None if it is not known which that is."""
        culprit = self.culprit()
        if culprit is None:
            log.warning("worker.culprit_unknown", held=len(self._leases))
            return
        log.error("worker.culprit", task_id=culprit[0], sample_idx=culprit[1], attempt=culprit[2])
        innocent = [attempt for attempt in self._leases.held() if attempt != culprit]
        self._do(lambda store: self._release(store, innocent))

    async def _keep(self, store: Store) -> None:
        await self._leases.renew(store, self.culprit())

    async def _release(self, store: Store, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            await store.release(*attempt)

    def _do(self, action: Any) -> None:
        async def bounded() -> None:
            store = Store.open(self._settings, max_connections=2)
            try:
                async with asyncio.timeout(_REDIS_S):
                    await action(store)
            finally:
                await store.close()

        work: Coroutine[Any, Any, None] = bounded()
        try:
            asyncio.run(work)
        except (ForebayError, TimeoutError) as error:  # then the leases end, and the slots run again by that
            log.warning("rescue.failed", reason=str(error) or type(error).__name__)
