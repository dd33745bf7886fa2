"""``forebay worker`` and ``forebay trace export``."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(worker)
    trace = typer.Typer(help="Sessions that workers wrote to FOREBAY_WORKER_TRACE_DIR.", no_args_is_help=True)
    trace.callback()(_trace)
    trace.command()(export)
    app.add_typer(trace, name="trace")


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


def _trace() -> None:
    """Sessions that workers wrote to FOREBAY_WORKER_TRACE_DIR."""


def export(
    folder: Annotated[Path, typer.Argument(help="What FOREBAY_WORKER_TRACE_DIR was.")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("trace.json"),
) -> None:
    """Make one trace of the sessions of all workers, for https://ui.perfetto.dev or chrome://tracing."""
    from forebay.errors import SettingsError
    from forebay.trace_files import chrome_trace, read_sessions

    try:
        trace = chrome_trace(read_sessions(folder))
        if not trace["otherData"]["sessions"]:
            raise SettingsError(f"no sessions in {folder}; name the folder that FOREBAY_WORKER_TRACE_DIR was set to")
        out.write_text(json.dumps(trace, separators=(",", ":")), encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{error.filename}: {error.strerror}") from None
    print(f"{out}: {trace['otherData']['sessions']} sessions; open it at https://ui.perfetto.dev")
