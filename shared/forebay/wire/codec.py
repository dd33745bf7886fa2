"""Rows to bytes and back.

A frame is one version byte and a msgpack map. Masks and versions are run-length coded; token ids and logprobs are
little-endian arrays, logprobs with their bytes shuffled (the high bytes of neighbours are alike), both under zstd
level 1. Sizes are checked against the frame's own claims, and these against its length, before anything is allocated.

Version 2 is version 1 with the ``multi_modal`` dicts of rows, version 3 has their ``values`` too. Each is written only
where a row needs it: a release that knows earlier ones alone must not read such rows without their images or values.
All are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import zstandard

from forebay.errors import FrameError, SlotDataError
from forebay.wire.arrays import CODES, code_of, shuffled, unshuffled
from forebay.wire.multi_modal import claimed_bytes, decode_dict, encode_dict, nbytes
from forebay.wire.rows import Row
from forebay.wire.values import pack, unpack

__all__ = ["decode_rows", "encode_rows"]

_VERSION = 1
_VERSION_MULTI_MODAL = 2
_VERSION_VALUES = 3
_VERSIONS = (_VERSION, _VERSION_MULTI_MODAL, _VERSION_VALUES)
_RUNS = "r"
_PLAIN = "p"
_MAX_TOKENS = 64 * 2**20
_FREE_BYTES = 64 * 2**20
_MAX_RATIO = 4096
"""Bytes that rows may take for each byte of their frame, above the free ones: real token ids compress by less than
ten, and a damaged frame of a few bytes must not claim gigabytes."""


def encode_rows(rows: Sequence[Row]) -> bytes:
    """The frame of a slot's rows.

    Raises:
        SlotDataError: a type that does not travel, or rows so repetitive that their frame would be taken for damaged.
    """
    compressor = zstandard.ZstdCompressor(level=1)
    for row in rows:
        for name, array in (row.tokens | row.values).items():
            if code_of(array) not in CODES:
                raise SlotDataError(f"{name} has dtype {array.dtype}, which does not travel")
    frame = bytes([_version_of(rows)]) + pack([_encode_row(row, compressor) for row in rows])
    size = sum(array.nbytes for row in rows for array in row.tokens.values())
    size += sum(nbytes(row.multi_modal) for row in rows)
    if size > _bound(frame):
        raise SlotDataError(f"the rows take {size} bytes, of one and the same value almost everywhere")
    return frame


def _version_of(rows: Sequence[Row]) -> int:
    if any(row.values for row in rows):
        return _VERSION_VALUES
    return _VERSION if all(row.multi_modal is None for row in rows) else _VERSION_MULTI_MODAL


def _bound(frame: bytes) -> int:
    return _FREE_BYTES + _MAX_RATIO * len(frame)


def decode_rows(frame: bytes) -> list[Row]:
    """The rows of a frame; their arrays are writable copies.

    Raises:
        FrameError: the frame is truncated, malformed, of another version, or claims impossible sizes.
    """
    if not frame or frame[0] not in _VERSIONS:
        found = frame[0] if frame else "nothing"
        known = f"{_VERSION} to {_VERSIONS[-1]}"
        raise FrameError(f"rows frame of version {found}, expected {known}; run the same release everywhere")
    forms = unpack(memoryview(frame)[1:].tobytes())
    if not isinstance(forms, list):
        raise FrameError("rows frame holds no list")
    decompressor = zstandard.ZstdDecompressor()
    try:
        claimed = sum(_claimed(form) for form in forms)
        if claimed > _bound(frame):
            raise FrameError(f"a rows frame of {len(frame)} bytes claims {claimed} bytes of rows")
        return [_decode_row(form, decompressor) for form in forms]
    except FrameError:
        raise
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError, zstandard.ZstdError) as error:
        raise FrameError(f"malformed rows frame: {error}") from None


def _claimed(form: dict[str, Any]) -> int:
    length = form["n"]
    if type(length) is not int or not 1 <= length <= _MAX_TOKENS:
        raise FrameError(f"a row claims {length!r} tokens")
    if any(spec[0] not in CODES for spec in form["k"].values()):
        raise FrameError("a row has an array of an unknown dtype")
    tokens = sum(length * np.dtype(spec[0]).itemsize for spec in form["k"].values())
    return int(tokens + claimed_bytes(form.get("m") or {}))


def _encode_row(row: Row, compressor: zstandard.ZstdCompressor) -> dict[str, Any]:
    form = {
        "n": row.seqlen,
        "k": {name: _encode_array(array, compressor) for name, array in row.tokens.items()},
        "r": row.reward,
        "o": row.original_reward,
        "t": row.is_truncated,
    }
    if row.completion is not None:
        form["c"] = row.completion
    if row.multi_modal is not None:
        form["m"] = encode_dict(row.multi_modal, compressor)
    if row.values:
        form["v"] = {name: [code_of(value), shuffled(np.asarray(value))] for name, value in row.values.items()}
    return form


def _encode_array(array: np.ndarray[Any, Any], compressor: zstandard.ZstdCompressor) -> list[Any]:
    dtype = code_of(array)
    if array.dtype.kind in "biu":
        starts = np.flatnonzero(np.concatenate(([True], array[1:] != array[:-1])))
        if len(starts) * 4 <= len(array) or len(starts) <= 8:
            lengths = np.diff(np.append(starts, len(array)))
            return [dtype, _RUNS, [[int(array[at]), int(n)] for at, n in zip(starts, lengths, strict=True)]]
    return [dtype, _PLAIN, compressor.compress(shuffled(array))]


def _decode_row(form: dict[str, Any], decompressor: zstandard.ZstdDecompressor) -> Row:
    length = form["n"]
    tokens = {name: _decode_array(name, spec, length, decompressor) for name, spec in form["k"].items()}
    if "input_ids" not in tokens:
        raise FrameError("a row has no input_ids")
    reward, original, truncated = form["r"], form["o"], form["t"]
    if any(value is not None and not isinstance(value, float) for value in (reward, original)):
        raise FrameError(f"a row has the rewards {reward!r} and {original!r}")
    if truncated is not None and not isinstance(truncated, bool):
        raise FrameError(f"a row is truncated: {truncated!r}")
    completion = form.get("c")
    if completion is not None and not isinstance(completion, str):
        raise FrameError(f"a row has the completion id {completion!r}")
    multi_modal = form.get("m")
    return Row(
        tokens,
        reward=reward,
        original_reward=original,
        is_truncated=truncated,
        multi_modal=None if multi_modal is None else decode_dict(multi_modal, decompressor),
        completion=completion,
        values={name: _decode_value(name, spec) for name, spec in form.get("v", {}).items()},
    )


def _decode_value(name: Any, spec: list[Any]) -> np.generic:
    code, data = spec
    if not isinstance(name, str) or code not in CODES:
        raise FrameError(f"the value of {name!r} is malformed")
    (value,) = unshuffled(data, code, 1)  # ValueError unless it has the length of one
    return cast("np.generic", value)


def _decode_array(
    name: str, spec: list[Any], length: int, decompressor: zstandard.ZstdDecompressor
) -> np.ndarray[Any, Any]:
    code, how, data = spec
    dtype = np.dtype(code).newbyteorder("<")
    if how == _RUNS:
        values, counts = [run[0] for run in data], [run[1] for run in data]
        if any(type(n) is not int or n < 1 for n in counts) or sum(counts) != length:
            raise FrameError(f"the runs of {name} do not add up to {length}")
        if dtype.kind not in "biu" or any(type(value) is not int for value in values):
            raise FrameError(f"the runs of {name} are not of integers")
        return np.repeat(np.array(values, dtype=np.dtype(code)), counts)
    if how != _PLAIN:
        raise FrameError(f"{name} is coded in an unknown way {how!r}")
    size = length * dtype.itemsize
    if zstandard.frame_content_size(data) != size:
        raise FrameError(f"{name} does not hold {length} values of {code}")
    return unshuffled(decompressor.decompress(data, max_output_size=size), code, length)
