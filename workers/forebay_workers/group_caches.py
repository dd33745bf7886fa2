"""The caches that the slots of a group share in this process (contract, section 8)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from forebay.processor_cache import ProcessorCache

__all__ = ["GroupCaches"]


class GroupCaches:
    """One cache for each group that has a running slot here, so never more than there are running slots."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[ProcessorCache, int]] = {}
        """By task id: the cache, and how many slots hold it."""

    def __len__(self) -> int:
        return len(self._held)

    @contextmanager
    def of(self, task_id: int) -> Iterator[ProcessorCache]:
        """The group's cache for a slot that runs inside the block; it is emptied when the last one leaves."""
        cache, holders = self._held.get(task_id) or (ProcessorCache(), 0)
        self._held[task_id] = cache, holders + 1
        try:
            yield cache
        finally:
            cache, holders = self._held.pop(task_id)
            if holders > 1:
                self._held[task_id] = cache, holders - 1
            else:
                cache.close()
