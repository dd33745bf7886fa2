"""Sessions, phases, and the trace of them (contract 8)."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from forebay import session_context, trace_session
from forebay.cli import build_app
from forebay.errors import SettingsError
from forebay.trace_files import TraceWriter, chrome_trace, read_sessions, session_record
from forebay.tracing import MAX_PHASES, MAX_SPANS, Session, current_session

US = 1_000_000


def spin(seconds: float) -> None:
    """Let time pass."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class TestPhases:
    async def test_decorators_and_blocks(self) -> None:
        """Contract 8: any phase name, as a decorator of coroutines and plain functions and as a block of both kinds."""

        @trace_session("generate")
        async def generate() -> str:
            await asyncio.sleep(0)
            spin(0.002)
            return "text"

        class Scorer:
            @trace_session("reward")
            def score(self, text: str) -> float:
                """Score."""
                spin(0.002)
                return float(len(text))

        with Session().active() as session:
            assert await generate() == "text"
            assert Scorer().score("text") == 4.0
            with trace_session("my own phase"):
                spin(0.002)
            async with trace_session("tools"):
                spin(0.002)
        assert Scorer.score.__doc__ == "Score."
        assert list(session.phases) == ["generate", "reward", "my own phase", "tools"]
        assert all(0.002 <= seconds < 2.0 for seconds in session.phases.values())

    async def test_without_a_session_nothing_happens(self) -> None:
        """Contract 8: traced code runs as it is where no session is open."""

        @trace_session("reward")
        async def reward() -> int:
            return 1

        with trace_session("outside"):
            assert await reward() == 1
        assert current_session() is None

    async def test_concurrent_calls_count_once(self) -> None:
        """Ten calls of a phase at once count for as long as it ran: no phase exceeds its session."""

        @trace_session("generate")
        async def generate() -> None:
            await asyncio.sleep(0.02)

        with Session().active() as session:
            await asyncio.gather(*(generate() for _ in range(10)))
        assert 0.02 <= session.phases["generate"] <= session.seconds
        assert len(session.spans) == 10

    async def test_episodes_on_one_loop_are_apart(self) -> None:
        """One decorator, and one object as a block, used by many episodes at once, count for each what is its own."""
        shared = trace_session("turn")

        async def episode(turns: int) -> Session:
            with Session().active() as session:
                for _ in range(turns):
                    with shared:
                        await asyncio.sleep(0)
            return session

        sessions = await asyncio.gather(*(episode(turns) for turns in range(1, 8)))
        assert [len(session.spans) for session in sessions] == list(range(1, 8))

    async def test_tasks_and_threads_of_an_episode(self) -> None:
        """What an episode starts belongs to its session."""

        @trace_session("thread")
        def work() -> int:
            return threading.get_ident()

        with Session().active() as session:
            await asyncio.gather(asyncio.to_thread(work), asyncio.to_thread(work))
        assert [span.name for span in session.spans] == ["thread"] * 2

    def test_errors_pass_and_are_noted(self) -> None:
        """A phase that raises has ended, and its span says with what."""
        with Session().active() as session, pytest.raises(KeyError), trace_session("reward"):
            raise KeyError("x")
        assert [(span.name, span.error) for span in session.spans] == [("reward", "KeyError")]

    def test_bounds(self) -> None:
        """Names and spans are bounded, whatever a workflow does: the header that carries the phases stays small."""
        session = Session()
        for number in range(MAX_PHASES + 50):
            session.leave(session.enter(f"{number:05}" + "x" * 500))
        for _ in range(MAX_SPANS):
            session.leave(session.enter("00000"))
        assert len(session.phases) == MAX_PHASES + 1
        assert session.phases["(other)"] > 0
        assert max(map(len, session.phases)) == 100
        assert len(session.spans) == MAX_SPANS
        assert session.spans_dropped == MAX_PHASES + 50

    @pytest.mark.parametrize("phase", ["", None, lambda: None])
    def test_a_phase_has_a_name(self, phase: Any) -> None:
        """``@trace_session`` without a name is refused where it stands."""
        with pytest.raises(TypeError, match='such as "reward"'):
            trace_session(phase)

    def test_generators_are_refused(self) -> None:
        """A generator, whose time between values is not its own, is refused with the remedy."""
        with pytest.raises(TypeError, match="use 'with trace_session"):

            @trace_session("stream")
            async def stream() -> Any:
                yield 1


class TestSessionContext:
    async def test_it_opens_one_where_none_is(self) -> None:
        """Outside of an episode a session is opened for the block or the call."""

        @session_context()
        async def inner() -> Session | None:
            return current_session()

        with session_context() as outer, trace_session("reward"):
            assert await inner() is outer
        assert list(outer.phases) == ["reward"]
        assert current_session() is None
        alone = await inner()
        assert alone is not None
        assert alone is not outer

    async def test_in_an_episode_it_is_the_episodes(self) -> None:
        """In an episode the session that is open stays."""
        with Session(task_id=7).active() as session:
            async with session_context() as inner:
                assert inner is session
            assert current_session() is session


def record(session: Session | None = None, **changes: Any) -> dict[str, Any]:
    """The line of a session."""
    return session_record(session or Session("e/t", 7, 1, 2), worker="host:1", status="usable") | changes


class TestFiles:
    def test_lines(self, tmp_path: Path) -> None:
        """Contract 8: a line has task_id, sample_idx, status, reason, timestamps and seconds per phase."""
        session = Session("e/t", 7, 1, 2)
        session.leave(session.enter("reward"))
        writer = TraceWriter(tmp_path / "new" / "folder", "host:12:ab/c", 10_000)
        writer.write(session_record(session, worker="host:12:ab/c", status="failed", reason="no such puzzle"))
        writer.close()
        assert writer.path.name == "host_12_ab_c.jsonl"
        (line,) = read_sessions(writer.path.parent)
        assert (line["run"], line["task_id"], line["sample_idx"], line["attempt"]) == ("e/t", 7, 1, 2)
        assert (line["status"], line["reason"], line["worker"]) == ("failed", "no such puzzle", "host:12:ab/c")
        assert time.time() - 60 < line["start"] <= line["end"] == line["start"] + line["seconds"]
        assert list(line["phases"]) == ["reward"]

    def test_files_are_bounded(self, tmp_path: Path) -> None:
        """A worker leaves two files at most, of about the bound each, with the newest sessions."""
        writer = TraceWriter(tmp_path, "w", 4096)
        for number in range(200):
            writer.write(record(task_id=number))
        writer.close()
        sizes = [path.stat().st_size for path in tmp_path.iterdir()]
        assert len(sizes) == 2
        assert max(sizes) <= 4096
        assert max(line["task_id"] for line in read_sessions(tmp_path)) == 199

    def test_a_disk_that_fails_costs_the_traces_only(self, tmp_path: Path) -> None:
        """What cannot be written is counted, and nothing is raised."""
        writer = TraceWriter(tmp_path / "gone", "w", 4096)
        (tmp_path / "gone").rmdir()
        writer.write(record())
        writer.close()
        assert writer.dropped == 1

    def test_a_line_that_was_cut_off_is_skipped(self, tmp_path: Path) -> None:
        """A killed worker may leave half a line; the others are read."""
        (tmp_path / "a.jsonl").write_text(json.dumps(record()) + "\n" + json.dumps(record())[:50])
        assert len(list(read_sessions(tmp_path))) == 1


def check_trace(trace: dict[str, Any]) -> dict[Any, list[tuple[str, int, int]]]:
    """Check the trace as the importers of Perfetto and Chrome read it; the slices of each track, in order of begin.

    They pair the begin and end events of a track (its category, id and process) last in, first out, and by name.
    """
    assert isinstance(json.loads(json.dumps(trace, allow_nan=False))["traceEvents"], list)
    named, open_, slices = set(), defaultdict(list), defaultdict(list)
    last = 0
    for event in trace["traceEvents"]:
        assert {"ph", "ts", "pid", "tid", "name"} <= event.keys()
        assert all(type(event[name]) is int and event[name] >= 0 for name in ("ts", "pid", "tid"))
        if event["ph"] == "M":
            if event["name"] == "process_name":
                named.add(event["pid"])
            continue
        assert event["ts"] >= last
        last = event["ts"]
        assert event["pid"] in named
        track = (event["pid"], event["cat"], event["id"])
        if event["ph"] == "b":
            open_[track].append(len(slices[track]))
            slices[track].append((event["name"], event["ts"], -1))
        else:
            assert event["ph"] == "e"
            name, begin, _ = slices[track][at := open_[track].pop()]
            assert name == event["name"]
            slices[track][at] = (name, begin, event["ts"])
    assert not any(open_.values())
    return slices


class TestChromeTrace:
    def test_nested_and_overlapping_phases(self) -> None:
        """Contract 8: a process a worker, a track an attempt, phases in it; what overlaps goes beside it."""
        spans = [
            ["turn", 0.1, 0.5, ""],
            ["generate", 0.2, 0.3, ""],
            ["reward", 0.55, 0.2, "KeyError"],
            ["turn", 0.8, 0.1, ""],
        ]
        other = record(worker="host:2", start=101.0, seconds=1.0, task_id=8)
        trace = chrome_trace([other, record(start=100.0, seconds=1.0, spans=spans)])
        slices = check_trace(trace)
        assert {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"} == {
            "worker host:1",
            "worker host:2",
        }
        mine = [track for track in slices if track[0] == 1]
        assert [slices[track] for track in mine] == [
            [
                ("slot 7:1:2", 0, US),
                ("turn", 100_000, 600_000),
                ("generate", 200_000, 500_000),
                ("turn", 800_000, 900_000),
            ],
            [("reward", 550_000, 750_000)],
        ]
        ((name, begin, end),) = slices[next(track for track in slices if track[0] == 2)]
        assert (name, begin, end) == ("slot 8:1:2", US, 2 * US)

    @given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 12), st.integers(0, 12)), max_size=12))
    def test_any_spans_nest(self, spans: list[tuple[str, int, int]]) -> None:
        """Whatever the spans, each track nests, and each span is there once, within its session."""
        line = record(start=5.0, seconds=10.0, spans=[[name, begin, seconds, ""] for name, begin, seconds in spans])
        found = [one for track in check_trace(chrome_trace([line])).values() for one in track]
        expected = [(name, min(at, 10) * US, min(at + length, 10) * US) for name, at, length in spans]
        assert sorted(found) == sorted([("slot 7:1:2", 0, 10 * US), *expected])

    def test_the_command(self, tmp_path: Path) -> None:
        """``forebay trace export DIR --out FILE`` writes a trace of all workers' files."""
        for worker in ("a", "b"):
            (tmp_path / f"{worker}.jsonl").write_text(json.dumps(record(worker=worker)) + "\n")
        out = tmp_path / "trace.json"
        result = CliRunner().invoke(build_app(), ["trace", "export", str(tmp_path), "--out", str(out)])
        assert result.exit_code == 0, result.output
        assert "2 sessions" in result.output
        assert len(check_trace(json.loads(out.read_text()))) == 2

    def test_an_empty_folder_is_an_error(self, tmp_path: Path) -> None:
        """A folder without sessions is named with the remedy."""
        result = CliRunner().invoke(build_app(), ["trace", "export", str(tmp_path)])
        assert isinstance(result.exception, SettingsError)
        assert "FOREBAY_WORKER_TRACE_DIR" in str(result.exception)
