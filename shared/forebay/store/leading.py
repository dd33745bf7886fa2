"""The collector's transitions; all that change something carry its epoch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.outcomes import FailureKind
from forebay.settings import RunSettings
from forebay.store.base import MAX_REASON, MAX_SAMPLE, StoreBase, block_ms, fenced, paired
from forebay.store.bounds import QUEUE_SHARE, ROWS_SHARE, within
from forebay.store.records import CutRule, ResultEntry

__all__ = ["CollectorCalls"]

_TASK = re.compile(rb"[0-9]{1,18}")


def _result(entry: str, fields: Mapping[bytes, bytes]) -> ResultEntry:
    task, idx, header = fields.get(b"t"), fields.get(b"i"), fields.get(b"h")
    if task is None or idx is None or header is None:
        have = ", ".join(sorted(repr(name[:20])[1:] for name in fields)[:8])
        return ResultEntry(entry, -1, -1, b" ".join(fields.values()), f"it has the fields {have}; expected t, i and h")
    if not _TASK.fullmatch(task) or not _TASK.fullmatch(idx):
        return ResultEntry(entry, -1, -1, header, f"it is of slot {idx[:20]!r} of group {task[:20]!r}")
    return ResultEntry(entry, int(task), int(idx), header)


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
        """Publish the run's rules. Raises FencedError.

        Bounds in bytes are no larger than what the server's ``maxmemory`` of now leaves for them.
        """
        memory = await self.memory()
        fields: dict[str, Any] = {
            "B": settings.batch_size,
            "k": settings.batches_per_version,
            "s": settings.max_staleness,
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
        if not await self._run("configure", epoch, settings.model_dump_json(), *flat):
            raise fenced()

    async def read_results(self, after: str, count: int, block_s: float) -> list[ResultEntry]:
        """Entries of the results stream after entry `after` (``"0"``: from the start), waiting up to `block_s`.

        Entries stay in the stream until their group is committed, so a new collector begins at the start. One that is
        no slot's result has a `fault`.
        """
        read = await self._ride(
            lambda: self._redis.xread({self.keys.results: after}, count=count, block=block_ms(block_s))
        )
        if not read:
            return []
        return [_result(entry.decode(), fields) for entry, fields in read[0][1]]

    async def set_aside_result(self, epoch: int, entry: ResultEntry, reason: str) -> bool:
        """Take an entry that is no slot's result out of the stream: whether it was there. Raises FencedError."""
        return await self._set_aside(epoch, "results:0", entry.entry_id, "results", reason, entry.header)

    async def note_unreadable(self, epoch: int, name: str, where: str, reason: str, sample: bytes) -> bool:
        """Record that `name` could not be read, once. Raises FencedError."""
        return await self._set_aside(epoch, "", name, where, reason, sample)

    async def _set_aside(self, epoch: int, stream: str, name: str, where: str, reason: str, sample: bytes) -> bool:
        answer = await self._run(
            "set_aside", epoch, stream, name, f"{where}:{name}", where, reason[:MAX_REASON], sample[:MAX_SAMPLE]
        )
        if answer == -1:
            raise fenced()
        return bool(answer == 1)

    async def foreign_results(self, task_id: int, entries: Mapping[int, str]) -> list[int]:
        """Of the result entries that a group was put together from, by slot: the slots whose own entry it is not."""
        slots = sorted(entries)
        (own,) = await self._ask(("HMGET", self.keys.group(task_id), *(f"e{idx}" for idx in slots)))
        return [idx for idx, entry in zip(slots, own, strict=True) if entry != entries[idx].encode()]

    async def group_rules(self, task_id: int) -> tuple[bytes, int, int | None] | None:
        """``(rules, group size, parent)`` of a running group; None of one that has ended."""
        ((state, rules, size, parent),) = await self._ask(
            ("HMGET", self.keys.group(task_id), "st", "rules", "n", "parent")
        )
        return (rules, int(size), int(parent) if parent else None) if state == b"running" else None

    async def commit(
        self, epoch: int, task_id: int, decision: str, *, reason: str = "", summary: bytes = b"", head: int = -1,
        dump_folder: str = "", detail: str = "", usable: int = 0, entries: Sequence[str] = (),
    ) -> bool | None:  # fmt: skip
        """Record the decision (ready, rejected, evicted) on a group; False: it had ended before.

        `usable` is how many of its slots are: what is known of it once it was rejected. With `entries`, the result
        entry of each slot that the decision rests on: None, and nothing has changed, where one of them is not the
        slot's own.

        Raises FencedError.
        """
        answer = await self._run(
            "commit", epoch, task_id, decision, reason, summary, head, dump_folder, detail, usable, *entries
        )
        if answer == b"fenced":
            raise fenced()
        return None if answer == b"foreign" else bool(answer == b"done")

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
        (found,) = await self._ask(("LRANGE", self.keys.evicted, -most, -1))
        tasks = [task for task in found if _TASK.fullmatch(task)]
        for odd in set(found).difference(tasks):
            await self._ask(("LREM", self.keys.evicted, 0, odd))
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
