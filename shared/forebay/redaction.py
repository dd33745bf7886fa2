"""Secrets do not leave a process by its texts: log lines, error lines, tracebacks.

No message of ours is made of one. This is the second line of defence, for texts that others make: the user and password
of any URL, and what this process was itself given as a secret, are replaced by ``***``.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from urllib.parse import unquote, urlsplit

__all__ = ["HIDDEN", "RedactingFormatter", "Redactor", "excepthook", "is_secret", "without_userinfo"]

HIDDEN = "***"
_USERINFO = re.compile(r"(?<=://)[^\s'\"<>]*@")
_SECRET_NAME = re.compile(r"(?i)(?:^|_)(?:token|api_?key|key|secret|password|passwd)$")
_LEAST = 4
"""Characters of a secret that is looked for as it is: shorter ones would turn up in words of the text."""


def is_secret(name: str) -> bool:
    """Whether the setting or variable `name` holds a secret, by its name."""
    return bool(_SECRET_NAME.search(name))


def without_userinfo(text: str) -> str:
    """`text` with the user and password of each URL in it replaced."""
    return _USERINFO.sub(f"{HIDDEN}@", text) if "@" in text else text


class Redactor:
    """Replaces secrets in texts: those of URLs, and those that `environment` holds."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        found: set[str] = set()
        for name, value in environment.items():
            if name == "REDIS_URL":
                found |= _password(value)
            elif name.startswith("FOREBAY_") and is_secret(name):
                found.add(value)
        known = {form for secret in found if len(secret) >= _LEAST for form in (secret, json.dumps(secret)[1:-1])}
        # The longest first: of a secret that contains another nothing may stay.
        self._known = tuple(sorted(known, key=len, reverse=True))

    def __call__(self, text: str) -> str:
        """`text` without secrets."""
        text = without_userinfo(text)
        for secret in self._known:
            text = text.replace(secret, HIDDEN)
        return text


def _password(url: str) -> set[str]:
    try:
        password = urlsplit(url).password or ""
    except ValueError:  # no URL
        return {url}
    return {password, unquote(password)}


class RedactingFormatter(logging.Formatter):
    """For handlers of :mod:`logging`, tracebacks included."""

    def __init__(self, pattern: str, redact: Callable[[str], str]) -> None:
        super().__init__(pattern)
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        """The line without secrets."""
        return self._redact(super().format(record))


def excepthook(
    redact: Callable[[str], str],
) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    """A ``sys.excepthook`` that writes the usual traceback, without secrets."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.stderr.write(redact("".join(traceback.format_exception(kind, error, trace))))

    return hook
