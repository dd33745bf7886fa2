"""The category of forebay's Python warnings, so that a program can silence or raise these alone."""

from __future__ import annotations

__all__ = ["ForebayWarning"]


class ForebayWarning(UserWarning):
    """Something that was asked for is ignored or left out. Like any warning, it is shown once for each place."""
