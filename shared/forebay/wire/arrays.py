"""Arrays as bytes: which types travel, and how their bytes are laid out before they are compressed."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

__all__ = ["CODES", "code_of", "numpy_of", "shuffled", "unshuffled"]

CODES: Final = frozenset({"b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"})
"""Type codes that travel: kind and bytes for each value."""


def code_of(array: np.ndarray[Any, Any] | np.generic) -> str:
    """The type code of `array`, whatever its byte order."""
    return str(array.dtype.str).lstrip("<>=|")


def numpy_of(value: Any) -> Any:
    """`value` as a numpy array if it is a torch tensor, else as it is; torch is not imported for that.

    numpy has no bfloat16: such a tensor becomes float32, which holds each of its values. Raises TypeError or
    RuntimeError of one that numpy cannot hold otherwise (float8, a sparse layout).
    """
    if not hasattr(value, "detach"):
        return value
    value = value.detach().cpu()
    if str(value.dtype) == "torch.bfloat16":
        value = value.float()
    return value.numpy()


def shuffled(array: np.ndarray[Any, Any]) -> bytes:
    """The little-endian bytes of `array`, first those of lowest value of all elements, and so on.

    The high bytes of neighbouring floats are alike, so that this compresses better; of what was bfloat16 the two low
    bytes are all zero and take no room.
    """
    flat = array.astype(array.dtype.newbyteorder("<"), copy=False).reshape(-1)
    return np.ascontiguousarray(flat).view(np.uint8).reshape(flat.size, array.dtype.itemsize).T.tobytes()


def unshuffled(raw: bytes, code: str, size: int) -> np.ndarray[Any, Any]:
    """The inverse of :func:`shuffled`: `size` values in a writable array of one dimension."""
    dtype = np.dtype(code)
    lanes = np.frombuffer(raw, dtype=np.uint8).reshape(dtype.itemsize, size)
    flat = np.array(lanes.T, order="C").view(dtype.newbyteorder("<")).reshape(size)
    return flat.astype(dtype, copy=False)
