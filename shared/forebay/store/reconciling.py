"""What brings Redis in line with a trainer's checkpoint again (``docs/operations.md``, contract section 13).

Every step may be repeated, and a call that was cut off is made again from its beginning. While Redis has gone back in
time the run stands still, so that nothing moves between the steps; the last of them lets it go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from forebay.store.base import StoreBase
from forebay.store.ledgers import LedgerCalls
from forebay.store.marks import Marks, Seen, read_marks

__all__ = ["ReconcileCalls"]

T = TypeVar("T")

_AT_ONCE = 1000
_KEY_TTL_S = 7 * 86400
_OPEN = frozenset({b"queued", b"running", b"ready", b"held", b"batched"})


class ReconcileCalls(LedgerCalls, StoreBase):
    """The steps of a reconciliation; ``forebay.reconciling`` has their order."""

    async def note_seen(self, last_batch: int, last_task: int) -> bool:
        """Whether Redis has gone back behind what this store, or the checkpoint, has seen: the run is stopped then."""
        seen = Seen() if self._marks is None else self._marks.seen
        async with self.unmarked() as plain:
            ((reconciled, stopped),) = await plain._ask(("HMGET", self.keys.state, "reconciled", "rolled_back"))
            if stopped is not None:
                return True
            claimed = Seen(
                max(seen.reconciled, int(reconciled or 0)), numbers={"batch_seq": last_batch, "task_seq": last_task}
            )
            for one in (seen, claimed):
                reason = str(self._rolled_back("; ".join(await plain._differences(one)) or "the checkpoint knows more"))
                if await plain._run("rolled_back", reason, *one.arguments()):
                    return True
        return False

    async def _differences(self, seen: Seen) -> list[str]:
        return seen.fallen(read_marks(await self._ask(*Marks(self.keys).commands)))

    async def tasks_of(self, keys: Sequence[str]) -> list[int | None]:
        """The groups that Redis knows by these idempotency keys."""
        out: list[int | None] = []
        for some in _portions(keys):
            out += [
                None if task is None else int(task)
                for task in await self._ask(*(("GET", self._submitted(key)) for key in some))
            ]
        return out

    def _submitted(self, key: str) -> str:
        return f"{self.keys.prefix}submitted:{key}"

    async def remember_keys(self, keys: Iterable[tuple[str, int]]) -> None:
        """These prompts were trained on, in groups that Redis does not know any more: they are not to run again."""
        for some in _portions(keys):
            await self._ask(*(("SET", self._submitted(key), task, "NX", "EX", _KEY_TTL_S) for key, task in some))

    async def forget_key(self, key: str, task_id: int) -> None:
        """The prompt of this key may be submitted again, unless it has been."""
        await self._run("forget_key", key, task_id)

    async def take_back(self, task_ids: Iterable[int]) -> list[int]:
        """Groups that were trained on are delivered: those of them that were pending."""
        taken: list[int] = []
        for some in _portions(task_ids):
            taken += [int(task) for task in await self._run("take_back", *some)]
        return taken

    async def settle_checkpoint(
        self, version: int, last_batch: int, consumer: str, *, whole: bool
    ) -> tuple[bool, list[int]]:
        """The last step: whether Redis had gone back, and which handed-over groups wait for another batch.

        With `whole`, batches up to `last_batch` count as trained on.
        """
        back, *returned = await self._run("reconcile", version, last_batch, consumer, int(whole))
        return bool(back), [int(task) for task in returned]

    def turn(self) -> None:
        """What readers of this store remember of their place in a stream is void (:attr:`era`)."""
        self._turns += 1

    async def fates(self, task_ids: Sequence[int]) -> list[str]:
        """What became of each group.

        ``open``, ``kept`` (in a batch that is still there), ``ended``, ``delivered:BATCH``, ``delivered`` or
        ``unknown``.
        """
        out: list[str] = []
        for some in _portions(task_ids):
            found = await self._ask(*(("HMGET", self.keys.group(task), "st", "batch", "why") for task in some))
            kept = await self._ask(*(("ZSCORE", self.keys.batches_kept, about[1] or b"") for about in found))
            held = await self._ask(*(("ZSCORE", self.keys.collected, task) for task in some))
            out += [_fate(*about[::2], *places) for about, *places in zip(found, kept, held, strict=True)]
        return out

    async def dropped(self) -> set[int]:
        """All groups of the drop ledger."""
        return {drop.task_id for drop in await self.drops(limit=None)}

    async def sequences(self) -> tuple[int, int]:
        """The last task id and the last batch id."""
        ((task, batch),) = await self._ask(("HMGET", self.keys.state, "task_seq", "batch_seq"))
        return int(task or 0), int(batch or 0)


def _fate(state: bytes | None, why: bytes | None, kept: Any, collected: Any) -> str:
    if state is None:
        return "unknown"
    if state in _OPEN:
        return "open"
    if state != b"delivered":
        return "ended"
    if kept is not None or collected is not None:
        return "kept"
    text = (why or b"").decode(errors="replace")
    return f"delivered:{text.removeprefix('batch ')}" if text.startswith("batch ") else "delivered"


def _portions(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while some := list(islice(rest, _AT_ONCE)):
        yield some
