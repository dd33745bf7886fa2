"""``python -m benchmarks [NAME ...] [--json FILE]``: run the benchmarks and print their figures."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from forebay import log
from forebay.errors import ForebayError

if TYPE_CHECKING:
    from benchmarks.measure import Report, Series

_BENCHMARKS = ("codec", "start_latency", "slots", "pipeline")
_WIDTH = 120
"""Of the table where the output is no terminal."""


def main(argv: list[str] | None = None) -> int:
    """Run what was asked for; returns the exit code."""
    args = _arguments(argv)
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    if args.list:
        for name in _BENCHMARKS:
            console.print(f"[bold]{name:14}[/] {_summary(name)}", highlight=False, soft_wrap=True)
        return 0
    log.configure(level="warning")
    # SIGTERM as Ctrl-C: it ends in order whatever runs, the processes that were started included. And a shell that
    # starts us in the background has SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        figures = {name: _run(name, console) for name in args.names or _BENCHMARKS}
    except ForebayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": _machine(), "benchmarks": figures}, indent=2) + "\n")
        print(f"wrote {args.json}")
    return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Compare ways of doing the same.")
    # No choices=: argparse would check the empty list of no names against them.
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(_BENCHMARKS)} (default: all)")
    parser.add_argument("--list", action="store_true", help="say what each compares, and run none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures, round by round")
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(_BENCHMARKS):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(_BENCHMARKS)}")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: there is no such folder")
    return args


def _summary(name: str) -> str:
    return (importlib.import_module(f"benchmarks.{name}").__doc__ or "").partition("\n")[0]


def _run(name: str, console: Console) -> dict[str, Any]:
    module = importlib.import_module(f"benchmarks.{name}")
    began = time.monotonic()

    def say(line: str) -> None:
        console.print(
            f"{name} [{time.monotonic() - began:4.1f} s] {line}", markup=False, highlight=False, soft_wrap=True
        )

    report: Report = module.run(say)
    console.print(_table(report))
    for note in report.notes:
        console.print(note, highlight=False, soft_wrap=True)
    console.print()
    return {
        "title": report.title,
        "reference": report.reference,
        "notes": report.notes,
        "figures": [series.as_dict() for series in report.series],
        "seconds": time.monotonic() - began,
    }


def _table(report: Report) -> Table:
    table = Table(title=f"{report.title} (ratios to {report.reference})", title_justify="left")
    for column in ("figure", "way"):
        table.add_column(column)
    for column in ("unit", "median", "lowest - highest", "ratio", "lowest - highest"):
        table.add_column(column, justify="right", no_wrap=True)
    last = ""
    for series in report.series:
        if last and series.what != last:
            table.add_section()
        table.add_row(series.what if series.what != last else "", series.way, series.unit, *_cells(series))
        last = series.what
    return table


def _cells(series: Series) -> list[str]:
    summary = series.as_dict()
    cells = [_number(series.median), _range(series.values), "", ""]
    if series.ratios:
        cells[2:] = [f"{_number(summary['ratio'])}x", _range(series.ratios)]
    return cells


def _range(values: tuple[float, ...]) -> str:
    return "" if len(values) < 2 else f"{_number(min(values))} - {_number(max(values))}"


def _number(value: float) -> str:
    """Three digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "system": platform.system(), "python": platform.python_version()}


if __name__ == "__main__":
    sys.exit(main())
