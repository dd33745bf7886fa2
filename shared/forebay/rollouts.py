"""Accepted groups with their rows, as trainers get them, and how the rows are read (contract, sections 3 and 13)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from forebay.errors import FrameError, RowsMissingError
from forebay.shares import ShareOf, tokens_of, trained_tokens_of
from forebay.store.records import BatchEntry
from forebay.store.store import Store
from forebay.trajectories import TrajBatchMeta
from forebay.wire.codec import decode_rows
from forebay.wire.envelopes import GroupSummary
from forebay.wire.rows import Row
from forebay.wire.tensors import RolloutGroup, common_keys, pad_rows, to_torch, warn_of

__all__ = ["BatchData", "CollectedRollouts", "Rollouts", "concatenated", "load_rows", "share_of"]

_ROWS_PER_READ = 256


@dataclass(slots=True, kw_only=True)
class Rollouts:
    """Accepted groups and their rows."""

    version: int
    """The run's version when they were handed over."""
    groups: list[GroupSummary]
    rows: list[Row] = field(repr=False)
    """In group, rollout, row order."""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def group_index(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[rows]: the position in `groups` of each row's group."""
        counts = [sum(len(rollout.rows) for rollout in group.rollouts) for group in self.groups]
        return np.repeat(np.arange(len(counts)), counts)

    @property
    def rollout_groups(self) -> list[RolloutGroup]:
        """For each group, which rows belong to which rollout."""
        return [
            RolloutGroup(
                row_counts=tuple(len(rollout.rows) for rollout in group.rollouts),
                rewards=tuple(rollout.reference for rollout in group.rollouts),
                sample_idx=tuple(rollout.sample_idx for rollout in group.rollouts),
            )
            for group in self.groups
        ]

    def select(self, places: Sequence[int]) -> Rollouts:
        """The groups at these places of `groups`, in this order, with their rows."""
        index = self.group_index
        rows = [self.rows[int(at)] for place in places for at in np.flatnonzero(index == place)]
        return Rollouts(version=self.version, groups=[self.groups[place] for place in places], rows=rows)

    @property
    def task_ids(self) -> list[int]:
        """What a checkpoint is to remember of them for ``reconcile``: their ids, and whose prompts they had."""
        return [task for group in self.groups for task in (group.task, group.parent) if task is not None]

    @property
    def normalized_groups(self) -> list[bool]:
        """For each group, whether its rewards are normalized already."""
        return [group.rewards_normalized for group in self.groups]

    @property
    def rewards_normalized(self) -> bool:
        """Whether rewards are normalized already, so that a trainer must not do it again (contract, section 5).

        True where those of any group are. Groups differ only where they were submitted so; `normalized_groups` says
        which are.
        """
        return any(self.normalized_groups)

    @property
    def tokens(self) -> int:
        """Real tokens, prompts included."""
        return sum(row.seqlen for row in self.rows)

    def arrays(self, *, pad_token_id: int = 0) -> dict[str, Any]:
        """All rows as numpy arrays [B, S], padded to the right (contract, section 3).

        ``rewards`` is NaN for a row without one, if any row has one; another key that only some rows carry is left out.
        A ForebayWarning names the keys and the task ids of the groups.
        """
        return pad_rows(self.rows, pad_token_id=pad_token_id, tasks=self._tasks)

    def tensors(self, *, pad_token_id: int = 0) -> dict[str, Any]:
        """All rows as torch tensors [B, S], as :meth:`arrays` makes them."""
        return to_torch(self.arrays(pad_token_id=pad_token_id))

    @property
    def meta(self) -> TrajBatchMeta:
        """Which rows of ``tensors()`` belong to which group; it takes them apart, splits and shuffles them."""
        groups = self.rollout_groups
        rows = self._rows_by_group()
        return TrajBatchMeta(
            n_trajs=len(groups),
            traj_group_sizes=tuple(len(own) for own in rows),
            traj_seqlens=tuple(max(row.seqlen for row in own) for own in rows),
            rollout_groups=tuple(groups),
        )

    def trajectories(self, *, pad_token_id: int = 0) -> list[dict[str, Any]]:
        """Each group's torch tensors [B, S], padded to its own longest row, with its ``rollout_group``.

        All have the keys of ``tensors()``: what not all rows of the batch carry is left out.
        """
        keys, notes = common_keys(self.rows, self._tasks)
        warn_of(notes)
        return [
            to_torch(pad_rows(rows, pad_token_id=pad_token_id, keys=keys)) | {"rollout_group": group}
            for rows, group in zip(self._rows_by_group(), self.rollout_groups, strict=True)
        ]

    @property
    def _tasks(self) -> list[int]:
        """The task id of each row's group."""
        return [group.task for group in self.groups for rollout in group.rollouts for _ in rollout.rows]

    def _rows_by_group(self) -> list[list[Row]]:
        rows = iter(self.rows)
        return [list(islice(rows, sum(group.row_counts))) for group in self.rollout_groups]


@dataclass(slots=True, kw_only=True)
class BatchData(Rollouts):
    """A batch, or one rank's share of it: after the hand-over its content never changes.

    A share may be empty, where a batch has fewer groups than there are ranks: it has no groups and no rows then,
    ``tensors()`` is ``{}``, and it is to be acknowledged like any other.
    """

    batch_id: int
    partial: bool
    """Fewer groups than ``batch_size``: the end of the data, or a batch of dynamic size."""
    redelivered: bool
    """It was handed to this consumer before."""
    entry: BatchEntry = field(repr=False)
    share: ShareOf | None = field(default=None, repr=False)
    """See `share_of`."""

    @property
    def share_of(self) -> ShareOf:
        """Which rank's share of which batch this is; a trainer of one rank has the whole."""
        return self.share or share_of(self.groups, 0, 1)


@dataclass(slots=True, kw_only=True)
class CollectedRollouts(Rollouts):
    """Groups that were asked for by their task ids, in that order, but for those that ended without a result."""

    ended: dict[int, str] = field(default_factory=dict)
    """The others: task id -> ``rejected: REASON`` or ``evicted: REASON``."""


def share_of(groups: Sequence[GroupSummary], rank: int, world_size: int) -> ShareOf:
    """What `rank` of so many gets told about a batch of `groups`."""
    tokens = sum(tokens_of(group) for group in groups)
    return ShareOf(rank, world_size, len(groups), tokens, sum(trained_tokens_of(group) for group in groups))


def concatenated(parts: Sequence[Rollouts]) -> Rollouts:
    """All groups of `parts`, in order; the version is the last part's."""
    return Rollouts(
        version=parts[-1].version,
        groups=[group for part in parts for group in part.groups],
        rows=[row for part in parts for row in part.rows],
    )


async def load_rows(store: Store, groups: Sequence[GroupSummary], where: str) -> list[Row]:
    """The rows of `groups`, in order, with the rewards that their summaries say.

    Raises:
        RowsMissingError: Redis has lost some; `where` says what counts them.
        FrameError: some cannot be read; names the group and the slot.
    """
    names = [(group.task, rollout.sample_idx, rollout.attempt) for group in groups for rollout in group.rollouts]
    frames: list[bytes | None] = []
    for at in range(0, len(names), _ROWS_PER_READ):
        frames += await store.read_rows(names[at : at + _ROWS_PER_READ])
    for name, frame in zip(names, frames, strict=True):
        if frame is None:
            raise RowsMissingError(
                f"{where}: the rows of group {name[0]}, slot {name[1]} are gone from Redis; it was "
                "flushed, or lost writes: check its persistence (appendonly yes, appendfsync always)"
            )
    # Decoding is CPU work: off the event loop, which also serves the other calls of this client.
    return await asyncio.to_thread(_rows_of, groups, [frame for frame in frames if frame is not None], where)


def _rows_of(groups: Sequence[GroupSummary], frames: list[bytes], where: str) -> list[Row]:
    out: list[Row] = []
    summaries = [(group.task, rollout) for group in groups for rollout in group.rollouts]
    for (task_id, rollout), frame in zip(summaries, frames, strict=True):
        try:
            found = decode_rows(frame)
            if len(found) != len(rollout.rows):
                raise FrameError(f"there are {len(found)}, and {len(rollout.rows)} in the index")
        except FrameError as error:
            slot = f"group {task_id}, slot {rollout.sample_idx}"
            raise FrameError(f"{where}: the rows of {slot} cannot be read: {error}") from None
        for row, summary in zip(found, rollout.rows, strict=True):
            # The rows were written before rewards were shaped and normalized: the summary has those that count.
            row.reward, row.original_reward = summary.reward, summary.original_reward
            out.append(row)
    return out
