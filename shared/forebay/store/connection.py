"""Connections to Redis, and what happens when one is lost."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import redis.asyncio as redis_asyncio
import stamina
import structlog
from redis.exceptions import (
    BusyLoadingError,
    ReadOnlyError,
    RedisError,
)
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)

from forebay.errors import ConnectionLostError, SettingsError
from forebay.store.refusals import address, hint, refusal

__all__ = ["ANSWER_TIMEOUT_S", "address", "connect", "connection_pool", "riding_through"]

T = TypeVar("T")

log = structlog.get_logger(__name__)

ANSWER_TIMEOUT_S = 5.0
"""Longest wait for an answer. Every BLOCK in the project is shorter."""

_ODD = re.compile(r"rediss?://(?!([^/?#@]*@)?[^/?#@]*(/[0-9]*)?(\?[^#@]*)?$)")
"""URLs whose parts are not what a user with an unencoded password takes them for."""

_PASSING = (RedisConnectionError, RedisTimeoutError, BusyLoadingError, ReadOnlyError, OSError)


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
    options: dict[str, Any] = {}
    if _ODD.match(url):  # a password with one of /?#@ in it: its rest would be taken for host or path, and be shown
        raise _no_url()
    if url.startswith("rediss:"):
        options["ssl_check_hostname"] = True  # by itself redis-py takes any certificate of the CA; the URL may say so
    try:
        pool = redis_asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=ANSWER_TIMEOUT_S,
            socket_timeout=socket_timeout_s,
            socket_connect_timeout=ANSWER_TIMEOUT_S,
            health_check_interval=30,
            **options,
        )
        pool.connection_class(**pool.connection_kwargs)  # connects to nothing; it takes the URL's options, or does not
        return pool
    except (TypeError, RedisError):
        raise SettingsError(
            "an option after the ? of REDIS_URL is unknown, or has a value that is not allowed; for TLS there are "
            "ssl_ca_certs, ssl_certfile, ssl_keyfile, ssl_cert_reqs and ssl_check_hostname, with rediss:// only"
        ) from None
    except ValueError:  # its text would quote a part of the URL, which may be one of the password
        raise _no_url() from None


def _no_url() -> SettingsError:
    return SettingsError(
        "REDIS_URL is no Redis URL; use redis://[user:password@]host:port/db, with special characters percent-encoded"
    )


async def riding_through(call: Callable[[], Awaitable[T]], url: str, timeout_s: float) -> T:
    """Run `call`, again and again while Redis is away or loading, for at most `timeout_s`.

    Only for calls that may be repeated: all scripts are written so that they may.

    Raises:
        ConnectionLostError: Redis was not to be had in that time.
        RedisRefusedError: it refuses this process for good; that is not waited for.
    """

    async def bounded() -> T:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await call()

    try:
        try:
            return await bounded()
        except _PASSING as error:
            if refusal(error, url) is not None:
                raise
            log.warning("redis.waiting", address=address(url), reason=_text(error), up_to_s=timeout_s)
        async for attempt in stamina.retry_context(
            on=lambda error: _passing(error, url),
            attempts=None,
            timeout=timeout_s,
            wait_initial=0.05,
            wait_max=1.0,
            wait_jitter=0.2,
        ):
            with attempt:
                return await bounded()
    except (RedisError, OSError) as error:
        if (refused := refusal(error, url)) is not None:
            raise refused from None
        if not isinstance(error, _PASSING):
            raise
        raise ConnectionLostError(
            f"Redis at {address(url)} cannot be reached (tried for {timeout_s:g} s: {_text(error)}); "
            f"start one with `make up`, or set REDIS_URL{hint(url, error)}"
        ) from None
    raise ConnectionLostError(f"Redis at {address(url)} cannot be reached")  # not reached: stamina returns or raises


def _text(error: BaseException) -> str:
    return str(error) or f"no answer in {ANSWER_TIMEOUT_S:g} s"


def _passing(error: Exception, url: str) -> bool:
    return isinstance(error, _PASSING) and refusal(error, url) is None
