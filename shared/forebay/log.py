"""Logs are events with fields, one line each: readable on a terminal, JSON elsewhere."""

from __future__ import annotations

import logging
import os
import sys

import stamina.instrumentation
import structlog

__all__ = ["configure"]


def configure(*, level: str | None = None, json: bool | None = None) -> None:
    """Set the process's logging up; `level` defaults to ``FOREBAY_LOG_LEVEL``, `json` to ``FOREBAY_LOG_JSON``."""
    chosen = (level or os.environ.get("FOREBAY_LOG_LEVEL") or "info").upper()
    as_json = json if json is not None else os.environ.get("FOREBAY_LOG_JSON", "") not in ("", "0")
    stamina.instrumentation.set_on_retry_hooks(())  # the store says once that it waits; a line a retry is noise
    number = logging.getLevelNamesMapping().get(chosen, logging.INFO)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=28)
    )
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
