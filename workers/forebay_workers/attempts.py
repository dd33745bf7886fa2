"""Runs one attempt of a slot, and says how it ended.

The only place where a failure of any kind, a user's exception included, becomes a slot outcome.
"""

from __future__ import annotations

import asyncio
import gc
import traceback
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from forebay import workflow_context
from forebay.backends.base import ServerError
from forebay.errors import (
    ContractError,
    EpisodeTimeoutError,
    GenerationError,
    ServerUnavailableError,
    SlotDataError,
    WorkflowContractError,
)
from forebay.generation import InferenceEngine
from forebay.interactions import rows_from_result
from forebay.outcomes import FailureKind, ResultKind, SlotOutcome
from forebay.pretrained import PretrainedCache
from forebay.wire.codec import encode_rows
from forebay.wire.envelopes import GroupSpec, RowSummary
from forebay.wire.trajectory_format import check_trajectory
from forebay.wire.values import decode_plain, pack
from forebay.workflow import RolloutWorkflow, build_workflow
from forebay_workers.format_check import FormatCheck

__all__ = ["Ended", "WorkflowCache", "classify", "run_attempt"]

_MAX_REASON = 500
_MAX_TRACEBACK = 4000


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended, and what it brought."""

    outcome: SlotOutcome
    kind: FailureKind | None = None
    reason: str = ""
    traceback: str = ""
    result_kind: ResultKind = ResultKind.TENSOR
    keys: tuple[str, ...] = ()
    """Of a tensor result."""
    rows: tuple[RowSummary, ...] = ()
    reference: float | None = None
    frame: bytes | None = None


class WorkflowCache:
    """Workflows by name and arguments: one instance serves all episodes of the process."""

    def __init__(self, allowlist: Sequence[str], entries: int = 64) -> None:
        self._allowlist = tuple(allowlist)
        self._entries = entries
        self._built: OrderedDict[tuple[str, bytes], RolloutWorkflow] = OrderedDict()
        self._lock = asyncio.Lock()
        self._pretrained = PretrainedCache()

    async def get(self, spec: GroupSpec) -> RolloutWorkflow:
        """The workflow of `spec`, built on first use. Raises WorkflowError."""
        key = (spec.workflow, pack(spec.kwargs))
        async with self._lock:
            found = self._built.get(key)
            if found is None:
                # In a thread: loading a tokenizer takes seconds, and leases must be renewed meanwhile.
                found = await asyncio.to_thread(
                    build_workflow, spec.workflow, spec.kwargs, self._allowlist, self._pretrained
                )
                self._built[key] = found
                # What it has loaded stays: a tokenizer and torch are a million objects that every full collection
                # would walk again.
                gc.collect()
                gc.freeze()
                if len(self._built) > self._entries:
                    self._built.popitem(last=False)
            self._built.move_to_end(key)
        return found


async def run_attempt(
    spec: GroupSpec,
    context: workflow_context.WorkflowContext,
    engine: InferenceEngine,
    workflows: WorkflowCache,
    *,
    timeout_s: float,
    max_rows_bytes: int,
    max_inline_tokens: int,
    check: FormatCheck | None = None,
) -> Ended:
    """Run the episode. Never raises but on cancellation."""
    runner = asyncio.current_task()
    try:
        workflow = await workflows.get(spec)
        data = decode_plain(spec.data)  # decoded anew for each attempt, so none sees another's changes
        with workflow_context.scope(context):
            clock = asyncio.timeout(timeout_s)
            try:
                async with clock:
                    result = await workflow.arun_episode(engine, data)
            except TimeoutError:
                if clock.expired():
                    raise EpisodeTimeoutError(f"the episode ran longer than {timeout_s:.1f} s") from None
                raise
        if result is None:
            return Ended(SlotOutcome.REJECTED)
        keys = None if check is None else check_trajectory(result)
        ended = await _usable(result, max_rows_bytes, max_inline_tokens)
        if check is not None and keys is not None:
            await check(spec.workflow, keys)  # last: a result that fails must not be the one that others are held to
        return ended
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return classify(error)  # nobody cancelled the attempt: something that the workflow awaited was
    except GeneratorExit as error:
        if runner is None or _current_task() is not runner:
            raise  # nobody raised it: this coroutine is being closed
        return classify(error)
    except BaseException as error:  # the boundary: whatever a workflow raises is this slot's outcome, no more
        # KeyboardInterrupt and SystemExit too, which a task would raise through the event loop and end the worker. A
        # real SIGINT never comes this way: the worker handles it as an event.
        return classify(error)


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs: the interpreter is ending
        return None


async def _usable(result: Any, max_rows_bytes: int, max_inline_tokens: int) -> Ended:
    if not isinstance(result, Mapping):
        raise WorkflowContractError(f"arun_episode returned a {type(result).__name__}; expected a dict or None")
    if not result:
        raise WorkflowContractError("arun_episode returned an empty dict; return None to reject the episode")
    kind, rows, reference = rows_from_result(result)
    if sum(row.seqlen for row in rows) > max_inline_tokens or any(row.multi_modal for row in rows):
        frame = await asyncio.to_thread(encode_rows, rows)
    else:
        frame = encode_rows(rows)
    if len(frame) > max_rows_bytes:
        raise SlotDataError(f"the rows take {len(frame)} bytes, above max_rows_bytes={max_rows_bytes}")
    return Ended(
        SlotOutcome.USABLE,
        result_kind=kind,
        keys=tuple(sorted(str(name) for name in result)) if kind is ResultKind.TENSOR else (),
        rows=tuple(RowSummary.of(row) for row in rows),
        reference=reference,
        frame=frame,
    )


_KINDS: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], FailureKind], ...] = (
    ((GenerationError, SlotDataError), FailureKind.DATA),
    (ContractError, FailureKind.CONTRACT),
    ((ServerUnavailableError, ServerError, aiohttp.ClientError, ConnectionError), FailureKind.INFRA),
    (TimeoutError, FailureKind.TIMEOUT),  # EpisodeTimeoutError and RewardTimeoutError are ones
)


def _describe(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # a user's exception whose own __str__ fails
        text = "<its text cannot be made>"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def classify(error: BaseException) -> Ended:
    """The failed outcome of an exception: anything that is not known to pass is kind ``data``, tried once."""
    kind = next((kind for types, kind in _KINDS if isinstance(error, types)), FailureKind.DATA)
    root = error
    while root.__cause__ is not None and isinstance(root.__cause__, Exception):
        root = root.__cause__
    text = _describe(error)
    if root is not error:
        text += f" (from {_describe(root)})"
    trace = "".join(traceback.format_exception(error))
    if len(trace) > _MAX_TRACEBACK:
        half = _MAX_TRACEBACK // 2
        trace = f"{trace[:half]}\n...\n{trace[-half:]}"
    return Ended(SlotOutcome.FAILED, kind=kind, reason=text[:_MAX_REASON], traceback=trace)
