"""How the supervisor tells that a process is ready to be used."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from forebay_ops.embedded_redis import RedisPlan
from forebay_ops.logs import plain

__all__ = ["HttpAnswers", "LogLine", "Readiness", "RedisAnswers", "Started"]

_CALL_TIMEOUT_S = 2.0


class Readiness(Protocol):
    """A predicate that is asked again and again from the start of a process until it says yes."""

    async def check(self, pid: int, lines: Sequence[str]) -> bool:
        """Whether the process is ready. `lines` are what its log got since the last call. Returns within seconds."""
        ...


@dataclass(frozen=True)
class Started:
    """Ready as soon as it runs."""

    async def check(self, pid: int, lines: Sequence[str]) -> bool:  # noqa: ARG002 - the protocol
        """Always."""
        return True


@dataclass(frozen=True)
class LogLine:
    """Ready once its log holds a line with this text, for example the event ``worker.ready``."""

    text: str

    async def check(self, pid: int, lines: Sequence[str]) -> bool:  # noqa: ARG002 - the protocol
        """Look through the new lines."""
        return any(self.text in plain(line) for line in lines)


@dataclass(frozen=True)
class HttpAnswers:
    """Ready once a GET of this URL gives 200, or asks for a key."""

    url: str

    async def check(self, pid: int, lines: Sequence[str]) -> bool:  # noqa: ARG002 - the protocol
        """Ask once."""
        import aiohttp  # keeps `forebay up --help` fast

        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_CALL_TIMEOUT_S)) as session,
                session.get(self.url) as response,
            ):
                return response.status in (200, 401)
        except (aiohttp.ClientError, TimeoutError):
            return False


@dataclass(frozen=True)
class RedisAnswers:
    """Ready once the embedded server answers with its data loaded."""

    plan: RedisPlan

    async def check(self, pid: int, lines: Sequence[str]) -> bool:  # noqa: ARG002 - the protocol
        """Ask once.

        Raises:
            RedisStartError: another server answers on the port.
        """
        return await asyncio.to_thread(self.plan.answers, pid)
