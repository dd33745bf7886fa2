"""The worker's transitions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import msgpack

from forebay.outcomes import FailureKind, SlotOutcome
from forebay.store.base import MAX_REASON, MAX_SAMPLE, StoreBase
from forebay.store.keys import Keys
from forebay.store.records import Lease

__all__ = ["WorkerCalls"]

_ROWS_TRIES = 3


class WorkerCalls(StoreBase):
    """What a worker does."""

    async def admit(self, most: int, deadline_s: float) -> tuple[int, int]:
        """Start up to `most` queued groups: ``(started, capacity left)``."""
        started, left = await self._run("admit", most, int(deadline_s * 1000))
        return int(started), int(left)

    async def claim(self, worker: str, most: int, lease_s: float) -> list[Lease]:
        """Up to `most` attempts that are due and still wanted, leased to `worker`."""
        claimed, specs = await self._run("claim", worker, most, int(lease_s * 1000))
        by_task = {int(task): spec for task, spec in zip(specs[::2], specs[1::2], strict=True)}
        leases = []
        for job, size, left_ms in claimed:
            job_id = job.decode()
            attempt = Keys.parse_job_id(job_id)
            # A group without a spec cannot be read: its slots fail, which is what frees them.
            leases.append(Lease(job_id, attempt, by_task[attempt[0]] or b"", int(size), int(left_ms) / 1000))
        return leases

    async def heartbeat(
        self,
        worker: str,
        about: dict[str, Any],
        lease_s: float,
        held: Iterable[tuple[int, int, int]],
        doing: bytes = b"",
    ) -> list[tuple[int, int, int]]:
        """Say that `worker` lives and renew what it holds: the attempts that it has lost meanwhile.

        `doing` is what its attempts do, a packed :class:`Doing`.
        """
        flat = [part for attempt in held for part in attempt]
        lost = await self._run("heartbeat", worker, msgpack.packb(about), int(lease_s * 1000), doing, *flat)
        return [cast("tuple[int, int, int]", tuple(int(part) for part in item.split(b":"))) for item in lost]

    async def note_unreadable_spec(self, task_id: int, reason: str, sample: bytes) -> None:
        """Record that the spec of a group could not be read, once for the group."""
        await self._run("set_aside", "", "", "", f"spec:{task_id}", "spec", reason[:MAX_REASON], sample[:MAX_SAMPLE])

    async def sign_off(self, worker: str) -> None:
        """Take `worker` off the list of live workers."""
        keys = self.keys
        await self._ask(
            ("HDEL", keys.workers, worker), ("HDEL", keys.workers_doing, worker), ("ZREM", keys.workers_seen, worker)
        )

    async def publish(
        self,
        task_id: int,
        sample_idx: int,
        attempt: int,
        *,
        outcome: SlotOutcome,
        kind: FailureKind | None,
        header: bytes,
        rows: bytes | None,
        rows_ttl_s: float,
        head: int = -1,
        reason: str = "",
    ) -> str:
        """Record how an attempt ended, its rows first: accepted, retry, duplicate, superseded or late.

        What has no rows is recorded when memory is short too: it needs little, and a failure frees something.

        Raises:
            StoreFullError: the server has no memory for the rows. Nothing has changed; the call may be repeated.
        """
        before = None
        if rows is not None:
            before = ("SET", self.keys.rows(task_id, sample_idx, attempt), rows, "PX", int(rows_ttl_s * 1000))
        for _ in range(_ROWS_TRIES):
            answer = await self._run(
                "publish", task_id, sample_idx, attempt, outcome.value, kind or "", header, head, reason,
                len(rows or b""), before=before, always=rows is None,
            )  # fmt: skip
            # The rows may have been refused, and memory become free before the script ran.
            if answer != b"no_rows":
                return str(answer.decode())
        raise await self.full()

    async def release(self, task_id: int, sample_idx: int, attempt: int) -> bool:
        """Hand an attempt back, to run again at once on another worker."""
        return bool(await self._run("release", task_id, sample_idx, attempt))

    async def first_keys(self, workflow: str, keys: Iterable[str]) -> frozenset[str]:
        """The key set of the first tensor result of `workflow` in the run: `keys`, if there was none before."""
        first = await self._run("first_keys", workflow, msgpack.packb(sorted(keys)))
        return frozenset(msgpack.unpackb(first))
