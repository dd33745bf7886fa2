"""``check_trajectory_format`` on a worker: each result has the keys of the workflow's first in the run."""

from __future__ import annotations

from collections import OrderedDict

from forebay.store.store import Store
from forebay.wire.trajectory_format import check_keys

__all__ = ["FormatCheck"]


class FormatCheck:
    """Checks key sets; asks Redis once for each of the last `entries` workflows what keys its first result had."""

    def __init__(self, store: Store, entries: int = 256) -> None:
        self._store = store
        self._entries = entries
        self._first: OrderedDict[str, frozenset[str]] = OrderedDict()

    async def __call__(self, workflow: str, keys: frozenset[str]) -> None:
        """Raise WorkflowContractError unless a result with these `keys` is like the first of `workflow`.

        To be asked of usable results only: the first one becomes what all others are compared with.
        """
        first = self._first.get(workflow)
        if first is None:
            first = self._first[workflow] = await self._store.first_keys(workflow, keys)
            if len(self._first) > self._entries:
                self._first.popitem(last=False)
        check_keys(keys, first)
