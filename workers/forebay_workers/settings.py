"""Settings of one worker process."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

__all__ = ["WorkerSettings"]


class WorkerSettings(BaseSettings):
    """Read from ``FOREBAY_WORKER_...``."""

    model_config = SettingsConfigDict(env_prefix="FOREBAY_WORKER_", frozen=True, extra="forbid", allow_inf_nan=False)

    max_slots: int = Field(128, ge=1)
    """Episodes that run at once in this process."""
    poll_delay_s: float = Field(0.005, gt=0)
    """Between two looks at the job queue while there is work."""
    idle_poll_s: float = Field(0.25, gt=0, le=1)
    """Between two looks when there is none. Queued jobs wake a worker at once; retries become due without that."""
    drain_timeout_s: float = Field(2.0, ge=0)
    """After SIGTERM, how long running episodes may still finish; then they are handed back."""
    memory_wait_s: float = Field(600.0, gt=0, le=86400)
    """How long a finished episode is held while Redis has no memory for its rows; then the attempt has failed (infra).
    The deadline of its group ends the wait too."""
    max_http_connections: int = Field(512, ge=1, le=65535)
    """Open at once in each HTTP client that workflows share; what wants more waits for one."""
    max_reward_processes: int = Field(512, ge=1, le=512)
    """Processes for reward functions, whatever their wrappers ask for."""
    wait_for_run_s: float = Field(120.0, gt=0)
    """How long to wait at start for a collector to publish the run's settings."""
    max_inline_tokens: int = Field(16384, ge=0)
    """Results above this many tokens are encoded in a thread, off the event loop."""
    watchdog_s: float = Field(20.0, ge=0)
    """A worker whose event loop a workflow has blocked for this long, and for two leases, ends itself with all stacks
    on stderr and exit code 70; one that never lets go of the interpreter is ended after three times as long, with
    code 1. 0: never, as for a debugger."""
    trace_dir: Path | None = None
    """Folder for one JSON line an episode, in a file of each worker process; ``forebay trace export`` makes of them
    what Perfetto shows. None: off."""
    trace_max_bytes: int = Field(64 * 2**20, ge=4096)
    """Of a worker's file in `trace_dir`; past it the file is set aside, in place of the one before."""

    @field_validator("trace_dir", mode="before")
    @classmethod
    def _empty_is_off(cls, value: object) -> object:
        return None if value == "" else value
