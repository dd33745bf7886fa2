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

__all__ = ["FILLED", "NEVER_DROPPED", "RolloutGroup", "common_keys", "pad_rows", "to_torch", "warn_of"]

NEVER_DROPPED = frozenset({"multi_modal_input", "mm_token_type_ids"})
"""Keys that a text row between rows with images lacks for a good reason: it has an empty dict, and tokens of type 0.
Without them the other rows' image tokens would have no image."""
FILLED = frozenset({"rewards", "original_rewards"})
"""Keys that are NaN for a row without, where any row has one: a missing reward is the trainer's to handle."""
_ROW_VALUES = (("rewards", "reward", np.float32), ("original_rewards", "original_reward", np.float32),
               ("is_truncated", "is_truncated", np.bool_))  # fmt: skip
_NAMED = 10
"""Groups that a warning names, at most."""
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


def common_keys(rows: Sequence[Row], tasks: Sequence[int] | None = None) -> tuple[frozenset[str], tuple[str, ...]]:
    """The keys of the tensors of `rows`, and what to warn of: keys that are left out, and rewards that are missing.

    A key is left out where some row lacks it, or where it is [B] in some rows and [B, S] in others. Not so rewards: if
    any row has one they are there, NaN for rows without (:data:`FILLED`).

    Args:
        rows: B of them.
        tasks: the task id of each, so that warnings name the groups; None: they name places in `rows`.
    """
    kept = {"input_ids", "attention_mask"}
    lacking: dict[str, list[int]] = {}
    mixed: list[str] = []
    for name in {name for row in rows for name in (*row.tokens, *row.values)}:
        lacks = [at for at, row in enumerate(rows) if name not in row.tokens and name not in row.values]
        if name in NEVER_DROPPED:
            kept.add(name)
        elif lacks:
            lacking[name] = lacks
        elif any(name in row.tokens for row in rows) and any(name in row.values for row in rows):
            mixed.append(name)
        else:
            kept.add(name)
    flagless = [at for at, row in enumerate(rows) if row.is_truncated is None]
    if not flagless:
        kept.add("is_truncated")
    elif len(flagless) < len(rows):
        lacking["is_truncated"] = flagless
    if any(row.original_reward is not None for row in rows):  # else nothing was normalized or shaped
        kept.add("original_rewards")
    unrewarded = [at for at, row in enumerate(rows) if row.reward is None]
    if len(unrewarded) < len(rows):
        kept.add("rewards")
    if any(row.multi_modal is not None for row in rows):
        kept.add("multi_modal_input")
    notes = _notes(lacking, mixed, unrewarded if "rewards" in kept else [], tasks)
    return frozenset(kept), notes


def _notes(
    lacking: Mapping[str, Sequence[int]], mixed: Sequence[str], unrewarded: Sequence[int], tasks: Sequence[int] | None
) -> tuple[str, ...]:
    notes: list[str] = []
    if lacking:
        names: dict[str, list[str]] = {}
        for name in sorted(lacking):
            names.setdefault(_places(lacking[name], tasks), []).append(name)
        each = "; ".join(f"{', '.join(some)} (missing in {places})" for places, some in names.items())
        notes.append(f"left out of the tensors, because not all rows carry them: {each}")
    if mixed:
        names_of = ", ".join(sorted(mixed))
        notes.append(f"left out of the tensors, because they are [B] in some rows and [B, S] in others: {names_of}")
    if unrewarded:
        notes.append(
            f"rewards are NaN for rows that have none (in {_places(unrewarded, tasks)}): "
            "leave these out of the loss, or reject the episodes"
        )
    return tuple(notes)


def _places(rows: Sequence[int], tasks: Sequence[int] | None) -> str:
    found = list(rows) if tasks is None else sorted({tasks[at] for at in rows})
    what = ("row" if tasks is None else "task_id") + ("s" if len(found) > 1 else "")
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"{what} {', '.join(map(str, found[:_NAMED]))}{more}"


def warn_of(notes: Sequence[str]) -> None:
    """A ForebayWarning of each; Python shows the same one once."""
    for note in notes:
        warnings.warn(note, ForebayWarning, stacklevel=2)


def _row_value(row: Row, key: str) -> Any:
    if key == "original_rewards" and row.original_reward is None:
        return row.reward  # a reward that was never changed is the raw one
    return getattr(row, _ATTRIBUTES[key])


def pad_rows(
    rows: Sequence[Row],
    *,
    pad_token_id: int = 0,
    keys: frozenset[str] | None = None,
    warn: bool = True,
    tasks: Sequence[int] | None = None,
) -> dict[str, Any]:
    """B rows as arrays [B, S], padded to the right to the longest of them, plus what each row has one of, [B].

    A reward that a row lacks is NaN where others have one.

    Padding: `pad_token_id` for ids, -1 for versions and turn ids, else 0. ``multi_modal_input`` is a list of B dicts
    (empty ones for rows without), present if any row has one; its arrays are the rows' own, not copies.

    Args:
        rows: B of them.
        pad_token_id: what ids are padded with.
        keys: which to make, as :func:`common_keys` gave them for a larger set of rows. None: the common keys of `rows`.
        warn: with a ForebayWarning of what only some rows carry, which is left out, and of missing rewards.
        tasks: the task id of each row, to name in warnings; None: its place is named.
    """
    if not rows:
        return {}
    if keys is None:
        keys, notes = common_keys(rows, tasks)
        if warn:
            warn_of(notes)
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
    for name in rows[0].values:
        if name in keys:
            each = [row.values[name] for row in rows]
            out[name] = np.array(each, dtype=np.result_type(*{value.dtype for value in each}))
    for name in (keys & NEVER_DROPPED) - out.keys() - {"multi_modal_input"}:
        out[name] = np.zeros((len(rows), width), dtype=np.int32)
    out["attention_mask"] = np.arange(width)[None, :] < np.array([row.seqlen for row in rows])[:, None]
    for key, _, dtype in _ROW_VALUES:
        if key in keys:
            values = [_row_value(row, key) for row in rows]
            out[key] = np.array([math.nan if value is None else value for value in values], dtype=dtype)
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
