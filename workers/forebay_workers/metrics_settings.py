"""Where a worker serves its metrics."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

__all__ = ["WorkerMetricsSettings"]


class WorkerMetricsSettings(BaseSettings):
    """Read from ``FOREBAY_WORKER_METRICS_...``."""

    model_config = SettingsConfigDict(env_prefix="FOREBAY_WORKER_METRICS_", frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    """Where ``/metrics`` is served; anything but loopback needs ``FOREBAY_HTTP_TOKEN``."""
    port: int | None = Field(None, ge=0, le=65535)
    """None: it is not served. 0: on any free port, which the log names; so several workers of one host can share it."""
