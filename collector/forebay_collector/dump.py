"""JSONL dumps of groups for people and their tools (contract, section 11).

One file a group, written whole and renamed into place: writing it again replaces it. Decoding and writing are done in
a thread.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from forebay.errors import SettingsError
from forebay.settings import RunSettings
from forebay.wire.envelopes import GroupRules, GroupSummary, RowSummary, SlotHeader
from forebay.wire.rows import Row

__all__ = ["Dumper", "run_lengths", "segments"]

log = structlog.get_logger(__name__)


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
        self.skipped: dict[str, int] = {}
        """Groups and rows that could not be dumped, by reason."""

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
            self._tokenizer = AutoTokenizer.from_pretrained(self._tokenizer_path)
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"FOREBAY_TOKENIZER_PATH={self._tokenizer_path}: no tokenizer there ({error})"
            ) from None

    def folder(self, summary: GroupSummary, rules: GroupRules, version: int) -> str:
        """Where the group's file lies, below the run's folder; "" if it is not dumped."""
        if not self._on or not summary.rollouts:
            return ""
        scope = "eval-rollout" if rules.is_eval else "rollout"
        return f"{scope}/{summary.tail if summary.tail >= 0 else version}"

    async def write(
        self,
        folder: str,
        summary: GroupSummary,
        rows: Sequence[Row],
        headers: Mapping[int, SlotHeader],
        outcome: str,
        reason: str,
        version: int,
    ) -> None:
        """Write a group's file. A failure is logged and counted; the pipeline goes on."""
        try:
            await asyncio.to_thread(self._write, folder, summary, rows, headers, outcome, reason, version)
        except (OSError, ValueError, TypeError, ArithmeticError) as error:  # OverflowError: the tokenizer's, for an id
            self._skip("write_failed", summary.task, f"{type(error).__name__}: {error}")

    def _write(
        self,
        folder: str,
        summary: GroupSummary,
        rows: Sequence[Row],
        headers: Mapping[int, SlotHeader],
        outcome: str,
        reason: str,
        version: int,
    ) -> None:
        lines = []
        place = iter(rows)
        for rollout in summary.rollouts:
            for at, known in enumerate(rollout.rows):
                row = next(place)
                if not row.trained.any():
                    self._skip("no_trained_token", summary.task, f"slot {rollout.sample_idx}, row {at}")
                    continue
                if "versions" not in row.tokens:
                    log.warning("dump.no_versions", task_id=summary.task, sample_idx=rollout.sample_idx, used=version)
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
        if lines:
            _replace(self._path(folder, summary.task), lines)

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
            "reward": known.reward,
            "prompt": self._decode(ids[:start]),
            "completion": self._decode(ids[start:]),
        }
        parts = segments(row.trained)
        if sum(role == "gen" for role, _, _ in parts) > 1:
            form["segments"] = [
                {"role": role, "len": end - begin, "text": self._decode(ids[begin:end])} for role, begin, end in parts
            ]
        if known.original_reward is not None:
            form["original_reward"] = known.original_reward
        if known.truncated is not None:
            form["stop_reason"] = "length" if known.truncated else "stop"
        return form

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    async def mark_evicted(self, task_id: int, folder: str, reason: str) -> None:
        """Mark the file of a group that was evicted after it was written."""
        try:
            await asyncio.to_thread(self._mark, task_id, folder, reason)
        except (OSError, ValueError) as error:
            self._skip("mark_failed", task_id, str(error))

    def _mark(self, task_id: int, folder: str, reason: str) -> None:
        path = self._path(folder, task_id)
        with path.open(encoding="utf-8", newline="\n") as file:  # str.splitlines would split at U+2028 in a text
            lines = [json.loads(line) for line in file]
        for line in lines:
            line.update(outcome="evicted", reason=reason)
        _replace(path, lines)

    def _path(self, folder: str, task_id: int) -> Path:
        return self._root / folder / f"{task_id}.jsonl"

    def _skip(self, why: str, task_id: int, detail: str) -> None:
        self.skipped[why] = self.skipped.get(why, 0) + 1
        log.warning("dump.skipped", why=why, task_id=task_id, detail=detail)


def _replace(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")  # of this call alone: two may write the same group
    try:
        draft.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
