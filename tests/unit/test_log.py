"""The loggers of workflows: as those of the standard library are called."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from structlog.testing import capture_logs

from forebay import log
from forebay.log import getLogger


def lines(call: Any) -> list[Any]:
    """What a call writes."""
    with capture_logs() as found:
        call(getLogger("my_workflow"))
    return list(found)


@pytest.mark.parametrize(
    ("args", "event"),
    [
        (("score %s of %d", "x", 3), "score x of 3"),
        (("%(a)s and %(b)s", {"a": 1, "b": 2}), "1 and 2"),
        (("100%",), "100%"),
        (("100% z", 3), "100% z (3,)"),
        (("one %s", 1, 2), "one %s (1, 2)"),
        ((ValueError("x"),), "x"),
    ],
)
def test_messages(args: tuple[Any, ...], event: str) -> None:
    """Messages are filled in as by logging; one that does not fit is written as it is and ends no episode."""
    (line,) = lines(lambda logger: logger.info(*args))
    assert line == {"event": event, "logger": "my_workflow", "log_level": "info"}


def test_events_with_fields() -> None:
    """Fields are kept; of the standard library's own arguments those are taken that have a counterpart."""
    (line,) = lines(lambda logger: logger.warning("reward.low", reward=0.1, extra={"task": 7}, stacklevel=2, event="x"))
    assert line == {
        "event": "reward.low", "reward": 0.1, "task": 7, "event_": "x", "logger": "my_workflow", "log_level": "warning",
    }  # fmt: skip


def test_levels() -> None:
    """All levels, by name and by number; exception has the traceback."""
    (line,) = lines(lambda logger: logger.exception("failed"))  # noqa: LOG004
    assert (line["log_level"], line["exc_info"]) == ("error", True)
    for level in ("debug", "info", "warning", "error", "critical"):
        (line,) = lines(lambda logger, level=level: getattr(logger, level)("x"))
        assert line["log_level"] == level
    for number, level in ((5, "debug"), (logging.INFO, "info"), (35, "warning"), (99, "critical")):
        (line,) = lines(lambda logger, number=number: logger.log(number, "x"))
        assert line["log_level"] == level


def test_one_that_was_made_before_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    """A logger at the top of a module, made before the process configures its logs, follows them; so does its level."""
    import structlog

    logger = getLogger("early", "of AReaL")
    before = structlog.get_config()
    try:
        log.configure(level="warning", json=True)
        logger.info("not seen")
        logger.error("seen %s", 1)
    finally:
        structlog.configure(**before)
    assert '"event": "seen 1"' in (text := capsys.readouterr().err)
    assert "not seen" not in text
