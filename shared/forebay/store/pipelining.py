"""Commands that are given at the same time travel together.

While one pipeline is under way, what is asked for meanwhile gathers and goes with the next. With hundreds of episodes
in a process that saves most of the client's work, and most of the server's fsyncs, and costs an idle process nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

import redis.asyncio as redis_asyncio
from redis.exceptions import RedisError

from forebay.store.marks import Marks, Seen

__all__ = ["Pipeliner"]

_COMMANDS_AT_ONCE = 256
_BYTES_AT_ONCE = 8 * 2**20


@dataclass(slots=True)
class _Request:
    commands: list[tuple[Any, ...]]
    size: int
    answers: asyncio.Future[list[Any]]


class Pipeliner:
    """Sends requests of one or more commands, each request whole and in the order of asking."""

    def __init__(self, client: redis_asyncio.Redis, marks: Marks | None = None) -> None:
        self._redis = client
        self._marks = marks
        self._waiting: deque[_Request] = deque()
        self._sender: asyncio.Task[None] | None = None

    async def send(self, *commands: tuple[Any, ...]) -> list[Any]:
        """The answers to `commands`. An error of a single command is among them, as the exception it is.

        Raises:
            RedisError: the connection was lost; which commands were done is unknown, so only repeatable ones may go
                this way.
        """
        size = sum(len(part) for command in commands for part in command if isinstance(part, bytes))
        request = _Request(list(commands), size, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_all(), name="forebay-pipeline")
        return await request.answers

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                await self._send_some(self._next())
        finally:
            self._sender = None
            for request in self._waiting:  # only when this task was cancelled, at shut-down
                request.answers.cancel()

    def _next(self) -> list[_Request]:
        chosen: list[_Request] = []
        count = size = 0
        while self._waiting and (not chosen or (count < _COMMANDS_AT_ONCE and size < _BYTES_AT_ONCE)):
            request = self._waiting.popleft()
            count += len(request.commands)
            size += request.size
            chosen.append(request)
        return chosen

    async def _send_some(self, requests: list[_Request]) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for request in requests:
            for command in request.commands:
                pipe.execute_command(*command)
        marks = self._marks if any(part[0] == "EVALSHA" for one in requests for part in one.commands) else None
        before = marks.seen if marks is not None else None
        for command in marks.commands if marks is not None else ():
            pipe.execute_command(*command)
        try:
            answers = await pipe.execute(raise_on_error=False)
            if marks is not None and before is not None:
                _compare(marks, before, answers)
        except (RedisError, OSError) as error:
            for request in requests:
                if not request.answers.done():
                    request.answers.set_exception(error)
            return
        at = 0
        for request in requests:
            end = at + len(request.commands)
            if not request.answers.done():  # else its caller was cancelled meanwhile
                request.answers.set_result(answers[at:end])
            at = end

    async def close(self) -> None:
        """Give up what waits."""
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)


def _compare(marks: Marks, before: Seen, answers: list[Any]) -> None:
    """Raises GoneBackError."""
    told = [answers.pop() for _ in marks.commands][::-1]
    if not any(isinstance(one, Exception) for one in told):  # a server that cannot answer these refuses the others too
        marks.compare(before, told)
