"""What each role's user of Redis has to be allowed, and no more: commands and key patterns.

Redis checks the commands and keys of a script against the rights of the user who runs it. So a role needs what it sends
itself and what its scripts call, which is read from the scripts; all keys are those of one run, arq's among them.
``tests/unit/test_acl.py`` holds the tables against the code, ``tests/integration/test_acl_pipeline.py`` runs a pipeline
with exactly these rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from forebay.store.keys import Keys
from forebay.store.scripts import source

__all__ = ["DIRECT", "SCRIPTS", "Role", "commands", "key_patterns", "rules"]

_CALL = re.compile(r"""call\(\s*'([A-Z]+)'(?:\s*,\s*'([A-Z]+)')?""")
_CONTAINERS = frozenset({"XGROUP", "XINFO"})
"""Commands whose sub-command is allowed by itself."""


class Role(StrEnum):
    """Who connects to Redis."""

    TRAINER = "trainer"
    """Trainers and producers: whoever uses the client, ``forebay submit``, ``status`` and the other commands."""
    WORKER = "worker"
    COLLECTOR = "collector"


SCRIPTS: Final[Mapping[Role, tuple[str, ...]]] = MappingProxyType(
    {
        Role.TRAINER: (
            "ack", "collect", "discard", "dynamic", "end_of_data", "forget_key", "join", "look", "owners",
            "reconcile", "recover", "redrive", "resume", "resume_after", "rolled_back", "set_version", "spoil_batch",
            "submit", "take", "take_back",
        ),
        Role.WORKER: (
            "admit", "claim", "first_keys", "heartbeat", "publish", "release", "rolled_back", "set_aside",
        ),
        Role.COLLECTOR: (
            "commit", "configure", "cut", "evict", "give_up", "hold", "lead", "look", "owners", "reap", "resign",
            "rolled_back", "set_aside", "spoil_group", "sweep",
        ),
    }
)  # fmt: skip
"""The scripts that each role runs."""

_EVERYBODY = (
    "evalsha script|load ping info get exists hget hgetall hlen hmget mget smembers scard xlen zcard zrange time multi "
    "exec"
)
DIRECT: Final[Mapping[Role, frozenset[str]]] = MappingProxyType(
    {
        Role.TRAINER: frozenset(f"{_EVERYBODY} sadd srem xread xrevrange zrevrange".split()),
        # blpop: to be woken; psetex: arq's record of its health.
        Role.WORKER: frozenset(f"{_EVERYBODY} blpop hdel hsetnx psetex sadd set zrem".split()),
        Role.COLLECTOR: frozenset(f"{_EVERYBODY} blpop del lrange lrem xread".split()),
    }
)
"""The commands that each role sends itself, as rules name them."""


def commands(role: Role) -> list[str]:
    """All commands of `role`, as rules name them, sorted."""
    found = set(DIRECT[role])
    for script in SCRIPTS[role]:
        for command, second in _CALL.findall(source(script).text):
            found.add(f"{command}|{second}".lower() if command in _CONTAINERS else command.lower())
    return sorted(found)


def key_patterns(role: Role, run: str) -> list[str]:
    """The keys of `run`, ``experiment/trial``, and its jobs' records, whose names arq decides.

    The run's settings, which hold the allowlist of imports, are the collector's to write, and others' to read.
    """
    keys = Keys(run)
    jobs = f"~arq:*:{{{run}}}:*"
    if role is Role.COLLECTOR:
        return [f"~{keys.prefix}*", jobs]
    # Rules can only allow: these are the names that do not begin with "set", and what scripts are given, the prefix.
    others = [f"~{keys.prefix}{rest}" for rest in ("", "[^s]*", "s[^e]*", "se[^t]*")]
    return [*others, f"%R~{keys.settings}", jobs]


def rules(role: Role, run: str) -> str:
    """What follows the user's name and password in ``ACL SETUSER`` or a line of an ACL file."""
    patterns, allowed = " ".join(key_patterns(role, run)), " ".join(f"+{command}" for command in commands(role))
    return f"resetkeys {patterns} resetchannels -@all {allowed}"
