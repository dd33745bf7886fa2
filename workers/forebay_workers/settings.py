"""Settings of one worker process."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

__all__ = ["WorkerSettings"]


class WorkerSettings(BaseSettings):
    """Read from ``FOREBAY_WORKER_...``."""

    model_config = SettingsConfigDict(env_prefix="FOREBAY_WORKER_", frozen=True, extra="forbid")

    max_slots: int = Field(128, ge=1)
    """Episodes that run at once in this process."""
    poll_delay_s: float = Field(0.005, gt=0)
    """Between two looks at the job queue while there is work."""
    idle_poll_s: float = Field(0.25, gt=0, le=1)
    """Between two looks when there is none. Queued jobs wake a worker at once; retries become due without that."""
    drain_timeout_s: float = Field(2.0, ge=0)
    """After SIGTERM, how long running episodes may still finish; then they are handed back."""
    wait_for_run_s: float = Field(120.0, gt=0)
    """How long to wait at start for a collector to publish the run's settings."""
    max_inline_tokens: int = Field(16384, ge=0)
    """Results above this many tokens are encoded in a thread, off the event loop."""
