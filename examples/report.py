"""Reads the dumps of a run back and holds them against what its trainer saw."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Check", "check_dumps", "read_groups"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold."""

    what: str
    ok: bool
    detail: str = ""

    def __str__(self) -> str:
        return f"{'ok  ' if self.ok else 'FAIL'} {self.what}{f': {self.detail}' if self.detail else ''}"


def read_groups(folder: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """``(task_id, rows)`` of each group that was dumped below `folder`, in no particular order."""
    for path in folder.rglob("*.jsonl"):
        yield int(path.stem), [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def check_dumps(folder: Path, *, submitted: set[int], delivered: set[int], group_size: int) -> list[Check]:
    """Every group of the trainer's books is in the dumps, by its id, with all its rows, and no other group is."""
    outcomes: dict[int, str] = {}
    short: list[int] = []
    torn: list[int] = []
    for task_id, rows in read_groups(folder):
        outcomes[task_id] = str(rows[0]["outcome"]) if rows else ""
        if len({row["sample_idx"] for row in rows}) != group_size:
            short.append(task_id)
        if any(sum(count for _, count in row["version_rle"]) != row["seqlen"] - row["prompt_len"] for row in rows):
            torn.append(task_id)
    accepted = {task_id for task_id, outcome in outcomes.items() if outcome == "accepted"}
    return [
        _same("every delivered group is dumped as accepted", delivered, accepted),
        _same("every group in the dumps was submitted", set(), outcomes.keys() - submitted),
        _same("every group has all its rollouts", set(), set(short) & delivered),
        _same("every generated token has its version", set(), set(torn)),
    ]


def _same(what: str, wanted: set[int], found: set[int]) -> Check:
    different = sorted(wanted ^ found)
    return Check(what, not different, f"not so for {different[:10]}" if different else "")
