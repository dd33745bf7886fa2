"""``GET /metrics`` over HTTP: off unless a port is set, on loopback unless told otherwise, and then with a token.

Knows nothing of what it serves: whoever starts it gives the text.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self

import structlog
from aiohttp import web
from pydantic import SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from forebay.errors import PortInUseError, SettingsError

__all__ = ["CONTENT_TYPE", "HttpSettings", "Listen", "MetricsServer", "is_loopback"]

log = structlog.get_logger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of the text format that every Prometheus reads."""

_SHUTDOWN_S = 1.0


class HttpSettings(BaseSettings):
    """What all HTTP endpoints of the services share, read from ``FOREBAY_HTTP_...``."""

    model_config = SettingsConfigDict(env_prefix="FOREBAY_HTTP_", frozen=True, extra="forbid")

    token: SecretStr | None = None
    """What callers send as ``Authorization: Bearer TOKEN``; needed to listen anywhere but on loopback. Never logged."""

    @field_validator("token", mode="after")
    @classmethod
    def _empty_is_unset(cls, value: SecretStr | None) -> SecretStr | None:
        return value if value is not None and value.get_secret_value() else None


@dataclass(frozen=True, slots=True)
class Listen:
    """Where an endpoint listens, with the names of the settings that say so, for errors."""

    port: int
    """0: any free port, which the log names."""
    host: str = "127.0.0.1"
    token: SecretStr | None = None
    port_setting: str = "port"
    host_setting: str = "host"

    def __post_init__(self) -> None:
        """Raise SettingsError where others could reach it and there is no token: before anything else is begun."""
        if self.token is None and not is_loopback(self.host):
            raise SettingsError(
                f"{self.host_setting}={self.host} can be reached from other machines: set FOREBAY_HTTP_TOKEN, "
                "which callers then send as `Authorization: Bearer TOKEN`, or listen on 127.0.0.1"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class MetricsServer:
    """Serves ``/metrics``. Use it as an async context manager."""

    def __init__(self, render: Callable[[], Awaitable[bytes]], listen: Listen) -> None:
        """Remember what to serve.

        Args:
            render: gives the text, at each scrape.
            listen: where.
        """
        self._render = render
        self._listen = listen
        self._expected = None if listen.token is None else f"Bearer {listen.token.get_secret_value()}".encode()
        self._runner: web.AppRunner | None = None
        self.url = ""
        """Where it is scraped, once it listens."""

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            PortInUseError: something else listens there.
            SettingsError: the host or the port cannot be listened on.
        """
        app = web.Application()
        app.router.add_get("/metrics", self._answer)
        # No access log: a scrape every few seconds is no event, and its headers carry the token.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._listen.host, self._listen.port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise self._refusal(error) from None
        port = self._runner.addresses[0][1]
        host = f"[{self._listen.host}]" if ":" in self._listen.host else self._listen.host
        self.url = f"http://{host}:{port}/metrics"
        log.info("metrics.listening", url=self.url)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _refusal(self, error: OSError) -> PortInUseError | SettingsError:
        where = self._listen
        if error.errno == errno.EADDRINUSE:
            return PortInUseError(
                f"{where.port_setting}={where.port}: the port is in use on {where.host}; choose another, or 0 for any "
                "free one (services on one host need one each)"
            )
        return SettingsError(
            f"{where.host_setting}={where.host}, {where.port_setting}={where.port}: cannot listen there "
            f"({error.strerror or error})"
        )

    async def _answer(self, request: web.Request) -> web.Response:
        if self._expected is not None:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, self._expected):
                return web.Response(
                    status=401, text="send Authorization: Bearer TOKEN\n", headers={"WWW-Authenticate": "Bearer"}
                )
        return web.Response(body=await self._render(), headers={"Content-Type": CONTENT_TYPE})
