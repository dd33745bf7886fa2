"""The primary that Sentinels name, asked for anew with each connection.

``redis+sentinel://[user:password@]host[:26379],host[:26379]/NAME[/DB]``; ``rediss+sentinel://`` for TLS, to Redis and
to the Sentinels. User and password are those of Redis; ``?sentinel_username=`` and ``sentinel_password=`` those of the
Sentinels. Further options of the query are redis-py's (``ssl_ca_certs``, ...), for Redis and, of TLS, for both.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import unquote, urlencode, urlsplit

import redis.asyncio as redis_asyncio
from redis.asyncio.connection import parse_url
from redis.asyncio.sentinel import Sentinel, SentinelManagedConnection, SentinelManagedSSLConnection

from forebay.errors import SettingsError

__all__ = ["PrimaryPool", "is_sentinel_url", "shown_url"]

_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
_PORT = 26379
_SENTINEL_S = 2.0
"""For one Sentinel to answer; the next one is asked then."""


def is_sentinel_url(url: str) -> bool:
    """Whether `url` names Sentinels."""
    return url.partition(":")[0].lower() in _SCHEMES


def shown_url(url: str) -> str:
    """`url` without its user, its password and its query, which may hold one too."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


@dataclass(frozen=True, slots=True)
class _Place:
    """What a Sentinel URL says."""

    hosts: list[tuple[str, int]]
    name: str
    options: dict[str, Any] = field(repr=False)
    sentinel_options: dict[str, Any] = field(repr=False)
    tls: bool


def _parse(url: str) -> _Place:
    """Raises ValueError, whose text holds nothing of the URL."""
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    name, _, database = parts.path.strip("/").partition("/")
    pairs = (pair.partition("=") for pair in parts.query.split("&") if pair)
    query = {word: value for word, _, value in pairs}
    own = {word: unquote(query.pop(word)) for word in ("sentinel_username", "sentinel_password") if word in query}
    if not hosts or not name:
        raise ValueError("no host, or no name of the primary")
    scheme = _SCHEMES[parts.scheme]
    rest = urlencode({word: unquote(value) for word, value in query.items()})
    # redis-py reads what is the same in both kinds of URL.
    options = dict(parse_url(f"{scheme}://{credentials}{'@' if credentials else ''}host:1/{database or 0}?{rest}"))
    for word in ("host", "port", "connection_class"):
        options.pop(word, None)
    tls = {word: value for word, value in options.items() if word.startswith("ssl_")}
    sentinel = {word.removeprefix("sentinel_"): value for word, value in own.items()} | tls
    return _Place([_host(part) for part in hosts.split(",")], unquote(name), options, sentinel, scheme == "rediss")


def _host(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("an empty host")
    return parts.hostname, parts.port or _PORT


class PrimaryPool(redis_asyncio.BlockingConnectionPool):
    """Connections to the primary. An answer that says ``READONLY`` ends its connection: the next one asks again."""

    is_master = True
    check_connection = False

    def __init__(self, place: Any, **options: Any) -> None:
        kind = SentinelManagedSSLConnection if place.tls else SentinelManagedConnection
        super().__init__(connection_class=kind, connection_pool=weakref.proxy(self), **place.options, **options)
        self._name = place.name
        self._primary: tuple[str, int] | None = None
        self._sentinels = Sentinel(  # type: ignore[no-untyped-call]  # as redis-py declares it
            place.hosts,
            sentinel_kwargs={
                "socket_timeout": _SENTINEL_S,
                "socket_connect_timeout": _SENTINEL_S,
                "ssl": place.tls,
                **place.sentinel_options,
            },
        )

    @classmethod
    def of(cls, url: str, **options: Any) -> Self:
        """The pool of what `url` names. Raises SettingsError."""
        try:
            return cls(_parse(url), **options)
        except (ValueError, TypeError):  # the text may hold a part of the password
            raise SettingsError(
                "REDIS_URL is no Sentinel URL; use redis+sentinel://[user:password@]host:port,host:port/name/db, with "
                "special characters percent-encoded, and ?sentinel_password= where the Sentinels want one"
            ) from None

    async def get_master_address(self) -> tuple[str, int]:
        """Host and port of the primary, by the first Sentinel that knows. redis-py's connections call this."""
        found: tuple[str, int] = await self._sentinels.discover_master(self._name)
        if found != self._primary:
            self._primary = found
            await self.disconnect(inuse_connections=False)  # idle ones lead to the primary of before
        return found

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """Close the connections; with `inuse_connections`, as at the end, those to the Sentinels too."""
        await super().disconnect(inuse_connections=inuse_connections)
        if inuse_connections:
            for sentinel in self._sentinels.sentinels:
                await sentinel.aclose(close_connection_pool=True)
