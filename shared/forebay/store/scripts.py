"""Loads the Lua scripts. Each transition that must happen exactly once is one file in ``lua/``.

``_lib.lua`` comes before each of them, a further library before those whose comments say ``uses _NAME``.

A server that has no memory left (``maxmemory``, policy noeviction) refuses a script before its first command, or lets
it run to its end, as its ``#!lua`` line says. Without that line it would depend on the order of its writes: a script
passes whose first write frees something. Refused are the scripts that begin something new, whose comments say so:
``Refused when memory is short``. All others may run then, since they free memory (acks, commits, hand-overs), or keep
what is there (heart-beats, leases).
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


_REFUSED = re.compile(r"^-- Refused when memory is short\.$", re.MULTILINE)


@cache
def source(name: str, *, always: bool = False) -> Script:
    """Script `name`, with the shared libraries before it; one that runs when memory is short too if `always`."""
    folder = files("forebay.store") / "lua"
    own = (folder / f"{name}.lua").read_text()
    libraries = ["_lib", *re.findall(r"^--.*\buses (_\w+)$", own, re.MULTILINE)]
    begin = "#!lua\n" if _REFUSED.search(own) and not always else "#!lua flags=allow-oom\n"
    text = begin + "".join((folder / f"{library}.lua").read_text() for library in libraries) + own
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


@cache
def names() -> tuple[str, ...]:
    """All scripts, without the libraries."""
    found = (entry.name for entry in (files("forebay.store") / "lua").iterdir())
    return tuple(sorted(name.removesuffix(".lua") for name in found if name.endswith(".lua") and name[0] != "_"))


def name_of(sha1: str) -> str:
    """The script that the server knows by `sha1`; "" if it is none of ours."""
    return next((name for name in names() if source(name).sha1 == sha1), "")
