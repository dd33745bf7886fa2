"""Why the next batch does not come: one look at a run, judged (contract, section 6 and 13).

:func:`diagnose` is pure. It goes through the causes in the order of :class:`Cause`, in which each makes those after it
pointless to look at, and gives the first. The collector's watch, a reader that waits, ``forebay why`` and
``forebay status`` all say what it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from forebay.settings import RunSettings
from forebay.store.bounds import held_back, out_of_memory
from forebay.store.connection import address
from forebay.store.look_records import OpenSlot, RunLook, RunningGroup

__all__ = ["Cause", "Diagnosis", "as_form", "diagnose", "seconds", "slot_text"]

_READER_WAITS_S = 3.0
"""A reader that has asked within this time waits; it asks several times a second."""
_MINUTES_FROM_S = 300.0


class Cause(StrEnum):
    """What the next batch waits for, first causes first."""

    REDIS_FULL = "redis_full"
    """Redis has reached its maxmemory and refuses writes."""
    STOPPED = "stopped"
    """The run has stopped itself."""
    NO_COLLECTOR = "no_collector"
    """No collector lives: nothing is assembled or cut."""
    PARTITION_WITHOUT_OWNER = "partition_without_owner"
    """Results of a partition are read by nobody."""
    UNREAD = "unread"
    """A batch is there: the trainer has yet to read it."""
    TRAINER_AHEAD = "trainer_ahead"
    """The trainer has all that max_staleness allows before it pushes the next version."""
    END_OF_DATA = "end_of_data"
    """The end of the data was said, and all was handed over."""
    NO_PROMPTS = "no_prompts"
    """Everything that was submitted has ended, or waits for others to make a batch."""
    NO_WORKER = "no_worker"
    NO_SERVER = "no_server"
    """No inference server is registered."""
    SERVERS_DOWN = "servers_down"
    """No inference server is healthy."""
    SERVERS_PAUSED = "servers_paused"
    """All of them are paused, as for a weight update."""
    DROPPED = "dropped"
    """Most groups that end are rejected or evicted."""
    NO_FREE_SLOT = "no_free_slot"
    """The oldest group waits for workers that are busy with others."""
    BACKING_OFF = "backing_off"
    """The oldest group waits to try a failed slot again."""
    RUNNING = "running"
    """Slots run; the oldest is named."""
    COLLECTING = "collecting"
    """All slots of the oldest group have ended: the collector is about to decide, or to cut."""
    HELD_BACK = "held_back"
    """Groups are queued, and a bound keeps them from being started."""
    STARTING = "starting"
    """Groups are queued, and there is room for them: workers are about to start them."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why the next batch does not come."""

    cause: Cause
    verdict: str
    """One sentence, with what to do where there is something."""
    look: RunLook
    """What it was judged by."""
    group: RunningGroup | None = None
    """The group that the next batch waits for, where it waits for one: the oldest."""
    slot: OpenSlot | None = None
    """Its slot that has run, or waited, for longest."""

    @property
    def trainer_waits(self) -> bool:
        """The trainer has asked for a batch within the last seconds."""
        idle_s = self.look.reader_idle_s
        return idle_s is not None and idle_s < _READER_WAITS_S

    @property
    def particulars(self) -> dict[str, Any]:
        """The slot, worker, server and ages, as fields of an event; absent where there are none."""
        fields: dict[str, Any] = {}
        if self.group is not None:
            fields |= {
                "task_id": self.group.task_id,
                "group_age_s": round(self.group.age_s, 1),
                "deadline_in_s": round(self.group.deadline_in_s, 1),
                "open_slots": self.group.open_slots,
            }
        if self.slot is not None:
            slot = self.slot
            fields |= {"sample_idx": slot.sample_idx, "attempt": slot.attempt, "state": slot.state}
            fields |= {"slot_age_s": round(slot.age_s, 1)}
            told = {
                "worker": slot.worker,
                "server": slot.server,
                "phase": slot.phase,
                "last_failure": slot.last_failure,
            }
            fields |= {name: value for name, value in told.items() if value}
        return fields


def diagnose(look: RunLook, settings: RunSettings) -> Diagnosis:
    """Why the next batch of the run does not come."""
    for judge in (_outside, _trainer, _supply, _fleet, _drops, _groups):
        found = judge(look, settings)
        if found is not None:
            return found
    return Diagnosis(
        Cause.STARTING, f"groups are queued and about to be started by the workers ({_where(look, settings)})", look
    )


def _outside(look: RunLook, settings: RunSettings) -> Diagnosis | None:
    status, where = look.status, _where(look, settings)
    if short := out_of_memory(status.bounds):
        return Diagnosis(Cause.REDIS_FULL, f"{short}; nothing is lost ({where})", look)
    if status.stopped is not None:
        text = f"the run has stopped itself: {status.stopped}; mend the cause, then `forebay resume`"
        return Diagnosis(Cause.STOPPED, text, look)
    if not status.collector_alive:
        since = "" if look.since_watched_s is None else f", since {seconds(look.since_watched_s)} ago"
        text = f"no collector is alive{since} ({where}); start one (`make up` or `forebay collector`): nothing is lost"
        return Diagnosis(Cause.NO_COLLECTOR, text, look)
    if status.owners.unowned:
        names = ", ".join(map(str, status.owners.unowned[:8]))
        text = f"no collector reads the results of partition {names} ({where}); start another `forebay collector`"
        return Diagnosis(Cause.PARTITION_WITHOUT_OWNER, text, look)
    return None


def _trainer(look: RunLook, settings: RunSettings) -> Diagnosis | None:
    status, where = look.status, _where(look, settings)
    if status.cut_batches > 0 or status.cut > 0:
        asked = "no trainer has asked for one yet"
        if look.reader_idle_s is not None:
            asked = f"{look.driver} last asked for one {seconds(look.reader_idle_s)} ago"
        count = max(status.cut_batches, 1)
        text = f"{_count(count, 'batch', 'batches')} of {_count(status.cut, 'group')} can be read: {asked} ({where})"
        return Diagnosis(Cause.UNREAD, text, look)
    ahead = status.delivered_ahead
    if status.ready < settings.batch_size and ahead and ahead + settings.batch_size > status.capacity:
        text = (
            f"{ahead} groups are handed over ahead of version {status.version}, and max_staleness allows no "
            f"further batch: push the next version ({where})"
        )
        return Diagnosis(Cause.TRAINER_AHEAD, text, look)
    return None


def _supply(look: RunLook, settings: RunSettings) -> Diagnosis | None:
    status, where = look.status, _where(look, settings)
    submitted = status.count("submitted")
    since = "" if look.since_submit_s is None else f"; the last was submitted {seconds(look.since_submit_s)} ago"
    if status.in_flight == 0:
        ends = ", ".join(f"{status.count(name)} {name}" for name in ("delivered", "rejected", "evicted"))
        if look.ended:
            return Diagnosis(Cause.END_OF_DATA, f"the data has ended, and all was handed over ({ends})", look)
        text = "nothing has been submitted yet; submit prompts (`forebay submit`, client.submit)"
        if submitted:
            text = f"all {submitted} submitted groups have ended ({ends}{since}); submit more, or end the data"
        return Diagnosis(Cause.NO_PROMPTS, text, look)
    idle = status.running == status.direct_running == status.queued == status.direct_queued == 0
    if idle and status.ready < settings.batch_size and not look.ended:
        text = f"too few groups for a batch ({where}{since}); submit more, or end the data (`forebay end`)"
        return Diagnosis(Cause.NO_PROMPTS, text, look)
    return None


def _fleet(look: RunLook, settings: RunSettings) -> Diagnosis | None:
    status, where = look.status, _where(look, settings)
    if not (status.running or status.queued or status.direct_running or status.direct_queued):
        return None
    if not status.workers:
        text = f"no worker is alive ({where}); start one with `forebay worker`"
        return Diagnosis(Cause.NO_WORKER, text, look)
    if not status.servers:
        text = f"no inference server is registered ({where}); set FOREBAY_SERVERS for the workers"
        return Diagnosis(Cause.NO_SERVER, text, look)
    usable = {url: seen for url, seen in look.servers.items() if seen.healthy}
    if look.servers and not usable:
        errors = "; ".join(
            f"{url}{_since(seen.down_s)}{f': {seen.error}' if seen.error else ''}"
            for url, seen in sorted(look.servers.items())[:4]
        )
        return Diagnosis(Cause.SERVERS_DOWN, f"no inference server answers ({errors}; {where})", look)
    if not look.servers and all(about.get("servers_healthy") == 0 for about in status.workers.values()):
        return Diagnosis(
            Cause.SERVERS_DOWN,
            f"no inference server answers ({', '.join(map(address, status.servers[:4]))}; {where})",
            look,
        )
    if usable and all(seen.paused_s is not None for seen in usable.values()):
        longest = max(seen.paused_s or 0.0 for seen in usable.values())
        text = f"all {len(usable)} inference servers are paused for a weight update, for {seconds(longest)} ({where})"
        return Diagnosis(Cause.SERVERS_PAUSED, text, look)
    return None


def _drops(look: RunLook, settings: RunSettings) -> Diagnosis | None:
    dropped = sum(look.drops.values())
    if dropped < settings.batch_size or dropped <= look.status.ready:
        return None
    ordered = sorted(look.drops.items(), key=lambda item: -item[1])
    first = ordered[0][0]
    kinds = ", ".join(f"{count} {kind}" for kind, count in ordered[:4])
    detail = f"; the last {first} says: {look.drop_details[first]}" if look.drop_details.get(first) else ""
    text = (
        f"{dropped} of the {dropped + look.status.ready} groups that have ended since the last batch were dropped "
        f"({kinds}{detail}); see `forebay drops --by reason` ({_where(look, settings)})"
    )
    group = _oldest(look)
    return Diagnosis(Cause.DROPPED, text, look, group, None if group is None else group.oldest)


def _groups(look: RunLook, settings: RunSettings) -> Diagnosis | None:
    status, where = look.status, _where(look, settings)
    if status.ready >= settings.batch_size or (look.ended and status.ready and not look.groups and not status.queued):
        return Diagnosis(Cause.COLLECTING, f"the collector is about to cut a batch ({where})", look)
    group = _oldest(look)
    if group is None:
        if status.running + status.direct_running:
            text = f"all slots of the running groups have ended, and the collector is yet to decide ({where})"
            return Diagnosis(Cause.COLLECTING, text, look)
        if held_back(status.bounds):
            return Diagnosis(Cause.HELD_BACK, f"no queued group is started ({where})", look)
        return None
    slot = group.oldest
    head = f"{where}; the oldest, group {group.task_id}, runs for {seconds(group.age_s)}"
    if slot is None:
        return Diagnosis(
            Cause.COLLECTING, f"{head}; all its slots have ended, and the collector is yet to decide", look, group
        )
    left = f"its deadline in {seconds(group.deadline_in_s)}" if group.deadline_in_s > 0 else "its deadline is over"
    head += f" ({group.size - group.open_slots} of {group.size} slots ended, {left})"
    if slot.state == "running":
        cause, text = Cause.RUNNING, f"{head}: waits for {slot_text(slot)}"
    elif slot.state == "backing off":
        cause, text = Cause.BACKING_OFF, f"{head}: waits for {slot_text(slot)}"
    else:
        slots = sum(int(about.get("slots", 0)) for about in status.workers.values())
        busy = f"{status.leased} of {slots} slots of {_count(len(status.workers), 'worker')} are busy"
        text = f"{head}: waits for {slot_text(slot)}; {busy}, and {look.due_attempts} attempts wait"
        cause = Cause.NO_FREE_SLOT if status.leased >= slots else Cause.STARTING
    return Diagnosis(cause, text, look, group, slot)


def _oldest(look: RunLook) -> RunningGroup | None:
    return next(iter(look.groups), None)


def slot_text(slot: OpenSlot) -> str:
    """What an open slot does, in words."""
    text = f"slot {slot.sample_idx}, attempt {slot.attempt}, "
    if slot.state == "running":
        text += f"which runs for {seconds(slot.age_s)} on worker {slot.worker}"
        if slot.phase:
            text += f" ({slot.phase} for {seconds(slot.phase_s)}" + (f" at {slot.server})" if slot.server else ")")
        elif slot.silent_s is None:
            text += " (which is silent)"
    elif slot.state == "backing off":
        text += f"which is tried again in {seconds(slot.due_in_s)}"
    elif slot.state == "queued":
        text += f"which is queued for {seconds(slot.age_s)}"
    else:
        text += "whose job was lost, and is queued again within seconds"
    return text + (f", after {slot.last_failure}" if slot.last_failure else "")


def _where(look: RunLook, settings: RunSettings) -> str:
    status = look.status
    text = f"{status.queued} groups queued, {status.running} running, {status.ready} of {settings.batch_size} ready"
    if direct := status.direct_queued + status.direct_running:
        text += f"; {direct} groups to be collected by id queued or running"
    if status.queued + status.direct_queued and (held := held_back(status.bounds)):
        text += f"; {held}"
    return text


def _since(down_s: float | None) -> str:
    return "" if down_s is None else f", down for {seconds(down_s)}"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def seconds(value: float) -> str:
    """A duration as it is read: ``0.4 s``, ``41 s``, ``12 min``, ``3.5 h``."""
    if value < 10:
        return f"{value:.1f} s"
    if value < _MINUTES_FROM_S:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def as_form(diagnosis: Diagnosis) -> dict[str, Any]:
    """A diagnosis as plain values, for JSON."""
    look = diagnosis.look
    status = look.status
    return {
        "cause": diagnosis.cause.value,
        "verdict": diagnosis.verdict,
        "trainer_waits": diagnosis.trainer_waits,
        "since_cut_s": look.since_cut_s,
        "since_submit_s": look.since_submit_s,
        "reader_idle_s": look.reader_idle_s,
        "version": status.version,
        "delivered_ahead": status.delivered_ahead,
        "capacity": status.capacity,
        **{name: getattr(status, name) for name in ("queued", "running", "ready", "cut", "cut_batches", "held")},
        "direct_queued": status.direct_queued,
        "direct_running": status.direct_running,
        "attempts": {"leased": status.leased, "due": look.due_attempts, "backing_off": look.later_attempts},
        "slots": sum(int(about.get("slots", 0)) for about in status.workers.values()),
        "workers": {
            name: {"silent_s": about["silent_s"], "busy": about.get("busy")} for name, about in status.workers.items()
        },
        "servers": {
            url: _server_form(look.servers, url) for url in sorted({*map(address, status.servers), *look.servers})
        },
        "drops_since_cut": dict(look.drops),
        "groups": [_group_form(group) for group in look.groups],
    }


def _server_form(seen: Mapping[str, Any], url: str) -> dict[str, Any]:
    found = seen.get(url)
    if found is None:
        return {}
    return {"healthy": found.healthy, "paused_s": found.paused_s, "down_s": found.down_s, "error": found.error}


def _group_form(group: RunningGroup) -> dict[str, Any]:
    return {
        "task_id": group.task_id,
        "size": group.size,
        "open_slots": group.open_slots,
        "age_s": group.age_s,
        "deadline_in_s": group.deadline_in_s,
        "direct": group.direct,
        "slots": [
            {
                "sample_idx": slot.sample_idx,
                "attempt": slot.attempt,
                "state": slot.state,
                "age_s": slot.age_s,
                "due_in_s": slot.due_in_s,
                "worker": slot.worker,
                "phase": slot.phase,
                "phase_s": slot.phase_s,
                "server": slot.server,
                "last_failure": slot.last_failure,
            }
            for slot in group.slots
        ],
    }
