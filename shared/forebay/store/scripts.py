"""Loads the Lua scripts. Each transition that must happen exactly once is one file in ``lua/``.

``_lib.lua`` comes before each of them, a further library before those whose comments say ``uses _NAME``.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

__all__ = ["Script", "name_of", "names", "source"]


@dataclass(frozen=True, slots=True)
class Script:
    """A script and the name by which the server knows it once it is loaded."""

    text: str
    sha1: str


@cache
def source(name: str) -> Script:
    """Script `name`, with the shared libraries before it."""
    folder = files("forebay.store") / "lua"
    own = (folder / f"{name}.lua").read_text()
    libraries = ["_lib", *re.findall(r"^--.*\buses (_\w+)$", own, re.MULTILINE)]
    text = "".join((folder / f"{library}.lua").read_text() for library in libraries) + own
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


@cache
def names() -> tuple[str, ...]:
    """All scripts, without the libraries."""
    found = (entry.name for entry in (files("forebay.store") / "lua").iterdir())
    return tuple(sorted(name.removesuffix(".lua") for name in found if name.endswith(".lua") and name[0] != "_"))


def name_of(sha1: str) -> str:
    """The script that the server knows by `sha1`; "" if it is none of ours."""
    return next((name for name in names() if source(name).sha1 == sha1), "")
