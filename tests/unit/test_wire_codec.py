"""Frames of rows: what is encoded comes back to the bit, and damaged frames are FrameErrors and nothing else."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import zstandard
from helpers.building import row, same_rows
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from forebay.errors import FrameError, SlotDataError
from forebay.wire import codec
from forebay.wire.codec import decode_rows, encode_rows
from forebay.wire.rows import Row
from forebay.wire.values import pack, unpack

CODES = ["b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]
finite = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def any_row(draw: st.DrawFn) -> Row:
    """A row of any length, with runs and noise, of keys of any type."""
    length = draw(st.integers(1, 60))
    tokens = {"input_ids": draw(hnp.arrays(np.int32, length))}
    mask = draw(st.lists(st.booleans(), min_size=1, max_size=5))
    tokens["loss_mask"] = np.resize(np.repeat(mask, 12), length).astype(np.int32)
    for at, code in enumerate(draw(st.lists(st.sampled_from(CODES), max_size=4))):
        tokens[f"key{at}"] = draw(hnp.arrays(np.dtype(code), length))
    own = {f"own{at}": draw(hnp.arrays(np.dtype(code), 1))[0]
           for at, code in enumerate(draw(st.lists(st.sampled_from(CODES), max_size=2)))}  # fmt: skip
    return Row(tokens, draw(finite), draw(finite), draw(st.none() | st.booleans()), values=own)


rows = st.lists(any_row(), max_size=4)
FRAME = encode_rows([row(list(range(40)), reward=0.5), row([1, 2], reward=None)])


def form(**changes: Any) -> dict[str, Any]:
    """The coded form of a row of two tokens."""
    return {"n": 2, "k": {"input_ids": ["i4", "r", [[7, 2]]]}, "r": 1.0, "o": None, "t": None} | changes


def framed(*forms: Any) -> bytes:
    """The frame of coded forms."""
    return b"\x01" + pack(list(forms))


def keyed(spec: Any) -> bytes:
    """The frame of a row whose ids are coded as `spec`."""
    return framed(form(k={"input_ids": spec}))


class TestRoundTrip:
    """contract 3: rows are ragged and lose nothing."""

    @given(rows)
    def test_any_rows(self, given_rows: list[Row]) -> None:
        """Rows of any length, type and value come back to the bit."""
        same_rows(decode_rows(encode_rows(given_rows)), given_rows)

    def test_older_frames(self) -> None:
        """Frames of the versions before are read, and are still what rows are written as that need no more."""
        old, new = row([1, 2]), row([1, 2])
        new.values["own"] = np.float32(0.5)
        image = row([1, 2])
        image.multi_modal = {"pixel_values": np.ones(2, np.float32)}
        assert [encode_rows(some)[0] for some in ([old], [image], [old, new], [image, new])] == [1, 2, 3, 3]
        assert "v" not in unpack(encode_rows([old])[1:])[0]
        assert decode_rows(framed(form()))[0].values == {}
        assert [one.values for one in decode_rows(encode_rows([old, new]))] == [{}, {"own": 0.5}]

    @given(hnp.arrays(np.uint32, st.integers(1, 50)))
    def test_every_float_pattern(self, patterns: np.ndarray[Any, Any]) -> None:
        """Logprobs keep every bit, of zeros with a sign and denormals too."""
        one = Row({"input_ids": np.zeros(len(patterns), np.int32), "logprobs": patterns.view(np.float32)})
        same_rows(decode_rows(encode_rows([one])), [one])

    @pytest.mark.parametrize("length", [1, 7, 8, 9, 31, 32, 33, 36, 1000])
    def test_runs_and_noise_at_every_border(self, length: int) -> None:
        """The choice between runs and plain never changes what comes back: constant, alternating and mixed keys."""
        at = np.arange(length, dtype=np.int32)
        for ids in (at * 0, at % 2, at, at // 4, np.where(at < length // 2, 5, at).astype(np.int32)):
            one = Row({"input_ids": ids})
            same_rows(decode_rows(encode_rows([one])), [one])

    def test_other_byte_orders_and_views(self) -> None:
        """Big-endian arrays and strided views come back as native values."""
        one = Row({"input_ids": np.arange(20, dtype=">i4")[::2], "f": np.linspace(0, 1, 10).astype(">f8")})
        (back,) = decode_rows(encode_rows([one]))
        assert back.tokens["input_ids"].tolist() == list(range(0, 20, 2))
        assert back.tokens["f"].tolist() == one.tokens["f"].tolist()
        assert all(array.dtype.isnative for array in back.tokens.values())

    def test_arrays_are_writable_copies(self) -> None:
        """A reader may change what it got."""
        for array in decode_rows(FRAME)[0].tokens.values():
            array[:] = 1

    def test_masks_and_versions_take_next_to_nothing(self) -> None:
        """A long row takes little more than its ids and logprobs."""
        ids = list(np.random.default_rng(0).integers(0, 100_000, 10_000))
        bare = Row({name: array for name, array in row(ids).tokens.items() if name == "input_ids"})
        extra = Row({**bare.tokens, **{k: v for k, v in row(ids).tokens.items() if k in {"loss_mask", "versions"}}})
        assert len(encode_rows([extra])) < len(encode_rows([bare])) + 100

    def test_types_that_do_not_travel_are_refused_where_they_enter(self) -> None:
        """A type that a reader would refuse fails the slot with the key's name."""
        with pytest.raises(SlotDataError, match="wide has dtype"):
            encode_rows([Row({"input_ids": np.zeros(1, np.int32), "wide": np.zeros(1, np.longdouble)})])

    def test_what_is_encoded_can_be_decoded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rows whose frame a reader would take for damaged are refused by the writer, by the same bound."""
        constant = Row({"input_ids": np.zeros(100_000, np.int32)})
        frame = encode_rows([constant])
        monkeypatch.setattr(codec, "_FREE_BYTES", 1000)
        with pytest.raises(SlotDataError, match="400000 bytes, of one and the same value"):
            encode_rows([constant])
        with pytest.raises(FrameError, match="claims 400000 bytes of rows"):
            decode_rows(frame)


class TestDamage:
    """A frame is rows or a FrameError, and nothing is allocated on its word alone."""

    @given(st.data())
    def test_truncated(self, data: st.DataObject) -> None:
        """A frame that is cut anywhere is a FrameError."""
        with pytest.raises(FrameError):
            decode_rows(FRAME[: data.draw(st.integers(0, len(FRAME) - 1))])

    @given(st.integers(0, 255).filter(lambda version: version not in {1, 2, 3}))
    def test_wrong_version(self, version: int) -> None:
        """A frame of another release says which version it has."""
        with pytest.raises(FrameError, match=f"version {version}, expected 1 to 3"):
            decode_rows(bytes([version]) + FRAME[1:])

    def test_empty(self) -> None:
        """No bytes are a FrameError."""
        with pytest.raises(FrameError, match="version nothing"):
            decode_rows(b"")

    @given(st.binary(max_size=300))
    @example(b"\x91\x81\xa1n\x02")
    @settings(max_examples=300)
    def test_random_bytes(self, noise: bytes) -> None:
        """Random bytes after the version are rows or a FrameError."""
        with suppress(FrameError):
            decode_rows(b"\x01" + noise)

    @given(st.data())
    @settings(max_examples=300)
    def test_flipped_bytes(self, data: st.DataObject) -> None:
        """A frame with some bytes changed is rows or a FrameError."""
        frame = bytearray(FRAME)
        for at in data.draw(st.lists(st.integers(1, len(frame) - 1), min_size=1, max_size=3)):
            frame[at] = data.draw(st.integers(0, 255))
        with suppress(FrameError):
            decode_rows(bytes(frame))

    values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=8)
    nested = st.recursive(values, lambda inner: st.lists(inner, max_size=3), max_leaves=6)

    @given(st.sampled_from(CODES), st.sampled_from(["r", "p"]), nested)
    @settings(max_examples=300)
    def test_any_content_of_an_array(self, code: str, how: str, content: Any) -> None:
        """An array's content of any shape and type is rows or a FrameError."""
        try:
            frame = keyed([code, how, content])
        except OverflowError:  # msgpack has no such integer
            return
        with suppress(FrameError):
            decode_rows(frame)

    @pytest.mark.parametrize(
        "frame",
        [
            framed(3),
            framed(None),
            framed([]),
            b"\x01" + pack({}),
            framed({}),
            framed(form(k={})),
            framed(form(k={"loss_mask": ["i4", "r", [[1, 2]]]})),
            framed(form(k=None)),
            framed(form(n=None)),
            framed(form(n=True)),
            framed(form(n=0)),
            framed(form(n=-1)),
            framed(form(n=2.0)),
            framed(form(r="1")),
            framed(form(o=[])),
            framed(form(t="yes")),
            keyed(None),
            keyed([]),
            keyed(["i4"]),
            keyed(["i4", "r", [[7, 2]], 1]),
            keyed(["i4", "?", b""]),
            keyed(["O", "r", [[7, 2]]]),
            keyed([["i4"], "r", [[7, 2]]]),
            keyed(["i4", "r", [[7, 1]]]),
            keyed(["i4", "r", [[7, 3]]]),
            keyed(["i4", "r", [[7, -1], [7, 3]]]),
            keyed(["i4", "r", [[7, 0], [7, 2]]]),
            keyed(["i4", "r", [[7, True], [7, 1]]]),
            keyed(["i4", "r", [[2**40, 2]]]),
            keyed(["i1", "r", [[300, 2]]]),
            keyed(["i4", "r", [[], [7, 2]]]),
            keyed(["i4", "r", [[[7], 2]]]),
            keyed(["i4", "r", [[None, 2]]]),
            keyed(["f4", "r", [[1.5, 2]]]),
            keyed(["i4", "r", 7]),
            keyed(["i4", "p", b""]),
            keyed(["i4", "p", None]),
            keyed(["i4", "p", b"\x28\xb5\x2f\xfd"]),
            keyed(["i4", "p", zstandard.compress(b"1234567")]),
            keyed(["i4", "p", zstandard.compress(b"123456789")]),
            *[framed(form(v=values)) for values in (None, [], 7, {7: ["i4", b"1234"]}, {"a": None}, {"a": ["i4"]})],
            *[framed(form(v={"a": spec})) for spec in (["O", b"1"], ["i4", b"123"], ["i4", "1234"], [[], b""])],
            *[framed(form(v={"a": spec})) for spec in (["i4", [1, 2, 3, 4]], ["f8", 1.0], ["i4", b"1234", 1])],
        ],
    )
    def test_malformed(self, frame: bytes) -> None:
        """Every part of a frame is checked."""
        with pytest.raises(FrameError):
            decode_rows(frame)

    @pytest.mark.parametrize(
        "frame",
        [
            framed(form(n=2**62, k={"input_ids": ["i4", "r", [[7, 2**62]]]})),
            framed(form(n=2**25, k={"input_ids": ["i8", "r", [[7, 2**25]]]})),
            framed(*[form(n=2**20, k={"input_ids": ["i4", "r", [[7, 2**20]]]})] * 100),
            framed(form(n=2**22, k={f"key{at}": ["i8", "r", [[7, 2**22]]] for at in range(10)})),
            framed(form(n=2**25, k={"input_ids": ["i4", "p", zstandard.compress(bytes(2**27))]})),
            b"\x01\xdd\xff\xff\xff\xff",
            b"\x01\x91\xdf\xff\xff\xff\xff",
            b"\x01\xc6\xff\xff\xff\xff",
        ],
    )
    def test_huge_claims_allocate_nothing(self, frame: bytes) -> None:
        """A frame of some bytes that claims hundreds of megabytes is refused before they are allocated."""
        tracemalloc.start()
        try:
            with pytest.raises(FrameError):
                decode_rows(frame)
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()
