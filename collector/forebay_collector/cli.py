"""``forebay collector``."""

from __future__ import annotations

import asyncio
from typing import Annotated

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

    A second one stands by and takes over.
    """
    from forebay.settings import RunSettings, Settings, load
    from forebay_collector.service import run_collector

    given = {"batch_size": batch_size, "max_staleness": max_staleness}
    rules = load(RunSettings, **{name: value for name, value in given.items() if value is not None})
    asyncio.run(run_collector(load(Settings), rules))
