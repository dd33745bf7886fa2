"""What the attempts of a worker do, for who asks what a batch waits for; said with each heart-beat."""

from __future__ import annotations

from collections.abc import Mapping

from forebay.tracing import Session
from forebay.wire.doing import AttemptDoing, Doing, ServerSeen
from forebay_workers.engines.fleet import Fleet, Generating
from forebay_workers.engines.progress import GENERATING
from forebay_workers.leases import Attempt

__all__ = ["what_runs"]

_BLOCKING = "blocking the event loop"
_OWN_CODE = "workflow"


def what_runs(sessions: Mapping[Attempt, Session], fleet: Fleet, culprit: Attempt | None = None) -> Doing:
    """What each attempt does now; `culprit` is the one that blocks the event loop. For other threads too."""
    generating = fleet.generating()
    return Doing(
        {
            attempt: _doing(session, generating.get(attempt), blocks=attempt == culprit)
            for attempt, session in list(sessions.items())
        },
        {
            url: ServerSeen(server.healthy, server.paused_s, server.down_s, server.error)
            for url, server in fleet.stats().items()
        },
    )


def _doing(session: Session, open_: Generating | None, *, blocks: bool) -> AttemptDoing:
    age_s = session.seconds
    if blocks:
        return AttemptDoing(age_s, _BLOCKING, 0.0)
    phases = session.open_phases
    if open_ is not None and (open_.doing != GENERATING or not phases or _last(phases)[1] >= open_.seconds):
        # Unless it traces something that began after the request: then that is what it does, beside it.
        return AttemptDoing(age_s, open_.doing, open_.seconds, open_.server)
    name, seconds = _last(phases) if phases else (_OWN_CODE, age_s)
    return AttemptDoing(age_s, name, seconds, "" if open_ is None else open_.server)


def _last(phases: Mapping[str, float]) -> tuple[str, float]:
    return list(phases.items())[-1]
