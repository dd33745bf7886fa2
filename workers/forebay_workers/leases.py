"""The attempts that this process holds, and the heart-beat that keeps them.

Whoever stops renewing has lost them within ``lease_s``: they run again elsewhere, and what this process may still
bring counts only if it comes first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from forebay.errors import ConnectionLostError
from forebay.store.store import Store

__all__ = ["Attempt", "Leases"]

log = structlog.get_logger(__name__)

Attempt = tuple[int, int, int]
"""``(task_id, sample_idx, attempt)``."""


class Leases:
    """What this worker holds, by attempt."""

    def __init__(
        self,
        store: Store,
        worker: str,
        lease_s: float,
        about: Callable[[], dict[str, Any]],
        doing: Callable[[Attempt | None], bytes] = lambda _: b"",
    ) -> None:
        """Keep the attempts of `worker`.

        Args:
            store: the run's.
            worker: its name.
            lease_s: of the attempts.
            about: what the worker says of itself.
            doing: what its attempts do, of which the one that is given blocks the event loop.
        """
        self._store = store
        self._worker = worker
        self._lease_s = lease_s
        self._about = about
        self._doing = doing
        self._held: dict[Attempt, asyncio.Task[Any]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, attempt: Attempt) -> None:
        """The current task runs `attempt`; it is cancelled if the lease is lost."""
        task = asyncio.current_task()
        if task is not None:
            self._held[attempt] = task

    def drop(self, attempt: Attempt) -> None:
        """`attempt` has ended here."""
        self._held.pop(attempt, None)

    def tasks(self) -> list[asyncio.Task[Any]]:
        """The tasks of the attempts that run here."""
        return list(self._held.values())

    def held(self) -> list[Attempt]:
        """The attempts that run here. For other threads too."""
        return list(self._held)

    def attempt_of(self, task: asyncio.Task[Any]) -> Attempt | None:
        """The attempt that `task` runs. For other threads too."""
        return next((attempt for attempt, held in list(self._held.items()) if held is task), None)

    async def renew(self, store: Store, culprit: Attempt | None = None) -> None:
        """A heart-beat over `store`, from another thread, while `culprit` blocks the loop that should do it."""
        await store.heartbeat(self._worker, self._about(), self._lease_s, self.held(), self._doing(culprit))

    async def beat(self) -> None:
        """One heart-beat: renew all, and stop what has been lost."""
        lost = await self._store.heartbeat(
            self._worker, self._about(), self._lease_s, list(self._held), self._doing(None)
        )
        for attempt in lost:
            # Popped first: a task that finds itself dropped knows that there is nothing left to hand back.
            task = self._held.pop(attempt, None)
            if task is not None:
                log.info("lease.lost", task_id=attempt[0], sample_idx=attempt[1], attempt=attempt[2])
                task.cancel()

    def holds(self, attempt: Attempt) -> bool:
        """Whether `attempt` is still this worker's."""
        return attempt in self._held

    async def run(self) -> None:
        """Beat three times a lease, until cancelled."""
        while True:
            try:
                await self.beat()
            except ConnectionLostError as error:
                log.warning("heartbeat.failed", reason=str(error))
            await asyncio.sleep(self._lease_s / 3)
