"""What an episode is, and how a workflow is named on the wire (contract, section 2)."""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from forebay.agents import Agent, agent_arguments, check_agent, module_level_name
from forebay.arguments import RemembersArguments, constructor_arguments
from forebay.errors import WorkflowError
from forebay.imports import check_allowed, import_object, split
from forebay.notices import ForebayWarning
from forebay.pretrained import PretrainedCache
from forebay.wire.values import callable_name, decode_plain, encode_kwargs

if TYPE_CHECKING:
    from forebay.generation import InferenceEngine

__all__ = [
    "NamedWorkflow",
    "RolloutWorkflow",
    "WorkflowKind",
    "WorkflowLike",
    "build_workflow",
    "name_callable",
    "name_workflow",
]


class RolloutWorkflow(RemembersArguments, ABC):
    """One way to turn a prompt into a rollout. One instance serves all episodes of a worker process.

    An instance remembers the arguments it was made with, so that it can be submitted as it is; what its attributes
    become later does not travel.
    """

    @abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """Run one episode.

        Args:
            engine: generates; shared with the other episodes of the process.
            data: the prompt as it was submitted, a copy of this slot's own.

        Returns:
            A tensor dict of one or more rows (keys and shapes in the contract, section 3: ``input_ids`` and
            ``attention_mask`` [B, S] at least), or None: the episode is rejected and not trained on. Keys of the
            workflow's own, of bools, integers or floats, are [B], a value for each row, or [B, S], one for each token;
            which of them is told by the number of dimensions, and any other shape fails the slot.
        """

    @classmethod
    def check_arguments(cls, **kwargs: Any) -> None:
        """Refuse arguments that fit the constructor's signature but cannot be right; by default nothing is refused.

        Called by ``submit`` with the arguments as they were passed (an absent one is absent, defaults are not filled
        in), so that a mistake is an error where it was made and not a failed slot on some worker. It should be quick:
        load nothing. Where a subclass has a constructor of its own, a check that it inherits is not called: it knows
        other arguments.

        Raises:
            Exception: any; ``submit`` raises a WorkflowError with its text.
        """


WorkflowLike = RolloutWorkflow | type[RolloutWorkflow] | Agent | type[Agent] | str
"""What ``submit`` takes: an instance, a class, or an import string (``package.module:Name``)."""


class WorkflowKind(StrEnum):
    """How a worker runs it."""

    ROLLOUT = "rollout"
    """Builds a RolloutWorkflow and calls ``arun_episode``."""
    AGENT = "agent"
    """Builds an agent and calls ``run`` with the address of a proxy for its model calls."""


@dataclass(frozen=True, slots=True)
class NamedWorkflow:
    """What crosses the wire of a workflow or an agent."""

    kind: WorkflowKind
    name: str
    """``module:name`` of its class, or of an instance that a module holds; the latter has no `kwargs`."""
    kwargs: dict[str, Any]
    """The constructor's arguments, encoded."""


def name_workflow(
    workflow: WorkflowLike | None, kwargs: Mapping[str, Any] | None, allowlist: Sequence[str]
) -> NamedWorkflow:
    """The name and the encoded arguments of a workflow or an agent, checked as a worker will check them.

    Raises:
        WorkflowError: a ValueError; no worker could import or build it, and the message says why.
        WorkflowTypeError: likewise, and a TypeError; it is neither a RolloutWorkflow nor an agent with a coroutine run.
    """
    if workflow is None:
        raise WorkflowError(
            "workflow=None is for online mode, in which agents open their sessions themselves; this run is not in "
            "it: pass a RolloutWorkflow (an instance, a subclass, or its import string)"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise WorkflowError(f"workflow_kwargs is a {type(kwargs).__name__}; pass a dict of the constructor's arguments")
    found: Any = import_object(workflow, allowlist) if isinstance(workflow, str) else workflow
    cls = _class_of(found)
    if issubclass(cls, RolloutWorkflow):
        kind = WorkflowKind.ROLLOUT
    else:
        check_agent(found, workflow if isinstance(workflow, str) else repr(workflow))
        kind = WorkflowKind.AGENT
    if found is not cls:
        if kwargs is not None:
            warnings.warn(
                "workflow_kwargs are ignored: the workflow is an instance already", ForebayWarning, stacklevel=4
            )
        if isinstance(workflow, str):
            return NamedWorkflow(kind, ":".join(split(workflow)), {})
        if kind is WorkflowKind.AGENT and (name := module_level_name(found)) is not None:
            check_allowed(name, allowlist)
            return NamedWorkflow(kind, name, {})
        kwargs = constructor_arguments(found) if kind is WorkflowKind.ROLLOUT else agent_arguments(found)
    if kwargs is None and kind is WorkflowKind.AGENT:
        kwargs = {}
    if kwargs is None:
        raise WorkflowError(f"{cls.__qualname__} needs workflow_kwargs; pass {{}} if its constructor takes nothing")
    return _name_class(kind, cls, dict(kwargs), allowlist)


def _class_of(found: Any) -> Any:
    return found if inspect.isclass(found) else type(found)


def _name_class(kind: WorkflowKind, cls: Any, kwargs: dict[str, Any], allowlist: Sequence[str]) -> NamedWorkflow:
    name = callable_name(cls, "workflow")
    check_allowed(name, allowlist)
    if inspect.isabstract(cls):
        raise WorkflowError(f"{name} is abstract: it does not define {', '.join(sorted(cls.__abstractmethods__))}")
    if cls.__init__ is object.__init__ and kwargs:
        raise WorkflowError(
            f"workflow_kwargs do not fit {name}: it takes no arguments, not {', '.join(map(str, kwargs))}"
        )
    try:
        inspect.signature(cls.__init__).bind(None, **kwargs)
    except TypeError as error:
        raise WorkflowError(f"workflow_kwargs do not fit {name}: {error}") from None
    if kind is WorkflowKind.ROLLOUT and _checks_its_constructor(cls):
        try:
            cls.check_arguments(**kwargs)
        except WorkflowError:
            raise
        except Exception as error:  # a user's check may refuse in any way
            raise WorkflowError(f"{name} refuses its workflow_kwargs: {error}") from error
    return NamedWorkflow(kind, name, encode_kwargs(kwargs, allow=partial(check_allowed, allowlist=allowlist)))


def _checks_its_constructor(cls: type[Any]) -> bool:
    """Whether ``check_arguments`` is defined no further up than the constructor, so that it knows its arguments."""
    for base in cls.__mro__:
        if "check_arguments" in vars(base):
            return True
        if "__init__" in vars(base):
            return False
    return False


def name_callable(function: Any, allowlist: Sequence[str], where: str) -> str:
    """The import string of a module-level function, or of the one that a string names, checked against `allowlist`."""
    name = function if isinstance(function, str) else callable_name(function, where)
    if isinstance(function, str) and not callable(import_object(name, allowlist)):
        raise WorkflowError(f"{where}: {name} is not callable")
    check_allowed(name, allowlist)
    return name


def build_workflow(
    name: str, kwargs: dict[str, Any], allowlist: Sequence[str], pretrained: PretrainedCache | None = None
) -> RolloutWorkflow:
    """The workflow that ``name_workflow`` named, on a worker; tokenizers and processors come from `pretrained`.

    Raises:
        WorkflowError: it cannot be imported or built here.
    """
    found = import_object(name, allowlist)
    if isinstance(found, RolloutWorkflow):
        return found
    if not (inspect.isclass(found) and issubclass(found, RolloutWorkflow)):
        raise WorkflowError(f"{name} is no RolloutWorkflow")
    cache = PretrainedCache() if pretrained is None else pretrained

    def resolve(kind: str, form: dict[str, Any]) -> Any:
        if kind == "callable":
            return import_object(str(form["name"]), allowlist)
        if kind in ("tokenizer", "processor"):
            return cache.get(kind, str(form["path"]))
        raise WorkflowError(f"{name}: an argument is of the unknown kind {kind!r}; run the same release everywhere")

    arguments = decode_plain(kwargs, resolve)
    try:
        with cache.in_use():
            return found(**arguments)
    except Exception as error:  # a user's constructor may fail in any way
        raise WorkflowError(f"{name} could not be built: {type(error).__name__}: {error}") from error
