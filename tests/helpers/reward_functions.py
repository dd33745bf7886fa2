"""Reward functions that behave and misbehave, by name in processes of their own. Imports nothing heavy."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any, NoReturn


def half(*_: Any, **__: Any) -> float:
    """A reward."""
    return 0.5


def process_id() -> int:
    """The process that it runs in."""
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
