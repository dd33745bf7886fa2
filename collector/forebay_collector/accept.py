"""The user's filter on assembled groups: ``should_accept_fn`` (contract, section 2)."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from forebay.errors import WorkflowError
from forebay.imports import import_object
from forebay.outcomes import RejectReason
from forebay.wire.envelopes import GroupSummary
from forebay.wire.rows import Row
from forebay.wire.tensors import RolloutGroup, pad_rows, to_torch

__all__ = ["AcceptFilter", "group_tensors"]

log = structlog.get_logger(__name__)

_DISTINCT_ERRORS = 1000


def group_tensors(summary: GroupSummary, rows: Sequence[Row]) -> dict[str, Any]:
    """The group as the filter sees it: torch tensors [B, S], ``original_rewards`` always, and its ``rollout_group``.

    ``rewards`` are as shaped and normalized so far: only as shaped where that takes statistics of the batch. Both are
    NaN for a row without a reward, and absent if no row has one.
    """
    summaries = [row for rollout in summary.rollouts for row in rollout.rows]
    for row, known in zip(rows, summaries, strict=True):
        row.reward = known.reward
        row.original_reward = known.reward if known.original_reward is None else known.original_reward
    tensors = to_torch(pad_rows(rows, warn=False))  # what is left out is logged by the committer, once
    tensors["rollout_group"] = RolloutGroup(
        row_counts=tuple(len(rollout.rows) for rollout in summary.rollouts),
        rewards=tuple(rollout.reference for rollout in summary.rollouts),
        sample_idx=tuple(rollout.sample_idx for rollout in summary.rollouts),
    )
    return tensors


class AcceptFilter:
    """Runs filters by import string, in a thread; what they raise rejects the group and is logged once."""

    def __init__(self, allowlist: Sequence[str]) -> None:
        self._allowlist = tuple(allowlist)
        self._functions: dict[str, Callable[[dict[str, Any]], Any]] = {}
        self._errors: Counter[str] = Counter()

    async def judge(self, name: str, summary: GroupSummary, rows: Sequence[Row]) -> tuple[RejectReason | None, str]:
        """``(None, "")`` to accept, else the reason and its detail."""
        try:
            return await asyncio.to_thread(self._call, name, summary, rows)
        except (Exception, SystemExit) as error:  # a user's function may fail in any way; the run goes on
            text = f"{name}: {type(error).__name__}: {error}"
            if len(self._errors) < _DISTINCT_ERRORS:
                self._errors[text] += 1
            if self._errors[text] == 1:
                log.exception("accept.error", task_id=summary.task, function=name)
            return RejectReason.ACCEPT_ERROR, text

    def _call(self, name: str, summary: GroupSummary, rows: Sequence[Row]) -> tuple[RejectReason | None, str]:
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = import_object(name, self._allowlist)
            if not callable(function):
                raise WorkflowError(f"{name} is not callable")
        verdict = function(group_tensors(summary, rows))
        if inspect.iscoroutine(verdict):
            verdict.close()  # as a truth value it would accept everything
            raise WorkflowError(f"{name} is a coroutine function; should_accept_fn is a plain one")
        if verdict:
            return None, ""
        return RejectReason.FILTERED, f"{name} said no"
