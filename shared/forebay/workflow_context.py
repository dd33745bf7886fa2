"""What an episode may ask about itself while it runs (contract, sections 4.1 and 8).

The context lives in a context variable, so episodes that share an event loop never see each other's. The HTTP clients
are those of the event loop: all episodes of a worker process share them, and the worker closes them when it ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forebay.http_clients import clients_of_loop
from forebay.processor_cache import ProcessorCache

if TYPE_CHECKING:
    import aiohttp
    import httpx

__all__ = ["WorkflowContext", "aclose", "get", "get_aiohttp_session", "get_httpx_client", "scope", "stat_scope"]


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
    processor_cache: ProcessorCache = field(default_factory=ProcessorCache, compare=False, repr=False)
    """Shared by the slots of the group that run in this process; emptied when none is left. A context that was made
    by hand has one of its own."""


_current: ContextVar[WorkflowContext | None] = ContextVar("forebay_workflow_context", default=None)


def get() -> WorkflowContext:
    """The context of the episode that is running here; outside of one a new one of defaults, which keeps nothing."""
    return _current.get() or WorkflowContext()


def of_task(task: Any) -> WorkflowContext | None:
    """The context of the episode that an asyncio task belongs to, from any thread; None: it belongs to none."""
    found = task.get_context().get(_current)  # Python 3.12
    return found if isinstance(found, WorkflowContext) else None


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


async def get_aiohttp_session() -> aiohttp.ClientSession:
    """The ``aiohttp.ClientSession`` that all episodes of this process share: pooled, at most 512 connections.

    It keeps no cookies. Do not close it: a worker does when it ends. Outside of a worker close it with :func:`aclose`.
    """
    return clients_of_loop().aiohttp_session()


async def get_httpx_client() -> httpx.AsyncClient:
    """The ``httpx.AsyncClient`` that all episodes of this process share; as :func:`get_aiohttp_session` otherwise.

    Raises:
        SettingsError: httpx is not installed; it comes with ``forebay[workers]``.
    """
    return clients_of_loop().httpx_client()


async def aclose() -> None:
    """Close the shared HTTP clients of this event loop. What is asked for afterwards is made anew."""
    await clients_of_loop().aclose()
