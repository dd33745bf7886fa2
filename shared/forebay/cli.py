"""The ``forebay`` command. Sub-commands come from the entry points of the installed packages."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path

import typer
from redis.exceptions import RedisError
from rich.console import Console

from forebay import log
from forebay.errors import ForebayError
from forebay.redaction import Redactor, excepthook

__all__ = ["build_app", "main"]


def build_app() -> typer.Typer:
    """The application with the commands of every installed package."""
    app = typer.Typer(
        name="forebay",
        help="The rollout layer of LLM reinforcement learning as a message-queue pipeline.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,  # help texts have brackets of their own
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def options(
        debug: bool = typer.Option(False, "--debug", help="Show tracebacks.", envvar="FOREBAY_DEBUG"),
    ) -> None:
        if debug:
            os.environ["FOREBAY_DEBUG"] = "1"

    for entry in sorted(entry_points(group="forebay.commands"), key=lambda found: found.name):
        entry.load()(app)
    return app


def main() -> None:
    """Run the command. An error of ours is one line on stderr and exit code 2."""
    log.configure()
    redact = Redactor(os.environ)
    sys.excepthook = excepthook(redact)
    folder = str(Path.cwd())
    if folder not in sys.path:
        # Workflows and rewards of the project in this folder, as with `python -m`; the allowlist still rules.
        sys.path.insert(0, folder)
    try:
        build_app()()
    except ForebayError as error:
        if os.environ.get("FOREBAY_DEBUG", "") not in ("", "0"):
            raise
        _show(redact(str(error)))
        sys.exit(2)
    except RedisError as error:
        _show(f"Redis refused the call: {redact(str(error))}; check REDIS_URL and its database number")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _show(text: str) -> None:
    plain = text.replace("[", r"\[")
    Console(stderr=True, highlight=False, soft_wrap=True, emoji=False).print(f"[red]error:[/] {plain}")
