"""``check_trajectory_format``: whether a workflow's result is exactly what the contract says (section 2).

Off by default, for what it refuses that would do no harm (a mask of integers, a key less than in other slots); what
would do harm is refused in every setting, by :mod:`forebay.wire.rows`, which also says which shapes are right. It looks
at types and shapes only, so it costs the same for 100 and for 100,000 tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Final

from forebay.errors import WorkflowContractError
from forebay.interactions import Interaction
from forebay.wire.rows import check_shapes

__all__ = ["EXEMPT", "check_keys", "check_trajectory"]

EXEMPT: Final = frozenset({"rollout_reward", "rollout_group"})
"""Keys that the key set does not count: of the rollout, not of its rows."""
_DTYPES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "input_ids": ("int32", "int64"),
        "attention_mask": ("bool",),
        "loss_mask": ("int32",),
        "logprobs": ("float32",),
        "versions": ("int32",),
        "rewards": ("float32",),
        "is_truncated": ("bool",),
        "original_rewards": ("float32",),
        "turn_ids": ("int32",),
        "token_rewards": ("float32",),
        "mm_token_type_ids": ("int32", "int64"),
    }
)
"""The table of section 3; a workflow's own keys may have any type."""


def check_trajectory(result: Any) -> frozenset[str] | None:
    """The key set of a tensor result that is right; None of a result that has none (None, a dict of Interactions).

    Raises:
        WorkflowContractError: says what is wrong, with the key, what it has and what is expected.
        SlotDataError: there are fewer logprobs than tokens.
    """
    if result is None:
        return None
    if not isinstance(result, Mapping):
        raise WorkflowContractError(f"the result is a {type(result).__name__}; expected a dict or None")
    if not result:
        raise WorkflowContractError("the result is an empty dict; return None to reject the episode")
    if all(isinstance(value, Interaction) for value in result.values()):
        return None
    tensors = {
        name: value
        for name, value in result.items()
        if name != "multi_modal_input" and name not in EXEMPT and not (name == "rewards" and value is None)
    }
    size, _ = check_shapes({name: _shape(name, value) for name, value in tensors.items()})
    for name, value in tensors.items():
        _check_dtype(name, value)
    if "multi_modal_input" in result:
        _check_multi_modal(result["multi_modal_input"], size)
    return frozenset(result) - EXEMPT


def _shape(name: str, value: Any) -> list[int]:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise WorkflowContractError(f"{name} is a {type(value).__name__}, expected a tensor")
    return list(value.shape)


def _check_dtype(name: str, value: Any) -> None:
    dtype = str(value.dtype).removeprefix("torch.")
    allowed = _DTYPES.get(name)
    if allowed is not None and dtype not in allowed:
        raise WorkflowContractError(f"{name} has dtype {dtype}, expected {' or '.join(allowed)}")


def _check_multi_modal(value: Any, rows: int) -> None:
    if not isinstance(value, list) or not value:
        raise WorkflowContractError("multi_modal_input must be a list of dicts that is not empty")
    if len(value) != rows:
        raise WorkflowContractError(f"multi_modal_input has {len(value)} entries for {rows} rows; each row has one")
    for at, entry in enumerate(value):
        if not isinstance(entry, Mapping) or "pixel_values" not in entry:
            raise WorkflowContractError(f"multi_modal_input[{at}] must be a dict with pixel_values")


def check_keys(keys: Collection[str], first: Collection[str]) -> None:
    """Raise WorkflowContractError if `keys` lack one that the first tensor result of the workflow in this run has."""
    if missing := sorted(set(first) - set(keys)):
        raise WorkflowContractError(
            f"the result lacks {', '.join(missing)}, which the first result of this workflow in this run had; "
            "return the same keys from every episode"
        )
