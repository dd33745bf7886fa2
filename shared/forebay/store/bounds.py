"""What is bounded in a run, how much of it there is, and what happens at each bound (docs/operations.md, Bounds)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "FIRST_SLOT_BYTES",
    "QUEUE_SHARE",
    "ROWS_SHARE",
    "Bound",
    "Memory",
    "bounds_of",
    "held_back",
    "human_bytes",
    "memory_of",
    "out_of_memory",
    "within",
]


@dataclass(frozen=True, slots=True)
class Memory:
    """What a Redis says of its memory."""

    used: int
    """Bytes."""
    maximum: int
    """``maxmemory`` in bytes; 0: none."""
    policy: str
    """``maxmemory-policy``."""


def memory_of(answer: Any) -> Memory | None:
    """The answer to ``INFO memory``; None where it is none."""
    if not isinstance(answer, Mapping):
        return None  # an error: the user may not ask
    used, maximum = answer.get("used_memory"), answer.get("maxmemory")
    if type(used) is not int or type(maximum) is not int:
        return None
    return Memory(used, maximum, str(answer.get("maxmemory_policy", "")))


def within(memory: Memory | None, setting: int, share: float) -> int:
    """The bound `setting`, in bytes, but no more than that share of the server's memory; 0, no bound, stays."""
    if memory is None or not memory.maximum or not setting:
        return setting
    return max(1, min(setting, int(memory.maximum * share)))


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound, as it stands."""

    name: str
    used: int
    limit: int
    """0: none."""
    setting: str
    """What raises it."""
    then: str
    """What is stopped at it."""
    in_bytes: bool = False
    expected: int = 0
    """What it will be once that which runs has ended, where this counts too."""
    stops: bool = False
    """It is what has stopped admission."""

    @property
    def reached(self) -> bool:
        """Whether something is stopped by it now."""
        return self.stops or 0 < self.limit <= self.used

    def __str__(self) -> str:
        """``NAME USED (EXPECTED with what runs) of LIMIT``."""
        shown = human_bytes if self.in_bytes else str
        running = f" ({shown(self.expected)} with what runs)" if self.expected > self.used else ""
        return f"{self.name} {shown(self.used)}{running}" + (f" of {shown(self.limit)}" if self.limit else "")


FIRST_SLOT_BYTES = 65_536
"""What a slot is taken to bring before the first has, as in ``lua/_bounds.lua``."""
ROWS_SHARE = 0.5
QUEUE_SHARE = 0.2
"""Of ``maxmemory``, for the rows and for each of the two queues. A server that were full of prompts, or of results of
groups that cannot be completed, would have nothing that a trainer could free."""
_NO_NEW_GROUP = "no group is started but those of the next batch"
_NO_SUBMIT = "submit is refused"


def bounds_of(
    number: Mapping[str, int], *, queued: int, direct_queued: int, running: int, direct_running: int, unread: int,
    open_slots: int, held_by: str, memory: Memory | None,
) -> tuple[Bound, ...]:  # fmt: skip
    """The bounds of a run whose state has these numbers."""

    def of(name: str) -> int:
        return max(0, number.get(name, 0))

    rows = of("rows_bytes")
    expected = rows + open_slots * number.get("slot_bytes", FIRST_SLOT_BYTES)
    found = [
        Bound("queued_groups", queued, of("max_queued"), "max_queued_groups", _NO_SUBMIT),
        Bound("queued_bytes", of("queued_bytes"), of("max_queued_bytes"), "max_queued_bytes", _NO_SUBMIT, True),
        Bound("direct_queued_groups", direct_queued, of("max_queued"), "max_queued_groups", _NO_SUBMIT),
        Bound(
            "direct_queued_bytes", of("queued_bytes:direct"), of("max_queued_bytes"), "max_queued_bytes", _NO_SUBMIT,
            True,
        ),
        Bound("running_groups", running, of("max_concurrent"), "max_concurrent", "no group is started"),
        Bound(
            "direct_running_groups", direct_running, of("max_direct"), "max_concurrent_direct", "no group is started"
        ),
        Bound("rows_bytes", rows, of("max_rows"), "max_stored_bytes", _NO_NEW_GROUP, True, expected,
              held_by == "rows_bytes"),
        Bound("retained_bytes", of("kept_bytes"), of("retain_bytes"), "max_retained_bytes", "the oldest go", True),
        Bound("unread_results", unread, of("max_unread"), "max_unread_results", "no group is started",
              stops=held_by == "unread_results"),
        Bound("unread_results_bytes", of("results_bytes"), 0, "max_unread_results", "", True),
    ]  # fmt: skip
    if memory is not None:
        then = "prompts are refused, and workers hold what they have finished"
        found.append(Bound("redis_memory_bytes", memory.used, memory.maximum, "maxmemory of Redis", then, True))
    return tuple(found)


def held_back(bounds: Sequence[Bound]) -> str:
    """What keeps queued groups from being started, and how to let them; "" where nothing of this kind does."""
    texts = []
    for bound in bounds:
        if bound.stops:
            first = "acknowledge batches" if bound.in_bytes else "the collector has to commit them"
            texts.append(f"at its bound: {bound}, so {bound.then} ({first}, or raise {bound.setting})")
    return "; ".join(texts)


def out_of_memory(bounds: Sequence[Bound]) -> str:
    """Why Redis refuses to write; "" where it does not."""
    for bound in bounds:
        if bound.name == "redis_memory_bytes" and 0 < bound.limit < bound.used:
            return (
                f"Redis has no memory left ({bound.used} of maxmemory={bound.limit} bytes): {bound.then}, until the "
                "trainer acknowledges batches; if that does not help, raise maxmemory, or lower max_stored_bytes, "
                "max_queued_bytes or retain_batches"
            )
    return ""


def human_bytes(count: int) -> str:
    """`count` bytes in a unit that fits: ``1.5 GiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
