"""The rules of Redis users, held against the code that needs them."""

from __future__ import annotations

import inspect
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from forebay.store.acl import DIRECT, SCRIPTS, Role, commands, key_patterns, rules
from forebay.store.base import StoreBase
from forebay.store.keys import Keys
from forebay.store.leading import LeaderCalls
from forebay.store.ledgers import LedgerCalls
from forebay.store.looking import LookCalls
from forebay.store.owning import OwnerCalls
from forebay.store.producing import ProducerCalls
from forebay.store.scripts import names, source
from forebay.store.store import Store
from forebay.store.training import TrainerCalls
from forebay.store.working import WorkerCalls

OWN = {
    Role.TRAINER: (StoreBase, Store, ProducerCalls, TrainerCalls, LedgerCalls, LookCalls),
    Role.WORKER: (WorkerCalls,),
    Role.COLLECTOR: (LeaderCalls, OwnerCalls),
}
DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"
READ_BY_ALL = {"dynamic"}
"""Defined among the collector's calls, and run by trainers."""


def text_of(role: Role) -> str:
    """The source of what `role` calls."""
    return "\n".join(inspect.getsource(found) for found in OWN[role])


def test_every_script_has_a_role() -> None:
    """9: a script that no role may run would be refused on a server with ACLs: name it in `acl.SCRIPTS`."""
    assert set(names()) == {script for scripts in SCRIPTS.values() for script in scripts}


@pytest.mark.parametrize("role", Role)
def test_the_scripts_of_a_role(role: Role) -> None:
    """9: each role's table has the scripts that its methods run."""
    run = set(re.findall(r"""_run\(\s*"(\w+)\"""", text_of(role)))
    assert run - READ_BY_ALL <= set(SCRIPTS[role])


@pytest.mark.parametrize("role", Role)
def test_the_commands_of_a_role(role: Role) -> None:
    """9: each role's rules have the commands that its methods send themselves."""
    text = text_of(role)
    sent = {command.lower() for command in re.findall(r"""\(\s*"([A-Z]{3,})"[,)]""", text)} - {"script"}
    sent |= set(re.findall(r"\bpipe\.(?!execute)(\w+)\(", text)) | set(re.findall(r"self\._redis\.(x\w+)\(", text))
    assert sent <= {command.partition("|")[0] for command in commands(role)}


@pytest.mark.parametrize("role", Role)
def test_no_role_has_a_dangerous_command(role: Role) -> None:
    """9: none may read or change the server itself, other runs, or all keys."""
    forbidden = "keys scan flushdb flushall config acl debug eval monitor shutdown save client subscribe publish"
    assert not set(forbidden.split()) & {command.partition("|")[0] for command in commands(role)}
    assert all(command == command.lower() for command in DIRECT[role])


@pytest.mark.parametrize("role", Role)
def test_keys_are_of_one_run(role: Role) -> None:
    """9: the patterns cover every name in `keys.py` and arq's records, and nothing of another run."""
    patterns = [pattern.rpartition("~")[2].replace("[^", "[!") for pattern in key_patterns(role, "a/b")]
    keys = Keys("a/b")
    named = [
        getattr(keys, name)
        for name, value in vars(Keys).items()
        if isinstance(value, property) and name not in ("prefix", "run")
    ]
    for name in (*named, keys.prefix, keys.group(3), keys.rows(1, 2, 3), f"arq:job:{keys.job_id(1, 2, 3)}"):
        assert any(fnmatchcase(name, pattern) for pattern in patterns), name
    other = Keys("a/c")
    for name in (other.settings, other.group(3), f"arq:job:{other.job_id(1, 2, 3)}", "forebay:", "arq:queue"):
        assert not any(fnmatchcase(name, pattern) for pattern in patterns), name
    assert "'arq:job:'" in source("admit").text


@pytest.mark.parametrize("role", Role)
def test_the_document_has_the_rules(role: Role) -> None:
    """9: what docs/security.md gives to be pasted is what `forebay acl` prints."""
    assert f"ACL SETUSER forebay-{role.value} reset on >PASSWORD {rules(role, 'dev/trial0')}\n" in DOCUMENT.read_text()
