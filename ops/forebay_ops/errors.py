"""Errors of the local processes."""

from __future__ import annotations

from forebay.errors import ForebayError

__all__ = [
    "AlreadyUpError",
    "NotUpError",
    "ProcessFailedError",
    "RedisPortTakenError",
    "RedisStartError",
    "StackFailedError",
]


class StackFailedError(ForebayError, RuntimeError):
    """The local processes cannot go on; all of them have been stopped."""


class ProcessFailedError(StackFailedError):
    """A local process failed for good, or was not ready in time. The text quotes the end of its log."""


class AlreadyUpError(ForebayError, FileExistsError):
    """The local processes of this home are up already. The text names the supervisor's pid."""


class NotUpError(ForebayError, LookupError):
    """Nothing is up in this home."""


class RedisStartError(ForebayError, RuntimeError):
    """The embedded Redis could not be started. The text quotes the end of its log."""


class RedisPortTakenError(RedisStartError):
    """Another Redis server answers on the port of the embedded one."""
