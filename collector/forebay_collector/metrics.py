"""What collectors tell of groups and batches: with each batch, and to Prometheus (contract, section 12).

A group that was decided is counted into the next batch that is cut, whatever became of the group and whichever
collector decided on it: each commit counts it in Redis (``tally``), and the cut takes out what the batch has told. Only
how many were evicted is counted from where this collector began to lead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from forebay.metrics import GroupTally, batch_metrics, scope_of
from forebay.outcomes import RejectReason
from forebay.settings import RunSettings
from forebay.store.records import RunStatus
from forebay.wire.envelopes import GroupSummary

__all__ = ["CollectorMetrics", "Observer", "tally_of"]


class Observer(Protocol):
    """Is told what happens, as it happens: what Prometheus exposes."""

    def decided(self, group: GroupSummary, reason: RejectReason | None) -> None:
        """A group was accepted (no reason) or rejected, and committed."""

    def cut(self, groups: Sequence[GroupSummary], version: int) -> None:
        """A batch was cut, to be trained on at `version`."""


def tally_of(counts: Mapping[str, int]) -> GroupTally:
    """The sums over groups that are counted by ``slots:usable slots:reason``; what is no such count is left out."""
    tally = GroupTally()
    for name, count in counts.items():
        size, _, rest = name.partition(":")
        usable, _, reason = rest.partition(":")
        if size.isdecimal() and usable.isdecimal() and count > 0:
            tally.count(int(size), int(usable), reason or None, times=count)
    return tally


class CollectorMetrics:
    """Counts from one cut to the next."""

    def __init__(self, settings: RunSettings, observer: Observer | None = None) -> None:
        self._batch_size = settings.batch_size
        self._per_version = settings.batch_size * settings.batches_per_version
        self._observer = observer
        self._evicted = 0
        self._offered = 0
        """The evicted groups of which a batch that may not have been cut yet tells, counted from the run's begin."""

    def begin(self, status: RunStatus) -> None:
        """This collector leads from here on."""
        self._evicted = status.count("evicted")

    def decided(self, group: GroupSummary, reason: RejectReason | None) -> None:
        """A group was accepted (no reason) or rejected, and committed."""
        if self._observer is not None:
            self._observer.decided(group, reason)

    def of_batch(self, groups: Sequence[GroupSummary], status: RunStatus, tally: Mapping[str, int]) -> dict[str, float]:
        """The metrics of a batch of `groups` that is about to be cut. Whether it was says :meth:`cut`.

        `tally` is what was decided since the batch before, as the store counts it.
        """
        self._offered = status.count("evicted")
        scope = scope_of(is_eval=False)
        return {
            **tally_of(tally).metrics(scope),
            f"{scope}/evicted": float(max(0, self._offered - self._evicted)),
            **batch_metrics(groups, scope, self._training_version(status)),
        }

    def cut(self, groups: Sequence[GroupSummary], status: RunStatus) -> None:
        """The batch was cut: what its metrics counted is delivered with it."""
        self._evicted = self._offered
        if self._observer is not None:
            self._observer.cut(groups, self._training_version(status))

    def _training_version(self, status: RunStatus) -> int:
        """At which version the next batch will be trained on (contract, section 6)."""
        ahead = status.delivered_ahead + status.cut_batches * self._batch_size
        return status.version + ahead // self._per_version
