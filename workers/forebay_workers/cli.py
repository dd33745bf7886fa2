"""``forebay worker``."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(worker)


def worker(
    slots: Annotated[int | None, typer.Option(help="Episodes at once; default: FOREBAY_WORKER_MAX_SLOTS.")] = None,
) -> None:
    """Run episode slots of the run that the environment names, until SIGTERM. Start as many as you like."""
    from forebay.http_metrics import HttpSettings, Listen
    from forebay.settings import EngineSettings, Settings, load
    from forebay_workers.metrics_settings import WorkerMetricsSettings
    from forebay_workers.service import run_worker
    from forebay_workers.settings import WorkerSettings

    overrides = {} if slots is None else {"max_slots": slots}
    metrics = load(WorkerMetricsSettings)
    listen = None
    if metrics.port is not None:
        listen = Listen(
            metrics.port,
            metrics.host,
            load(HttpSettings).token,
            port_setting="FOREBAY_WORKER_METRICS_PORT",
            host_setting="FOREBAY_WORKER_METRICS_HOST",
        )
    asyncio.run(run_worker(load(Settings), load(EngineSettings), load(WorkerSettings, **overrides), listen))
