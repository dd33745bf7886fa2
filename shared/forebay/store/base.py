"""How a store calls Redis; what its callers share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self, TypeVar, cast

import redis.asyncio as redis_asyncio
from redis.exceptions import NoScriptError, OutOfMemoryError

from forebay.errors import FencedError, QueueFullError, RunStoppedError, StoreFullError
from forebay.settings import Settings
from forebay.store.bounds import Memory, memory_of
from forebay.store.connection import address, connect, riding_through
from forebay.store.keys import Keys
from forebay.store.pipelining import Pipeliner
from forebay.store.refusals import named
from forebay.store.scripts import source

__all__ = ["MAX_REASON", "MAX_SAMPLE", "StoreBase", "block_ms", "fenced", "paired", "queue_full", "run_stopped"]

T = TypeVar("T")

_BLOCK_MAX_S = 1.0
MAX_REASON = 300
"""Characters of a reason in the ledgers."""
MAX_SAMPLE = 64
"""Bytes that are kept of what could not be read."""


class StoreBase:
    """A connection to the state of one run."""

    def __init__(self, client: redis_asyncio.Redis, url: str, run: str, timeout_s: float) -> None:
        self._redis = client
        self._url = url
        self._timeout_s = timeout_s
        self.keys = Keys(run)
        self._pipeliner = Pipeliner(client)

    @classmethod
    def open(cls, settings: Settings, *, max_connections: int = 64) -> Self:
        """The store of the run that `settings` name; connects on the first call."""
        url = settings.resolved_redis_url()
        return cls(connect(url, max_connections=max_connections), url, settings.run, settings.redis_timeout_s)

    async def close(self) -> None:
        """Close the connections."""
        await self._pipeliner.close()
        await self._redis.aclose(close_connection_pool=True)

    async def _ride(self, call: Callable[[], Awaitable[T]]) -> T:
        return await riding_through(call, self._url, self._timeout_s)

    async def _ask(self, *commands: tuple[Any, ...]) -> list[Any]:
        """The answers to repeatable `commands`; the first that is an error is raised.

        Raises:
            StoreFullError: the server has no memory for them.
        """

        async def once() -> list[Any]:
            answers = await self._pipeliner.send(*commands)
            for command, answer in zip(commands, answers, strict=True):
                if isinstance(answer, Exception):
                    raise named(answer, command)
            return answers

        try:
            return await self._ride(once)
        except OutOfMemoryError:
            raise await self.full() from None

    async def full(self) -> StoreFullError:
        """The error of a server that has no memory left."""
        memory = await self.memory() or Memory(0, 0, "")
        numbers = f" ({memory.used} of maxmemory={memory.maximum} bytes)" if memory.maximum else ""
        return StoreFullError(
            f"Redis at {address(self._url)} has no memory left{numbers} and "
            "refused to write; nothing is lost: what is finished waits with the workers, prompts with their producers, "
            "until the trainer has acknowledged batches. If that does not help, raise maxmemory, or lower "
            "max_stored_bytes, max_queued_bytes or retain_batches",
            memory.used,
            memory.maximum,
        )

    async def memory(self) -> Memory | None:
        """What the server says of its memory; None where it does not say (a user without INFO)."""
        return memory_of(await self.answer("INFO", "memory"))

    async def answer(self, *command: str) -> Any:
        """The server's answer to a question about itself; an exception where it refuses to say."""

        async def ask() -> list[Any]:
            return await self._pipeliner.send(command)

        (answer,) = await self._ride(ask)
        return answer

    async def _run(self, name: str, *args: Any, before: tuple[Any, ...] | None = None, always: bool = False) -> Any:
        """Run script `name`, with the command `before` ahead of it in the same breath.

        With `always` it runs when the server has no memory left, too. Raises StoreFullError where it does not.
        """
        script = source(name, always=always)
        call = ("EVALSHA", script.sha1, 1, self.keys.prefix, *args)
        commands = [call] if before is None else [before, call]
        try:
            answers = await self._ask(*commands)
        except NoScriptError:  # the first call, or the server was restarted
            answers = await self._ask(*commands[:-1], ("SCRIPT", "LOAD", script.text), call)
        return answers[-1]

    async def ping(self) -> None:
        """Raise ConnectionLostError unless Redis answers."""
        await self._ask(("PING",))

    async def wait_for_wake(self, name: str, timeout_s: float) -> None:
        """Wait until ``admission``, ``cutter`` or ``jobs`` is woken, or `timeout_s` has passed."""
        keys = self.keys
        key = {"admission": keys.wake_admission, "cutter": keys.wake_cutter, "jobs": keys.wake_jobs}[name]
        wait_s = min(timeout_s, _BLOCK_MAX_S)
        # redis-py wants whole seconds here, the server does not.
        await self._ride(lambda: cast("Awaitable[Any]", self._redis.blpop([key], timeout=cast("int", wait_s))))

    async def read_rows(self, names: Sequence[tuple[int, int, int]]) -> list[bytes | None]:
        """Encoded rows of ``(task_id, sample_idx, attempt)``; None where they are gone."""
        if not names:
            return []
        (frames,) = await self._ask(("MGET", *(self.keys.rows(*name) for name in names)))
        return cast("list[bytes | None]", frames)


def block_ms(wait_s: float) -> int:
    """`wait_s` as the argument of BLOCK, at most a second."""
    # BLOCK 0 would wait for ever, and a BLOCK longer than the socket's time-out would look like a lost connection.
    return max(1, int(min(wait_s, _BLOCK_MAX_S) * 1000))


def paired(task_ids: Sequence[int], rewards: Mapping[int, bytes] | None) -> list[Any]:
    """Each task id with its group's new rewards, ``b""`` where there are none, as scripts take them."""
    known = rewards or {}
    return [part for task_id in task_ids for part in (task_id, known.get(task_id, b""))]


def queue_full(answer: Sequence[Any], again: str) -> QueueFullError:
    """The error of a full queue, from what a script says of it; `again` is what to do once there is room."""
    if len(answer) == 2:
        queued, most = map(int, answer)
        return QueueFullError(
            f"{queued} groups wait to start, the bound max_queued_groups={most}; {again} again when some have started"
        )
    queued, waiting, size, most = map(int, answer)
    return QueueFullError(
        f"{queued} groups with {waiting} bytes of prompts wait to start, and this one has {size}: above the bound "
        f"max_queued_bytes={most}; {again} again when some have started, pass paths instead of contents, or raise it"
    )


def run_stopped(reason: str) -> RunStoppedError:
    """The error of a run that has stopped itself."""
    return RunStoppedError(f"the run has stopped itself: {reason}; mend the cause, then `forebay resume`")


def fenced() -> FencedError:
    """The error of a collector whose epoch is old."""
    return FencedError("the lease has ended, or another collector has taken it: this one changes nothing any more")
