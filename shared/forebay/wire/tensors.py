"""Tensor dicts for user code: padded, of torch tensors or numpy arrays (contract, section 3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.errors import ContractError
from forebay.wire.rows import PADDING, Row

__all__ = ["RolloutGroup", "pad_rows", "to_torch"]

_ROW_VALUES = (("rewards", "reward", np.float32), ("original_rewards", "original_reward", np.float32),
               ("is_truncated", "is_truncated", np.bool_))  # fmt: skip


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """Which rows of a group's tensors belong to which rollout; one entry for each usable rollout."""

    row_counts: tuple[int, ...]
    rewards: tuple[float | None, ...]
    """The reference of each rollout."""
    sample_idx: tuple[int, ...]
    """The slot of each rollout."""

    def __post_init__(self) -> None:
        """Check the counts."""
        if any(type(count) is not int or count < 1 for count in self.row_counts):
            raise ContractError(f"row_counts {self.row_counts} must be integers of at least 1")
        if not len(self.row_counts) == len(self.rewards) == len(self.sample_idx):
            raise ContractError("row_counts, rewards and sample_idx have one entry for each usable rollout")
        if any(reward is not None and not math.isfinite(reward) for reward in self.rewards):
            raise ContractError(f"rewards {self.rewards} must be finite or None")

    @property
    def usable_size(self) -> int:
        """Usable rollouts."""
        return len(self.row_counts)


def pad_rows(rows: Sequence[Row], *, pad_token_id: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """B rows as arrays [B, S], padded to the right to the longest of them, plus what each row has one of, [B].

    Keys that not all rows carry are left out; but where some rows have an original reward, those of the others, which
    nothing has changed, are their rewards. Padding: `pad_token_id` for ids, -1 for versions and turn ids, else 0.
    """
    if not rows:
        return {}
    width = max(row.seqlen for row in rows)
    lengths = np.array([row.seqlen for row in rows])
    out: dict[str, np.ndarray[Any, Any]] = {}
    for name in rows[0].tokens:
        if not all(name in row.tokens for row in rows):
            continue
        fill = pad_token_id if name == "input_ids" else PADDING.get(name, 0)
        # The workflow's own keys may differ in type from row to row; no value is lost to the first one's.
        padded = np.full((len(rows), width), fill, dtype=np.result_type(*{row.tokens[name].dtype for row in rows}))
        for at, row in enumerate(rows):
            padded[at, : row.seqlen] = row.tokens[name]
        out[name] = padded
    out["attention_mask"] = np.arange(width)[None, :] < lengths[:, None]
    for key, attribute, dtype in _ROW_VALUES:
        values = [getattr(row, attribute) for row in rows]
        if key == "original_rewards" and any(value is not None for value in values):
            values = [row.reward if value is None else value for row, value in zip(rows, values, strict=True)]
        if all(value is not None for value in values):
            out[key] = np.array(values, dtype=dtype)
    return out


def to_torch(arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """The same as torch tensors, sharing memory."""
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}
