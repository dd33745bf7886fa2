"""The transitions of the collector that leads; all that change something carry its epoch."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from forebay.outcomes import FailureKind
from forebay.settings import RunSettings
from forebay.store.base import MAX_REASON, MAX_SAMPLE, StoreBase, fenced, paired
from forebay.store.bounds import QUEUE_SHARE, ROWS_SHARE, within
from forebay.store.records import CutRule

__all__ = ["LeaderCalls"]

_TASK = re.compile(rb"[0-9]{1,18}")


class LeaderCalls(StoreBase):
    """The duties that one collector has at a time."""

    async def lead(self, owner: str, lease_s: float) -> int:
        """Take or renew the lease of the leader: its fencing epoch, or 0 if another collector holds it."""
        return int(await self._run("lead", owner, int(lease_s * 1000)))

    async def check_lead(self, epoch: int) -> None:
        """Raise FencedError unless `epoch` is that of the lead."""
        (current,) = await self._ask(("HGET", self.keys.state, "epoch"))
        if current != b"%d" % epoch:
            raise fenced()

    async def configure(self, epoch: int, settings: RunSettings) -> None:
        """Publish the run's rules. Raises FencedError.

        Bounds in bytes are no larger than what the server's ``maxmemory`` of now leaves for them.
        """
        memory = await self.memory()
        fields: dict[str, Any] = {
            "B": settings.batch_size,
            "k": settings.batches_per_version,
            "s": settings.max_staleness,
            "P": settings.partitions,
            "collector_lease_ms": int(settings.collector_lease_s * 1000),
            "max_concurrent": settings.max_concurrent,
            "max_queued": settings.max_queued_groups,
            "max_direct": settings.max_concurrent_direct,
            "max_queued_bytes": within(memory, settings.max_queued_bytes, QUEUE_SHARE),
            "max_rows": within(memory, settings.max_stored_bytes, ROWS_SHARE),
            "max_unread": settings.max_unread_results,
            "max_requeues": settings.max_requeues if settings.requeue_evicted else 0,
            "max_contract_errors": settings.max_contract_errors,
            "max_barren_groups": settings.max_barren_groups,
            "window": settings.failure_window,
            "retain": settings.retain_batches,
            "retain_bytes": settings.max_retained_bytes or 0,
            "follower_ttl_ms": int(settings.follower_ttl_s * 1000),
            "follower_lag": settings.max_follower_lag,
            "held_ms": int(settings.rows_ttl_s * 1000),
            "drops_max": settings.drop_ledger_entries,
            "dead_max": settings.dead_letter_entries,
            "dead_bytes_max": settings.dead_letter_bytes,
            "dead_ttl_ms": int(settings.dead_letter_ttl_s * 1000),
            "backoff_ms": int(settings.retry_backoff_s * 1000),
            **{f"share:{kind.value}": settings.max_failed_share(kind) for kind in FailureKind},
            **{f"attempts:{kind.value}": settings.attempts(kind) for kind in FailureKind},
        }
        flat = [part for item in fields.items() for part in item]
        if not await self._run("configure", epoch, settings.model_dump_json(), uuid.uuid4().hex, *flat):
            raise fenced()

    async def ready(self, most: int) -> list[tuple[int, bytes]]:
        """The oldest ready groups with their summaries."""
        found = await self._ready(most)
        return [(int(name), summary) for name, summary in found if summary is not None and _TASK.fullmatch(name)]

    async def _ready(self, most: int) -> list[tuple[bytes, bytes | None]]:
        (names,) = await self._ask(("ZRANGE", self.keys.ready, 0, most - 1))
        if not names:
            return []
        found = await self._ask(*(("HGET", self.keys.prefix.encode() + b"group:" + name, "sum") for name in names))
        return list(zip(names, found, strict=True))

    async def spoil_odd(self, epoch: int, most: int) -> int:
        """Set aside what stands among the first `most` ready groups and is none: how many. Raises FencedError."""
        odd = [name for name, summary in await self._ready(most) if summary is None or not _TASK.fullmatch(name)]
        for name in odd:
            await self.spoil_group(epoch, name, "it is no group that waits, or has no summary", name)
        return len(odd)

    async def spoil_group(self, epoch: int, task_id: int | bytes, reason: str, sample: bytes) -> bool:
        """Evict a waiting group that cannot be read: whether it waited. Raises FencedError."""
        answer = await self._run("spoil_group", epoch, task_id, reason[:MAX_REASON], sample[:MAX_SAMPLE])
        if answer == -1:
            raise fenced()
        return bool(answer)

    async def evict_stale(self, epoch: int, *, running_too: bool = False) -> list[int]:
        """Evict waiting groups that can no longer be fresh, and cancel running ones if `running_too`."""
        return [int(task) for task in await self._run("evict", epoch, int(running_too))]

    async def cut(
        self, epoch: int, index: bytes, task_ids: Sequence[int], rewards: Mapping[int, bytes] | None = None,
        told: Mapping[str, int] | None = None,
    ) -> int | None:  # fmt: skip
        """Cut a batch of `task_ids`: its id, or None if one of them is not ready or was evicted. Raises FencedError.

        `rewards` has the packed summaries of those that this batch normalizes: their dumps are rewritten. `told` is
        what its metrics tell of :meth:`tally`, which the next batch does not tell again.
        """
        answer = await self._run("cut", epoch, index, msgpack.packb(told) if told else b"", *paired(task_ids, rewards))
        if answer[0] == b"fenced":
            raise fenced()
        return int(answer[1]) if answer[0] == b"cut" else None

    async def cut_rule(self) -> CutRule:
        """What the next cut depends on."""
        keys = self.keys
        # In this order: a group moves from queued to running, and a submit takes the end of data back.
        ready, queued, running, state = await self._ask(
            ("ZCARD", keys.ready),
            ("XLEN", keys.prompts),
            ("SCARD", keys.running),
            ("HMGET", keys.state, "eod", "dynamic", "settled", "rolled_back"),
        )
        ended, dynamic, settled, rolled_back = state
        if rolled_back is not None:
            ready = 0  # nothing is cut from what may have been trained on, until it is reconciled
        return CutRule(int(ready), bool(ended) and queued + running == 0, dynamic == b"1", int(settled or 0))

    async def tally(self) -> dict[str, int]:
        """Groups that were decided and that no batch has told of: how many, by ``slots:usable slots:reason``."""
        (fields,) = await self._ask(("HGETALL", self.keys.tally))
        return {name.decode(errors="replace"): int(count) for name, count in fields.items()}

    async def set_dynamic(self, dynamic: bool) -> None:
        """Whether batches are cut once accepted and rejected groups reach the batch size."""
        await self._run("dynamic", int(dynamic))

    async def reap(self, epoch: int, most: int = 500, *, lease_s: float = 0.0) -> tuple[int, int]:
        """Supersede attempts with ended leases, close groups past their deadline: how many of each.

        With `lease_s`, that of the run, leases are spared for a while after Redis was away, when nobody could renew.
        """
        leases, groups = await self._run("reap", epoch, most, int(lease_s * 1000))
        if int(leases) < 0:
            raise fenced()
        return int(leases), int(groups)

    async def sweep(self, epoch: int, chunk: int = 200) -> int:
        """Queue again the open slots that are neither queued nor leased: how many were lost."""
        members = await self._ask(("SMEMBERS", self.keys.running), ("SMEMBERS", self.keys.running_direct))
        tasks = [task for running in members for task in running]
        lost = 0
        for at in range(0, len(tasks), chunk):
            lost += int(await self._run("sweep", epoch, *tasks[at : at + chunk]))
        return lost

    async def evicted_dumps(self, most: int = 100) -> list[tuple[int, str, str]]:
        """``(task_id, dump folder, reason)`` of the first evicted groups whose files are not marked yet.

        They stay until :meth:`forget_evicted_dump`, so that who dies in between is followed by one that marks them.
        The folder is "" where an hour has passed, and nothing is known of them any more.
        """
        (found,) = await self._ask(("LRANGE", self.keys.evicted, -most, -1))
        tasks = [task for task in found if _TASK.fullmatch(task)]
        for odd in set(found).difference(tasks):
            await self._ask(("LREM", self.keys.evicted, 0, odd))
        if not tasks:
            return []
        fields = await self._ask(*(("HMGET", self.keys.group(int(task)), "dump", "why") for task in tasks))
        return [
            (int(task), (folder or b"").decode(errors="replace"), (why or b"").decode(errors="replace"))
            for task, (folder, why) in zip(tasks, fields, strict=True)
        ]

    async def forget_evicted_dump(self, task_id: int) -> None:
        """The file of an evicted group is marked."""
        await self._ask(("LREM", self.keys.evicted, 0, task_id))

    async def dump_rewrites(self, most: int) -> list[bytes]:
        """The first entries (:class:`DumpRewrite`) of dumps that are to have new rewards, oldest first.

        They stay until :meth:`forget_dump_rewrites`, as evicted groups do.
        """
        (entries,) = await self._ask(("LRANGE", self.keys.rewrites, 0, most - 1))
        return list(entries)

    async def forget_dump_rewrites(self, entries: Sequence[bytes]) -> None:
        """The files of these entries are rewritten. Of two equal ones the older goes."""
        if entries:
            await self._ask(*(("LREM", self.keys.rewrites, 1, entry) for entry in entries))
