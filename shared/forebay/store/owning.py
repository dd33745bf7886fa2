"""The transitions of whoever owns partitions of the results; all that change something carry the partition's epoch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.store.base import MAX_REASON, MAX_SAMPLE, StoreBase, block_ms, fenced
from forebay.store.records import Held, Owners, PartitionOwner, ResultEntry

__all__ = ["OwnerCalls"]

_NUMBER = re.compile(rb"[0-9]{1,18}")


def _result(entry: str, fields: Mapping[bytes, bytes], partition: int) -> ResultEntry:
    task, idx, header = fields.get(b"t"), fields.get(b"i"), fields.get(b"h")
    if task is None or idx is None or header is None:
        have = ", ".join(sorted(repr(name[:20])[1:] for name in fields)[:8])
        fault = f"it has the fields {have}; expected t, i and h"
        return ResultEntry(entry, -1, -1, b" ".join(fields.values()), fault, partition)
    if not _NUMBER.fullmatch(task) or not _NUMBER.fullmatch(idx):
        fault = f"it is of slot {idx[:20]!r} of group {task[:20]!r}"
        return ResultEntry(entry, -1, -1, header, fault, partition)
    return ResultEntry(entry, int(task), int(idx), header, "", partition)


class OwnerCalls(StoreBase):
    """What every collector does."""

    async def hold(self, collector: str, lease_s: float) -> list[Held]:
        """Say that `collector` lives, renew its partitions, and take free ones up to its share: those that it owns."""
        held = await self._run("hold", collector, int(lease_s * 1000))
        return [Held(int(partition), int(epoch), not keep) for partition, epoch, keep in held]

    async def give_up(self, collector: str, partition: int) -> bool:
        """Give a partition up, to be taken at once: whether it was `collector`'s. Its epoch is old from then on."""
        return bool(await self._run("give_up", collector, partition))

    async def resign(self, collector: str) -> None:
        """Give up all that `collector` holds, the lead among it, and take it off the list of live collectors."""
        await self._run("resign", collector)

    async def owners(self) -> Owners:
        """Who collects."""
        leader, live, partitions = await self._run("owners")
        return Owners(
            leader.decode(errors="replace"),
            tuple(sorted(name.decode(errors="replace") for name in live)),
            tuple(PartitionOwner(int(p), owner.decode(errors="replace"), int(n)) for p, owner, n in partitions),
        )

    async def read_results(self, after: Mapping[int, str], count: int, block_s: float) -> list[ResultEntry]:
        """Entries of these partitions after the entry named (``"0"``: from the start), waiting up to `block_s`.

        At most `count` of each, those of one partition in its order. Entries stay in the stream until their group is
        committed, so a new owner begins at the start. One that is no slot's result has a `fault`.
        """
        by_name = {self.keys.results(partition).encode(): partition for partition in after}
        streams: dict[Any, Any] = {self.keys.results(partition): entry for partition, entry in after.items()}
        read = await self._ride(lambda: self._redis.xread(streams, count=count, block=block_ms(block_s)))
        return [
            _result(entry.decode(), fields, by_name[name]) for name, entries in read or () for entry, fields in entries
        ]

    async def set_aside_result(self, epoch: int, entry: ResultEntry, reason: str) -> bool:
        """Take an entry that is no slot's result out of its stream: whether it was there. Raises FencedError."""
        stream = f"results:{entry.partition}"
        name = f"{entry.partition}:{entry.entry_id}"
        return await self._set_aside(
            epoch, entry.partition, stream, entry.entry_id, name, "results", reason, entry.header
        )

    async def note_unreadable(
        self, epoch: int, name: str, where: str, reason: str, sample: bytes, *, partition: int = 0
    ) -> bool:
        """Record that `name`, of a group in this partition, could not be read, once. Raises FencedError."""
        return await self._set_aside(epoch, partition, "", "", name, where, reason, sample)

    async def _set_aside(
        self, epoch: int, partition: int, stream: str, entry: str, name: str, where: str, reason: str, sample: bytes
    ) -> bool:
        answer = await self._run(
            "set_aside", epoch, stream, entry, f"{where}:{name}", where, reason[:MAX_REASON], sample[:MAX_SAMPLE],
            partition,
        )  # fmt: skip
        if answer == -1:
            raise fenced()
        return bool(answer == 1)

    async def foreign_results(self, task_id: int, entries: Mapping[int, str]) -> list[int]:
        """Of the result entries that a group was put together from, by slot: the slots whose own entry it is not."""
        slots = sorted(entries)
        (own,) = await self._ask(("HMGET", self.keys.group(task_id), *(f"e{idx}" for idx in slots)))
        return [idx for idx, entry in zip(slots, own, strict=True) if entry != entries[idx].encode()]

    async def group_rules(self, task_id: int, partition: int = 0) -> tuple[bytes, int, int | None] | None:
        """``(rules, group size, parent)`` of a running group of `partition`; None of any other."""
        ((state, rules, size, parent, own),) = await self._ask(
            ("HMGET", self.keys.group(task_id), "st", "rules", "n", "parent", "p")
        )
        if state != b"running" or (own or b"0") != b"%d" % partition:
            return None
        return (rules, int(size), int(parent) if parent else None)

    async def commit(
        self, epoch: int, task_id: int, decision: str, *, reason: str = "", summary: bytes = b"", head: int = -1,
        dump_folder: str = "", detail: str = "", usable: int = 0, partition: int = 0, entries: Sequence[str] = (),
    ) -> bool | None:  # fmt: skip
        """Record the decision (ready, rejected, evicted) on a group of `partition`; False: it had ended before.

        `usable` is how many of its slots are: what is known of it once it was rejected. With `entries`, the result
        entry of each slot that the decision rests on: None, and nothing has changed, where one of them is not the
        slot's own.

        Raises FencedError.
        """
        answer = await self._run(
            "commit", epoch, task_id, decision, reason, summary, head, dump_folder, detail, usable, partition, *entries
        )
        if answer == b"fenced":
            raise fenced()
        return None if answer == b"foreign" else bool(answer == b"done")
