"""What rows with images carry: from a workflow, over the wire, to the trainer's tensors (contract 3)."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from helpers.building import result, row
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from forebay.errors import FrameError, SlotDataError, WorkflowContractError
from forebay.wire import codec
from forebay.wire.codec import decode_rows, encode_rows
from forebay.wire.rows import Row, rows_from_tensors
from forebay.wire.tensors import pad_rows, to_torch
from forebay.wire.values import pack, unpack

CODES = ["b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]
shapes = hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4)


def with_images(*entries: Any) -> list[Row]:
    """The rows of a result with a row for each of `entries`."""
    rows, _ = rows_from_tensors(result(rows=len(entries), multi_modal_input=list(entries)))
    return rows


def there_and_back(*entries: Any) -> list[dict[str, Any] | None]:
    """`entries` as a trainer finds them in the rows."""
    return [one.multi_modal for one in decode_rows(encode_rows(with_images(*entries)))]


def image_row(ids: list[int], **entry: Any) -> Row:
    """A row with a multi-modal dict."""
    one = row(ids)
    one.multi_modal = entry
    return one


class TestWire:
    """contract 3: multi_modal_input travels with its rows."""

    @given(st.sampled_from(CODES).flatmap(lambda code: hnp.arrays(np.dtype(code), shapes)))
    def test_arrays_of_any_shape_and_type(self, array: np.ndarray[Any, Any]) -> None:
        """Any array comes back to the bit, with its shape, writable."""
        (entry,) = there_and_back({"pixel_values": array})
        assert entry is not None
        back = entry["pixel_values"]
        assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())
        assert back.flags.writeable

    def test_plain_values_and_nested_arrays(self) -> None:
        """Plain values, lists, dicts and the arrays in them come back; tensors in them as arrays."""
        entry = {"size": [3, {"deep": (1, "a", None, b"x", 0.5)}], "parts": [np.ones(2), torch.zeros(1)]}
        (back,) = there_and_back(entry)
        assert back is not None
        assert back["size"] == [3, {"deep": [1, "a", None, b"x", 0.5]}]
        assert [part.tolist() for part in back["parts"]] == [[1.0, 1.0], [0.0]]
        assert all(isinstance(part, np.ndarray) for part in back["parts"])

    def test_bfloat16_becomes_float32_of_the_same_values(self) -> None:
        """bfloat16 arrives as float32 with equal values, and its empty low bytes take no room."""
        exact = torch.randn((64, 64), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        one = with_images({"pixel_values": exact})
        (back,) = decode_rows(encode_rows(one))
        assert back.multi_modal is not None
        assert back.multi_modal["pixel_values"].dtype == np.float32
        assert torch.equal(torch.from_numpy(back.multi_modal["pixel_values"]), exact.float())
        assert len(encode_rows(one)) < 64 * 64 * 2 * 1.1

    def test_other_orders_and_views(self) -> None:
        """Transposed, sliced and big-endian arrays come back as what they show."""
        base = np.arange(24, dtype=">f4").reshape(2, 3, 4)
        (entry,) = there_and_back({"pixel_values": base.T[::2]})
        assert entry is not None
        assert entry["pixel_values"].tolist() == base.T[::2].tolist()
        assert entry["pixel_values"].dtype.isnative

    def test_text_rows_beside_image_rows(self) -> None:
        """None and an empty dict are a text row."""
        entries = there_and_back({"pixel_values": np.ones(1)}, {}, None)
        assert [entry is None for entry in entries] == [False, True, True]

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            (np.zeros((1, 3)), "multi_modal_input is a ndarray; expected a list of 1 dicts"),
            ([], "multi_modal_input is 0 entries; expected a list of 1"),
            ([{}, {}], "multi_modal_input is 2 entries; expected a list of 1"),
            ([[1]], r"multi_modal_input\[0\] is a list; expected a dict"),
            ([{1: 2}], r"multi_modal_input\[0\] is a dict; expected a dict"),
            ([{"a": object()}], r"multi_modal_input\[0\]\['a'\]: a builtins.object cannot travel"),
            ([{"a": [{"b": {1}}]}], r"multi_modal_input\[0\]\['a'\]\[0\]\['b'\]: a builtins.set cannot travel"),
            ([{"a": np.array(["x"])}], r"multi_modal_input\[0\]\['a'\] has dtype <U1"),
            ([{"a": torch.eye(2).to_sparse()}], r"multi_modal_input\[0\]\['a'\] has a type that does not travel"),
        ],
    )
    def test_what_does_not_travel_is_a_contract_error(self, value: Any, said: str) -> None:
        """A wrong form, and a value that cannot travel, are contract errors with the path."""
        with pytest.raises(WorkflowContractError, match=said):
            rows_from_tensors(result(multi_modal_input=value))


class TestFrames:
    """Frames: what is not new is as before, and sizes are checked before anything is allocated."""

    def test_rows_without_images_are_version_1(self) -> None:
        """Only a frame with images is one of version 2; a frame of version 1 is decoded as ever."""
        text = encode_rows([row([1, 2])])
        image = encode_rows([row([1, 2]), image_row([3], pixel_values=np.ones(1))])
        assert (text[0], image[0]) == (1, 2)
        assert "m" not in unpack(text[1:])[0]
        assert decode_rows(text)[0].multi_modal is None

    def test_completion_ids_travel(self) -> None:
        """The completion id of an interaction's row comes back; that of others is None."""
        named = row([1, 2])
        named.completion = "chatcmpl-1"
        assert [one.completion for one in decode_rows(encode_rows([named, row([1])]))] == ["chatcmpl-1", None]

    @pytest.mark.parametrize(
        "spec",
        [
            ["a", "f4", [2**40], b""],
            ["a", "f4", [2**62, 2**62], b""],
            ["a", "f4", [-1], b""],
            ["a", "f4", [1.0], b""],
            ["a", "f4", "1", b""],
            ["a", "f4", [1] * 17, b""],
            ["a", "f4", [2], b"not zstd"],
            ["a", "O", [2], b""],
            ["a", ["f4"], [2], b""],
            ["x", "f4", [2], b""],
            ["a", "f4", [2]],
            ["v"],
            ["v", {"__forebay__": "callable", "name": "os:system"}],
            [],
            3,
        ],
    )
    def test_malformed_dicts(self, spec: Any) -> None:
        """Impossible shapes, types, codings and tagged forms are FrameErrors, and allocate nothing large."""
        form = {"n": 1, "k": {"input_ids": ["i4", "r", [[7, 1]]]}, "r": None, "o": None, "t": None}
        assert decode_rows(b"\x02" + pack([form]))[0].multi_modal is None
        with pytest.raises(FrameError):
            decode_rows(b"\x02" + pack([form | {"m": {"pixel_values": spec}}]))

    @pytest.mark.parametrize(
        ("shape", "data", "said"),
        [
            ([-1, -2], bytes(2), "claims the shape"),
            ([2.0], bytes(2), "claims the shape"),
            ([2], bytes(100_000_000), "does not hold 2 values of u1"),
            ([10_000_000], bytes(10_000_000), "claims 10000004 bytes of rows"),
        ],
    )
    def test_sizes_are_checked_before_anything_is_allocated(
        self, shape: list[Any], data: bytes, said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A shape that is none, a block that holds more than its shape, and more bytes than the frame may claim."""
        monkeypatch.setattr(codec, "_FREE_BYTES", 1000)
        form = {"n": 1, "k": {"input_ids": ["i4", "r", [[7, 1]]]}, "r": None, "o": None, "t": None}
        spec = ["a", "u1", shape, zstandard.ZstdCompressor().compress(data)]
        frame = b"\x02" + pack([form | {"m": {"pixel_values": spec}}])
        del data, spec
        tracemalloc.start()
        try:
            with pytest.raises(FrameError, match=said):
                decode_rows(frame)
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
        finally:
            tracemalloc.stop()

    @given(st.data())
    @settings(max_examples=200)
    def test_damaged_frames(self, data: st.DataObject) -> None:
        """A frame that is cut or in which bytes are changed decodes, or is a FrameError and nothing else."""
        whole = bytearray(encode_rows([image_row([1, 2], pixel_values=np.arange(30.0), note=[1, "a"])]))
        for _ in range(data.draw(st.integers(1, 3))):
            whole[data.draw(st.integers(1, len(whole) - 1))] = data.draw(st.integers(0, 255))
        with suppress(FrameError):
            decode_rows(bytes(whole[: data.draw(st.integers(1, len(whole)))]))

    def test_what_is_encoded_can_be_decoded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An image of one colour that would look like a damaged frame is refused where it is made."""
        monkeypatch.setattr(codec, "_FREE_BYTES", 1000)
        with pytest.raises(SlotDataError, match="one and the same value"):
            encode_rows([image_row([1], pixel_values=np.zeros(10_000_000, np.uint8))])


class TestTensors:
    """contract 3: user-facing tensors."""

    def test_a_list_of_b_dicts(self) -> None:
        """multi_modal_input is a list of B dicts, empty for text rows, present if any row has one; tensors in torch."""
        rows = [image_row([1, 2], pixel_values=np.ones((2, 3), np.float32), parts=[np.zeros(1)], n=1), row([3])]
        arrays = pad_rows(rows)
        assert [sorted(entry) for entry in arrays["multi_modal_input"]] == [["n", "parts", "pixel_values"], []]
        tensors = to_torch(arrays)["multi_modal_input"]
        assert torch.equal(tensors[0]["pixel_values"], torch.ones(2, 3))
        assert torch.equal(tensors[0]["parts"][0], torch.zeros(1, dtype=torch.float64))
        assert (tensors[0]["n"], tensors[1]) == (1, {})
        assert "multi_modal_input" not in pad_rows([row([3])])

    def test_tensors_can_be_read_again(self) -> None:
        """Tensors with images, given back as a result, are the same rows."""
        rows = [image_row([1, 2], pixel_values=np.ones((2, 3), np.float32)), row([3])]
        again, _ = rows_from_tensors(to_torch(pad_rows(rows)))
        assert again[0].multi_modal is not None
        assert again[0].multi_modal["pixel_values"].tolist() == [[1.0] * 3] * 2
        assert again[1].multi_modal is None

    def test_token_types_are_zero_for_text_rows(self) -> None:
        """mm_token_type_ids are a key of tokens; a text row beside image rows has type 0 everywhere."""
        (image,) = with_images({"pixel_values": np.ones(1)})
        (typed,), _ = rows_from_tensors(result(mm_token_type_ids=np.array([[0, 1, 1, 0]])))
        assert typed.tokens["mm_token_type_ids"].dtype == np.int32
        assert pad_rows([typed, image])["mm_token_type_ids"].tolist() == [[0, 1, 1, 0], [0] * 4]
