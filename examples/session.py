"""What both demos need around their trainer: the local processes, Ctrl-C, and one clear line when something fails."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, cast

from forebay import Settings, load, log
from forebay.errors import ForebayError
from forebay_ops.supervisor import LocalStack, LocalStackConfig
from forebay_ops.terminal import Terminal

__all__ = ["new_home", "run_demo", "run_environment", "running", "settings_of"]

EXPERIMENT = "demo"


def new_home(kind: str) -> Path:
    """A folder that no run before has used; its name is the trial's."""
    root = Path(os.environ.get("FOREBAY_HOME", ".forebay"))
    return (root / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}").absolute()


def run_environment(home: Path, model: Path, **rules: object) -> dict[str, str]:
    """The settings of the run as its processes read them; `rules` are fields of ``RunSettings``."""
    chosen = {
        "experiment_name": EXPERIMENT,
        "trial_name": home.name,
        "dump_to_file": True,
        "fileroot": home / "dumps",
        "tokenizer_path": model,
        "import_allowlist": "examples",  # what workers may import for us: the reward functions are in here
        **rules,
    }
    return {f"FOREBAY_{name.upper()}": str(value) for name, value in chosen.items()}


def settings_of(stack: LocalStack) -> Settings:
    """What a client needs to join the run of `stack`."""
    return load(
        Settings, experiment_name=EXPERIMENT, trial_name=stack.home.name, redis_url=stack.redis_url, home=stack.home
    )


def run_demo(demo: Callable[[], dict[str, Any]]) -> int:
    """Run `demo`, print its result as the last line, as JSON, and return the exit code of the program.

    Ctrl-C gives 130 and SIGTERM 143, each after all processes have ended; an error of ours is one line and gives 1.
    """
    reasons: list[signal.Signals] = []

    def interrupt(number: int, _: object) -> None:
        reasons.append(signal.Signals(number))
        raise KeyboardInterrupt

    log.configure(level="error")  # the demo says itself what there is to say
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        result = demo()
    except KeyboardInterrupt:
        reason = reasons[0] if reasons else signal.SIGINT
        print(f"{reason.name}: the demo has ended, and so has everything that it had started", file=sys.stderr)
        return 128 + reason
    except ForebayError as error:
        if os.environ.get("FOREBAY_DEBUG", "") not in ("", "0"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result), flush=True)
    return 0


@contextmanager
def running(config: LocalStackConfig) -> Iterator[LocalStack]:
    """The local processes of `config`, supervised from a thread of their own, so that a plain trainer can be written.

    Raises:
        StackFailedError: a process failed for good, at the start or while the block ran.
    """
    output = _CurrentOutput()
    thread = _StackThread(replace(config, terminal=Terminal(cast("TextIO", output), quiet=True)))
    try:
        thread.start()
        yield thread.wait_until_up()
    except KeyboardInterrupt:
        output.muted = True
        if thread.failure is not None:  # the interrupt was ours: it brings the failure to this thread
            raise thread.failure from None
        raise
    finally:
        output.muted = True  # that each process has stopped is no news when all is well
        thread.stop()


class _StackThread:
    """A :class:`LocalStack` in an event loop in a thread."""

    def __init__(self, config: LocalStackConfig) -> None:
        self._config = config
        self._up: Future[LocalStack] = Future()
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="demo-processes", daemon=True)
        self.failure: ForebayError | None = None

    def start(self) -> None:
        self._task = self._loop.create_task(self._supervise())
        self._thread.start()

    def wait_until_up(self) -> LocalStack:
        return self._up.result()

    def stop(self) -> None:
        """Stop all processes in order; a further Ctrl-C meanwhile kills them at once."""
        interrupted = False
        self._stopping = True
        self._call(self._cancel)
        while self._thread.is_alive():
            try:
                self._thread.join()
            except KeyboardInterrupt:
                interrupted = True
                self._call(self._kill)
        if interrupted:
            raise KeyboardInterrupt

    def _call(self, function: Callable[[], None]) -> None:
        if self._thread.is_alive() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _kill(self) -> None:
        if self._up.done() and self._up.exception() is None:
            for process in self._up.result().processes.values():
                process.kill()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._task or self._supervise())
        except asyncio.CancelledError:
            pass
        except ForebayError as error:
            self._fail(error)
        finally:
            self._loop.close()

    async def _supervise(self) -> None:
        async with LocalStack(self._config) as stack:
            self._up.set_result(stack)
            await stack.wait()

    def _fail(self, error: ForebayError) -> None:
        if not self._up.done():
            self._up.set_exception(error)
        elif not self._stopping:
            self.failure = error
            main = threading.main_thread().ident
            if main is not None:
                signal.pthread_kill(main, signal.SIGINT)  # a real signal: it also ends a wait for a lock


class _CurrentOutput(io.TextIOBase):
    """Standard output as it is at the moment of writing, for a live view replaces it while it is on."""

    def __init__(self) -> None:
        self.muted = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return sys.stdout.encoding

    def isatty(self) -> bool:
        return sys.stdout.isatty()

    def write(self, text: str) -> int:
        return len(text) if self.muted else sys.stdout.write(text)

    def flush(self) -> None:
        sys.stdout.flush()
