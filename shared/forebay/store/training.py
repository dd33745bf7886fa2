"""The trainer's transitions."""

from __future__ import annotations

from collections.abc import Sequence

import redis.asyncio as redis_asyncio

from forebay.errors import VersionError
from forebay.store.base import MAX_REASON, MAX_SAMPLE, StoreBase, block_ms
from forebay.store.records import BatchEntry, Collected, Taken

__all__ = ["TrainerCalls"]


class TrainerCalls(StoreBase):
    """What a trainer does."""

    async def join(self, consumer_group: str) -> None:
        """Make a cursor on the batches stream that begins at its start; one that exists is kept."""

        async def create() -> None:
            try:
                await self._redis.xgroup_create(self.keys.batches, consumer_group, id="0", mkstream=True)
            except redis_asyncio.ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

        await self._ride(create)

    async def take(self, consumer_group: str, consumer: str, after: str) -> Taken:
        """Ask for the batch after entry `after`, without waiting."""
        answer = await self._run("take", consumer_group, consumer, after)
        match answer[0]:
            case b"batch":
                _, entry, batch, index, version, again = answer
                return Taken(batch=BatchEntry(entry.decode(), int(batch), index, int(version), bool(again)))
            case b"end":
                return Taken(end=True)
            case b"blocked":
                return Taken(blocked_at_version=int(answer[1]))
            case b"stopped":
                return Taken(stopped=answer[1].decode())
            case _:
                return Taken()

    async def wait_for_batch(self, after: str, timeout_s: float) -> None:
        """Wait until the batches stream has an entry after `after`, or `timeout_s` has passed."""
        await self._ride(lambda: self._redis.xread({self.keys.batches: after}, count=1, block=block_ms(timeout_s)))

    async def spoil_batch(self, consumer_group: str, batch: BatchEntry, reason: str) -> int:
        """Set aside a batch that its reader cannot read: how many groups are evicted by that; 0: it is gone already."""
        return int(
            await self._run(
                "spoil_batch", consumer_group, batch.entry_id, batch.batch_id, reason[:MAX_REASON],
                batch.index[:MAX_SAMPLE],
            )
        )  # fmt: skip

    async def ack(self, consumer_group: str, batch: BatchEntry) -> bool:
        """The trainer is done with `batch`: its rows go. False if that was so already."""
        return bool(await self._run("ack", consumer_group, batch.entry_id, batch.batch_id))

    async def collect(self, task_id: int) -> Collected:
        """Ask for one group, without waiting; what was handed over comes again until :meth:`discard`."""
        state, *rest = await self._run("collect", task_id)
        if state == b"group":
            return Collected("group", summary=rest[0], version=int(rest[1] or 0))
        return Collected(state.decode(), detail=rest[0].decode() if rest else "")

    async def discard(self, task_ids: Sequence[int]) -> int:
        """The rows of collected groups are read: they go. How many there were."""
        return int(await self._run("discard", *task_ids)) if task_ids else 0

    async def stopped(self) -> str | None:
        """Why the run has stopped itself; None: it has not."""
        (reason,) = await self._ask(("HGET", self.keys.state, "stopped"))
        return None if reason is None else str(reason.decode())

    async def resume(self) -> bool:
        """Let a run that has stopped itself go on: whether it had."""
        return bool(await self._run("resume"))

    async def set_version(self, version: int) -> None:
        """The trainer has stepped. Raises VersionError if that would go backwards."""
        answer, current = await self._run("set_version", version)
        if answer == b"backwards":
            raise VersionError(
                f"version {version} is below the run's version {int(current)}; versions only grow: "
                "resume from a checkpoint of that version or later, or use a new trial_name"
            )

    async def recover(self, version: int) -> int:
        """A trainer begins again at `version`, which may be an older one: the version before."""
        return int(await self._run("recover", version))

    async def version(self) -> int:
        """The version in force; 0 before the first."""
        (value,) = await self._ask(("HGET", self.keys.state, "version"))
        return int(value or 0)
