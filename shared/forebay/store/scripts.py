"""Loads the Lua scripts. Each transition that must happen exactly once is one file in ``lua/``."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

__all__ = ["source"]


@cache
def source(name: str) -> str:
    """The text of script `name`, with the shared library before it."""
    folder = files("forebay.store") / "lua"
    return (folder / "_lib.lua").read_text() + (folder / f"{name}.lua").read_text()
