"""Rows as they travel: ragged, only real tokens, one numpy array for each key (contract, section 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forebay.errors import SlotDataError, WorkflowContractError
from forebay.wire.arrays import CODES, code_of, numpy_of
from forebay.wire.multi_modal import row_dicts

__all__ = ["LARGEST_REWARD", "PADDING", "Row", "check_shapes", "rows_from_tensors"]

PADDING: Mapping[str, float] = {"versions": -1, "turn_ids": -1}
"""What a key is padded with to the right; every other key with 0."""

_DTYPES: Mapping[str, np.dtype[Any]] = {
    "input_ids": np.dtype(np.int32),
    "attention_mask": np.dtype(np.bool_),
    "loss_mask": np.dtype(np.int32),
    "logprobs": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
    "turn_ids": np.dtype(np.int32),
    "token_rewards": np.dtype(np.float32),
    "mm_token_type_ids": np.dtype(np.int32),
}
_REQUIRED = ("input_ids", "attention_mask")
LARGEST_REWARD = float(np.finfo(np.float32).max)
"""Rewards are float32 in tensors: beyond it they are infinite."""
_PER_ROW = ("rewards", "original_rewards", "is_truncated")


@dataclass(slots=True)
class Row:
    """One token sequence of S tokens. Every array of `tokens` has length S and carries no padding."""

    tokens: dict[str, np.ndarray[Any, Any]]
    """``input_ids`` always; ``loss_mask``, ``logprobs``, ``versions`` and further keys as the workflow gave them."""
    reward: float | None = None
    original_reward: float | None = None
    is_truncated: bool | None = None
    multi_modal: dict[str, Any] | None = None
    """What the row's images and the like were made into: arrays of any shape (``pixel_values``, ``image_grid_thw``,
    ...) and plain values."""
    completion: str | None = None
    """Completion id of an interaction; None: a row of a tensor result."""
    values: dict[str, np.generic] = field(default_factory=dict)
    """The workflow's own keys that have one value for each row: [B] in tensors."""
    _trained: np.ndarray[Any, Any] | None = field(default=None, repr=False, compare=False)

    @property
    def seqlen(self) -> int:
        """Tokens, prompt included."""
        return len(self.tokens["input_ids"])

    @property
    def trained(self) -> np.ndarray[Any, Any]:
        """Bool [S]: the tokens that are trained on."""
        if self._trained is None:
            mask = self.tokens.get("loss_mask")
            self._trained = np.zeros(self.seqlen, dtype=np.bool_) if mask is None else mask.astype(np.bool_)
        return self._trained

    @property
    def turns(self) -> int:
        """Runs of trained tokens."""
        trained = self.trained
        return int(trained[0]) + int((trained[1:] & ~trained[:-1]).sum())

    @property
    def prompt_len(self) -> int:
        """Index of the first trained token; S if there is none."""
        where = np.flatnonzero(self.trained)
        return int(where[0]) if len(where) else self.seqlen

    @property
    def head_tail(self) -> tuple[int, int]:
        """Smallest and largest version of the trained tokens; (-1, -1) if there are none or no versions."""
        versions = self.tokens.get("versions")
        trained = self.trained
        if versions is None or not trained.any():
            return -1, -1
        chosen = versions[trained]
        return int(chosen.min()), int(chosen.max())


def _numpy(name: str, value: Any) -> np.ndarray[Any, Any]:
    try:
        value = numpy_of(value)  # bfloat16 becomes float32, of the same values
    except (TypeError, RuntimeError) as error:  # numpy has no such type (float8), or no such layout (sparse)
        raise WorkflowContractError(f"{name} has a type that does not travel: {error}") from None
    if not isinstance(value, np.ndarray):
        raise WorkflowContractError(f"{name} is a {type(value).__name__}; a workflow returns tensors")
    return value


def check_shapes(shapes: Mapping[str, Sequence[int]]) -> tuple[int, int]:
    """B and S of a tensor result whose keys have these shapes: which shapes are right is decided here alone.

    Keys of the contract's table are [B] or [B, S] as it says; a workflow's own are either, by their number of
    dimensions.

    Raises:
        WorkflowContractError: a required key is missing, a key is no text, or a shape is wrong.
        SlotDataError: there are fewer logprobs than tokens.
    """
    for name in shapes:
        if not isinstance(name, str):
            raise WorkflowContractError(f"the result has the key {name!r}; keys are strings")
    for name in _REQUIRED:
        if name not in shapes:
            raise WorkflowContractError(f"the result has no {name}; it has {', '.join(sorted(shapes)) or 'nothing'}")
    ids = shapes["input_ids"]
    if len(ids) != 2 or 0 in ids:
        raise WorkflowContractError(
            f"input_ids has shape {list(ids)}, expected [B, S] with B and S at least 1; "
            "add the batch dimension with unsqueeze(0)"
        )
    size, width = ids
    for name, shape in shapes.items():
        _check_shape(name, list(shape), size, width)
    return size, width


def _check_shape(name: str, shape: list[int], size: int, width: int) -> None:
    if name == "logprobs" and len(shape) == 2 and shape[0] == size and shape[1] < width:
        raise SlotDataError(f"logprobs are missing: {shape[1]} for {width} tokens; zeros are never filled in")
    per_row, per_token = [size], [size, width]
    if name in _PER_ROW or name in _DTYPES:
        want = per_row if name in _PER_ROW else per_token
        if shape != want:
            raise WorkflowContractError(f"{name} has shape {shape}, expected {want}")
    elif len(shape) > 2:
        raise WorkflowContractError(
            f"{name} has shape {shape}; a workflow's own key is {per_row}, a value for each row, or {per_token}, one "
            "for each token: reduce it, give each slice a key of its own, or put it into multi_modal_input, whose "
            "dicts hold arrays of any shape"
        )
    elif shape not in (per_row, per_token):
        raise WorkflowContractError(
            f"{name} has shape {shape}, expected {per_row}, a value for each row, or {per_token}, one for each token"
        )


def rows_from_tensors(result: Mapping[str, Any]) -> tuple[list[Row], float | None]:
    """The rows of a workflow's tensor dict, and the rollout's reference reward if it carries one.

    Versions are set to -1 where ``loss_mask`` is 0, and a row ends where its ``attention_mask`` does.

    Raises:
        WorkflowContractError: a required key is missing, or a shape or a type is wrong.
        SlotDataError: a logprob or a reward is NaN, infinite or missing for a token, an integer is out of range, or a
            ``loss_mask`` has another value than 0 and 1. Nothing is filled in, and nothing wraps.
    """
    arrays = {
        name: _numpy(name, value)
        for name, value in result.items()
        if name not in ("rollout_reward", "rollout_group", "multi_modal_input")
        and not (name == "rewards" and value is None)
    }
    size, _ = check_shapes({name: array.shape for name, array in arrays.items()})
    for name, array in arrays.items():
        _check_dtype(name, array)
    reference = _reference(result.get("rollout_reward"), size)
    lengths = _lengths(arrays["attention_mask"])
    rows = [_row(arrays, at, length) for at, length in enumerate(lengths)]
    if (multi_modal := result.get("multi_modal_input")) is not None:
        for row, entry in zip(rows, row_dicts(multi_modal, size), strict=True):
            row.multi_modal = entry
    return rows, reference


def _reference(value: Any, size: int) -> float | None:
    """The one number of a ``rollout_reward``: a number, an array of one, or an array [B] whose values agree."""
    if value is None:
        return None
    try:
        values = value.reshape(-1).tolist() if hasattr(value, "reshape") else [value]
        several = len(values) != 1
        if (several and (len(values) != size or value.ndim != 1)) or any(isinstance(v, (str, bytes)) for v in values):
            raise TypeError
        numbers = [float(one) for one in values]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise WorkflowContractError(
            f"rollout_reward is {value!r}, expected one finite number, or one for each of the {size} rows"
        ) from None
    for number in numbers:
        if not _fits(number):
            raise SlotDataError(f"rollout_reward is {number}")
    if any(number != numbers[0] for number in numbers):
        raise WorkflowContractError(
            f"rollout_reward has values from {min(numbers):g} to {max(numbers):g}; it is one number for each rollout, "
            "so those of its rows agree"
        )
    return numbers[0]


def _check_dtype(name: str, array: np.ndarray[Any, Any]) -> None:
    kinds = {"logprobs": "f", "token_rewards": "f", "rewards": "fiu", "original_rewards": "fiu"}.get(name, "biu")
    own = name not in _DTYPES and name not in _PER_ROW
    if own:
        kinds = "biuf"
    if array.dtype.kind not in kinds or (own and code_of(array) not in CODES):
        raise WorkflowContractError(f"{name} has dtype {array.dtype}")


def _lengths(mask: np.ndarray[Any, Any]) -> list[int]:
    real = mask.astype(np.bool_)
    lengths = real.sum(axis=1)
    for at, length in enumerate(lengths):
        if not real[at, :length].all():
            raise WorkflowContractError(f"row {at}: attention_mask has holes; rows are padded to the right only")
        if length == 0:
            raise WorkflowContractError(f"row {at}: attention_mask is all zero; a row has at least one token")
    return [int(length) for length in lengths]


def _fits(value: float) -> bool:
    return abs(value) <= LARGEST_REWARD  # False for NaN


def _converted(where: str, values: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if dtype.kind == "i" and values.dtype.kind in "iu" and values.dtype != dtype:
        bounds = np.iinfo(dtype)
        if values.min() < bounds.min or values.max() > bounds.max:
            raise SlotDataError(f"{where} has a value that does not fit {dtype}")
    with np.errstate(over="ignore"):  # becomes infinite, which is looked for next
        return np.ascontiguousarray(values, dtype=dtype)


def _check_loss_mask(at: int, mask: np.ndarray[Any, Any]) -> None:
    # Trainers multiply the loss by it: any other number would be a weight that nobody asked for.
    if mask.min() < 0 or mask.max() > 1:
        bad = int(np.flatnonzero((mask < 0) | (mask > 1))[0])
        raise SlotDataError(f"row {at}: loss_mask[{bad}] is {mask[bad]}; it is 1 where a token is trained on, else 0")


def _row(arrays: Mapping[str, np.ndarray[Any, Any]], at: int, length: int) -> Row:
    tokens: dict[str, np.ndarray[Any, Any]] = {}
    values: dict[str, np.generic] = {}
    for name, array in arrays.items():
        if name in _PER_ROW or name == "attention_mask":
            continue
        if array.ndim == 1:
            values[name] = array[at]
        else:
            tokens[name] = _converted(f"row {at}: {name}", array[at, :length], _DTYPES.get(name, array.dtype))
    if int(tokens["input_ids"].min()) < 0:
        raise SlotDataError(f"row {at}: input_ids has the negative id {tokens['input_ids'].min()}")
    if "loss_mask" in tokens:
        _check_loss_mask(at, tokens["loss_mask"])
    row = Row(tokens, values=values)
    if "versions" in tokens:
        # AReaL's documents put 0 on prompt tokens; only generated tokens have a version.
        tokens["versions"] = np.where(row.trained, tokens["versions"], np.int32(-1))
    for name in ("logprobs", "token_rewards"):
        if name in tokens and not np.isfinite(tokens[name]).all():
            bad = int(np.flatnonzero(~np.isfinite(tokens[name]))[0])
            raise SlotDataError(f"row {at}: {name}[{bad}] is {tokens[name][bad]}")
    for name, attribute in (("rewards", "reward"), ("original_rewards", "original_reward")):
        if name in arrays:
            value = float(arrays[name][at])
            if not _fits(value):
                raise SlotDataError(f"row {at}: {name} is {value}")
            setattr(row, attribute, value)
    if "is_truncated" in arrays:
        row.is_truncated = bool(arrays["is_truncated"][at])
    return row
