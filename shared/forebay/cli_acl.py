"""``forebay acl``: the rules of the users of Redis, to be pasted."""

from __future__ import annotations

from typing import Annotated

import typer

from forebay.settings import Settings, load
from forebay.store.acl import Role, rules

__all__ = ["acl", "register"]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(acl)


def acl(
    role: Annotated[Role | None, typer.Argument(help="One role; default: all.")] = None,
    acl_file: Annotated[bool, typer.Option("--file", help="As lines of an ACL file, instead of commands.")] = False,
) -> None:
    """Print a user of Redis for each role, with the least rights, for the run that the environment names.

    Replace PASSWORD, by one of each role.
    """
    run = load(Settings).run
    for one in Role if role is None else [role]:
        words = "user" if acl_file else "ACL SETUSER"
        print(f"{words} forebay-{one.value} reset on >PASSWORD {rules(one, run)}")
