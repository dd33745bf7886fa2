"""How a store calls Redis; what its callers share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar, cast

import structlog
from redis.exceptions import NoScriptError, OutOfMemoryError

from forebay.errors import (
    ConnectionLostError,
    FencedError,
    QueueFullError,
    RolledBackError,
    RunStoppedError,
    StoreFullError,
)
from forebay.settings import Settings
from forebay.store.bounds import Memory, memory_of
from forebay.store.connection import Absence, address, connect, riding_through
from forebay.store.keys import Keys
from forebay.store.marks import GoneBackError, Marks, Seen
from forebay.store.pipelining import Pipeliner
from forebay.store.refusals import named
from forebay.store.scripts import source

__all__ = ["MAX_REASON", "MAX_SAMPLE", "StoreBase", "block_ms", "fenced", "paired", "queue_full", "run_stopped"]

T = TypeVar("T")

log = structlog.get_logger(__name__)

_ROLLED_BACK = "Redis has gone back in time"
"""What the reason of a run begins with that was stopped for it."""
_LOOK_AGAIN_S = 0.5
_BLOCK_MAX_S = 1.0
MAX_REASON = 300
"""Characters of a reason in the ledgers."""
MAX_SAMPLE = 64
"""Bytes that are kept of what could not be read."""


class StoreBase:
    """A connection to the state of one run."""

    def __init__(
        self, url: str, run: str, absence: Absence, *, max_connections: int = 64, marked: bool = True,
        waits_for_reconciliation: bool = False,
    ) -> None:  # fmt: skip
        """Make the store; it connects on the first call.

        Args:
            url: Redis.
            run: which run.
            absence: how long calls wait for a Redis that is away.
            max_connections: at once.
            marked: notice a Redis that has gone back in time.
            waits_for_reconciliation: wait then, as for one that is away, until somebody has reconciled it, instead of
                raising RolledBackError: for a process that holds nothing which the reconciliation would make void.
        """
        self.keys = Keys(run)
        self._url = url
        self._absence = absence
        self._marks = Marks(self.keys) if marked else None
        self._waits = waits_for_reconciliation
        self._told: Seen | None = None
        self._turns = 0
        greet = None if self._marks is None else self._marks.greet
        self._redis = connect(url, max_connections=max_connections, greet=greet)
        self._pipeliner = Pipeliner(self._redis, self._marks)

    @classmethod
    def open(cls, settings: Settings, *, max_connections: int = 64, waits_for_reconciliation: bool = False) -> Self:
        """The store of the run that `settings` name; connects on the first call."""
        url = settings.resolved_redis_url()
        absence = Absence(url, settings.redis_timeout_s, settings.redis_away_s)
        return cls(
            url, settings.run, absence, max_connections=max_connections,
            waits_for_reconciliation=waits_for_reconciliation,
        )  # fmt: skip

    async def close(self) -> None:
        """Close the connections."""
        await self._pipeliner.close()
        await self._redis.aclose(close_connection_pool=True)

    def hurry(self) -> None:
        """Do not wait any more for a Redis that is away: the process is to end."""
        self._absence.hurry()

    @property
    def hurried(self) -> bool:
        """Whether that was said."""
        return self._absence.hurried

    @property
    def era(self) -> tuple[int, int]:
        """Changes when the run was reconciled: what a reader remembers of its place in a stream is void then."""
        return (0 if self._marks is None else self._marks.seen.reconciled), self._turns

    @asynccontextmanager
    async def unmarked(self) -> AsyncIterator[Self]:
        """A store of the same run that takes Redis as it is."""
        other = type(self)(self._url, self.keys.run, self._absence, max_connections=4, marked=False)
        try:
            yield other
        finally:
            await other.close()

    async def _ride(self, call: Callable[[], Awaitable[T]]) -> T:
        began = asyncio.get_running_loop().time()
        while True:
            try:
                return await riding_through(call, self._absence, self._reconnect)
            except GoneBackError as gone:
                error = self._rolled_back(str(gone))
                await self._tell(gone, str(error))
                if not self._waits:
                    raise error from None
                if asyncio.get_running_loop().time() - began > self._absence.patience_s:
                    raise ConnectionLostError(str(error)) from None
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _reconnect(self) -> None:
        """Let idle connections go: they lead to a server that is not the primary any more."""
        pool: Any = self._redis.connection_pool  # whose type redis-py does not tell
        await pool.disconnect(inuse_connections=False)

    def _rolled_back(self, differences: str) -> RolledBackError:
        return RolledBackError(
            f"{_ROLLED_BACK}: {differences}. The data of run {self.keys.run} at {address(self._url)} was restored from "
            "an older state, lost its last writes, or was emptied; nothing is handed out until the trainer calls "
            "client.reconcile(...) with what its checkpoint knows (docs/operations.md)"
        )

    async def _tell(self, gone: GoneBackError, reason: str) -> None:
        """Stop the run, once for each time: whoever has seen less would not know."""
        if self._told is gone.seen:
            return
        log.error("redis.gone_back", run=self.keys.run, address=address(self._url), differences=str(gone))
        async with self.unmarked() as other:
            await other._run("rolled_back", reason, *gone.seen.arguments())
        self._told = gone.seen

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

    async def check_marks(self) -> None:
        """Raise RolledBackError if Redis has less of the run than this store has seen."""
        marks = self._marks
        if marks is None:
            return

        async def once() -> None:
            before = marks.seen
            marks.compare(before, await self._pipeliner.send(*marks.commands))

        await self._ride(once)

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
    if reason.startswith(_ROLLED_BACK):
        return RolledBackError(reason)
    return RunStoppedError(f"the run has stopped itself: {reason}; mend the cause, then `forebay resume`")


def fenced() -> FencedError:
    """The error of a collector whose epoch is old."""
    return FencedError("the lease has ended, or another collector has taken it: this one changes nothing any more")
