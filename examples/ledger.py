"""Keeps the prompt queue full and remembers, by id, what became of every group that was submitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay import Batch, Client
    from forebay.store.records import RunStatus

__all__ = ["Ledger"]


class Ledger:
    """Books of one run.

    Its ids are those that ``submit`` returned and that came back in batches, not the pipeline's own counters, so that
    a group which the pipeline forgot would show. `submit` enqueues the next prompt and returns its task id.
    """

    def __init__(self, submit: Callable[[], int]) -> None:
        self._submit = submit
        self.submitted: set[int] = set()
        self.batches_of: dict[int, set[int]] = {}
        """The batches in which each delivered group came; more than one would be a fault of the pipeline."""

    @property
    def delivered(self) -> set[int]:
        """Ids of the groups that came in a batch."""
        return set(self.batches_of)

    def top_up(self, client: Client, wanted: int) -> None:
        """Submit until `wanted` groups are in flight: queued, running, or waiting to be read.

        The bound matters: a queue that is filled without one grows without end when prompts come faster than they are
        trained on. Groups that were rejected or evicted are in flight no longer, so others take their place.
        """
        for _ in range(wanted - client.status().in_flight):
            self.submitted.add(self._submit())

    def deliver(self, batch: Batch) -> None:
        """Enter the groups of `batch`."""
        for group in batch.groups:
            self.batches_of.setdefault(group.task, set()).add(batch.batch_id)

    def account(self, status: RunStatus) -> dict[str, Any]:
        """How many groups went which way; ``lost`` are those that no way accounts for."""
        delivered = self.delivered & self.submitted
        rejected, evicted = status.count("rejected"), status.count("evicted")
        return {
            "submitted": len(self.submitted),
            "accepted": len(delivered) + status.ready + status.cut,
            "rejected": rejected,
            "evicted": evicted,
            "lost": len(self.submitted) - len(delivered) - rejected - evicted - status.in_flight,
            "duplicated": sum(len(batches) > 1 for batches in self.batches_of.values()),
        }
