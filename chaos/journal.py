"""Append-only files of JSON lines, each on disk before the call returns.

They are the books that the verdict is made from. Nothing of them is in Redis, so whatever Redis or the pipeline forgets
still stands here. A writer that is killed in the middle of a line leaves a torn one: it is skipped, and means that what
it would have recorded had not been done yet, since everything is recorded before it has effects.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["Journal", "read_journal"]


class Journal:
    """Writes one file; one writer at a time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")  # ends the torn line of a writer that was killed

    def write(self, kind: str, **fields: Any) -> None:
        """Append a record; on disk when this returns."""
        os.write(self._descriptor, json.dumps({"kind": kind, **fields}).encode() + b"\n")
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All whole records, in the order of writing; none if there is no file."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # torn, or the empty end
        if isinstance(record, dict):
            records.append(record)
    return records
