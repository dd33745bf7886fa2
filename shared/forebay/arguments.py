"""Objects that remember what they were made with, so that another process can make the like (contract, section 2)."""

from __future__ import annotations

import inspect
from typing import Any, Self

from forebay.errors import WorkflowError

__all__ = ["RemembersArguments", "constructor_arguments"]


class RemembersArguments:
    """Base of what travels as its class and its constructor's arguments."""

    _forebay_arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remember the constructor's arguments."""
        if cls.__init__ is object.__init__ and (args or kwargs):
            raise TypeError(f"{cls.__qualname__}() takes no arguments")  # object says so only where __new__ is its own
        self = super().__new__(cls)
        object.__setattr__(self, "_forebay_arguments", (args, kwargs))  # a frozen dataclass may be a workflow
        return self


def constructor_arguments(made: RemembersArguments) -> dict[str, Any]:
    """The arguments that `made` was made with, by name. Raises WorkflowError where one has no name."""
    args, kwargs = made._forebay_arguments
    bound = inspect.signature(type(made).__init__).bind(made, *args, **kwargs)
    named: dict[str, Any] = {}
    for at, (name, value) in enumerate(bound.arguments.items()):
        if at == 0:  # self
            continue
        kind = bound.signature.parameters[name].kind
        if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise WorkflowError(
                f"{type(made).__qualname__} was made with positional-only arguments, which do not travel; "
                "pass the class and workflow_kwargs"
            )
        named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return named
