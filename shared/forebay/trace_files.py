"""Sessions as JSON lines, and as a trace that Perfetto and Chrome's ``about:tracing`` show (contract, section 8).

A line has ``run, task_id, sample_idx, attempt, is_eval, worker, status, reason, start, end`` (seconds since the epoch),
``seconds``, ``phases`` (name -> seconds) and ``spans`` (``[name, seconds since start, seconds, error]`` each).
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import structlog

from forebay.tracing import Session

__all__ = ["TraceWriter", "chrome_trace", "read_sessions", "session_record"]

log = structlog.get_logger(__name__)

_QUEUE = 10_000
_CLOSE_S = 5.0


def session_record(session: Session, *, worker: str, status: str, reason: str = "") -> dict[str, Any]:
    """The line of a session that ends now.

    `status` is the outcome of its attempt, ``usable``, ``rejected`` or ``failed``, or ``handed_back`` or ``lost`` where
    it was stopped; whether the group is accepted is decided elsewhere, later.
    """
    seconds = session.seconds
    return {
        "run": session.run,
        "task_id": session.task_id,
        "sample_idx": session.sample_idx,
        "attempt": session.attempt,
        "is_eval": session.is_eval,
        "worker": worker,
        "status": status,
        "reason": reason,
        "start": session.began,
        "end": session.began + seconds,
        "seconds": seconds,
        "phases": session.phases,
        "spans": [[span.name, span.began_s, span.seconds, span.error] for span in session.spans],
        "spans_dropped": session.spans_dropped,
    }


class TraceWriter:
    """Appends lines to one file of this process, in a thread of its own: a slow disk stops no episode.

    The file is ``<worker>.jsonl``. Past `max_bytes` it becomes ``<worker>.old.jsonl``, in place of an earlier one, and
    a new one begins: a process never leaves more than about twice that. What does not fit the queue to the disk, or
    cannot be written, is dropped and counted.
    """

    def __init__(self, folder: Path, worker: str, max_bytes: int) -> None:
        """Begin to write. Raises OSError if `folder` cannot be made."""
        folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^A-Za-z0-9._-]", "_", worker)
        self.path = folder / f"{name}.jsonl"
        self._old = folder / f"{name}.old.jsonl"
        self._max_bytes = max_bytes
        self._lines: queue.Queue[str | None] = queue.Queue(_QUEUE)
        self._complained = False
        self.dropped = 0
        self._thread = threading.Thread(target=self._write_all, name="forebay-traces", daemon=True)
        self._thread.start()

    def write(self, record: dict[str, Any]) -> None:
        """Write `record`, soon."""
        try:
            self._lines.put_nowait(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what is left, for a few seconds at most."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=_CLOSE_S)
        self._thread.join(_CLOSE_S)
        if self.dropped:
            log.warning("traces.dropped", sessions=self.dropped, path=str(self.path))

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._append(line)
            except OSError as error:  # a full or missing disk must not stop the run that it was to describe
                self.dropped += 1
                if not self._complained:
                    self._complained = True
                    log.warning("traces.not_written", path=str(self.path), reason=str(error))

    def _append(self, line: str) -> None:
        data = line.encode("utf-8", "replace")
        if self.path.exists() and self.path.stat().st_size + len(data) > self._max_bytes:
            self.path.replace(self._old)
        with self.path.open("ab") as file:
            file.write(data)


def read_sessions(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of all files in `folder`, by file; a line that is cut off, as a killed worker may leave, is skipped."""
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict) and {"start", "seconds", "task_id"} <= record.keys():
                    yield record


def chrome_trace(sessions: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The trace in Chrome's event format: a process for each worker, in it an asynchronous track for each attempt.

    On a track the attempt's slice encloses those of its phases. Phases that overlap without one enclosing the other,
    which the format cannot show on one track, go to tracks of their own beside it. Times are microseconds since the
    first session began.
    """
    found = sorted(sessions, key=lambda record: record["start"])
    origin = found[0]["start"] if found else 0.0
    pids: dict[str, int] = {}
    meta: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for record in found:
        worker = str(record.get("worker", ""))
        if worker not in pids:
            pids[worker] = len(pids) + 1
            about = {"ph": "M", "pid": pids[worker], "tid": 0, "ts": 0}
            meta.append({**about, "name": "process_name", "args": {"name": f"worker {worker}"}})
            meta.append({**about, "name": "process_sort_index", "args": {"sort_index": pids[worker]}})
        events.extend(_session_events(record, pids[worker], origin))
    events.sort(key=lambda event: event["ts"])  # stable: what begins or ends together keeps its nesting
    return {
        "traceEvents": meta + events,
        "displayTimeUnit": "ms",
        "otherData": {"origin_seconds_since_epoch": origin, "sessions": len(found)},
    }


def _session_events(record: dict[str, Any], pid: int, origin: float) -> Iterator[dict[str, Any]]:
    slot = f"{record['task_id']}:{record.get('sample_idx', 0)}:{record.get('attempt', 0)}"
    begin = round((record["start"] - origin) * 1e6)
    length = max(1, round(record["seconds"] * 1e6))
    spans = []
    for name, began_s, seconds, error in record.get("spans", []):
        start = min(max(0, round(began_s * 1e6)), length)
        spans.append((start, min(start + max(0, round(seconds * 1e6)), length), str(name), str(error)))
    spans.sort(key=lambda span: (span[0], -span[1]))
    args = {name: record.get(name) for name in ("run", "status", "reason", "phases", "is_eval", "spans_dropped")}
    whole = (0, length, f"slot {slot}", args)
    for number, lane in enumerate(_lanes(whole, spans)):
        about = {"cat": "episode", "pid": pid, "tid": 0, "id": f"{record.get('run', '')}/{slot}/{pid}/{number}"}
        for phase, at, name, details in lane:
            yield {"ph": phase, "ts": begin + at, "name": name, **about, **({"args": details} if details else {})}


_Event = tuple[str, int, str, dict[str, Any]]


def _lanes(
    whole: tuple[int, int, str, dict[str, Any]], spans: list[tuple[int, int, str, str]]
) -> Iterator[list[_Event]]:
    """Begin and end events, in order, of as few tracks as it takes for each to nest; the first has `whole`."""
    begin, end, name, args = whole
    lanes: list[tuple[list[_Event], list[tuple[int, str]]]] = [([("b", begin, name, args)], [(end, name)])]
    for start, stop, phase, error in spans:
        for events, open_ in lanes:
            while open_ and open_[-1][0] <= start and (open_[-1][0] < end or events is not lanes[0][0]):
                until, ended = open_.pop()
                events.append(("e", until, ended, {}))
            if not open_ or stop <= open_[-1][0]:
                break
        else:
            events, open_ = [], []
            lanes.append((events, open_))
        events.append(("b", start, phase, {"error": error} if error else {}))
        open_.append((stop, phase))
    for events, open_ in lanes:
        while open_:
            until, ended = open_.pop()
            events.append(("e", until, ended, {}))
        yield events
