"""Settings of one collector process; the rules of the run are :class:`forebay.settings.RunSettings`."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

__all__ = ["CollectorSettings"]


class CollectorSettings(BaseSettings):
    """Read from ``FOREBAY_COLLECTOR_...``."""

    model_config = SettingsConfigDict(env_prefix="FOREBAY_COLLECTOR_", frozen=True, extra="forbid")

    http_host: str = "127.0.0.1"
    """Where ``/metrics`` is served; anything but loopback needs ``FOREBAY_HTTP_TOKEN``."""
    http_port: int | None = Field(None, ge=0, le=65535)
    """None: it is not served. 0: on any free port, which the log names."""
