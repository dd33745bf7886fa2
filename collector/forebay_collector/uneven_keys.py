"""Keys that not all rollouts of a group carry: they are left out of its tensors (contract, section 2)."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from forebay.outcomes import ResultKind, SlotOutcome
from forebay.wire.envelopes import SlotHeader
from forebay.wire.tensors import FILLED, NEVER_DROPPED
from forebay.wire.trajectory_format import EXEMPT

__all__ = ["UnevenKeys", "uneven_keys"]

log = structlog.get_logger(__name__)


def uneven_keys(headers: Iterable[SlotHeader]) -> tuple[str, ...]:
    """The keys that some and not all of the usable tensor results carry, sorted."""
    sets = [
        set(header.keys)
        for header in headers
        if header.outcome == SlotOutcome.USABLE and header.result_kind == ResultKind.TENSOR
    ]
    if not sets:
        return ()
    everywhere = sets[0].intersection(*sets)
    return tuple(sorted(sets[0].union(*sets) - everywhere - EXEMPT - NEVER_DROPPED - FILLED))


class UnevenKeys:
    """Warns of such keys, once for each set of them; of at most `sets` sets, that the log stays readable."""

    def __init__(self, sets: int = 100) -> None:
        self._sets = sets
        self._seen: set[tuple[str, ...]] = set()

    def warn(self, task_id: int, headers: Iterable[SlotHeader]) -> None:
        """Look at an assembled group."""
        keys = uneven_keys(headers)
        if keys and keys not in self._seen and len(self._seen) < self._sets:
            self._seen.add(keys)
            log.warning("group.keys_dropped", task_id=task_id, keys=list(keys), remedy="return them from every episode")
