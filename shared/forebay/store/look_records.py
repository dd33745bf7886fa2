"""What one look at a run shows of what its next batch waits for: plain records. Times are seconds before the look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from forebay.store.records import RunStatus
from forebay.wire.doing import ServerSeen

__all__ = ["OpenSlot", "RunLook", "RunningGroup"]


@dataclass(frozen=True, slots=True)
class OpenSlot:
    """A slot that has not ended, and what its attempt does."""

    sample_idx: int
    attempt: int
    state: str
    """``running``, ``queued``, ``backing off`` (until `due_in_s`), or ``lost``: neither, and queued again soon."""
    age_s: float
    """Since it was claimed; of one that is queued, since it is due."""
    due_in_s: float = 0.0
    worker: str = ""
    phase: str = ""
    """What its worker last said that it does; "": nothing yet."""
    phase_s: float = 0.0
    server: str = ""
    """The inference server that its generation is at."""
    silent_s: float | None = None
    """How long ago its worker said that; None: it has said nothing, or its heart-beat is not kept any more."""
    last_failure: str = ""
    """Kind and reason of its last failed attempt."""


@dataclass(frozen=True, slots=True)
class RunningGroup:
    """A group whose slots run."""

    task_id: int
    size: int
    open_slots: int
    age_s: float
    """Since it was started."""
    deadline_in_s: float
    direct: bool
    """It is asked for by its id, and comes in no batch."""
    slots: tuple[OpenSlot, ...]
    """The first of the open ones."""

    @property
    def oldest(self) -> OpenSlot | None:
        """The open slot that has run for longest; where none runs, that has waited for longest."""
        return max(self.slots, key=lambda slot: (slot.state == "running", slot.age_s), default=None)


@dataclass(frozen=True, slots=True)
class RunLook:
    """All that a diagnosis is made from."""

    status: RunStatus
    groups: tuple[RunningGroup, ...] = ()
    """The oldest running ones."""
    since_cut_s: float | None = None
    """None: no batch was cut yet."""
    since_watched_s: float | None = None
    """Since a leading collector last looked."""
    since_submit_s: float | None = None
    ended: bool = False
    """The end of the data was said."""
    driver: str = ""
    """The consumer that drives the version."""
    reader_idle_s: float | None = None
    """Since the driver last asked for a batch."""
    due_attempts: int = 0
    """Attempts that wait for a free slot."""
    later_attempts: int = 0
    """Attempts that back off after a failure."""
    drops: Mapping[str, int] = field(default_factory=dict)
    """Groups dropped since the last cut (the last 500), by ``outcome: reason``."""
    drop_details: Mapping[str, str] = field(default_factory=dict)
    servers: Mapping[str, ServerSeen] = field(default_factory=dict)
    """By URL, as the live workers see them: what the best of them sees."""
