"""Closed sets of words for how things end (contract, sections 1 and 4). They travel as their string values."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["FailureKind", "GroupState", "OnSlotError", "RejectReason", "ResultKind", "SlotOutcome"]


class SlotOutcome(StrEnum):
    """How a slot ended: exactly one is recorded for each slot."""

    USABLE = "usable"
    """The episode delivered one or more rows."""
    REJECTED = "rejected"
    """The workflow returned ``None``: not trained on, not retried."""
    FAILED = "failed"
    """The attempts of some :class:`FailureKind` are used up."""


class FailureKind(StrEnum):
    """Why an attempt failed. Each kind has an attempt budget of its own."""

    INFRA = "infra"
    """Server, network, or the death of a worker. Retried with back-off."""
    DATA = "data"
    """A bad request or a bad value; trying again gives the same."""
    TIMEOUT = "timeout"
    """The episode or its group ran out of time."""
    CONTRACT = "contract"
    """The workflow returned something of the wrong format."""


class GroupState(StrEnum):
    """Where a prompt group is. The last three are final; a stale batch sends its fresh groups back to ready."""

    QUEUED = "queued"
    RUNNING = "running"
    READY = "ready"
    HELD = "held"
    """Accepted, and kept for whoever asks for it by its task id."""
    BATCHED = "batched"
    DELIVERED = "delivered"
    REJECTED = "rejected"
    EVICTED = "evicted"


class RejectReason(StrEnum):
    """Why an assembled group was rejected, in the order in which the collector decides."""

    NO_USABLE_SLOT = "no_usable_slot"
    INCOMPLETE = "incomplete"
    BELOW_MINIMUM = "below_minimum"
    MISSING_REWARD = "missing_reward"
    CONTRACT_ERROR = "contract_error"
    FILTERED = "filtered"
    ACCEPT_ERROR = "accept_error"
    ROWS_LOST = "rows_lost"
    """The rows of a usable slot vanished from Redis before the group was assembled."""


class OnSlotError(StrEnum):
    """What a failed slot means for its siblings."""

    KEEP = "keep"
    """They count; the minimum size decides."""
    DROP_GROUP = "drop_group"
    """The group is rejected as incomplete, which is AReaL's behaviour."""


class ResultKind(StrEnum):
    """What a workflow returned."""

    TENSOR = "tensor"
    INTERACTIONS = "interactions"
