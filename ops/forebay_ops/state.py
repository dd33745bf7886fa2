"""What a supervisor tells others about itself: ``<home>/state.json``."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from forebay_ops.spawning import is_alive, kill_group

__all__ = ["ProcessRecord", "StackState", "clear_stale", "read_live_state", "read_state", "write_state"]

_NAME = "state.json"


class ProcessRecord(BaseModel):
    """One process."""

    model_config = ConfigDict(frozen=True)

    name: str
    state: str
    pid: int | None
    create_time: float | None
    """Start of the current process, in seconds since the epoch."""
    restarts: int
    address: str
    log: Path


class StackState(BaseModel):
    """The supervisor and its processes."""

    model_config = ConfigDict(frozen=True)

    pid: int
    create_time: float
    phase: str
    """``starting``, ``up`` or ``stopping``."""
    socket: Path
    """Where it takes commands."""
    redis_url: str
    """Without password; empty until it is known."""
    servers: list[str]
    processes: list[ProcessRecord]


def write_state(home: Path, state: StackState) -> None:
    """Replace the state file in one step, so that no reader sees half of it."""
    scratch = home / f"{_NAME}.tmp"
    scratch.touch(mode=0o600)
    scratch.write_text(state.model_dump_json(indent=1))
    scratch.replace(home / _NAME)


def remove_state(home: Path) -> None:
    """The supervisor is gone."""
    (home / _NAME).unlink(missing_ok=True)


def read_state(home: Path) -> StackState | None:
    """The state file, alive or stale; None if there is none."""
    try:
        return StackState.model_validate_json((home / _NAME).read_text())
    except (FileNotFoundError, ValidationError):
        return None


def read_live_state(home: Path) -> StackState | None:
    """The state of the supervisor that runs; None if none does."""
    state = read_state(home)
    return state if state is not None and is_alive(state.pid, state.create_time) else None


def clear_stale(home: Path) -> list[str]:
    """Remove what a supervisor that died left behind, processes included; their names.

    There are none unless the kernel could not carry out the parent-death signal and the guardian was killed too.
    """
    state = read_state(home)
    if state is None or is_alive(state.pid, state.create_time):
        return []
    killed = []
    for record in state.processes:
        if record.pid is None or record.create_time is None or not is_alive(record.pid, record.create_time):
            continue
        if os.getpgid(record.pid) == record.pid and kill_group(record.pid, signal.SIGKILL):
            killed.append(record.name)
    remove_socket(state.socket, home)
    remove_state(home)
    return killed


def remove_socket(path: Path, home: Path) -> None:
    """Remove a control socket, and its folder where that was made for it."""
    path.unlink(missing_ok=True)
    if path.parent != home and path.parent.name.startswith("forebay-"):
        shutil.rmtree(path.parent, ignore_errors=True)
