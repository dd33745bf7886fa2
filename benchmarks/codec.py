"""Bytes and CPU time of rows on the wire: ``forebay.wire.codec`` against JSON and against plain msgpack.

Compared: a row of 4096 tokens becomes bytes, and bytes become the same row of numpy arrays again. The other ways turn
the arrays into lists, as one does who has no codec: JSON, and msgpack with floats of 32 bits; both also under zstd of
level 1, the level that our codec uses, so that it is seen what compression alone brings.

Why it is fair: all ways begin and end with the same numpy arrays of the same types, all are lossless (checked before
anything is measured), and all run in turns on the same rows in one process. Times are CPU times, which neighbours on
the machine disturb least. The rows are made to resemble real ones: two generations with the prompt before and a tool's
output between them, 58 % of the tokens trained, token ids with the skew of text (Zipf over 150 000 ids, 10 bits a
token), log-probabilities of which most are near 0 and all of which have noise in their last bits, versions that change
once.

What it does not show: other row shapes (short rows pay the fixed parts of the frame; keys of a workflow's own cost what
they hold), ids of real text, whose repetitions compress somewhat better, and the time on the network.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import zstandard

from benchmarks.measure import Report, Say
from forebay.wire.codec import decode_rows, encode_rows
from forebay.wire.rows import Row

__all__ = ["run", "synthetic_row"]

_TOKENS = 4096
_TRAINED = 0.58
_ROWS = 16
_ROUNDS = 9
_ZIPF = 1.1
_IDS = np.arange(150_000, dtype=np.int32)
_ID_WEIGHTS = (_IDS + 1.0) ** -_ZIPF / np.sum((_IDS + 1.0) ** -_ZIPF)
_DTYPES = {"input_ids": np.int32, "loss_mask": np.int32, "logprobs": np.float32, "versions": np.int32}


def synthetic_row(rng: np.random.Generator, tokens: int = _TOKENS) -> Row:
    """A row like those of training: prompt, generation, a tool's output, generation."""
    trained = round(tokens * _TRAINED)
    first, tool = trained * 2 // 3, tokens // 8
    mask = np.zeros(tokens, dtype=np.int32)
    start = tokens - trained - tool
    mask[start : start + first] = 1
    mask[start + first + tool :] = 1
    generated = np.flatnonzero(mask)
    # Most tokens are nearly certain; some are real choices. A logprob is computed in float32, so its bits are noise.
    certain = rng.random(trained) < 0.6
    logprobs = np.zeros(tokens, dtype=np.float32)
    logprobs[generated] = -np.where(certain, rng.exponential(0.002, trained), rng.exponential(0.9, trained))
    versions = np.full(tokens, -1, dtype=np.int32)
    versions[generated] = np.where(np.arange(trained) < trained // 2, 17, 18)
    ids = rng.choice(_IDS, tokens, p=_ID_WEIGHTS)
    return Row({"input_ids": ids, "loss_mask": mask, "logprobs": logprobs, "versions": versions}, reward=1.0)


@dataclass(frozen=True, slots=True)
class _Way:
    encode: Callable[[Row], bytes]
    decode: Callable[[bytes], Row]


def _lists(row: Row) -> dict[str, Any]:
    return {name: array.tolist() for name, array in row.tokens.items()} | {"reward": row.reward}


def _row(form: dict[str, Any]) -> Row:
    return Row({name: np.array(form[name], dtype=dtype) for name, dtype in _DTYPES.items()}, reward=form["reward"])


def _json(row: Row) -> bytes:
    return json.dumps(_lists(row), separators=(",", ":")).encode()


def _msgpack(row: Row) -> bytes:
    return bytes(msgpack.Packer(use_single_float=True).pack(_lists(row)))


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def _unzstd(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


_WAYS = {
    "forebay": _Way(lambda row: encode_rows([row]), lambda frame: decode_rows(frame)[0]),
    "msgpack": _Way(_msgpack, lambda data: _row(msgpack.unpackb(data))),
    "msgpack + zstd": _Way(lambda row: _zstd(_msgpack(row)), lambda data: _row(msgpack.unpackb(_unzstd(data)))),
    "JSON": _Way(_json, lambda data: _row(json.loads(data))),
    "JSON + zstd": _Way(lambda row: _zstd(_json(row)), lambda data: _row(json.loads(_unzstd(data)))),
}


def _check(way: str, row: Row, frame: bytes) -> None:
    found = _WAYS[way].decode(frame)
    for name, array in row.tokens.items():
        if found.tokens[name].dtype != array.dtype or found.tokens[name].tobytes() != array.tobytes():
            raise ValueError(f"{way} does not bring {name} back as it was")


def _cpu_us(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return (time.process_time() - began) / _ROWS * 1e6


def run(say: Say) -> Report:
    """Run the benchmark."""
    rng = np.random.default_rng(1)
    rows = [synthetic_row(rng) for _ in range(_ROWS)]
    frames = {name: [way.encode(row) for row in rows] for name, way in _WAYS.items()}
    for name in _WAYS:
        for row, frame in zip(rows, frames[name], strict=True):
            _check(name, row, frame)
    encode: dict[str, list[float]] = {name: [] for name in _WAYS}
    decode: dict[str, list[float]] = {name: [] for name in _WAYS}
    for at in range(_ROUNDS):
        say(f"round {at + 1} of {_ROUNDS}: {_ROWS} rows of {_TOKENS} tokens, {len(_WAYS)} ways")
        for name, way in _WAYS.items():
            encode[name].append(_cpu_us(lambda way=way: [way.encode(row) for row in rows]))  # type: ignore[misc]
            decode[name].append(_cpu_us(lambda way=way, name=name: [way.decode(data) for data in frames[name]]))  # type: ignore[misc]
    report = Report("Rows on the wire", reference="forebay")
    size = {name: sum(map(len, data)) / (_ROWS * _TOKENS) for name, data in frames.items()}
    report.add("size", "bytes/token", {name: [value] for name, value in size.items()})
    report.add("encode", "us/row", encode)
    report.add("decode", "us/row", decode)
    report.notes.append(f"{_ROWS} rows of {_TOKENS} tokens, {_TRAINED:.0%} of them trained; CPU time")
    return report
