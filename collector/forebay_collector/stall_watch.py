"""Says in the log when batches do not come any more, and what the next one waits for: a duty of the leading collector.

A wait is a stall once no batch was cut for ``stall_warn_s``, and for three times the usual time between two cuts, while
groups run or the trainer waits. It is told then, each time it has doubled, and when it is over. Nothing is changed by
it: deadlines and budgets end what hangs.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median

import structlog

from forebay.errors import FrameError
from forebay.settings import RunSettings
from forebay.stalls import Cause, Diagnosis, diagnose
from forebay.store.store import Store

__all__ = ["StallWatch"]

log = structlog.get_logger(__name__)

_LOOK_EVERY_S = 2.0
_LOOKS_A_LIMIT = 5
_USUAL_FACTOR = 3.0
_CUTS_REMEMBERED = 32
_WELL_AS_IT_IS = frozenset({Cause.STOPPED, Cause.END_OF_DATA})
"""The run's log has said the first; after the second nothing is to come."""
_THE_TRAINERS = frozenset({Cause.UNREAD, Cause.TRAINER_AHEAD})
"""A trainer that trains meanwhile does not wait."""


class StallWatch:
    """Looks at the run every few seconds."""

    def __init__(self, store: Store, settings: RunSettings) -> None:
        self._store = store
        self._settings = settings
        self._usual: deque[float] = deque(maxlen=_CUTS_REMEMBERED)
        """Seconds between two cuts."""
        self._cuts = -1
        self._cut_at = 0.0
        self._awaited_since: float | None = None
        self._next_warning_s = 0.0
        self.stalled_s = 0.0
        """For how long the batch that is awaited has been told to be missing; 0: it is not."""

    @property
    def interval_s(self) -> float:
        """Between two looks."""
        return min(_LOOK_EVERY_S, self._settings.stall_warn_s / _LOOKS_A_LIMIT)

    @property
    def limit_s(self) -> float:
        """A wait of so long is a stall."""
        usual_s = median(self._usual) if self._usual else 0.0
        return max(self._settings.stall_warn_s, _USUAL_FACTOR * usual_s)

    async def look(self) -> None:
        """One look: log what there is to say."""
        try:
            found = diagnose(await self._store.look(leading=True, groups=1), self._settings)
        except FrameError as error:  # no reason to stop collecting
            log.warning("stalls.not_watched", reason=str(error))
            return
        self.judge(found, time.monotonic())

    def judge(self, found: Diagnosis, now: float) -> None:
        """Log what there is to say of a run that was `found` so at `now`, monotonic seconds."""
        self._note_cuts(found, now)
        if not _awaited(found):
            self._awaited_since, self.stalled_s = None, 0.0
            return
        if self._awaited_since is None:
            self._awaited_since, self._next_warning_s = now, self.limit_s
        waited_s = now - self._awaited_since
        if waited_s < max(self._next_warning_s, self.limit_s):
            return
        self._next_warning_s, self.stalled_s = 2 * max(waited_s, self.limit_s), waited_s
        log.warning(
            "batch.stalled",
            run=self._store.keys.run,
            seconds=round(waited_s, 1),
            cause=found.cause.value,
            why=found.verdict,
            trainer_waits=found.trainer_waits,
            running=found.look.status.running,
            ready=found.look.status.ready,
            **found.particulars,
        )

    def _note_cuts(self, found: Diagnosis, now: float) -> None:
        cuts = found.look.status.count("batches_cut")
        if self._cuts < 0:
            self._cuts = cuts
        if cuts <= self._cuts:
            return
        at = now - (found.look.since_cut_s or 0.0)
        if self._cut_at and not self.stalled_s:  # what was a stall is no usual time
            self._usual.append(max(0.0, at - self._cut_at) / (cuts - self._cuts))
        if self.stalled_s and self._awaited_since is not None:
            log.info("batch.flows_again", run=self._store.keys.run, stalled_s=round(at - self._awaited_since, 1))
        self._cuts, self._cut_at = cuts, at
        self._awaited_since, self.stalled_s = None, 0.0


def _awaited(found: Diagnosis) -> bool:
    """Whether somebody waits for a batch, or work is under way for one."""
    if found.cause in _WELL_AS_IT_IS:
        return False
    status = found.look.status
    about_to_cut = status.ready and found.cause is Cause.COLLECTING  # nothing runs between the last commit and the cut
    works = bool(status.running or status.queued or about_to_cut) and found.cause not in _THE_TRAINERS
    return works or found.trainer_waits
