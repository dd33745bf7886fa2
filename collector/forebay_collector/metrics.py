"""What the collector tells of groups and batches: with each batch, and to Prometheus (contract, section 12).

A group that was decided is counted into the next batch that is cut, whatever became of the group. What is counted and
not yet delivered lives in this process alone: a collector that takes over begins with none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forebay.metrics import GroupTally, batch_metrics, scope_of
from forebay.outcomes import RejectReason
from forebay.settings import RunSettings
from forebay.store.records import RunStatus
from forebay.wire.envelopes import GroupSummary

__all__ = ["CollectorMetrics", "Observer"]


class Observer(Protocol):
    """Is told what happens, as it happens: what Prometheus exposes."""

    def decided(self, group: GroupSummary, reason: RejectReason | None) -> None:
        """A group was accepted (no reason) or rejected, and committed."""

    def cut(self, groups: Sequence[GroupSummary], version: int) -> None:
        """A batch was cut, to be trained on at `version`."""


class CollectorMetrics:
    """Counts from one cut to the next."""

    def __init__(self, settings: RunSettings, observer: Observer | None = None) -> None:
        self._batch_size = settings.batch_size
        self._per_version = settings.batch_size * settings.batches_per_version
        self._observer = observer
        self._tally = GroupTally()
        self._evicted = 0
        self._offered: tuple[GroupTally, int] = (GroupTally(), 0)
        """What the metrics of a batch that may not have been cut yet have counted."""

    def begin(self, status: RunStatus) -> None:
        """This collector leads from here on."""
        self._evicted = status.count("evicted")

    def decided(self, group: GroupSummary, reason: RejectReason | None) -> None:
        """A group was accepted (no reason) or rejected, and committed."""
        if not group.is_eval:
            self._tally.add(group, reason)
        if self._observer is not None:
            self._observer.decided(group, reason)

    def of_batch(self, groups: Sequence[GroupSummary], status: RunStatus) -> dict[str, float]:
        """The metrics of a batch of `groups` that is about to be cut. Whether it was says :meth:`cut`."""
        offered, _ = self._offered  # a batch that could not be cut, if it counts anything
        offered.merge(self._tally)
        self._tally = GroupTally()
        evicted = status.count("evicted")
        self._offered = offered, evicted
        scope = scope_of(is_eval=False)
        return {
            **offered.metrics(scope),
            f"{scope}/evicted": float(max(0, evicted - self._evicted)),
            **batch_metrics(groups, scope, self._training_version(status)),
        }

    def cut(self, groups: Sequence[GroupSummary], status: RunStatus) -> None:
        """The batch was cut: what its metrics counted is delivered with it."""
        self._evicted = self._offered[1]
        self._offered = GroupTally(), 0
        if self._observer is not None:
            self._observer.cut(groups, self._training_version(status))

    def _training_version(self, status: RunStatus) -> int:
        """At which version the next batch will be trained on (contract, section 6)."""
        ahead = status.delivered_ahead + status.cut_batches * self._batch_size
        return status.version + ahead // self._per_version
