"""``forebay collector``."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

import structlog
import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(collector)


def collector(
    batch_size: Annotated[int | None, typer.Option(help="Groups in a batch; default: FOREBAY_BATCH_SIZE.")] = None,
    max_staleness: Annotated[int | None, typer.Option(help="In versions; default: FOREBAY_MAX_STALENESS.")] = None,
) -> None:
    """Collect for the run that the environment names, until SIGTERM. It publishes the run's settings.

    Several share the work, and take over from one that ends.
    """
    from forebay.http_metrics import HttpSettings, Listen
    from forebay.settings import RunSettings, Settings, load, unknown_variables
    from forebay_collector.service import run_collector
    from forebay_collector.settings import CollectorSettings

    given = {"batch_size": batch_size, "max_staleness": max_staleness}
    rules = load(RunSettings, **{name: value for name, value in given.items() if value is not None})
    http = load(CollectorSettings)
    listen = None
    if http.http_port is not None:
        listen = Listen(
            http.http_port,
            http.http_host,
            load(HttpSettings).token,
            port_setting="FOREBAY_COLLECTOR_HTTP_PORT",
            host_setting="FOREBAY_COLLECTOR_HTTP_HOST",
        )
    for name, meant in unknown_variables(os.environ):
        structlog.get_logger(__name__).warning("setting.unknown", variable=name, meant=meant)
    asyncio.run(run_collector(load(Settings), rules, listen))
