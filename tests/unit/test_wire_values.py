"""Plain values and tagged arguments on the wire (contract 2)."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from contextlib import suppress
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any, ClassVar

import msgpack
import numpy as np
import pytest
import torch
from helpers import reward_functions as functions
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import GenerationHyperparameters
from forebay.errors import FrameError, SubmitError, WorkflowError
from forebay.wire.values import MAX_DEPTH, TAG, callable_name, decode_plain, encode_kwargs, encode_plain, pack, unpack

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    | st.binary(max_size=20)
)
keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda key: key != TAG)
plain = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4), max_leaves=20
)
RNG = np.random.default_rng(0)


def there_and_back(value: Any) -> Any:
    """`value` as a worker sees it."""
    return decode_plain(unpack(pack(encode_plain(value))))


def resolve(kind: str, form: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Leave a tagged form as it is."""
    return kind, form


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    TWO = 2


class Checker:
    """A class with the kinds of methods that users pass."""

    def method(self) -> float:
        """Needs an instance."""
        return 1.0

    @classmethod
    def of_class(cls) -> float:
        """Can be imported through its class."""
        return 2.0

    @staticmethod
    def static() -> float:
        """Can be imported through its class."""
        return 3.0


class TestPlainData:
    """contract 2: what crosses the wire is plain."""

    @given(plain)
    def test_plain_data_survives_to_the_bit(self, value: Any) -> None:
        """Any nesting of plain values comes back equal, with its types."""
        assert pack(there_and_back(value)) == pack(value)

    def test_tuples_become_lists(self) -> None:
        """A tuple travels as a list."""
        assert there_and_back({"a": (1, (2, 3))}) == {"a": [1, [2, 3]]}

    def test_numpy_scalars_and_enums_become_plain(self) -> None:
        """Scalars of numpy and enum members travel as their values."""
        value = {"f": np.float32(0.5), "d": np.float64(0.1), "i": np.int64(3), "b": np.bool_(True), "s": Colour.RED}
        assert there_and_back(value | {"e": Level.TWO}) == {
            "f": 0.5,
            "d": 0.1,
            "i": 3,
            "b": True,
            "s": "red",
            "e": 2,
        }

    @pytest.mark.parametrize(
        "code", ["b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", ">i4", ">f8"]
    )
    @pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3)])
    def test_arrays_keep_dtype_and_shape(self, code: str, shape: tuple[int, ...]) -> None:
        """Numpy arrays come back with their type, shape and values, writable, whatever their byte order was."""
        array = RNG.integers(0, 2, shape).astype(code)
        back = there_and_back({"x": [array]})["x"][0]
        assert isinstance(back, np.ndarray)
        assert (back.dtype, back.shape) == (array.dtype.newbyteorder("="), shape)
        assert np.array_equal(back, array)
        assert back.flags.writeable

    def test_a_view_with_strides_travels_as_what_it_shows(self) -> None:
        """A transposed, sliced array keeps its values."""
        array = np.arange(12).reshape(3, 4).T[::2]
        assert np.array_equal(there_and_back(array), array)

    def test_torch_tensors_stay_torch_tensors(self) -> None:
        """Tensors come back as tensors, without their gradient."""
        tensor = torch.tensor([[1.5, 2.5]], requires_grad=True)
        back = there_and_back(tensor)
        assert isinstance(back, torch.Tensor)
        assert torch.equal(back, tensor.detach())
        assert not back.requires_grad

    @pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
    def test_bfloat16_stays_bfloat16(self, shape: tuple[int, ...]) -> None:
        """A bfloat16 tensor, a type that numpy has not, comes back with its type and its values."""
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        back = there_and_back(tensor)
        assert (back.dtype, back.shape) == (torch.bfloat16, tensor.shape)
        assert torch.equal(back, tensor)

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            ({"a": [0, {"b": object()}]}, r"data\['a'\]\[1\]\['b'\]: a builtins.object cannot travel"),
            ({"a": {1, 2}}, r"data\['a'\]: a builtins.set"),
            ({1: 2}, "the key 1 is not allowed"),
            ({TAG: "callable"}, f"the key '{TAG}' is not allowed"),
            ([2**64], r"data\[0\]: the integer 18446744073709551616"),
            ([-(2**63) - 1], r"data\[0\]: the integer"),
            ([np.array(["text"])], r"data\[0\]: arrays of dtype <U4"),
            ([np.array([object()])], r"data\[0\]: arrays of dtype object"),
            ([np.zeros(1, np.longdouble)], r"data\[0\]: arrays of dtype"),
            ([np.zeros(1, np.complex64)], r"data\[0\]: arrays of dtype complex64"),
            ([torch.zeros(1, dtype=torch.float8_e4m3fn)], r"data\[0\]: this tensor cannot travel"),
            (["ok", "\ud800"], r"data\[1\]: not valid Unicode"),
            ({"\udfff": 1}, "not valid Unicode"),
            (functions.half, "cannot travel"),
        ],
    )
    def test_what_cannot_travel_is_refused_with_the_path_to_it(self, value: Any, said: str) -> None:
        """Anything else is a SubmitError that leads to the place."""
        with pytest.raises(SubmitError, match=said):
            encode_plain(value)

    def test_depth_is_bounded(self) -> None:
        """What may be encoded can be decoded; one level more is refused, a cycle too."""

        def nested(levels: int) -> list[Any]:
            value: list[Any] = []
            for _ in range(levels - 1):
                value = [value]
            return value

        deepest = nested(MAX_DEPTH + 1)
        assert there_and_back(deepest) == deepest
        with pytest.raises(SubmitError, match="nested deeper"):
            encode_plain(nested(MAX_DEPTH + 2))
        cycle: list[Any] = []
        cycle.append(cycle)
        with pytest.raises(SubmitError, match="nested deeper"):
            encode_plain(cycle)


class TestFrames:
    """What comes from the network is a value or a FrameError."""

    @given(st.binary(max_size=200))
    @settings(max_examples=300)
    def test_random_bytes(self, frame: bytes) -> None:
        """Random bytes are a value or a FrameError, also when the tagged forms in them are decoded."""
        with suppress(FrameError):
            decode_plain(unpack(frame))

    @given(plain, st.data())
    def test_a_truncated_frame(self, value: Any, data: st.DataObject) -> None:
        """A frame that is cut anywhere is a FrameError."""
        frame = pack(encode_plain(value))
        with pytest.raises(FrameError):
            unpack(frame[: data.draw(st.integers(0, len(frame) - 1))])

    @pytest.mark.parametrize(
        "frame",
        [
            b"\xdd\xff\xff\xff\xff",  # a list of 2**32 - 1
            b"\xdf\xff\xff\xff\xff",  # a map of as many
            b"\xc6\xff\xff\xff\xff",  # bytes
            b"\xdb\xff\xff\xff\xff",  # text
            b"\xc9\xff\xff\xff\xff\x01",  # an extension
            b"\x91" * 100_000 + b"\xc0",  # nested 100,000 times
            b"\x81\x90\xc0",  # a list as a key
            b"\x81\x80\xc0",  # a map as a key
            b"\xc0\xc0",  # two values
            b"\xa1\xff",  # text that is not UTF-8
            b"\xc1",  # never used
            b"",
        ],
    )
    def test_a_malformed_frame(self, frame: bytes) -> None:
        """Impossible sizes, keys, nestings and texts are FrameErrors."""
        with pytest.raises(FrameError):
            unpack(frame)

    @pytest.mark.parametrize(
        "change",
        [
            {"dtype": "O"},
            {"dtype": "V8"},
            {"dtype": None},
            {"dtype": ["i4"]},
            {"dtype": "i4,f4"},
            {"shape": [3]},
            {"shape": [2**70]},
            {"shape": [2**40, 2**40]},
            {"shape": "2"},
            {"shape": None},
            {"shape": [[2]]},
            {"data": "text"},
            {"data": b"123"},
            {"data": None},
        ],
    )
    def test_a_malformed_array(self, change: dict[str, Any]) -> None:
        """An array that does not fit its own description is a FrameError."""
        form = {TAG: "array", "dtype": "i4", "shape": [2], "data": b"12345678", "torch": False}
        assert decode_plain(form).shape == (2,)
        with pytest.raises(FrameError):
            decode_plain(form | change)
        for name in change:
            with pytest.raises(FrameError):
                decode_plain({key: value for key, value in form.items() if key != name})

    def test_tagged_forms_are_bounded_and_known(self) -> None:
        """A deep nesting, unknown forms and malformed settings are FrameErrors, never an object."""
        deep: Any = None
        for _ in range(500):
            deep = [deep]
        for value in (
            deep,
            {TAG: "callable", "name": "os:system"},
            {TAG: "gconfig"},
            {TAG: "gconfig", "fields": {"bogus": 1}},
            {TAG: "gconfig", "fields": 3},
        ):
            with pytest.raises(FrameError):
                decode_plain(value)

    def test_an_oversized_frame_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A frame above the bound is refused before it is parsed."""
        monkeypatch.setattr("forebay.wire.values._MAX_VALUES_BYTES", 10)
        assert unpack(pack(b"1234567")) == b"1234567"
        with pytest.raises(FrameError, match="above the bound of 10"):
            unpack(pack(b"123456789"))


class TestArguments:
    """contract 2: kwargs hold plain values and tagged forms."""

    @given(st.dictionaries(keys, plain, max_size=4))
    def test_plain_arguments(self, kwargs: dict[str, Any]) -> None:
        """Plain arguments travel as plain data does."""
        assert pack(decode_plain(unpack(pack(encode_kwargs(kwargs))), resolve)) == pack(kwargs)

    def test_generation_settings(self) -> None:
        """GenerationHyperparameters come back equal, wherever they stand, with numpy numbers made plain."""
        gconfig = GenerationHyperparameters(max_new_tokens=7, stop=["\n"], seed=3)
        ids = [np.int64(4)]
        kwargs = encode_kwargs({"a": gconfig, "b": [{"c": gconfig.new(stop_token_ids=ids)}]})
        back = decode_plain(unpack(pack(kwargs)), resolve)
        assert back == {"a": gconfig, "b": [{"c": gconfig.new(stop_token_ids=[4])}]}

    def test_a_function_travels_by_name(self) -> None:
        """A module-level function, a class, a static or class method travel as ``module:name``."""
        kwargs = {"f": functions.half, "g": [Checker], "h": Checker.static, "i": Checker.of_class}
        names = {name: form["name"] if name != "g" else form[0]["name"] for name, form in encode_kwargs(kwargs).items()}
        assert names == {
            "f": "helpers.reward_functions:half",
            "g": f"{__name__}:Checker",
            "h": f"{__name__}:Checker.static",
            "i": f"{__name__}:Checker.of_class",
        }

    @pytest.mark.parametrize("base", ["PreTrainedTokenizerBase", "ProcessorMixin"])
    def test_tokenizers_and_processors_travel_by_path(self, base: str) -> None:
        """A tokenizer or processor of transformers, also a callable one, travels by its name_or_path."""

        class Base:
            name_or_path: ClassVar[str] = "some/folder"

            def __call__(self) -> None:
                """Be callable, as tokenizers are."""

        value = type("Special", (type(base, (Base,), {}),), {})()
        kind = "tokenizer" if base == "PreTrainedTokenizerBase" else "processor"
        assert encode_kwargs({"t": value}) == {"t": {TAG: kind, "path": "some/folder"}}
        value.name_or_path = ""
        with pytest.raises(WorkflowError, match=rf"workflow_kwargs\['t'\]: this {kind} has no name_or_path"):
            encode_kwargs({"t": value})

    def test_what_cannot_be_named_is_refused_with_the_argument_and_the_cause(self, tmp_path: Path) -> None:
        """Local functions and classes, lambdas, partials, bound methods and open files are refused, each with why."""

        def local() -> float:
            return 1.0

        class Local: ...

        with (tmp_path / "f").open("w", encoding="utf-8") as file:
            for value, said in (
                (local, "local is a local function or class"),
                (Local, "Local is a local function or class"),
                (lambda: 1.0, "is a lambda"),
                (functools.partial(functions.half), "has no importable name"),
                (Checker().method, "is a method bound to an instance"),
                (functions.Callable(), "has no importable name"),
                (file, "TextIOWrapper cannot travel"),
                ({1: 2}, "the key 1 is not allowed"),
            ):
                with pytest.raises(WorkflowError) as caught:
                    encode_kwargs({"good": 1, "bad": [value]})
                assert "workflow_kwargs['bad'][0]: " in str(caught.value)
                assert said in str(caught.value)

    def test_a_name_that_leads_elsewhere_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A function that its module no longer has by that name would be another one on a worker."""
        original = functions.half
        monkeypatch.setattr(functions, "half", functions.forever)
        with pytest.raises(WorkflowError, match="does not lead back"):
            callable_name(original, "reward_fn")

    def test_the_started_program(self, tmp_path: Path) -> None:
        """What a script defines is refused; started with ``python -m package.module``, it has that module's name."""
        folder = tmp_path / "started"
        folder.mkdir()
        (folder / "__init__.py").touch()
        code = """
from forebay.errors import WorkflowError
from forebay.wire.values import callable_name
def reward(): return 1.0
try:
    print(callable_name(reward, "here"))
except WorkflowError as error:
    print(error)
"""
        (folder / "program.py").write_text(code, encoding="utf-8")

        def run(*arguments: str) -> str:
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=tmp_path,
                env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
            return done.stdout.strip()

        assert run("-m", "started.program") == "started.program:reward"
        assert "here: reward is defined in the program that was started" in run(str(folder / "program.py"))


def test_frames_are_plain_msgpack() -> None:
    """A frame can be read by any msgpack library: no pickle, no extension types."""
    frame = pack(encode_plain({"a": [1, "two", b"three", None, np.zeros(1)]}))

    def refuse(code: int, data: bytes) -> Any:
        raise AssertionError(f"extension {code}: {data!r}")

    assert set(msgpack.unpackb(frame, ext_hook=refuse)) == {"a"}
