"""Import strings and the allowlist of modules they may lead to (contract, section 2)."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from forebay.errors import ImportNotAllowedError, WorkflowError

__all__ = ["check_allowed", "import_object", "split"]


def split(name: str) -> tuple[str, str]:
    """``package.module:Name`` or ``package.module.Name`` as ``(module, name)``.

    Raises:
        ImportNotAllowedError: a name that is never imported.
        WorkflowError: it is no import string.
    """
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    parts = [*module.split("."), *attribute.split(".")]
    if not all(part.isidentifier() for part in parts):
        raise WorkflowError(f"{name!r} is no import string; write package.module:Name")
    if any(part.startswith("__") for part in parts):
        # `__main__` runs a program when it is imported, and others lead to what a module has from elsewhere.
        raise ImportNotAllowedError(f"{name!r}: what begins with two underscores is never imported")
    return module, attribute


def check_allowed(name: str, allowlist: Sequence[str]) -> None:
    """Raise ImportNotAllowedError unless the module of `name` lies under a prefix of `allowlist`."""
    module, _ = split(name)
    if not any(module == prefix or module.startswith(prefix + ".") for prefix in allowlist):
        raise ImportNotAllowedError(
            f"{name}: the module {module} is not in the run's import allowlist ({', '.join(allowlist)}); "
            "add its package to FOREBAY_IMPORT_ALLOWLIST of the collector, which publishes it"
        )


def _check_home(name: str, found: Any, allowlist: Sequence[str]) -> None:
    qualified = getattr(found, "__qualname__", None)
    if qualified is None:  # an object that was made in the module
        return
    home = getattr(found, "__module__", None)
    if not any(home == prefix or str(home).startswith(prefix + ".") for prefix in allowlist):
        raise ImportNotAllowedError(
            f"{name}: {qualified} is defined in {home or 'builtins'}, which is not in the run's import allowlist "
            f"({', '.join(allowlist)}); add it to FOREBAY_IMPORT_ALLOWLIST, or wrap it in a function of your own"
        )


def import_object(name: str, allowlist: Sequence[str]) -> Any:
    """The object that `name` leads to.

    Raises:
        ImportNotAllowedError: its module is not allowed, and nothing was imported; or the object was only imported
            into that module, from one that is not allowed.
        WorkflowError: there is no such module or attribute, or importing it failed.
    """
    check_allowed(name, allowlist)
    module, attribute = split(name)
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise WorkflowError(f"{name}: cannot import {module}: {error}; is it on the path (PYTHONPATH)?") from error
    except (Exception, SystemExit) as error:  # a user's module may fail in any way while it is imported
        raise WorkflowError(f"{name}: importing {module} failed: {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise WorkflowError(f"{name}: {module} has no {attribute}") from None
        if inspect.ismodule(found):
            raise ImportNotAllowedError(f"{name}: {part} is another module; name the module that defines the object")
    _check_home(name, found, allowlist)
    return found
