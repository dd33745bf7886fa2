"""Connections to Redis, and what happens when one is lost.

A call that finds Redis away, loading, demoted to a replica or unable to write is made again until it is answered; the
log says once that Redis is away, now and then that it still is, and once for how long it was.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import redis.asyncio as redis_asyncio
import stamina
import structlog
from redis.exceptions import (
    BusyLoadingError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)

from forebay.errors import ConnectionLostError, SettingsError
from forebay.store.refusals import address, hint, refusal
from forebay.store.sentinel import PrimaryPool, is_sentinel_url

__all__ = ["ANSWER_TIMEOUT_S", "Absence", "address", "connect", "connection_pool", "riding_through"]

T = TypeVar("T")
Greet = Callable[[Any], Awaitable[None]]
"""Called with each new connection, in place of redis-py's own greeting, which it calls itself."""

log = structlog.get_logger(__name__)

ANSWER_TIMEOUT_S = 5.0
"""Longest wait for an answer. Every BLOCK in the project is shorter."""

_ODD = re.compile(r"rediss?(\+sentinel)?://(?!([^/?#@]*@)?[^/?#@]*(/[^?#@]*)?(\?[^#@]*)?$)")
"""URLs whose parts are not what a user with an unencoded password takes them for."""
_ODD_DATABASE = re.compile(r"rediss?://[^/]*/(?![0-9]*(\?|$))")
_HURRY_S = 2.0
_REMIND_S = 60.0
_PASSING = (RedisConnectionError, RedisTimeoutError, BusyLoadingError, ReadOnlyError, OSError)
_PASSING_CODES = ("READONLY", "UNBLOCKED", "MASTERDOWN", "NOREPLICAS", "MISCONF")
"""Of answers that a server gives while it is demoted, has no replica that it needs, or cannot write to its disk."""


def connect(url: str, *, max_connections: int = 64, greet: Greet | None = None) -> redis_asyncio.Redis:
    """A client of the server at `url`; nothing is sent yet. Raises SettingsError."""
    return redis_asyncio.Redis(connection_pool=connection_pool(url, max_connections=max_connections, greet=greet))


def connection_pool(
    url: str, *, max_connections: int = 64, socket_timeout_s: float | None = None, greet: Greet | None = None
) -> redis_asyncio.BlockingConnectionPool:
    """Connections to the server at `url`, or to the primary that its Sentinels name, made when they are needed.

    Without `socket_timeout_s` the caller bounds its calls, as :func:`riding_through` does: redis-py would make a task
    for every command, through ``asyncio.wait_for``, which on Python 3.11 also swallows cancellations.

    Raises:
        SettingsError: `url` is no Redis URL.
    """
    options: dict[str, Any] = {
        "max_connections": max_connections,
        "timeout": ANSWER_TIMEOUT_S,
        "socket_timeout": socket_timeout_s,
        "socket_connect_timeout": ANSWER_TIMEOUT_S,
        "health_check_interval": 30,
    }
    # A password with one of /?#@ in it: its rest would be taken for host or path, and be shown.
    if _ODD.match(url) or _ODD_DATABASE.match(url):
        raise _no_url()
    if greet is not None:
        options["redis_connect_func"] = greet
    if url.startswith("rediss"):
        options["ssl_check_hostname"] = True  # by itself redis-py takes any certificate of the CA; the URL may say so
    if is_sentinel_url(url):
        return PrimaryPool.of(url, **options)
    try:
        pool = redis_asyncio.BlockingConnectionPool.from_url(url, **options)
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
        "REDIS_URL is no Redis URL; use redis://[user:password@]host:port/db, with special characters percent-encoded, "
        "or redis+sentinel://[user:password@]host:port,host:port/name/db"
    )


class Absence:
    """What the calls over one set of connections know together of Redis being away."""

    def __init__(self, url: str, first_s: float, away_s: float) -> None:
        """A call waits for `first_s` before Redis has answered for the first time, and for `away_s` after that."""
        self.url = url
        self._first_s = first_s
        self._away_s = away_s
        self._met = self.hurried = False
        self._since: float | None = None
        self._told = 0.0
        self._answered = 0.0

    @property
    def patience_s(self) -> float:
        """How long a call is made again, s, before it is an error."""
        patience = self._away_s if self._met else self._first_s
        return min(patience, _HURRY_S) if self.hurried else patience

    def hurry(self) -> None:
        """Wait no more than a moment from now on, those that wait already included: the process is to end."""
        self.hurried = True

    def lost(self, reason: str, asked: float) -> None:
        """A call that was made at `asked`, monotonic seconds, was not answered."""
        now = time.monotonic()
        if asked < self._answered:  # others were answered since: it tells of what is over
            return
        if self._since is None:
            self._since = self._told = now
            log.warning("redis.away", address=address(self.url), reason=reason, waiting_up_to_s=self.patience_s)
        elif now - self._told >= _REMIND_S:
            self._told = now
            log.warning(
                "redis.still_away", address=address(self.url), reason=reason, away_s=round(now - self._since, 1)
            )

    def answered(self) -> None:
        """A call was answered."""
        self._met = True
        self._answered = time.monotonic()
        if self._since is not None:
            away_s = round(time.monotonic() - self._since, 1)
            self._since = None
            log.warning("redis.back", address=address(self.url), away_s=away_s)


async def riding_through(
    call: Callable[[], Awaitable[T]], absence: Absence, reconnect: Callable[[], Awaitable[None]] | None = None
) -> T:
    """Run `call`, again and again while Redis is away or loading, for as long as `absence` has patience.

    Only for calls that may be repeated: all scripts are written so that they may. `reconnect` is awaited after an
    answer that only another server, or this one in another role, can better.

    Raises:
        ConnectionLostError: Redis was not to be had in that time.
        RedisRefusedError: it refuses this process for good; that is not waited for.
    """
    began = time.monotonic()
    where = address(absence.url)

    async def bounded() -> T:
        asked = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await call()
        except Exception as error:  # looked at, and raised again: all but a loss is the caller's
            if _passing(error, absence.url):
                absence.lost(_text(error), asked)
                if isinstance(error, ResponseError) and reconnect is not None:
                    await reconnect()
            raise
        absence.answered()
        return answer

    def again(error: Exception) -> bool:
        return _passing(error, absence.url) and time.monotonic() - began < absence.patience_s

    try:
        async for attempt in stamina.retry_context(
            on=again, attempts=None, timeout=None, wait_initial=0.05, wait_max=0.5, wait_jitter=0.2
        ):
            with attempt:
                return await bounded()
    except (RedisError, OSError) as error:
        if (refused := refusal(error, absence.url)) is not None:
            raise refused from None
        if not _passing(error, absence.url):
            raise
        raise ConnectionLostError(
            f"Redis at {where} cannot be reached (tried for {time.monotonic() - began:.3g} s: {_text(error)}); "
            f"start one with `make up`, or set REDIS_URL{hint(absence.url, error)}"
        ) from None
    raise ConnectionLostError(f"Redis at {where} cannot be reached")  # not reached: stamina returns or raises


def _text(error: BaseException) -> str:
    return str(error) or f"no answer in {ANSWER_TIMEOUT_S:g} s"


def _passing(error: BaseException, url: str) -> bool:
    if refusal(error, url) is not None:
        return False
    return isinstance(error, _PASSING) or (isinstance(error, ResponseError) and str(error).startswith(_PASSING_CODES))
