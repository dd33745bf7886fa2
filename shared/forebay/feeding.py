"""A trainer that also submits: ``prepare_batch`` and ``wait`` (contract, section 13)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

from forebay.batches import AsyncBatch, AsyncBatchStream, Rollouts, concatenated
from forebay.errors import QueueFullError, SubmitError

__all__ = ["Feed", "GroupBuffer"]


class Feed:
    """The prompts of a dataloader, over and over: one item at a time, or lists of items."""

    def __init__(self, dataloader: Iterable[Any]) -> None:
        self.dataloader = dataloader
        self._iterator: Iterator[Any] = iter(())
        self._waiting: deque[dict[str, Any]] = deque()

    async def top_up(self, want: int, submit: Callable[[dict[str, Any]], Awaitable[object]]) -> None:
        """Submit the next `want` prompts, or fewer where the queue is full. Raises SubmitError."""
        for _ in range(want):
            if not self._waiting:
                # In a thread: a dataloader may read files, or wait for processes of its own.
                self._waiting.extend(await asyncio.to_thread(self._more))
            try:
                await submit(self._waiting[0])
            except QueueFullError:
                return
            self._waiting.popleft()

    def _more(self) -> list[dict[str, Any]]:
        for _ in range(2):
            for item in self._iterator:
                if items := [item] if isinstance(item, dict) else list(item):
                    return items
            self._iterator = iter(self.dataloader)  # the next epoch
        raise SubmitError("the dataloader gave no prompt in a whole epoch; it must give dicts, or lists of dicts")


class GroupBuffer:
    """Hands out groups in any number from batches of one size; a batch is acknowledged after its last group."""

    def __init__(self, stream: AsyncBatchStream) -> None:
        self._stream = stream
        self._left: deque[tuple[AsyncBatch, int]] = deque()
        self._done: list[AsyncBatch] = []

    async def take(self, count: int, timeout_s: float | None) -> Rollouts | None:
        """The next `count` groups, fewer at the end of the data, None after it.

        Whoever asks again has trained on what it got before: those batches are acknowledged then.
        """
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
        return concatenated(parts)
