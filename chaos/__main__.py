"""``python -m chaos``: kill, restart, let come to rest, judge. The last line is one JSON object."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from chaos.master import Progress, Result, run_chaos
from chaos.schedule import Action
from chaos.stack import ChaosConfig
from forebay import log
from forebay.errors import ForebayError

_LINE_EVERY_S = 5.0
_SHOWN = 10
_TERMINAL_RATE = 4


def main(argv: list[str] | None = None) -> int:
    """Run; the exit code: 0 if the guarantee held, 1 if not, 130 or 143 after a signal."""
    args = _arguments(argv)
    log.configure(level="critical")  # what processes say is in their logs
    console = Console(highlight=False, soft_wrap=True)
    folder = Path(args.folder or tempfile.mkdtemp(prefix="forebay-chaos-")).absolute()
    config = ChaosConfig(folder, args.seed, workers=args.workers)
    progress = Progress()
    keep = args.folder is not None
    console.print(f"seed {args.seed}, {args.duration:g} s of blows, {args.workers} workers; everything is in {folder}")
    try:
        result = asyncio.run(_run(config, args.duration, progress, console))
        keep = keep or result.failed
        _report(result, console)
        if result.failed:
            console.print(f"books and logs: {folder}")
    except ForebayError as error:
        keep = True
        console.print(f"error: {error}", markup=False)
        console.print(f"books and logs: {folder}")
        return 1
    except SystemExit:  # a signal; the code says which
        console.print("ended before its time: nothing is judged, and nothing of it runs any more")
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(result.line(), flush=True)
    return 1 if result.failed else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--duration", type=float, default=300.0, help="seconds of blows")
    parser.add_argument("--seed", type=int, default=None, help="of the blows and the prompts; default: the clock")
    parser.add_argument("--workers", type=int, default=3, help="worker processes")
    parser.add_argument("--folder", help="keep books and logs in this new folder; default: kept only after a fault")
    args = parser.parse_args(argv)
    if args.seed is None:
        args.seed = int(time.time())
    if args.workers < 1 or args.duration <= 0:
        parser.error("give 1 worker or more, and a duration above 0")
    return args


async def _run(config: ChaosConfig, duration_s: float, progress: Progress, console: Console) -> Result:
    with _shown(progress, duration_s, console):
        return await run_chaos(config, duration_s, progress)


@contextlib.contextmanager
def _shown(progress: Progress, duration_s: float, console: Console) -> Iterator[None]:
    """Show `progress`: a table that changes on a terminal, else a line now and then."""
    if console.is_terminal:
        with Live(get_renderable=lambda: _table(progress, duration_s), console=console, transient=True,
                  refresh_per_second=_TERMINAL_RATE):  # fmt: skip
            yield
        return
    task = asyncio.get_running_loop().create_task(_lines(progress, console))
    try:
        yield
    finally:
        task.cancel()


async def _lines(progress: Progress, console: Console) -> None:
    while True:
        await asyncio.sleep(_LINE_EVERY_S)
        console.print(" ".join(f"{name}={value}" for name, value in _facts(progress)), markup=False)


def _facts(progress: Progress) -> list[tuple[str, str]]:
    count = progress.counters.get
    names = ("submitted", "requeued", "delivered", "rejected", "evicted", "leases_lost", "handed_back", "duplicates")
    return [
        ("phase", progress.phase),
        ("seconds", f"{time.monotonic() - progress.began:.0f}"),
        ("kills", str(progress.kills.total())),
        ("version", str(progress.version)),
        *((name, str(count(name, 0))) for name in names),
        ("in_flight", str(progress.in_flight)),
        ("last", progress.last.replace(" ", ":") or "-"),
    ]


def _table(progress: Progress, duration_s: float) -> Table:
    table = Table(title=f"chaos, {duration_s:g} s of blows", show_header=False)
    for name, value in _facts(progress):
        table.add_row(name, value)
    for target, kills in sorted(progress.kills.items()):
        table.add_row(f"kills of {target}", str(kills))
    return table


def _report(result: Result, console: Console) -> None:
    verdict = result.verdict
    table = Table(title=f"seed {result.seed}: {result.seconds:.0f} s of blows", show_header=False)
    kills = sum(result.kills.values())
    rows = {
        "kills": f"{kills} ({kills * 60 / result.seconds:.1f} a minute)",
        **{f"  {name}": _by_signal(result, name, count) for name, count in result.kills.items()},
        "prompts submitted": str(verdict.groups),
        "groups delivered": f"{verdict.delivered} in {verdict.batches} batches",
        "hand-overs again": str(verdict.redelivered),
        "rejected, evicted": f"{verdict.rejected}, {verdict.evicted}",
        "batches dissolved": str(result.dissolved),
        "staleness": ", ".join(f"{age}: {count}" for age, count in sorted(verdict.staleness.items())),
        "slots of killed workers": str(result.recoveries),
        "recovery p50, p99": f"{_seconds(result.recovery_p50_s)}, {_seconds(result.recovery_p99_s)}",
        "recovery, undisturbed, max": _seconds(result.recovery_max_s),
        "lost, duplicated, stale": f"{len(verdict.lost)}, {len(verdict.duplicated)}, {len(verdict.stale)}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    for kind, faults in (("lost", verdict.lost), ("duplicated", verdict.duplicated), ("stale", verdict.stale),
                         ("wrong content", verdict.wrong), ("fault", result.faults)):  # fmt: skip
        for fault in faults[:_SHOWN]:
            console.print(f"{kind}: {fault}", markup=False)
        if len(faults) > _SHOWN:
            console.print(f"{kind}: and {len(faults) - _SHOWN} more")


def _by_signal(result: Result, target: str, count: int) -> str:
    of = [f"{signal} {result.signals.get((target, signal), 0)}" for signal in Action]
    return f"{count}: {', '.join(of)}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


if __name__ == "__main__":
    sys.exit(main())
