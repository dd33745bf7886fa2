"""The trainer's transitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog

from forebay.errors import BatchGoneError, ConsumerError, VersionError
from forebay.store.base import MAX_REASON, MAX_SAMPLE, StoreBase, block_ms, paired, run_stopped
from forebay.store.records import BatchEntry, Collected, Cursor, Taken

__all__ = ["TrainerCalls"]

log = structlog.get_logger(__name__)


def _cursor(reader: Cursor | str) -> Cursor:
    """`reader`; a name alone is the only rank of a consumer that drives."""
    return reader if isinstance(reader, Cursor) else Cursor(reader)


class TrainerCalls(StoreBase):
    """What a trainer does."""

    async def join(self, reader: Cursor | str) -> None:
        """Make a cursor on the batches stream that begins at its start; one that exists is kept.

        The first consumer that does not follow drives the version. Raises ConsumerError for a second one.
        """
        cursor = _cursor(reader)
        if driver := await self._run("join", cursor.name, cursor.consumer, int(cursor.follows)):
            raise self._driven(cursor, driver)

    async def take(self, reader: Cursor | str, name: str, after: str) -> Taken:
        """Ask for the batch after entry `after`, without waiting; `name` is that of the reading process.

        A cursor that Redis does not know any more begins anew; what the reader has in hand does not come twice.
        Raises ConsumerError as :meth:`join` does.
        """
        cursor = _cursor(reader)
        answer = await self._run(
            "take", cursor.name, name, after, cursor.consumer, cursor.world_size, int(cursor.follows)
        )
        match answer[0]:
            case b"batch":
                _, entry, batch, index, version, again, missed = answer
                found = BatchEntry(entry.decode(), int(batch), index, int(version), bool(again), int(missed))
                return Taken(batch=found)
            case b"end":
                return Taken(end=True)
            case b"blocked":
                return Taken(blocked_at_version=int(answer[1]), seen=answer[2].decode())
            case b"stopped":
                return Taken(stopped=answer[1].decode())
            case b"driven":
                raise self._driven(cursor, answer[1])
            case _:
                return Taken(seen=answer[1].decode())

    def _driven(self, cursor: Cursor, driver: bytes) -> ConsumerError:
        run, name = self.keys.run, driver.decode()
        if cursor.follows:
            return ConsumerError(
                f"consumer={name!r} drives the version of run {run}, it cannot follow it: choose another name"
            )
        return ConsumerError(
            f"consumer={name!r} drives the version of run {run}; a second one, {cursor.consumer!r}, would move it too: "
            f"pass follows=True (--follow) to read beside it, or consumer={name!r} to go on where it stands"
        )

    async def resume_after(self, reader: Cursor, batch_id: int) -> None:
        """A trainer begins again from a checkpoint that names the last batch it was trained on.

        Raises:
            BatchGoneError: a later batch is not kept any more, or this Redis does not know that `batch_id` was read.
            ConsumerError: as for :meth:`join`.
        """
        state, *rest = await self._run(
            "resume_after", reader.name, reader.consumer, reader.world_size, int(reader.follows), batch_id
        )
        if state == b"driven":
            raise self._driven(reader, rest[0])
        if state == b"gone":
            raise BatchGoneError(
                f"cannot go on after batch {batch_id}: batch {int(rest[0])} was acknowledged and is not kept any more; "
                "resume after a later one, and set retain_batches to the batches between two checkpoints"
            )
        if state in {b"unknown", b"unread"}:
            known = f"its last batch is {int(rest[0])}" if state == b"unknown" else f"batch {int(rest[0])} is unread"
            raise BatchGoneError(
                f"cannot go on after batch {batch_id}: in this Redis {known}; it is another run, or Redis has lost "
                "writes (check its persistence: appendonly yes, appendfsync always): client.reconcile(...) mends that"
            )

    async def wait_for_batch(self, after: str, timeout_s: float) -> None:
        """Wait until the batches stream has an entry after `after`, or `timeout_s` has passed."""
        await self._ride(lambda: self._redis.xread({self.keys.batches: after}, count=1, block=block_ms(timeout_s)))

    async def spoil_batch(self, reader: Cursor | str, batch: BatchEntry, reason: str) -> int | None:
        """Set aside a batch that its reader cannot read: how many groups are evicted by that; 0: it is gone already.

        None, and nothing has changed, where another rank has it or the reader only follows.
        """
        cursor = _cursor(reader)
        evicted = int(
            await self._run(
                "spoil_batch", cursor.name, batch.entry_id, batch.batch_id, reason[:MAX_REASON],
                batch.index[:MAX_SAMPLE], cursor.consumer,
            )
        )  # fmt: skip
        return None if evicted < 0 else evicted

    async def ack(self, reader: Cursor | str, batch: BatchEntry) -> bool:
        """This reader is done with `batch`, which goes when nobody needs it. False if that was so already."""
        cursor = _cursor(reader)
        first, *dropped = await self._run(
            "ack", cursor.name, batch.batch_id, cursor.consumer, cursor.world_size, int(cursor.follows)
        )
        if dropped:
            log.warning("batches.dropped", batch_ids=[int(one) for one in dropped], reason="max_retained_bytes")
        return bool(first)

    async def collect(self, task_id: int) -> Collected:
        """Ask for one group, without waiting; what was handed over comes again until :meth:`discard`."""
        state, *rest = await self._run("collect", task_id)
        if state == b"group":
            return Collected("group", summary=rest[0], version=int(rest[1] or 0))
        detail = rest[0].decode() if rest else ""
        group_size, usable = map(int, rest[1:3] or (0, 0))
        return Collected(state.decode(), detail=detail, group_size=group_size, usable=usable)

    async def discard(self, task_ids: Sequence[int], rewards: Mapping[int, bytes] | None = None) -> int:
        """The rows of collected groups are read: they go. How many there were.

        `rewards` has the packed summaries of those whose rewards the reader has normalized: their dumps are rewritten.
        """
        return int(await self._run("discard", *paired(task_ids, rewards))) if task_ids else 0

    async def stopped(self) -> str | None:
        """Why the run has stopped itself; None: it has not."""
        (reason,) = await self._ask(("HGET", self.keys.state, "stopped"))
        return None if reason is None else str(reason.decode())

    async def resume(self) -> bool:
        """Let a run that has stopped itself go on: whether it had. Raises RolledBackError."""
        answer = await self._run("resume")
        if answer == -1:
            raise run_stopped(await self.stopped() or "")
        return bool(answer)

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
