"""What the ledgers of a run hold: groups that did not reach a trainer, dead letters, what was set aside."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DeadGroup", "DeadSlot", "Drop", "Redriven", "SetAside"]


@dataclass(frozen=True, slots=True)
class Drop:
    """A group that did not reach a trainer."""

    task_id: int
    at_ms: int
    """When, by the server's clock, Unix ms."""
    outcome: str
    """``rejected`` or ``evicted``."""
    place: str
    """Where: ``admission``, ``assembly``, ``waiting``, ``cut``, ``hand-over``, ``cancelled`` (while it ran) or
    ``uncollected`` (nobody asked for it)."""
    reason: str
    """A :class:`forebay.RejectReason`, or ``stale``, ``uncollected``, ``unreadable``."""
    detail: str
    """The first cause, in words."""
    parent: int | None
    """The group whose prompt this one had."""
    child: int | None
    """The group under which its prompt came again (``requeue_evicted``)."""
    prompt: str
    """What tells the prompt from others: its idempotency key, else ``#`` and a hash of its data; "" where unknown."""


@dataclass(frozen=True, slots=True)
class DeadSlot:
    """A slot whose attempts were used up."""

    task_id: int
    sample_idx: int
    kind: str
    """A :class:`forebay.FailureKind`."""
    reason: str
    traceback: str
    """Of the last attempt, shortened; "" where there is none."""
    worker: str
    """The last that ran it; "": none did."""
    attempts: int
    """The number of its last attempt."""
    at_ms: int


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """A group some slots of which failed for good."""

    task_id: int
    group_size: int
    channel: str
    """As :class:`forebay.store.records.Channel`."""
    prompt: str
    """As in :class:`Drop`."""
    slots: tuple[DeadSlot, ...]
    ended: str | None
    """How the group ended; None: it has not, or that is not known."""
    next_task: int | None
    """The group under which its prompt came again."""
    spec: bytes | None
    """The packed ``GroupSpec``; None: it was too large to be kept, so it cannot be redriven."""


@dataclass(frozen=True, slots=True)
class Redriven:
    """The answer to a redrive of one group."""

    task_id: int
    state: str
    """``created``; or, with nothing submitted, ``exists`` (it came again before), ``delivered`` (with the slots that it
    had), ``open`` (it has not ended), ``no_prompt`` (too large to be kept) or ``unknown``."""
    new_task: int | None = None


@dataclass(frozen=True, slots=True)
class SetAside:
    """Something in Redis that could not be read."""

    name: str
    where: str
    """``results``, ``prompts``, ``spec``, ``ready``, ``batches``, ``rows`` or ``leases``."""
    reason: str
    sample: bytes
    """Its first bytes."""
    at_ms: int
