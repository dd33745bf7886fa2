"""``multi_modal_input``: for each row, what its images and the like were made into (contract, section 3).

A row's dict holds arrays of any shape (``pixel_values``, ``image_grid_thw``, ...) and plain values. On the wire each
array is one compressed block with its type and shape. bfloat16 travels, and comes back, as float32: numpy has no such
type, float32 holds its every value, and the two bytes that are always zero take no room when compressed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import zstandard

from forebay.errors import FrameError, SubmitError, WorkflowContractError
from forebay.wire.arrays import CODES, code_of, numpy_of, shuffled, unshuffled
from forebay.wire.values import decode_plain, encode_plain

__all__ = ["claimed_bytes", "decode_dict", "encode_dict", "nbytes", "row_dicts", "to_torch_dict"]

_ARRAY = "a"
_VALUE = "v"
_MAX_DIMENSIONS = 16


def row_dicts(value: Any, size: int) -> list[dict[str, Any] | None]:
    """The dict of each of `size` rows of a workflow's ``multi_modal_input``; None where it is empty.

    Raises:
        WorkflowContractError: it is no list of `size` dicts, or holds something that does not travel.
    """
    if not isinstance(value, (list, tuple)) or len(value) != size:
        found = f"{len(value)} entries" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"
        raise WorkflowContractError(f"multi_modal_input is {found}; expected a list of {size} dicts, one for each row")
    out: list[dict[str, Any] | None] = []
    for at, entry in enumerate(value):
        # Not only dict: what a processor of transformers returns is a mapping of its own.
        if entry is not None and (not isinstance(entry, Mapping) or not all(isinstance(name, str) for name in entry)):
            raise WorkflowContractError(f"multi_modal_input[{at}] is a {type(entry).__name__}; expected a dict")
        out.append({name: _checked(f"multi_modal_input[{at}][{name!r}]", item) for name, item in entry.items()}
                   if entry else None)  # fmt: skip
    return out


def _checked(where: str, value: Any) -> Any:
    value = _without_tensors(where, value)
    if isinstance(value, np.ndarray):
        if code_of(value) not in CODES:
            raise WorkflowContractError(f"{where} has dtype {value.dtype}, which does not travel")
        return value
    try:
        return decode_plain(encode_plain(value, where))
    except SubmitError as error:
        raise WorkflowContractError(str(error)) from None


def _without_tensors(where: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_without_tensors(where, item) for item in value]
    if isinstance(value, dict):
        return {name: _without_tensors(where, item) for name, item in value.items()}
    try:
        return numpy_of(value)
    except (TypeError, RuntimeError) as error:
        raise WorkflowContractError(f"{where} has a type that does not travel: {error}") from None


def nbytes(entry: Mapping[str, Any] | None) -> int:
    """Bytes of the arrays of a row's dict."""
    return sum(value.nbytes for value in (entry or {}).values() if isinstance(value, np.ndarray))


def encode_dict(entry: Mapping[str, Any], compressor: zstandard.ZstdCompressor) -> dict[str, list[Any]]:
    """The coded form of a row's dict."""
    return {
        name: [_ARRAY, code_of(value), list(value.shape), compressor.compress(shuffled(value))]
        if isinstance(value, np.ndarray)
        else [_VALUE, encode_plain(value)]
        for name, value in entry.items()
    }


def claimed_bytes(form: Mapping[str, list[Any]]) -> int:
    """Bytes that the arrays of a coded dict say they take; nothing is allocated. Raises FrameError."""
    total = 0
    for name, spec in form.items():
        if spec[0] == _VALUE:
            continue
        how, code, shape, _ = spec
        if how != _ARRAY or code not in CODES:
            raise FrameError(f"{name} is coded in an unknown way ({how!r}, {code!r})")
        if len(shape) > _MAX_DIMENSIONS or any(type(size) is not int or size < 0 for size in shape):
            raise FrameError(f"{name} claims the shape {shape!r}"[:200])
        total += math.prod(shape) * np.dtype(code).itemsize
    return total


def decode_dict(form: Mapping[str, list[Any]], decompressor: zstandard.ZstdDecompressor) -> dict[str, Any]:
    """The inverse of :func:`encode_dict`, of a form whose claims :func:`claimed_bytes` has checked."""
    out: dict[str, Any] = {}
    for name, spec in form.items():
        if spec[0] == _VALUE:
            out[name] = decode_plain(spec[1])
            continue
        _, code, shape, data = spec
        count = math.prod(shape)
        size = count * np.dtype(code).itemsize
        if zstandard.frame_content_size(data) != size:
            raise FrameError(f"{name} does not hold {count} values of {code}")
        raw = decompressor.decompress(data, max_output_size=size) if size else b""
        out[name] = unshuffled(raw, code, count).reshape(shape)
    return out


def to_torch_dict(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A row's dict with torch tensors for its arrays, sharing memory."""
    import torch

    def convert(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value)
        if isinstance(value, list):
            return [convert(item) for item in value]
        return {name: convert(item) for name, item in value.items()} if isinstance(value, dict) else value

    return {name: convert(value) for name, value in entry.items()}
