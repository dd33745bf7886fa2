"""Tensor dicts for user code: padded, of torch tensors or numpy arrays (contract, section 3)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from forebay.errors import ContractError
from forebay.notices import ForebayWarning
from forebay.wire.multi_modal import to_torch_dict
from forebay.wire.rows import PADDING, Row

__all__ = ["NEVER_DROPPED", "RolloutGroup", "common_keys", "pad_rows", "to_torch", "warn_of"]

NEVER_DROPPED = frozenset({"multi_modal_input", "mm_token_type_ids"})
"""Keys that a text row between rows with images lacks for a good reason: it has an empty dict, and tokens of type 0.
Without them the other rows' image tokens would have no image."""
_ROW_VALUES = (("rewards", "reward", np.float32), ("original_rewards", "original_reward", np.float32),
               ("is_truncated", "is_truncated", np.bool_))  # fmt: skip
_ATTRIBUTES: Mapping[str, str] = MappingProxyType({key: attribute for key, attribute, _ in _ROW_VALUES})


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


def common_keys(rows: Sequence[Row]) -> tuple[frozenset[str], tuple[str, ...]]:
    """The keys of the tensors of `rows`, and those that only some rows carry and that are left out of them."""
    kept = {"input_ids", "attention_mask"}
    names = {name for row in rows for name in row.tokens}
    kept |= {name for name in names if name in NEVER_DROPPED or all(name in row.tokens for row in rows)}
    for key, _, _ in _ROW_VALUES:
        known = [_row_value(row, key) is not None for row in rows]
        if key == "original_rewards" and all(row.original_reward is None for row in rows):
            continue  # nothing was normalized or shaped
        names |= {key} if any(known) else set()
        kept |= {key} if all(known) else set()
    if any(row.multi_modal is not None for row in rows):
        kept.add("multi_modal_input")
    return frozenset(kept), tuple(sorted(names - kept))


def warn_of(dropped: Sequence[str]) -> None:
    """A ForebayWarning of keys that are left out; Python shows the same one once."""
    if dropped:
        warnings.warn(
            f"left out of the tensors, because not all rows carry them: {', '.join(dropped)}",
            ForebayWarning,
            stacklevel=2,
        )


def _row_value(row: Row, key: str) -> Any:
    if key == "original_rewards" and row.original_reward is None:
        return row.reward  # a reward that was never changed is the raw one
    return getattr(row, _ATTRIBUTES[key])


def pad_rows(
    rows: Sequence[Row], *, pad_token_id: int = 0, keys: frozenset[str] | None = None, warn: bool = True
) -> dict[str, Any]:
    """B rows as arrays [B, S], padded to the right to the longest of them, plus what each row has one of, [B].

    Padding: `pad_token_id` for ids, -1 for versions and turn ids, else 0. ``multi_modal_input`` is a list of B dicts
    (empty ones for rows without), present if any row has one; its arrays are the rows' own, not copies.

    Args:
        rows: B of them.
        pad_token_id: what ids are padded with.
        keys: which to make, as :func:`common_keys` gave them for a larger set of rows. None: the common keys of `rows`.
        warn: with a ForebayWarning of what only some rows carry, which is left out.
    """
    if not rows:
        return {}
    if keys is None:
        keys, dropped = common_keys(rows)
        if warn:
            warn_of(dropped)
    width = max(row.seqlen for row in rows)
    out: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row.tokens if name in keys):
        fill = pad_token_id if name == "input_ids" else PADDING.get(name, 0)
        carried = [(at, row.tokens[name]) for at, row in enumerate(rows) if name in row.tokens]
        # The workflow's own keys may differ in type from row to row; no value is lost to the first one's.
        padded = np.full((len(rows), width), fill, dtype=np.result_type(*{array.dtype for _, array in carried}))
        for at, array in carried:
            padded[at, : len(array)] = array
        out[name] = padded
    for name in (keys & NEVER_DROPPED) - out.keys() - {"multi_modal_input"}:
        out[name] = np.zeros((len(rows), width), dtype=np.int32)
    out["attention_mask"] = np.arange(width)[None, :] < np.array([row.seqlen for row in rows])[:, None]
    for key, _, dtype in _ROW_VALUES:
        if key in keys:
            out[key] = np.array([_row_value(row, key) for row in rows], dtype=dtype)
    if "multi_modal_input" in keys:
        out["multi_modal_input"] = [dict(row.multi_modal or {}) for row in rows]
    return out


def to_torch(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The same as torch tensors, sharing memory; the dicts of ``multi_modal_input`` too."""
    import torch

    return {
        name: [to_torch_dict(entry) for entry in value] if name == "multi_modal_input" else torch.from_numpy(value)
        for name, value in arrays.items()
    }
