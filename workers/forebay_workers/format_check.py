"""``check_trajectory_format`` on a worker: each result as the page has it, and like the workflow's first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from forebay.store.store import Store
from forebay.wire.trajectory_format import check_keys, check_trajectory

__all__ = ["FormatCheck"]


class FormatCheck:
    """Checks results; asks Redis once for each of the last `entries` workflows what keys its first result had."""

    def __init__(self, store: Store, entries: int = 256) -> None:
        self._store = store
        self._entries = entries
        self._first: OrderedDict[str, frozenset[str]] = OrderedDict()

    async def __call__(self, workflow: str, result: Any) -> None:
        """Raise WorkflowContractError unless `result` of `workflow` is as it should be."""
        keys = check_trajectory(result)
        if keys is None:
            return
        first = self._first.get(workflow)
        if first is None:
            first = self._first[workflow] = await self._store.first_keys(workflow, keys)
            if len(self._first) > self._entries:
                self._first.popitem(last=False)
        check_keys(keys, first)
