"""Loads the Lua scripts. Each transition that must happen exactly once is one file in ``lua/``."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

__all__ = ["Script", "source"]


@dataclass(frozen=True, slots=True)
class Script:
    """A script and the name by which the server knows it once it is loaded."""

    text: str
    sha1: str


@cache
def source(name: str) -> Script:
    """Script `name`, with the shared library before it."""
    folder = files("forebay.store") / "lua"
    text = (folder / "_lib.lua").read_text() + (folder / f"{name}.lua").read_text()
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
