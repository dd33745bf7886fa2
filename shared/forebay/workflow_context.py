"""What an episode may ask about itself while it runs (contract, sections 4.1 and 8).

The context lives in a context variable, so episodes that share an event loop never see each other's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

__all__ = ["WorkflowContext", "get", "scope", "stat_scope"]


@dataclass(frozen=True, slots=True)
class WorkflowContext:
    """Identity of the running slot. Outside an episode every field has its default."""

    is_eval: bool = False
    task_id: int = -1
    sample_idx: int = 0
    group_size: int = 1
    attempt: int = 0
    """1 for the first try at the slot."""
    run: str = ""


_current: ContextVar[WorkflowContext] = ContextVar("forebay_workflow_context", default=WorkflowContext())  # noqa: B039 (frozen)


def get() -> WorkflowContext:
    """The context of the episode that is running here."""
    return _current.get()


def stat_scope() -> str:
    """``"eval-rollout"`` in an evaluation episode, else ``"rollout"``: the prefix of metrics and of the dump folder."""
    return "eval-rollout" if get().is_eval else "rollout"


@contextmanager
def scope(context: WorkflowContext) -> Iterator[WorkflowContext]:
    """Make `context` the current one inside the block. For the runtime, and for tests of workflows."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
