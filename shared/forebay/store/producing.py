"""The producer's transitions."""

from __future__ import annotations

import uuid

from forebay.store.base import StoreBase, queue_full, run_stopped
from forebay.store.records import Channel

_IDEMPOTENCY_TTL_S = 7 * 86400
_REPEAT_TTL_S = 600
_MAX_LABEL = 200

__all__ = ["ProducerCalls"]


class ProducerCalls(StoreBase):
    """What a producer does."""

    async def submit(
        self,
        spec: bytes,
        rules: bytes,
        group_size: int,
        idempotency_key: str | None = None,
        channel: Channel = Channel.BATCHES,
        label: str = "",
    ) -> tuple[int, bool]:
        """Enqueue a group: its task id, and whether this call created it.

        Without an `idempotency_key` one is made that lives just long enough for a repetition after a lost answer. The
        ledgers call the prompt by its `label`, by default the key that was given.

        Raises:
            QueueFullError: the queue is at a bound; the text says at which.
            StoreFullError: one too; Redis has no memory left.
            RunStoppedError: the run has stopped itself.
        """
        key, ttl_s = idempotency_key, _IDEMPOTENCY_TTL_S
        label = (label or idempotency_key or "")[:_MAX_LABEL]
        if key is None:
            key, ttl_s = uuid.uuid4().hex, _REPEAT_TTL_S
        first, *rest = await self._run("submit", key, ttl_s, spec, group_size, rules, channel.value, label)
        if first == b"stopped":
            raise run_stopped(rest[0].decode())
        if first in {b"full", b"full_bytes"}:
            raise queue_full(rest, "submit")
        return int(first), rest[0] == b"created"

    async def queued(self) -> int:
        """How many groups for the batches wait to start."""
        (count,) = await self._ask(("XLEN", self.keys.prompts))
        return int(count)

    async def batch_possible(self, batch_size: int) -> bool:
        """Whether what is on its way may still make a batch without another prompt."""
        keys = self.keys
        queued, running, ready, cut = await self._ask(
            ("XLEN", keys.prompts), ("SCARD", keys.running), ("ZCARD", keys.ready), ("HLEN", keys.cut)
        )
        return bool(cut) or queued + running + ready >= batch_size

    async def end_of_data(self) -> None:
        """No more groups: the last batch may be partial, and readers come to an end."""
        await self._run("end_of_data")
