"""Reward functions that behave and misbehave, by name in processes of their own. Imports nothing heavy."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any, NoReturn


def half(*_: Any, **__: Any) -> float:
    """A reward."""
    return 0.5


def process_id() -> int:
    """The process that it runs in."""
    return os.getpid()


def process_slowly() -> int:
    """As :func:`process_id`, long enough for others to run meanwhile."""
    time.sleep(0.1)
    return os.getpid()


def forever(*_: Any, **__: Any) -> NoReturn:
    """Never returns and never sleeps."""
    while True:
        pass


def forever_at(folder: str) -> NoReturn:
    """As :func:`forever`, leaving its process id in `folder`."""
    (Path(folder) / str(os.getpid())).touch()
    forever()


def forever_if(hang: bool) -> float:
    """As :func:`forever` if `hang`, else 1."""
    return forever() if hang else 1.0


def burn(seconds: float) -> float:
    """Use a core for `seconds`; the reward is 1."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return 1.0


def die(code: int = 3) -> NoReturn:
    """Take the process down."""
    os._exit(code)


def die_once(folder: str) -> float:
    """Take the process down at the first call, give 1 at the second."""
    mark = Path(folder) / "died"
    if not mark.exists():
        mark.touch()
        os._exit(3)
    return 1.0


def explode(*_: Any, **__: Any) -> NoReturn:
    """Raise."""
    raise ZeroDivisionError("by the reward")


def nothing(*_: Any, **__: Any) -> None:
    """Forget to return."""


def words(*_: Any, **__: Any) -> str:
    """Return no number."""
    return "very good"


def not_a_number(*_: Any, **__: Any) -> float:
    """Return NaN."""
    return float("nan")


def huge() -> int:
    """Return an integer beyond every float."""
    return 10**400


def named(self: int, **others: int) -> int:
    """Take an argument called self, as a prompt's data may hold one."""
    return self + sum(others.values())


class Untidy(Exception):  # noqa: N818
    """An exception that cannot be copied: its arguments are not those of its constructor."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")


def untidy() -> NoReturn:
    """Raise what no other process can read."""
    raise Untidy(7, "by the reward")


class Unsendable:
    """Refuses to be pickled in a way of its own."""

    def __reduce__(self) -> NoReturn:
        raise RuntimeError("not this one")


class Unloadable:
    """Can be pickled, and not be loaded again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return explode, ()


def stop_iteration() -> NoReturn:
    """Do what ``next(iter([]))`` does."""
    raise StopIteration


def interrupt() -> NoReturn:
    """Raise what ends a program."""
    raise KeyboardInterrupt


def own_timeout() -> NoReturn:
    """Raise a time-out of its own."""
    raise TimeoutError("the judge did not answer")


def backtrack(text: str) -> float:
    """A regular expression that takes for ever and never lets go of the interpreter."""
    return 1.0 if re.match(r"(a|aa)+$", text) else 0.0


def backtrack_at(folder: str) -> float:
    """As :func:`backtrack`, leaving its process id in `folder`."""
    (Path(folder) / str(os.getpid())).touch()
    return backtrack("a" * 80 + "b")


def forked_exit() -> int:
    """What a process that it forks ends with, asking for 0."""
    child = os.fork()
    if not child:
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def child_at(folder: str) -> float:
    """Start a process, as a verifier that runs code does, and wait for it."""
    child = subprocess.Popen(["sleep", "300"])
    (Path(folder) / str(child.pid)).touch()
    child.wait()
    return 1.0


async def gentle_process_id() -> int:
    """The process that it runs in."""
    return os.getpid()


async def gentle_interrupt() -> NoReturn:
    """Raise what ends a program."""
    raise KeyboardInterrupt


async def gentle(value: float = 0.25) -> float:
    """A coroutine."""
    await asyncio.sleep(0)
    return value


async def gentle_forever(*_: Any, **__: Any) -> None:
    """A coroutine that never ends."""
    await asyncio.Event().wait()


class Callable:
    """An object with a coroutine ``__call__``."""

    async def __call__(self) -> float:
        """A reward."""
        await asyncio.sleep(0)
        return 0.75


async def gentle_half(*_: Any, **__: Any) -> float:
    """A coroutine that takes anything."""
    await asyncio.sleep(0)
    return 0.5
