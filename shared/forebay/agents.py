"""Agents: anything with ``async def run(data, **extra)`` (contract, sections 2 and 9).

Here is how they are told apart and named; running them takes a proxy for their model calls, which this release does
not have.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, Self

from forebay.arguments import RemembersArguments, constructor_arguments
from forebay.errors import WorkflowError, WorkflowTypeError

__all__ = ["Agent", "AgentWorkflow", "agent_arguments", "check_agent", "module_level_name"]

_EXTRA = ("base_url", "api_key", "http_client")
"""What ``run`` is called with besides the data."""


class Agent(Protocol):
    """What an agent has."""

    @property
    def run(self) -> Callable[..., Awaitable[Any]]:
        """A coroutine function of ``(data, **extra)``: a reward, or ``{interaction_id: reward}``."""
        ...  # a type checker takes it for the body


class AgentWorkflow(RemembersArguments, ABC):
    """Deprecated base of agents, which need none: any class with ``async def run(data, **extra)`` is one."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Warn, and remember the constructor's arguments."""
        warnings.warn(
            f"{cls.__qualname__}: AgentWorkflow is deprecated; an agent needs no base class, only "
            "`async def run(self, data, **extra)`",
            DeprecationWarning,
            stacklevel=2,
        )
        return super().__new__(cls, *args, **kwargs)

    @abstractmethod
    async def run(self, data: dict[str, Any], **extra: Any) -> Any:
        """Run one episode: its reward, or ``{interaction_id: reward}``."""


def check_agent(found: Any, shown: str) -> None:
    """Raise WorkflowTypeError, which names `shown`, unless `found`, a class or an instance, is an agent."""
    run = None if inspect.ismodule(found) else getattr(found, "run", None)
    if run is None:
        raise WorkflowTypeError(
            f"{shown} is no RolloutWorkflow, and no agent either: it has no `async def run(data, **extra)`; pass a "
            "RolloutWorkflow (an instance, a subclass, or its import string)"
        )
    if not inspect.iscoroutinefunction(run):
        raise WorkflowTypeError(f"{shown}: an agent's run must be a coroutine function: `async def run(data, **extra)`")
    bound_later = inspect.isclass(found) and inspect.isfunction(inspect.getattr_static(found, "run", None))
    try:
        inspect.signature(run).bind(*([None] if bound_later else []), {}, **dict.fromkeys(_EXTRA))
    except TypeError as error:
        raise WorkflowTypeError(
            f"{shown}: an agent's run is called as run(data, {', '.join(f'{name}=...' for name in _EXTRA)}), and this "
            f"one cannot be: {error}; write `async def run(self, data, **extra)`"
        ) from None


def module_level_name(found: Any) -> str | None:
    """``module:name`` of an instance that the module of its class holds at its top level."""
    module = type(found).__module__
    for name, value in getattr(sys.modules.get(module), "__dict__", {}).items():
        if value is found and module != "__main__":
            return f"{module}:{name}"
    return None


def agent_arguments(agent: Any) -> dict[str, Any]:
    """The constructor's arguments of an agent's instance.

    Raises:
        WorkflowError: they cannot be known.
    """
    if isinstance(agent, RemembersArguments):
        return constructor_arguments(agent)
    if dataclasses.is_dataclass(agent):
        return {item.name: getattr(agent, item.name) for item in dataclasses.fields(agent) if item.init}
    if type(agent).__init__ is object.__init__ and not getattr(agent, "__dict__", None):
        return {}
    raise WorkflowError(
        f"an instance of {type(agent).__qualname__} does not say what it was made with, so that no worker can make it "
        "again; pass the class and workflow_kwargs, make it a dataclass, or put the instance at the top level of a "
        "module and pass its import string"
    )
