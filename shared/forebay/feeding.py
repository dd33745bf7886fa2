"""A trainer that also submits: ``prepare_batch`` and ``wait`` (contract, section 13)."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

from forebay.batches import AsyncBatch, AsyncBatchStream, Rollouts, concatenated
from forebay.errors import QueueFullError, SubmitError
from forebay.metrics import batch_metrics, scope_of
from forebay.store.store import Store

__all__ = ["Feed", "Feeds", "GroupBuffer"]


_FEEDS = 16


class Feeds:
    """A feed for each dataloader, by identity; of more than a few the least recently used begins anew."""

    def __init__(self) -> None:
        self._feeds: OrderedDict[int, Feed] = OrderedDict()

    def of(self, dataloader: Iterable[Any]) -> Feed:
        """The feed of `dataloader`, where it was. Raises SubmitError if it cannot be one."""
        if not isinstance(dataloader, Iterable) or isinstance(dataloader, (str, bytes, dict)):
            raise SubmitError(f"dataloader is a {type(dataloader).__name__}; it must give prompts, or lists of prompts")
        feed = self._feeds.setdefault(id(dataloader), Feed(dataloader))  # which keeps it, so its id stays its own
        self._feeds.move_to_end(id(dataloader))
        if len(self._feeds) > _FEEDS:
            self._feeds.popitem(last=False)
        return feed


class Feed:
    """The prompts of a dataloader, over and over: one item at a time, or lists of items."""

    def __init__(self, dataloader: Iterable[Any]) -> None:
        self.dataloader = dataloader
        self._iterator: Iterator[Any] = iter(())
        self._waiting: deque[dict[str, Any]] = deque()
        self._lock = asyncio.Lock()

    async def keep_full(
        self, store: Store, batch_size: int, submit: Callable[[dict[str, Any]], Awaitable[object]]
    ) -> None:
        """Submit until a batch's worth of prompts waits to start, or the queue is full.

        Raises:
            SubmitError: a prompt cannot be submitted, which is left out from then on; or the dataloader gives nothing
                more, and what is on its way cannot make a batch.
        """
        async with self._lock:
            for _ in range(batch_size - await store.queued()):
                if not self._waiting:
                    # In a thread: a dataloader may read files, or wait for processes of its own.
                    self._waiting.extend(await asyncio.to_thread(self._more))
                if not self._waiting:
                    if await store.batch_possible(batch_size):
                        return  # what was submitted before comes first
                    raise SubmitError(
                        "the dataloader gave no prompt in a whole epoch, and too few groups are left for a batch; it "
                        "must give dicts, or lists of dicts, each time it is gone through"
                    )
                item = self._waiting.popleft()
                try:
                    await submit(item)
                except QueueFullError:
                    self._waiting.appendleft(item)
                    return

    def _more(self) -> list[dict[str, Any]]:
        for _ in range(2):
            for item in self._iterator:
                if items := _prompts(item):
                    return items
            self._iterator = iter(self.dataloader)  # the next epoch
        return []


def _prompts(item: Any) -> list[dict[str, Any]]:
    if isinstance(item, dict):
        return [item]
    if isinstance(item, (list, tuple)):
        return list(item)
    raise SubmitError(f"the dataloader gave a {type(item).__name__}; it must give prompts (dicts), or lists of them")


class GroupBuffer:
    """Hands out groups in any number from batches of one size; a batch is acknowledged after its last group."""

    def __init__(self, stream: AsyncBatchStream) -> None:
        self._stream = stream
        self._lock = asyncio.Lock()
        self._left: deque[tuple[AsyncBatch, int]] = deque()
        self._done: list[AsyncBatch] = []

    async def take(self, count: int, timeout_s: float | None) -> Rollouts | None:
        """The next `count` groups, fewer at the end of the data, None after it.

        Whoever asks again has trained on what it got before: those batches are acknowledged then.
        """
        async with self._lock:
            return await self._take(count, timeout_s)

    async def _take(self, count: int, timeout_s: float | None) -> Rollouts | None:
        self._stream.timeout_s = timeout_s
        while self._done:
            await self._done[0].ack()
            self._done.pop(0)
        while len(self._left) < count and (batch := await self._stream.next()) is not None:
            self._left.extend((batch, place) for place in range(len(batch.groups)))
        taken = [self._left.popleft() for _ in range(min(count, len(self._left)))]
        if not taken:
            return None
        parts = []
        for _, places in groupby(taken, key=lambda pair: pair[0].batch_id):
            mine = list(places)
            batch = mine[0][0]
            parts.append(batch.select([place for _, place in mine]))
            if not self._left or self._left[0][0] is not batch:
                self._done.append(batch)
        out = concatenated(parts)
        out.metrics = batch_metrics(out.groups, scope_of(is_eval=False))
        return out
