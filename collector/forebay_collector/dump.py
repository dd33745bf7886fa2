"""JSONL dumps of groups for people and their tools (contract, section 11).

Invariants, each with its test in ``tests/conformance/test_11_dumps.py``:

- One file a group, written whole and renamed into place: whoever reads it finds one whole writing, and writing it again
  replaces it (``test_normalize_and_mark_while_dumping``).
- The works on one group's file are done one after the other, in the order in which they were asked for, however their
  callers ended: a mark is never lost to a rewriting that began earlier, nor the other way round (same test).
- Decoding and writing happen in at most ``_LANES`` threads, never on the event loop (``test_loop_lag_while_dumping``).
- Whatever fails is logged as a warning and counted by reason; the pipeline goes on (``TestWhatIsMissing``).
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import structlog

from forebay.errors import FrameError, SettingsError
from forebay.metrics import scope_of
from forebay.settings import RunSettings
from forebay.wire.envelopes import DumpRewrite, GroupRules, GroupSummary, RowSummary, SlotHeader
from forebay.wire.rows import Row

__all__ = ["Dumper", "run_lengths", "segments"]

log = structlog.get_logger(__name__)

T = TypeVar("T")

_LANES = 4
"""Threads that decode and write. A group's works all take the same one, so they keep their order."""
_FOLDER = re.compile(r"(?:eval-)?rollout/-?[0-9]{1,19}")
"""Folders of dumps, as :meth:`Dumper.folder` names them."""
_ESSENTIAL = frozenset({"no_loss_mask", "no_trained_token"})
"""What a row cannot lack and be a line."""


def run_lengths(values: np.ndarray[Any, Any]) -> list[list[int]]:
    """``[[value, count], ...]`` of neighbours that are equal."""
    if not len(values):
        return []
    starts = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))
    counts = np.diff(np.append(starts, len(values)))
    return [[int(values[at]), int(count)] for at, count in zip(starts, counts, strict=True)]


def segments(trained: np.ndarray[Any, Any]) -> list[tuple[str, int, int]]:
    """``(role, start, end)`` runs of a row: ``prompt`` before the first generation, then ``gen`` and ``context``."""
    out: list[tuple[str, int, int]] = []
    at = 0
    for value, count in run_lengths(trained.astype(np.int32)):
        role = "gen" if value else ("prompt" if at == 0 else "context")
        out.append((role, at, at + count))
        at += count
    return out


class Dumper:
    """Writes the groups of one run. Without ``dump_to_file`` it writes nothing."""

    def __init__(self, settings: RunSettings, run: str) -> None:
        self._root = settings.fileroot.expanduser() / run
        self._on = settings.dump_to_file
        self._tokenizer_path = settings.tokenizer_path
        self._tokenizer: Any = None
        self._lanes: list[ThreadPoolExecutor] = []
        self._counting = threading.Lock()
        self.skipped: Counter[str] = Counter()
        """What was not dumped as it should be, by reason: groups, or rows for the reasons about rows."""
        self.written: Counter[str] = Counter()
        """Files written, by the outcome in them; one that is marked or given new rewards counts again."""

    @property
    def on(self) -> bool:
        """Whether groups are dumped."""
        return self._on

    async def open(self) -> None:
        """Load the tokenizer and make the folder, so that a bad setting is an error at start.

        Raises:
            SettingsError: the folder cannot be written, or the tokenizer cannot be loaded.
        """
        if self._on:
            await asyncio.to_thread(self._open)

    def _open(self) -> None:
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"FOREBAY_FILEROOT={self._root}: cannot be written ({error.strerror})") from None
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise SettingsError("FOREBAY_DUMP_TO_FILE needs transformers; install forebay[collector]") from None
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self._tokenizer_path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"FOREBAY_TOKENIZER_PATH={self._tokenizer_path}: no tokenizer there ({error})"
            ) from None

    async def close(self) -> None:
        """Finish what was asked for, and end the threads."""
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            await asyncio.to_thread(lane.shutdown)

    async def _in_turn(self, task_id: int, work: Callable[[], T]) -> T:
        """The result of `work`, done after all that was asked for this group before; also if the caller goes away."""
        if not self._lanes:
            self._lanes = [ThreadPoolExecutor(1, f"forebay-dump-{at}") for at in range(_LANES)]
        return await asyncio.get_running_loop().run_in_executor(self._lanes[task_id % _LANES], work)

    # -- where --------------------------------------------------------------------------------------------------------

    def folder(self, summary: GroupSummary, rules: GroupRules, version: int) -> str:
        """Where the group's file lies, below the run's folder; "" if it is not dumped.

        That is the largest version of its trained tokens, where rows without versions count as of `version`, the one in
        force.
        """
        rows = [row for rollout in summary.rollouts for row in rollout.rows]
        tails = [row.tail if row.tail >= 0 else version for row in rows if row.trained]
        if not self._on or not summary.rollouts:
            return ""
        return f"{scope_of(is_eval=rules.is_eval)}/{max(tails, default=version)}"

    def _path(self, folder: str, task_id: int) -> Path:
        return self._root / folder / f"{task_id}.jsonl"

    # -- writing ------------------------------------------------------------------------------------------------------

    async def write(
        self,
        folder: str,
        summary: GroupSummary,
        rows: Sequence[Row],
        headers: Mapping[int, SlotHeader],
        outcome: str,
        reason: str,
        version: int,
    ) -> bool:
        """Write a group's file: whether there is one. A failure is logged and counted; the pipeline goes on."""

        def work() -> bool:
            try:
                lines = self._lines(summary, rows, headers, outcome, reason, version)
                if lines:
                    _replace(self._path(folder, summary.task), lines)
            except Exception as error:  # a tokenizer is foreign code and may raise anything, a disk may be full
                self._skip("write_failed", summary.task, f"{type(error).__name__}: {error}")
                return False
            self._count(outcome, bool(lines))
            return bool(lines)

        return await self._in_turn(summary.task, work)

    def _lines(
        self,
        summary: GroupSummary,
        rows: Sequence[Row],
        headers: Mapping[int, SlotHeader],
        outcome: str,
        reason: str,
        version: int,
    ) -> list[dict[str, Any]]:
        if self._tokenizer is None:
            self._skip("no_tokenizer", summary.task, "the tokenizer was not loaded")
            return []
        lines = []
        place = iter(rows)
        lacking: dict[str, list[str]] = {}
        for rollout in summary.rollouts:
            for at, known in enumerate(rollout.rows):
                row = next(place)
                lacks = list(_lacks(row, known))
                for what in lacks:
                    lacking.setdefault(what, []).append(f"slot {rollout.sample_idx} row {at}")
                if not _ESSENTIAL.isdisjoint(lacks):
                    continue
                lines.append(
                    {
                        "task_id": summary.task,
                        "sample_idx": rollout.sample_idx,
                        "row": at,
                        **self._describe(row, known, version),
                        "outcome": outcome,
                        "reason": reason,
                        "attempt": headers[rollout.sample_idx].attempt,
                    }
                )
        for what, places in lacking.items():
            self._skip(what, summary.task, f"{len(places)} of {len(rows)} rows, the first: {places[0]}", len(places))
        return lines

    def _describe(self, row: Row, known: RowSummary, version: int) -> dict[str, Any]:
        ids = row.tokens["input_ids"].tolist()
        start = row.prompt_len
        versions = row.tokens.get("versions")
        chosen = np.full(int(row.trained.sum()), version) if versions is None else versions[row.trained]
        form: dict[str, Any] = {
            "seqlen": row.seqlen,
            "prompt_len": start,
            "head_version": int(chosen.min()),
            "tail_version": int(chosen.max()),
            "version_rle": run_lengths(chosen),
            **_rewards(known),
            "prompt": self._decode(ids[:start]),
            "completion": self._decode(ids[start:]),
        }
        parts = segments(row.trained)
        if sum(role == "gen" for role, _, _ in parts) > 1:
            form["segments"] = [
                {"role": role, "len": end - begin, "text": self._decode(ids[begin:end])} for role, begin, end in parts
            ]
        if known.truncated is not None:
            form["stop_reason"] = "length" if known.truncated else "stop"
        return form

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    # -- rewriting ----------------------------------------------------------------------------------------------------

    async def mark_evicted(self, task_id: int, folder: str, reason: str) -> None:
        """Mark the file of a group that was evicted after it was written."""

        def mark(line: dict[str, Any]) -> dict[str, Any]:
            return {**line, "outcome": "evicted", "reason": reason}

        await self._rewrite("mark_failed", task_id, folder, mark)

    async def rewrite_rewards(self, entry: bytes) -> None:
        """Give the file of a group the rewards in `entry`, a packed :class:`DumpRewrite`. Nothing else changes.

        For rewards with statistics of the batch, which were not known when the file was written; again whenever the
        group is cut into another batch.
        """
        try:
            asked = DumpRewrite.unpack(entry)
        except FrameError as error:
            self._skip("reward_failed", -1, str(error))
            return
        summary = asked.summary
        known = {(rollout.sample_idx, at): row for rollout in summary.rollouts for at, row in enumerate(rollout.rows)}

        def reward(line: dict[str, Any]) -> dict[str, Any]:
            found = _rewards(known[line["sample_idx"], line["row"]])
            out: dict[str, Any] = {}
            for name, value in line.items():
                if name == "reward":
                    out.update(found)
                elif name != "original_reward":
                    out[name] = value
            return out

        await self._rewrite("reward_failed", asked.task, asked.folder, reward)

    async def _rewrite(
        self, why: str, task_id: int, folder: str, change: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        def work() -> None:
            if not _FOLDER.fullmatch(folder):  # it comes from Redis, and must not lead out of the run's folder
                self._skip(why, task_id, f"{folder[:100]!r} is no folder of dumps")
                return
            path = self._path(folder, task_id)
            try:
                with path.open(encoding="utf-8", newline="\n") as file:  # splitlines would split at U+2028 in a text
                    lines = [change(json.loads(line)) for line in file]
                _replace(path, lines)
            except (OSError, ValueError, LookupError, TypeError) as error:  # gone, damaged, or no file of ours
                self._skip(why, task_id, f"{type(error).__name__}: {error}")
                return
            self._count(str(lines[0].get("outcome")) if lines else "", bool(lines))

        await self._in_turn(task_id, work)

    # -- counting -----------------------------------------------------------------------------------------------------

    def note_lost(self, task_id: int) -> None:
        """The rows of a group are gone, so there is nothing to decode."""
        if self._on:
            self._skip("rows_lost", task_id, "its rows are gone from Redis")

    def _count(self, outcome: str, wrote: bool) -> None:
        with self._counting:
            self.written[outcome] += wrote

    def _skip(self, why: str, task_id: int, detail: str, by: int = 1) -> None:
        with self._counting:
            self.skipped[why] += by
        log.warning("dump.skipped", why=why, task_id=task_id, detail=detail)


def _lacks(row: Row, known: RowSummary) -> Iterator[str]:
    """What the row lacks. Without a reward its line has null, without versions the current one."""
    if "loss_mask" not in row.tokens:
        yield "no_loss_mask"
    elif not row.trained.any():  # no token at all among them
        yield "no_trained_token"
    else:
        if known.reward is None:
            yield "no_reward"
        if "versions" not in row.tokens:
            yield "no_versions"


def _rewards(known: RowSummary) -> dict[str, Any]:
    out: dict[str, Any] = {"reward": known.reward}
    if known.original_reward is not None:
        out["original_reward"] = known.original_reward
    return out


def _replace(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    # Strict JSON: a number that is not finite would be a line that others cannot parse.
    text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")  # of this call alone: two may write the same group
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
