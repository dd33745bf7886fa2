"""Connections to Redis, and what happens when one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar
from urllib.parse import urlsplit

import redis.asyncio as redis_asyncio
import stamina
import structlog
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ReadOnlyError,
)
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)

from forebay.errors import ConnectionLostError, SettingsError

__all__ = ["ANSWER_TIMEOUT_S", "address", "connect", "connection_pool", "riding_through"]

T = TypeVar("T")

log = structlog.get_logger(__name__)

ANSWER_TIMEOUT_S = 5.0
"""Longest wait for an answer. Every BLOCK in the project is shorter."""

_PASSING = (RedisConnectionError, RedisTimeoutError, BusyLoadingError, ReadOnlyError, OSError)


def address(url: str) -> str:
    """`url` without its user and password, fit to be shown."""
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


def connect(url: str, *, max_connections: int = 64) -> redis_asyncio.Redis:
    """A client of the server at `url`; nothing is sent yet. Raises SettingsError."""
    return redis_asyncio.Redis(connection_pool=connection_pool(url, max_connections=max_connections))


def connection_pool(
    url: str, *, max_connections: int = 64, socket_timeout_s: float | None = None
) -> redis_asyncio.BlockingConnectionPool:
    """Connections to the server at `url`, made when they are needed.

    Without `socket_timeout_s` the caller bounds its calls, as :func:`riding_through` does: redis-py would make a task
    for every command, through ``asyncio.wait_for``, which on Python 3.11 also swallows cancellations.

    Raises:
        SettingsError: `url` is no Redis URL.
    """
    try:
        return redis_asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=ANSWER_TIMEOUT_S,
            socket_timeout=socket_timeout_s,
            socket_connect_timeout=ANSWER_TIMEOUT_S,
            health_check_interval=30,
        )
    except ValueError:  # its text would quote a part of the URL, which may be one of the password
        raise SettingsError(
            "REDIS_URL is no Redis URL; use redis://[user:password@]host:port/db, with special characters "
            "percent-encoded"
        ) from None


async def riding_through(call: Callable[[], Awaitable[T]], url: str, timeout_s: float) -> T:
    """Run `call`, again and again while Redis is away or loading, for at most `timeout_s`.

    Only for calls that may be repeated: all scripts are written so that they may.

    Raises:
        ConnectionLostError: Redis was not to be had in that time.
    """

    async def bounded() -> T:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await call()

    try:
        try:
            return await bounded()
        except _PASSING as error:
            if not _passing(error):
                raise
            log.warning("redis.waiting", address=address(url), reason=_text(error), up_to_s=timeout_s)
        async for attempt in stamina.retry_context(
            on=_passing, attempts=None, timeout=timeout_s, wait_initial=0.05, wait_max=1.0, wait_jitter=0.2
        ):
            with attempt:
                return await bounded()
    except AuthenticationError as error:
        raise ConnectionLostError(
            f"Redis at {address(url)} refused the credentials ({error}); check the user and the password in REDIS_URL"
        ) from None
    except _PASSING as error:
        raise ConnectionLostError(
            f"Redis at {address(url)} cannot be reached (tried for {timeout_s:g} s: {_text(error)}); "
            "start one with `make up`, or set REDIS_URL"
        ) from None
    raise ConnectionLostError(f"Redis at {address(url)} cannot be reached")  # not reached: stamina returns or raises


def _text(error: BaseException) -> str:
    return str(error) or f"no answer in {ANSWER_TIMEOUT_S:g} s"


def _passing(error: Exception) -> bool:
    return isinstance(error, _PASSING) and not isinstance(error, AuthenticationError)
