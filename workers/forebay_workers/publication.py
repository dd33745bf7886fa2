"""Publishes how attempts ended, also while Redis has no memory left.

What is finished is held here then, and its lease with it, until there is memory: no attempt is burned and no rollout
lost. Invariants (``tests/integration/test_memory_short.py``):

- A result that was held counts under its own attempt (``test_short_memory_loses_nothing``).
- Nothing is lost while Redis is away, but past the group's deadline (``test_redis_away.py``).
- Every wait for memory ends: with the publication, with the lease (the group's deadline), or after ``memory_wait_s`` as
  a failure of kind infra, which needs no memory (``test_a_wait_that_is_too_long_is_a_failure_of_infrastructure``).
- Rows that the server could never hold are a failure of kind data at once
  (``test_rows_above_the_servers_memory_are_a_failure_of_data``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from forebay.errors import ConnectionLostError, StoreFullError
from forebay.outcomes import FailureKind, SlotOutcome
from forebay.store.store import Store
from forebay.wire.envelopes import SlotHeader
from forebay_workers.attempts import Ended
from forebay_workers.leases import Attempt, Leases

__all__ = ["Held", "Publisher"]

log = structlog.get_logger(__name__)

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 2.0


@dataclass(slots=True)
class Held:
    """Results that wait for memory in this process."""

    results: int = 0
    rows_bytes: int = 0


class Publisher:
    """Publishes for one worker."""

    def __init__(self, store: Store, leases: Leases, *, rows_ttl_s: float, memory_wait_s: float, away_s: float) -> None:
        """Make one for the process.

        Args:
            store: where to.
            leases: of the attempts that run.
            rows_ttl_s: rows without a header go after this.
            memory_wait_s: how long a result waits for memory.
            away_s: how long it waits for a Redis that is away; after that its group has ended.
        """
        self._store = store
        self._leases = leases
        self._rows_ttl_s = rows_ttl_s
        self._memory_wait_s = memory_wait_s
        self._away_s = away_s
        self.held = Held()

    async def publish(self, attempt: Attempt, ended: Ended, header: Callable[[Ended], SlotHeader]) -> tuple[str, Ended]:
        """Publish: what became of it, and what was published, which is a failure where memory did not come.

        Args:
            attempt: whose end it is.
            ended: how it ended.
            header: made of what is published.

        Raises:
            ConnectionLostError: Redis cannot be reached, and the process is to end, or the group has ended.
        """
        try:
            return await self._once(attempt, ended, header), ended
        except StoreFullError as error:
            return await self._hold(attempt, ended, header, error)

    async def _once(self, attempt: Attempt, ended: Ended, header: Callable[[Ended], SlotHeader]) -> str:
        # From here on the lease is not renewed: it ends with the publication, and a heart-beat that crosses it must not
        # take that for a loss. Should Redis stay away for longer than the lease, the slot runs again; the first wins.
        self._leases.drop(attempt)
        packed, began = header(ended).pack(), time.monotonic()
        while True:
            try:
                return await self._store.publish(
                    *attempt,
                    outcome=ended.outcome,
                    kind=ended.kind,
                    header=packed,
                    rows=ended.frame,
                    rows_ttl_s=self._rows_ttl_s,
                    head=min((row.head for row in ended.rows if row.head >= 0), default=-1),
                    reason=ended.reason,
                )
            except ConnectionLostError:  # however long Redis is away, nothing that was computed is lost
                if self._store.hurried or time.monotonic() - began > self._away_s:
                    raise

    async def _hold(
        self, attempt: Attempt, ended: Ended, header: Callable[[Ended], SlotHeader], error: StoreFullError
    ) -> tuple[str, Ended]:
        size, began, wait_s = len(ended.frame or b""), time.monotonic(), _FIRST_WAIT_S
        if not self.held.results:
            log.warning("results.held", reason=str(error))
        self.held.results += 1
        self.held.rows_bytes += size
        try:
            while True:
                self._leases.hold(attempt)
                if size >= error.maximum > 0:
                    reason = f"its rows take {size} bytes, and Redis may use maxmemory={error.maximum} in all"
                    ended = Ended(SlotOutcome.FAILED, kind=FailureKind.DATA, reason=reason)
                elif time.monotonic() - began > self._memory_wait_s:
                    reason = f"Redis had no memory for its rows for {self._memory_wait_s:g} s: {error}"
                    ended = Ended(SlotOutcome.FAILED, kind=FailureKind.INFRA, reason=reason)
                else:
                    await self._wait(attempt, wait_s)
                    wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                try:
                    return await self._once(attempt, ended, header), ended
                except StoreFullError as again:
                    error = again
        finally:
            self.held.results -= 1
            self.held.rows_bytes -= size
            if not self.held.results:
                log.info("results.no_longer_held")

    async def _wait(self, attempt: Attempt, wait_s: float) -> None:
        try:
            await asyncio.sleep(wait_s)
        except asyncio.CancelledError:
            # A shut-down hands the attempt back, without its result; one that lost its lease has nothing to hand back.
            if self._leases.holds(attempt):
                await asyncio.shield(self._store.release(*attempt))
                log.info("slot.handed_back")
            raise
