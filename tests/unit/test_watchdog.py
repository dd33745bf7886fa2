"""What ends a worker whose event loop stands still: each case in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from forebay_workers.watchdog import EXIT_CODE, Silence

LIMIT_S = 1.5
PROGRAM = """
import asyncio, ctypes, re, sys, threading, time
from forebay import log
from forebay_workers.watchdog import watched

log.configure()

def the_culprit(how):
    if how == "sleep":
        time.sleep(3600)
    if how == "regex":
        re.match(r"(a|aa)+$", "a" * 80 + "b")
    if how == "wait":
        ctypes.PyDLL(None).sleep(3600)
    if how == "stderr":
        threading.Thread(target=write, daemon=True).start()
        time.sleep(3600)

def write():
    while True:
        sys.stderr.write("x" * 65536)

async def steps(seconds):
    for _ in range(2):
        time.sleep(seconds)
        await asyncio.sleep(0)

async def main(how, seconds):
    with watched({limit}, lambda: [(7, 1, 2)]):
        print("running", flush=True)
        the_culprit(how)
        if how == "busy":  # every turn of the loop takes longer than the limit
            await asyncio.gather(*(steps(seconds / 40) for _ in range(20)))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.sleep(0.05)
    print("done", flush=True)

asyncio.run(main(sys.argv[1], float(sys.argv[2])))
"""


def start(how: str, seconds: float = 0.0) -> subprocess.Popen[str]:
    """A process with a watched loop, that blocks it as `how` says, or turns it for so long."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(limit=LIMIT_S), how, str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    return process


def test_blocked_loop_ends() -> None:
    """A loop that is blocked ends its process with code 70; stderr has the attempts that it held and all stacks."""
    process = start("sleep")
    began = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == EXIT_CODE
    assert time.monotonic() - began >= LIMIT_S * 0.8
    assert "worker.blocked" in stderr
    assert "7:1 attempt 2" in stderr
    assert "in the_culprit" in stderr


@pytest.mark.parametrize("how", ["regex", "wait"])
def test_blocked_interpreter_ends(how: str) -> None:
    """Code that never lets another thread run, be it busy or waiting, ends its process too, its stack on stderr."""
    process = start(how)
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "in the_culprit" in stderr


def test_a_busy_loop_goes_on() -> None:
    """Twenty tasks with short steps, for which one turn of the loop takes twice the limit, are left alone."""
    process = start("busy", LIMIT_S * 4)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (0, "done\n", "")


def test_a_full_stderr_does_not_save_it() -> None:
    """The process ends although nobody reads what it has to say."""
    process = start("stderr")
    try:
        assert process.wait(timeout=60) == EXIT_CODE
    finally:
        process.kill()
        process.communicate()


def test_a_loop_that_turns_goes_on() -> None:
    """A loop that turns is left alone for longer than the limit."""
    process = start("nothing", LIMIT_S * 2)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (0, "done\n", "")


def test_only_time_that_the_loop_had_counts() -> None:
    """Steps without a tick add up; a wait that took an hour, when nothing ran, counts as one step and a half."""
    silence = Silence(1.0)
    assert [silence.after(ticks, 1.0) for ticks in (0, 1, 1, 1)] == [0.0, 0.0, 1.0, 2.0]
    assert silence.after(1, 3600.0) == 3.5
    assert silence.after(2, 3600.0) == 0.0


def test_stopped_process_goes_on() -> None:
    """A process that was stopped for longer than the limit goes on when it is continued."""
    process = start("nothing", LIMIT_S * 4)
    stopped = threading.Event()
    for _ in range(2):
        process.send_signal(signal.SIGSTOP)
        while Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "T":
            stopped.wait(0.01)
        stopped.wait(LIMIT_S * 1.5)  # what is tested is that this time has no effect
        process.send_signal(signal.SIGCONT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (0, "done\n", "")
