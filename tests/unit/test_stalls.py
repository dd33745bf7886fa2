"""Why the next batch does not come, judged from one look (contract, sections 6 and 13)."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.settings import RunSettings
from forebay.stalls import Cause, as_form, diagnose, seconds
from forebay.store.bounds import Bound
from forebay.store.look_records import OpenSlot, RunLook, RunningGroup
from forebay.store.records import Owners, PartitionOwner, RunStatus
from forebay.wire.doing import ServerSeen

RULES = RunSettings(batch_size=4, max_staleness=1)
WORKER = {"w1": {"slots": 8, "busy": 1, "silent_s": 1.0, "servers_healthy": 1}}
URL = "http://gpu1:30000"
SLOT = OpenSlot(
    3, 2, "running", 61.0, worker="w1", phase="generating", phase_s=60.0, server=URL, silent_s=1.0,
    last_failure="infra: HTTP 500",
)  # fmt: skip
QUEUED = OpenSlot(4, 1, "queued", 90.0)
GROUP = RunningGroup(17, 8, 2, 95.0, 120.0, False, (QUEUED, SLOT))


def look(**changes: Any) -> RunLook:
    """A run in which one group runs and nothing is wrong, with `changes` of the look or of its status."""
    status: dict[str, Any] = {
        "version": 5, "delivered_ahead": 0, "capacity": 8, "queued": 3, "running": 1, "ready": 2, "cut": 0,
        "queued_jobs": 1, "leased": 1, "collector_alive": True, "counters": {"submitted": 40, "delivered": 34},
        "workers": WORKER, "servers": (URL,),
    }  # fmt: skip
    parts: dict[str, Any] = {"groups": (GROUP,), "servers": {URL: ServerSeen(True)}}
    for name, value in changes.items():
        (status if name in RunStatus.__dataclass_fields__ and name != "servers" else parts)[name] = value
    return RunLook(RunStatus(**status), **parts)


NO_MEMORY = Bound("redis_memory_bytes", 2**31, 2**30, "maxmemory", "writes are refused", in_bytes=True)
UNREAD = Bound("unread_results", 9, 8, "max_unread_results", "no group is started", stops=True)
NOBODY = Owners("c1", ("c1",), (PartitionOwner(0, "c1", 0), PartitionOwner(1, "", 3)))
DROPPED_TEXT = (
    "6 of the 8 groups that have ended since the last batch were dropped (5 rejected: no_usable_slot, 1 evicted: "
    "stale; the last rejected: no_usable_slot says: 8 x failed(data): no such puzzle)"
)
RUNNING_TEXT = (
    "the oldest, group 17, runs for 95 s (6 of 8 slots ended, its deadline in 120 s): waits for slot 3, attempt 2, "
    "which runs for 61 s on worker w1 (generating for 60 s at http://gpu1:30000), after infra: HTTP 500"
)
NOTHING_RUNS: dict[str, Any] = {"running": 0, "queued": 0, "groups": ()}


@pytest.mark.parametrize(
    ("changes", "cause", "text"),
    [
        ({"bounds": (NO_MEMORY,)}, Cause.REDIS_FULL, "no memory left (2147483648 of maxmemory=1073741824 bytes)"),
        ({"stopped": "8 slots in a row"}, Cause.STOPPED, "stopped itself: 8 slots in a row; mend the cause"),
        ({"collector_alive": False, "since_watched_s": 41.0}, Cause.NO_COLLECTOR, "is alive, since 41 s ago ("),
        ({"collector_alive": False}, Cause.NO_COLLECTOR, "no collector is alive (3 groups queued"),
        ({"owners": NOBODY}, Cause.PARTITION_WITHOUT_OWNER, "reads the results of partition 1"),
        (
            {"cut": 4, "cut_batches": 1, "driver": "trainer", "reader_idle_s": 12.0},
            Cause.UNREAD,
            "1 batch of 4 groups can be read: trainer last asked for one 12 s ago",
        ),
        ({"cut": 4, "cut_batches": 1}, Cause.UNREAD, "no trainer has asked for one yet"),
        ({"delivered_ahead": 8}, Cause.TRAINER_AHEAD, "8 groups are handed over ahead of version 5, .*push the next"),
        ({**NOTHING_RUNS, "ready": 0, "ended": True}, Cause.END_OF_DATA, "34 delivered, 0 rejected"),
        (
            {**NOTHING_RUNS, "ready": 0, "since_submit_s": 130.0},
            Cause.NO_PROMPTS,
            "all 40 submitted groups have ended .*the last was submitted 130 s ago",
        ),
        ({**NOTHING_RUNS, "ready": 0, "counters": {}}, Cause.NO_PROMPTS, "nothing has been submitted yet"),
        (NOTHING_RUNS, Cause.NO_PROMPTS, "too few groups for a batch .*2 of 4 ready.*forebay end"),
        ({"workers": {}}, Cause.NO_WORKER, "no worker is alive"),
        (
            {"servers": {URL: ServerSeen(False, down_s=33.0, error="HTTP 503")}},
            Cause.SERVERS_DOWN,
            "no inference server answers (http://gpu1:30000, down for 33 s: HTTP 503;",
        ),
        (
            {"servers": {URL: ServerSeen(True, paused_s=42.0)}},
            Cause.SERVERS_PAUSED,
            "all 1 inference servers are paused for a weight update, for 42 s",
        ),
        (
            {"drops": {"rejected: no_usable_slot": 5, "evicted: stale": 1}, "drop_details": {
                "rejected: no_usable_slot": "8 x failed(data): no such puzzle"}},
            Cause.DROPPED,
            DROPPED_TEXT,
        ),
        (
            {},
            Cause.RUNNING,
            RUNNING_TEXT,
        ),
        (
            {"groups": (RunningGroup(17, 8, 1, 9.0, 1.0, False, (OpenSlot(0, 2, "backing off", 0, 12.0),)),)},
            Cause.BACKING_OFF,
            "waits for slot 0, attempt 2, which is tried again in 12 s",
        ),
        (
            {"groups": (RunningGroup(17, 8, 1, 9.0, 1.0, False, (QUEUED,)),), "leased": 8, "due_attempts": 5},
            Cause.NO_FREE_SLOT,
            "slot 4, attempt 1, which is queued for 90 s; 8 of 8 slots of 1 worker are busy, and 5 attempts wait",
        ),
        (
            {"groups": (RunningGroup(17, 8, 0, 9.0, 1.0, False, ()),)},
            Cause.COLLECTING,
            "all its slots have ended, and the collector is yet to decide",
        ),
        ({"ready": 4}, Cause.COLLECTING, "the collector is about to cut a batch"),
        (
            {"running": 0, "groups": (), "queued": 5, "bounds": (UNREAD,)},
            Cause.HELD_BACK,
            "no queued group is started (.*at its bound: unread_results 9 of 8, so no group is started",
        ),
        ({"running": 0, "groups": (), "queued": 5}, Cause.STARTING, "about to be started by the workers"),
    ],
)  # fmt: skip
def test_each_cause_is_named(changes: dict[str, Any], cause: Cause, text: str) -> None:
    """Each cause has its sentence, with the particulars that it is known by."""
    found = diagnose(look(**changes), RULES)
    assert found.cause is cause, found.verdict
    for part in text.split(".*"):
        assert part in found.verdict
    assert as_form(found)["cause"] == cause.value


def test_no_server_is_registered() -> None:
    """Nothing generates where the registry is empty, whatever workers may say."""
    status = look().status
    fields: dict[str, Any] = {name: getattr(status, name) for name in RunStatus.__dataclass_fields__}
    empty = RunStatus(**{**fields, "servers": ()})
    found = diagnose(RunLook(empty, groups=(GROUP,)), RULES)
    assert (found.cause, "set FOREBAY_SERVERS" in found.verdict) == (Cause.NO_SERVER, True)


def test_first_causes_come_first() -> None:
    """With everything wrong at once, mending what is named brings the next cause to light, in the order of Cause."""
    wrong: dict[str, Any] = {
        "bounds": (NO_MEMORY,), "stopped": "it", "collector_alive": False, "owners": NOBODY,
        "cut": 4, "cut_batches": 1, "delivered_ahead": 8, "workers": {}, "servers": {URL: ServerSeen(False)},
        "drops": {"evicted: stale": 9},
    }  # fmt: skip
    causes = [diagnose(look(**wrong), RULES).cause]
    for name in list(wrong):
        del wrong[name]
        causes.append(diagnose(look(**wrong), RULES).cause)
    ordered = list(dict.fromkeys(causes))
    assert ordered == [
        Cause.REDIS_FULL, Cause.STOPPED, Cause.NO_COLLECTOR, Cause.PARTITION_WITHOUT_OWNER, Cause.UNREAD,
        Cause.TRAINER_AHEAD, Cause.NO_WORKER, Cause.SERVERS_DOWN, Cause.DROPPED, Cause.RUNNING,
    ]  # fmt: skip
    assert ordered == sorted(ordered, key=list(Cause).index)


def test_a_batch_that_can_be_read_comes_before_the_lack_of_prompts() -> None:
    """Where nothing runs any more but a batch is there, or the trainer must step, it is the trainer's turn."""
    assert diagnose(look(**NOTHING_RUNS, cut=4, cut_batches=1), RULES).cause is Cause.UNREAD
    assert diagnose(look(**NOTHING_RUNS, delivered_ahead=8), RULES).cause is Cause.TRAINER_AHEAD


def test_particulars_name_what_blocks() -> None:
    """The fields of an event have the slot, worker, server and ages; a slot that runs counts before one that waits."""
    assert diagnose(look(), RULES).particulars == {
        "task_id": 17, "group_age_s": 95.0, "deadline_in_s": 120.0, "open_slots": 2, "sample_idx": 3, "attempt": 2,
        "state": "running", "slot_age_s": 61.0, "worker": "w1", "server": URL, "phase": "generating",
        "last_failure": "infra: HTTP 500",
    }  # fmt: skip
    assert diagnose(look(**NOTHING_RUNS), RULES).particulars == {}


@pytest.mark.parametrize(("idle_s", "waits"), [(None, False), (0.3, True), (40.0, False)])
def test_a_trainer_that_trains_does_not_wait(idle_s: float | None, waits: bool) -> None:
    """Only who has asked within the last seconds waits."""
    assert diagnose(look(reader_idle_s=idle_s), RULES).trainer_waits is waits


def test_one_healthy_server_is_enough() -> None:
    """Servers that are down or paused beside one that serves are not what a batch waits for."""
    servers = {URL: ServerSeen(True), "http://b": ServerSeen(False), "http://c": ServerSeen(True, paused_s=9)}
    assert diagnose(look(servers=servers), RULES).cause is Cause.RUNNING


def test_a_few_drops_among_many_are_no_cause() -> None:
    """A filter that drops less than comes through does not explain a wait."""
    assert diagnose(look(drops={"rejected: filtered": 2}), RULES).cause is Cause.RUNNING


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.04, "0.0 s"), (9.96, "10.0 s"), (59.6, "60 s"), (299, "299 s"), (900, "15 min"), (9000, "2.5 h")],
)
def test_durations(value: float, text: str) -> None:
    """Durations are told in the unit that they are read in."""
    assert seconds(value) == text
