"""What an episode is, and how a workflow is named on the wire (contract, section 2)."""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forebay.errors import WorkflowError
from forebay.imports import check_allowed, import_object
from forebay.wire.values import callable_name, decode_plain, encode_kwargs

if TYPE_CHECKING:
    from forebay.generation import InferenceEngine

__all__ = ["RolloutWorkflow", "WorkflowLike", "build_workflow", "name_callable", "name_workflow"]


class RolloutWorkflow(ABC):
    """One way to turn a prompt into a rollout. One instance serves all episodes of a worker process.

    An instance remembers the arguments it was made with, so that it can be submitted as it is; what its attributes
    become later does not travel.
    """

    _forebay_arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> RolloutWorkflow:
        """Remember the constructor's arguments."""
        if cls.__init__ is object.__init__ and (args or kwargs):
            raise TypeError(f"{cls.__qualname__}() takes no arguments")  # object says so only where __new__ is its own
        self = super().__new__(cls)
        object.__setattr__(self, "_forebay_arguments", (args, kwargs))  # a frozen dataclass may be a workflow
        return self

    @abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """Run one episode.

        Args:
            engine: generates; shared with the other episodes of the process.
            data: the prompt as it was submitted, a copy of this slot's own.

        Returns:
            A tensor dict of one or more rows (keys and shapes in the contract, section 3: ``input_ids`` and
            ``attention_mask`` [B, S] at least), or None: the episode is rejected and not trained on.
        """


WorkflowLike = RolloutWorkflow | type[RolloutWorkflow] | str
"""What ``submit`` takes: an instance, a class, or an import string (``package.module:Name``)."""


def name_workflow(
    workflow: WorkflowLike, kwargs: dict[str, Any] | None, allowlist: Sequence[str]
) -> tuple[str, dict[str, Any]]:
    """``(import string, encoded arguments)`` of a workflow, checked as a worker will check it.

    Raises:
        WorkflowError: a ValueError; no worker could import or build it, and the message says why.
    """
    if isinstance(workflow, RolloutWorkflow):
        if kwargs is not None:
            warnings.warn("workflow_kwargs are ignored: the workflow is an instance already", stacklevel=3)
        cls: Any = type(workflow)
        kwargs = _constructor_arguments(workflow)
    elif isinstance(workflow, str):
        cls = import_object(workflow, allowlist)
    else:
        cls = workflow
    if not (inspect.isclass(cls) and issubclass(cls, RolloutWorkflow)):
        raise WorkflowError(f"{workflow!r} is no RolloutWorkflow: pass an instance, a subclass, or its import string")
    if kwargs is None:
        raise WorkflowError(f"{cls.__qualname__} needs workflow_kwargs; pass {{}} if its constructor takes nothing")
    name = callable_name(cls, "workflow")
    check_allowed(name, allowlist)
    if inspect.isabstract(cls):
        raise WorkflowError(f"{name} is abstract: it does not define {', '.join(sorted(cls.__abstractmethods__))}")
    if cls.__init__ is object.__init__ and kwargs:
        raise WorkflowError(f"workflow_kwargs do not fit {name}: it takes no arguments, not {', '.join(kwargs)}")
    try:
        inspect.signature(cls.__init__).bind(None, **kwargs)
    except TypeError as error:
        raise WorkflowError(f"workflow_kwargs do not fit {name}: {error}") from None
    return name, encode_kwargs(kwargs)


def _constructor_arguments(workflow: RolloutWorkflow) -> dict[str, Any]:
    args, kwargs = workflow._forebay_arguments
    bound = inspect.signature(type(workflow).__init__).bind(workflow, *args, **kwargs)
    named: dict[str, Any] = {}
    for at, (name, value) in enumerate(bound.arguments.items()):
        if at == 0:  # self
            continue
        kind = bound.signature.parameters[name].kind
        if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise WorkflowError(
                f"{type(workflow).__qualname__} was made with positional-only arguments, which do not travel; "
                "pass the class and workflow_kwargs"
            )
        named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return named


def name_callable(function: Any, allowlist: Sequence[str], where: str) -> str:
    """The import string of a module-level function, or of the one that a string names, checked against `allowlist`."""
    name = function if isinstance(function, str) else callable_name(function, where)
    if isinstance(function, str) and not callable(import_object(name, allowlist)):
        raise WorkflowError(f"{where}: {name} is not callable")
    check_allowed(name, allowlist)
    return name


def build_workflow(name: str, kwargs: dict[str, Any], allowlist: Sequence[str]) -> RolloutWorkflow:
    """The workflow that ``name_workflow`` named, on a worker.

    Raises:
        WorkflowError: it cannot be imported or built here.
    """
    cls = import_object(name, allowlist)
    if not (inspect.isclass(cls) and issubclass(cls, RolloutWorkflow)):
        raise WorkflowError(f"{name} is no RolloutWorkflow")

    def resolve(kind: str, form: dict[str, Any]) -> Any:
        if kind == "callable":
            return import_object(str(form["name"]), allowlist)
        if kind in ("tokenizer", "processor"):
            return _load_pretrained(kind, str(form["path"]))
        raise WorkflowError(f"{name}: an argument is of the unknown kind {kind!r}; run the same release everywhere")

    arguments = decode_plain(kwargs, resolve)
    try:
        return cls(**arguments)
    except Exception as error:  # a user's constructor may fail in any way
        raise WorkflowError(f"{name} could not be built: {type(error).__name__}: {error}") from error


def _load_pretrained(kind: str, path: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise WorkflowError(f"loading the {kind} {path} needs transformers; install forebay[workers]") from None
    loader = transformers.AutoTokenizer if kind == "tokenizer" else transformers.AutoProcessor
    try:
        return loader.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise WorkflowError(f"the {kind} {path} cannot be loaded here: {error}") from error
