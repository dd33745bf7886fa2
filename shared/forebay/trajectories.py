"""Trajectories, one group's tensor dict each, and batches of them (contract, sections 3 and 4.8).

What belongs to which group and rollout is in :class:`TrajBatchMeta`, which goes with a batch through splitting,
shuffling and back into trajectories. Torch tensors and numpy arrays both work, and torch is imported only where a
tensor is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np

from forebay.errors import ContractError
from forebay.wire.rows import PADDING
from forebay.wire.tensors import RolloutGroup

__all__ = ["TrajBatchMeta", "concat_padded_tensors"]

Tensors = dict[str, Any]


def concat_padded_tensors(dicts: Sequence[Mapping[str, Any]], *, pad_token_id: int = 0) -> Tensors:
    """Tensor dicts of several widths as one, their rows one after the other.

    Tensors [B, S] are padded to the right to the largest S (`pad_token_id` for ``input_ids``, -1 for ``versions`` and
    ``turn_ids``, else 0), tensors [B] and lists (``multi_modal_input``) are concatenated, each dict's
    ``rollout_group`` becomes an entry of a list. Any other value, such as a ``rollout_reward``, must be the same in
    all dicts.

    Returns:
        The dict; ``{}`` for no dicts.

    Raises:
        ValueError: the dicts have different keys, or a key has values that do not go together; the keys are named.
    """
    if not dicts:
        return {}
    common = set(dicts[0]).intersection(*dicts)
    if uneven := sorted({str(name) for one in dicts for name in one} - common):
        raise ContractError(
            f"the dicts have different keys: {', '.join(uneven)} in some of {len(dicts)} only; give them all the same"
        )
    out: Tensors = {}
    for name in dicts[0]:
        fill = pad_token_id if name == "input_ids" else PADDING.get(name, 0)
        out[name] = _joined(name, [one[name] for one in dicts], fill)
    return out


def _joined(name: str, values: list[Any], fill: float) -> Any:
    if all(_is_tensor(value) for value in values):
        dimensions = {value.ndim for value in values}
        if len(dimensions) > 1 or 0 in dimensions:
            raise ContractError(f"{name} has tensors of {sorted(dimensions)} dimensions; expected [B] or [B, S] in all")
        if dimensions == {1}:
            return _concatenated(values)
        width = max(value.shape[1] for value in values)
        return _concatenated([_widened(value, width, fill) for value in values])
    if all(isinstance(value, (list, RolloutGroup)) for value in values):
        return [item for value in values for item in (value if isinstance(value, list) else [value])]
    if any(_is_tensor(value) or isinstance(value, list) or value != values[0] for value in values):
        raise ContractError(f"{name} has values that do not go together: {', '.join(map(_shown, values[:4]))}")
    return values[0]


def _shown(value: Any) -> str:
    return type(value).__name__ if _is_tensor(value) or isinstance(value, list) else repr(value)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, np.ndarray) or _is_torch(value)


def _is_torch(value: Any) -> bool:
    return hasattr(value, "detach")  # without importing torch


def _widened(value: Any, width: int, fill: float) -> Any:
    missing = width - value.shape[1]
    if not missing:
        return value
    shape = (value.shape[0], missing, *value.shape[2:])
    if _is_torch(value):
        return _concatenated([value, value.new_full(shape, fill)], axis=1)
    return _concatenated([value, np.full(shape, fill, dtype=value.dtype)], axis=1)


def _concatenated(values: Sequence[Any], axis: int = 0) -> Any:
    if not any(_is_torch(value) for value in values):
        return np.concatenate(values, axis=axis)
    import torch

    return torch.cat([torch.as_tensor(value) for value in values], dim=axis)


@dataclass(frozen=True, slots=True)
class TrajBatchMeta:
    """Which rows of a batch's tensors belong to which trajectory, and which of these to which rollout.

    A trajectory is one group's tensor dict: all rows of all its usable rollouts.
    """

    n_trajs: int
    traj_group_sizes: tuple[int, ...]
    """Rows of each trajectory."""
    traj_seqlens: tuple[int, ...]
    """Width S of each trajectory, that of its longest row."""
    rollout_groups: tuple[RolloutGroup | None, ...]
    """The rollouts of each; None: not known, its rows are taken for what they are."""

    def __post_init__(self) -> None:
        """Check that the counts agree. Raises ContractError, a ValueError."""
        if not self.n_trajs == len(self.traj_group_sizes) == len(self.traj_seqlens) == len(self.rollout_groups):
            raise ContractError(
                f"n_trajs={self.n_trajs}, but there are {len(self.traj_group_sizes)} traj_group_sizes, "
                f"{len(self.traj_seqlens)} traj_seqlens and {len(self.rollout_groups)} rollout_groups"
            )
        if any(size < 1 for size in (*self.traj_group_sizes, *self.traj_seqlens)):
            raise ContractError("traj_group_sizes and traj_seqlens must be at least 1")
        for at, (size, group) in enumerate(zip(self.traj_group_sizes, self.rollout_groups, strict=True)):
            if group is not None and sum(group.row_counts) != size:
                raise ContractError(
                    f"trajectory {at} has {size} rows, but its rollout_group counts {sum(group.row_counts)}"
                )

    @classmethod
    def batch(cls, trajectories: Sequence[Mapping[str, Any]], *, pad_token_id: int = 0) -> tuple[Tensors, Self]:
        """The trajectories as one tensor dict, and what is needed to take it apart again.

        Their ``rollout_group`` moves from the dicts to the meta.

        Raises:
            ValueError: as :func:`concat_padded_tensors`, or the counts of a ``rollout_group`` do not fit its rows.
        """
        shapes = [tuple(one["input_ids"].shape) for one in trajectories]
        meta = cls(
            n_trajs=len(trajectories),
            traj_group_sizes=tuple(int(shape[0]) for shape in shapes),
            traj_seqlens=tuple(int(shape[1]) for shape in shapes),
            rollout_groups=tuple(one.get("rollout_group") for one in trajectories),
        )
        bare = [{name: value for name, value in one.items() if name != "rollout_group"} for one in trajectories]
        return concat_padded_tensors(bare, pad_token_id=pad_token_id), meta

    def trajectories(self, tensors: Mapping[str, Any]) -> list[Tensors]:
        """A batch's tensors taken apart: each trajectory cut to its own width, with its ``rollout_group``.

        Raises:
            ValueError: `tensors` has another number of rows than this meta.
        """
        if not self.n_trajs:
            return []
        rows, width = sum(self.traj_group_sizes), max(self.traj_seqlens)
        for name, value in tensors.items():
            if (_is_tensor(value) or isinstance(value, list)) and len(value) != rows:
                raise ContractError(f"{name} has {len(value)} rows, but the trajectories have {rows}")
        out: list[Tensors] = []
        start = 0
        for size, seqlen, group in zip(self.traj_group_sizes, self.traj_seqlens, self.rollout_groups, strict=True):
            one = {name: _cut(value, start, start + size, width, seqlen) for name, value in tensors.items()}
            if group is not None:
                one["rollout_group"] = group
            out.append(one)
            start += size
        return out

    def split(
        self, tensors: Mapping[str, Any], n: int, *, pad_token_id: int = 0
    ) -> list[tuple[Tensors, TrajBatchMeta]]:
        """`n` parts of whole trajectories, in order, whose numbers of trajectories differ by at most one.

        Raises:
            ValueError: there are fewer than `n` trajectories, so that a part would be empty.
        """
        if not 1 <= n <= self.n_trajs:
            raise ContractError(f"{self.n_trajs} trajectories cannot be split into {n} parts, none of them empty")
        whole = self.trajectories(tensors)
        bounds = [self.n_trajs * part // n for part in range(n + 1)]
        return [TrajBatchMeta.batch(whole[start:end], pad_token_id=pad_token_id) for start, end in pairwise(bounds)]

    def reorder(
        self, tensors: Mapping[str, Any], order: Sequence[int], *, pad_token_id: int = 0
    ) -> tuple[Tensors, TrajBatchMeta]:
        """The trajectories in another `order`, a permutation of ``range(n_trajs)`` (a shuffle, a sort by length).

        Raises:
            ValueError: `order` is no permutation.
        """
        places = [int(place) for place in order]
        if sorted(places) != list(range(self.n_trajs)):
            raise ContractError(f"order={places} is no permutation of the {self.n_trajs} trajectories")
        whole = self.trajectories(tensors)
        return TrajBatchMeta.batch([whole[place] for place in places], pad_token_id=pad_token_id)


def _cut(value: Any, start: int, end: int, width: int, seqlen: int) -> Any:
    if isinstance(value, list):
        return value[start:end]
    if not _is_tensor(value):
        return value
    rows = value[start:end]
    return rows[:, :seqlen] if rows.ndim > 1 and rows.shape[1] == width else rows
