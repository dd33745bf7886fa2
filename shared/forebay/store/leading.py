"""The collector's transitions; all that change something carry its epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forebay.outcomes import FailureKind
from forebay.settings import RunSettings
from forebay.store.base import StoreBase, block_ms, fenced, paired
from forebay.store.records import CutRule, ResultEntry

__all__ = ["CollectorCalls"]


class CollectorCalls(StoreBase):
    """What a collector does."""

    async def lead(self, owner: str, lease_s: float) -> int:
        """Take or renew the collector lease: the fencing epoch, or 0 if another collector holds it."""
        return int(await self._run("lead", owner, int(lease_s * 1000)))

    async def resign(self, owner: str) -> None:
        """Give the collector lease up, if `owner` holds it."""
        (holder,) = await self._ask(("GET", self.keys.collector))
        if holder == owner.encode():
            await self._ask(("DEL", self.keys.collector))

    async def configure(self, epoch: int, settings: RunSettings) -> None:
        """Publish the run's rules. Raises FencedError."""
        fields: dict[str, Any] = {
            "B": settings.batch_size,
            "k": settings.batches_per_version,
            "s": settings.max_staleness,
            "max_concurrent": settings.max_concurrent,
            "max_queued": settings.max_queued_groups,
            "max_direct": settings.max_concurrent_direct,
            "max_requeues": settings.max_requeues if settings.requeue_evicted else 0,
            "max_contract_errors": settings.max_contract_errors,
            "max_barren_groups": settings.max_barren_groups,
            "window": settings.failure_window,
            "retain": settings.retain_batches,
            "retain_bytes": settings.max_retained_bytes or 0,
            "follower_ttl_ms": int(settings.follower_ttl_s * 1000),
            "follower_lag": settings.max_follower_lag,
            "held_ms": int(settings.rows_ttl_s * 1000),
            "backoff_ms": int(settings.retry_backoff_s * 1000),
            **{f"share:{kind.value}": settings.max_failed_share(kind) for kind in FailureKind},
            **{f"attempts:{kind.value}": settings.attempts(kind) for kind in FailureKind},
        }
        flat = [part for item in fields.items() for part in item]
        if not await self._run("configure", epoch, settings.model_dump_json(), *flat):
            raise fenced()

    async def read_results(self, after: str, count: int, block_s: float) -> list[ResultEntry]:
        """Entries of the results stream after entry `after` (``"0"``: from the start), waiting up to `block_s`.

        Entries stay in the stream until their group is committed, so a new collector begins at the start.
        """
        read = await self._ride(
            lambda: self._redis.xread({self.keys.results: after}, count=count, block=block_ms(block_s))
        )
        if not read:
            return []
        return [
            ResultEntry(entry.decode(), int(fields[b"t"]), int(fields[b"i"]), fields[b"h"])
            for entry, fields in read[0][1]
        ]

    async def group_rules(self, task_id: int) -> tuple[bytes, int, int | None] | None:
        """``(rules, group size, parent)`` of a running group; None of one that has ended."""
        ((state, rules, size, parent),) = await self._ask(
            ("HMGET", self.keys.group(task_id), "st", "rules", "n", "parent")
        )
        return (rules, int(size), int(parent) if parent else None) if state == b"running" else None

    async def commit(
        self, epoch: int, task_id: int, decision: str, *, reason: str = "", summary: bytes = b"", head: int = -1,
        dump_folder: str = "", detail: str = "", usable: int = 0,
    ) -> bool:  # fmt: skip
        """Record the decision (ready, rejected, evicted) on a group; False: it had ended before. Raises FencedError.

        `usable` is how many of its slots are: what is known of it once it was rejected.
        """
        answer = await self._run("commit", epoch, task_id, decision, reason, summary, head, dump_folder, detail, usable)
        if answer == b"fenced":
            raise fenced()
        return bool(answer == b"done")

    async def ready(self, most: int) -> list[tuple[int, bytes]]:
        """The oldest ready groups with their summaries."""
        (names,) = await self._ask(("ZRANGE", self.keys.ready, 0, most - 1))
        if not names:
            return []
        found = await self._ask(*(("HGET", self.keys.group(int(name)), "sum") for name in names))
        return [(int(name), summary) for name, summary in zip(names, found, strict=True) if summary is not None]

    async def evict_stale(self, epoch: int, *, running_too: bool = False) -> list[int]:
        """Evict waiting groups that can no longer be fresh, and cancel running ones if `running_too`."""
        return [int(task) for task in await self._run("evict", epoch, int(running_too))]

    async def cut(
        self, epoch: int, index: bytes, task_ids: Sequence[int], rewards: Mapping[int, bytes] | None = None
    ) -> int | None:
        """Cut a batch of `task_ids`: its id, or None if one of them is not ready or was evicted. Raises FencedError.

        `rewards` has the packed summaries of those that this batch normalizes: their dumps are rewritten.
        """
        answer = await self._run("cut", epoch, index, *paired(task_ids, rewards))
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
            ("HMGET", keys.state, "eod", "dynamic", "settled"),
        )
        ended, dynamic, settled = state
        return CutRule(int(ready), bool(ended) and queued + running == 0, dynamic == b"1", int(settled or 0))

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
        (tasks,) = await self._ask(("LRANGE", self.keys.evicted, -most, -1))
        if not tasks:
            return []
        fields = await self._ask(*(("HMGET", self.keys.group(int(task)), "dump", "why") for task in tasks))
        return [
            (int(task), (folder or b"").decode(), (why or b"").decode())
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
