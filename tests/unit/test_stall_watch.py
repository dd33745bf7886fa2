"""When the collector says that batches do not come any more, and when it does not."""

from __future__ import annotations

from typing import Any, cast

import pytest
from structlog.testing import capture_logs
from test_stalls import look

from forebay.settings import RunSettings
from forebay.stalls import diagnose
from forebay_collector.stall_watch import StallWatch


class _Store:
    """As much of a store as a judgement needs."""

    class keys:  # noqa: N801 (stands for an attribute)
        run = "dev/trial0"


RULES = RunSettings(batch_size=4, stall_warn_s=10)


def watch() -> StallWatch:
    """A watch that has seen nothing yet."""
    return StallWatch(cast("Any", _Store()), RULES)


def told(one: StallWatch, times: list[float], cuts: int = 7, **changes: Any) -> list[dict[str, Any]]:
    """What is logged when the run is found the same at all these times."""
    with capture_logs() as logs:
        for now in times:
            found = look(**{"counters": {"batches_cut": cuts, "submitted": 9}, "since_cut_s": 0.0, **changes})
            one.judge(diagnose(found, RULES), now)
    return [dict(entry) for entry in logs]


def test_warns_at_the_limit_and_when_the_wait_has_doubled() -> None:
    """The first warning comes after stall_warn_s, the next each time the wait has doubled; it names what blocks."""
    logs = told(watch(), [100.0 + now for now in range(90)])
    assert [entry["seconds"] for entry in logs] == [10, 20, 40, 80]
    assert {entry["event"] for entry in logs} == {"batch.stalled"}
    first = logs[0]
    assert (first["task_id"], first["sample_idx"], first["worker"], first["server"], first["slot_age_s"]) == (
        17, 3, "w1", "http://gpu1:30000", 61.0,
    )  # fmt: skip
    assert (first["cause"], first["log_level"]) == ("running", "warning")


def test_says_when_batches_flow_again() -> None:
    """A cut ends the stall, and is said; a cut without a stall is not."""
    one = watch()
    told(one, [0.0, 10.0])
    assert one.stalled_s == 10
    (entry,) = told(one, [12.0], cuts=8)
    assert (entry["event"], entry["stalled_s"]) == ("batch.flows_again", 12)
    assert told(one, [13.0], cuts=9) == []


def test_a_look_between_the_last_commit_and_the_cut_forgets_nothing() -> None:
    """Where all groups are ready and none runs, the batch that is about to be cut still ends the stall."""
    one = watch()
    told(one, [0.0, 10.0])
    assert told(one, [11.0], running=0, queued=0, groups=(), ready=4) == []
    assert [entry["event"] for entry in told(one, [12.0], cuts=8)] == ["batch.flows_again"]


def test_the_usual_pace_is_no_stall() -> None:
    """Where a batch takes a minute, two are no stall, though above stall_warn_s: the limit is three times the usual."""
    one = watch()
    for at in range(5):
        told(one, [60.0 * at], cuts=at)
    assert one.limit_s == pytest.approx(180)
    assert told(one, [240.0 + now for now in range(180)], cuts=4) == []
    assert [entry["seconds"] for entry in told(one, [420.0], cuts=4)] == [180]


@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        ({"stopped": "it"}, False),
        ({"running": 0, "queued": 0, "ready": 0, "groups": (), "ended": True}, False),
        ({"running": 0, "queued": 0, "ready": 0, "groups": ()}, False),
        ({"running": 0, "queued": 0, "ready": 0, "groups": (), "reader_idle_s": 0.2}, True),
        ({"cut": 4, "cut_batches": 1, "reader_idle_s": 50.0}, False),
        ({"delivered_ahead": 8, "reader_idle_s": 50.0}, False),
        ({"delivered_ahead": 8, "reader_idle_s": 0.2}, True),
        ({"workers": {}}, True),
    ],
)
def test_only_what_is_awaited_stalls(changes: dict[str, Any], warns: bool) -> None:
    """A trainer that trains, a run without work, one that has stopped itself: none is a stall; a wait is one."""
    assert bool(told(watch(), [float(now) for now in range(15)], **changes)) is warns


def test_a_wait_begins_when_there_is_work() -> None:
    """A run that lay idle for an hour has not stalled when the first group starts."""
    one = watch()
    idle = {"running": 0, "queued": 0, "ready": 0, "groups": ()}
    assert told(one, [0.0, 1800.0, 3600.0], **idle) == []
    assert told(one, [3601.0, 3609.0]) == []
    assert [entry["seconds"] for entry in told(one, [3611.0])] == [10]
