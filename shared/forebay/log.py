"""Logs are events with fields, one line each: readable on a terminal, JSON elsewhere."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

import stamina.instrumentation
import structlog

from forebay.redaction import RedactingFormatter, Redactor

__all__ = ["Logger", "configure", "getLogger"]


def configure(*, level: str | None = None, json: bool | None = None) -> None:
    """Set the process's logging up; `level` defaults to ``FOREBAY_LOG_LEVEL``, `json` to ``FOREBAY_LOG_JSON``.

    No line holds a secret that the environment has, or the password of a URL.
    """
    chosen = (level or os.environ.get("FOREBAY_LOG_LEVEL") or "info").upper()
    as_json = json if json is not None else os.environ.get("FOREBAY_LOG_JSON", "") not in ("", "0")
    stamina.instrumentation.set_on_retry_hooks(())  # the store says once that it waits; a line a retry is noise
    number = logging.getLevelNamesMapping().get(chosen, logging.INFO)
    redact = Redactor(os.environ)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RedactingFormatter("%(levelname)s %(name)s: %(message)s", redact))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    # The default of structlog writes the local variables of each frame beside a traceback, whatever they hold.
    plain = structlog.dev.plain_traceback
    render: Any = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=28, exception_formatter=plain)
    )

    def renderer(logger: Any, method: str, event: structlog.typing.EventDict) -> str:
        return redact(render(logger, method, event))

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if not as_json else "iso", utc=as_json),
            structlog.processors.format_exc_info if as_json else _keep,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


def _keep(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return event


class Logger:
    """The calls of the standard library's loggers on top of ours: messages with ``%s``, or events with fields.

    A line carries the run, task_id, sample_idx and attempt of the episode that wrote it. A message whose arguments do
    not fit its ``%`` is written with both as they are: a log line ends no episode.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._log = structlog.get_logger()  # finds its configuration at the first line, not now

    def debug(self, message: object, *args: object, **fields: Any) -> None:
        """For developers."""
        self._write("debug", message, args, fields)

    def info(self, message: object, *args: object, **fields: Any) -> None:
        """As expected."""
        self._write("info", message, args, fields)

    def warning(self, message: object, *args: object, **fields: Any) -> None:
        """Not as expected; the work goes on."""
        self._write("warning", message, args, fields)

    warn = warning

    def error(self, message: object, *args: object, **fields: Any) -> None:
        """Something failed."""
        self._write("error", message, args, fields)

    def exception(self, message: object, *args: object, **fields: Any) -> None:
        """Something failed; with the traceback of the exception that is being handled."""
        self._write("error", message, args, {"exc_info": True, **fields})

    def critical(self, message: object, *args: object, **fields: Any) -> None:
        """The process cannot go on."""
        self._write("critical", message, args, fields)

    fatal = critical

    def log(self, level: int, message: object, *args: object, **fields: Any) -> None:
        """At one of :mod:`logging`'s numbers; what lies between two levels counts as the lower."""
        below = [number for number in _LEVELS if number <= level]
        self._write(_LEVELS[max(below, default=logging.DEBUG)], message, args, fields)

    def _write(self, level: str, message: object, args: tuple[object, ...], fields: dict[str, Any]) -> None:
        text = str(message)
        if args:
            given: Any = args[0] if len(args) == 1 and args[0] and isinstance(args[0], Mapping) else args
            try:
                text %= given
            except (TypeError, ValueError, KeyError):
                text = f"{text} {args!r}"
        for name in ("stacklevel", "stack_info"):  # of the standard library, without a counterpart
            fields.pop(name, None)
        extra = fields.pop("extra", None)
        fields = {**extra, **fields} if isinstance(extra, Mapping) else fields
        if "event" in fields:
            fields["event_"] = fields.pop("event")
        getattr(self._log, level)(text, **{"logger": self.name, **fields})


_LEVELS = {
    logging.DEBUG: "debug",
    logging.INFO: "info",
    logging.WARNING: "warning",
    logging.ERROR: "error",
    logging.CRITICAL: "critical",
}


def getLogger(name: str = "forebay", *_: object) -> Logger:  # noqa: N802 (the name that ported workflows import)
    """A logger for workflows and rewards, called as those of :mod:`logging` are; further arguments are ignored."""
    return Logger(name)
