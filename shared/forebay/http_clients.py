"""HTTP clients that all episodes of a process share, one pool for each event loop (contract, section 8)."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any

import aiohttp

from forebay.errors import SettingsError
from forebay.pools import PoolUse

if TYPE_CHECKING:
    import httpx

__all__ = ["HttpClients", "clients_of_loop"]

MAX_CONNECTIONS = 512
"""Open at once in each client of a loop, unless a worker's settings say otherwise; what wants more waits for one."""
TIMEOUT_S = 600.0
"""One request, unless the caller says otherwise."""
CONNECT_TIMEOUT_S = 30.0


@dataclass(slots=True)
class _Wanted:
    """Callers that have a connection, or wait for one."""

    count: int = 0

    def less(self) -> None:
        self.count -= 1


class _CountingConnector(aiohttp.TCPConnector):
    def __init__(self, wanted: _Wanted, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._wanted = wanted

    async def connect(self, *args: Any, **kwargs: Any) -> Any:
        self._wanted.count += 1
        try:
            connection = await super().connect(*args, **kwargs)
        except BaseException:  # a cancelled caller waits no more either
            self._wanted.less()
            raise
        connection.add_callback(self._wanted.less)  # once, at its release
        return connection


class HttpClients:
    """The clients of one event loop, made when they are first asked for."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._client: httpx.AsyncClient | None = None
        self._wanted = {"aiohttp": _Wanted(), "httpx": _Wanted()}
        self.max_connections = MAX_CONNECTIONS
        """Of each client that is made from now on."""

    @property
    def use(self) -> dict[str, PoolUse]:
        """The connections of each client, by the library's name.

        Of httpx requests are counted, each until its answer is read; a streamed one until its head is there.
        """
        return {name: PoolUse.of(wanted.count, self.max_connections) for name, wanted in self._wanted.items()}

    def aiohttp_session(self) -> aiohttp.ClientSession:
        """The shared session; a new one if a user has closed it."""
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                connector=_CountingConnector(self._wanted["aiohttp"], limit=self.max_connections),
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S),
                # Episodes are independent: the cookies of one are none of another's business.
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    def httpx_client(self) -> httpx.AsyncClient:
        """The shared client; a new one if a user has closed it. Raises SettingsError if httpx is not installed."""
        if self._client is None or self._client.is_closed:
            try:
                import httpx
            except ImportError:
                raise SettingsError(
                    "get_httpx_client() needs httpx, which is not installed here; install forebay[workers]"
                ) from None

            wanted = self._wanted["httpx"]

            class CountingClient(httpx.AsyncClient):
                async def send(self, *args: Any, **kwargs: Any) -> httpx.Response:
                    wanted.count += 1
                    try:
                        return await super().send(*args, **kwargs)
                    finally:
                        wanted.count -= 1

            self._client = CountingClient(
                timeout=httpx.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
                limits=httpx.Limits(
                    max_connections=self.max_connections, max_keepalive_connections=self.max_connections
                ),
                cookies=_no_cookies(),
            )
        return self._client

    async def aclose(self) -> None:
        """Close what is open. What is asked for afterwards is made anew."""
        session, self._session = self._session, None
        client, self._client = self._client, None
        try:
            if session is not None:
                await session.close()
        finally:
            if client is not None:
                await client.aclose()


def _no_cookies() -> CookieJar:
    return CookieJar(DefaultCookiePolicy(allowed_domains=[]))


_LOCK = threading.Lock()
# Connections belong to the process and to the loop that opened them, and workflows reach them through a plain function:
# there is no object of ours on that way that could hold them.
_BY_LOOP: dict[asyncio.AbstractEventLoop, HttpClients] = {}


def clients_of_loop() -> HttpClients:
    """The clients of the running event loop."""
    loop = asyncio.get_running_loop()
    with _LOCK:
        found = _BY_LOOP.get(loop)
        if found is None:
            for ended in [one for one in _BY_LOOP if one.is_closed()]:  # connections refer to their loop: no weak keys
                del _BY_LOOP[ended]
            found = _BY_LOOP[loop] = HttpClients()
        return found
