"""Plain values on the wire, and the tagged forms of what a workflow's arguments may hold besides (contract, section 2).

Never pickle: what cannot be named or copied as plain data is refused where it enters, with the path to it.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable
from typing import Any, cast

import msgpack
import numpy as np

from forebay.errors import FrameError, ImportNotAllowedError, SubmitError, WorkflowError
from forebay.wire.arrays import numpy_of
from forebay.wire.settings_forms import SETTINGS, decode_settings, settings_base, settings_fields, settings_name

__all__ = ["MAX_DEPTH", "TAG", "callable_name", "decode_plain", "encode_kwargs", "encode_plain", "pack", "unpack"]

TAG = "__forebay__"
"""Key that marks a tagged form; plain data may not use it."""
MAX_DEPTH = 64
_ARRAYS = frozenset({"b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"})
"""Array types that travel."""
_BFLOAT16 = "bfloat16"
_MAX_VALUES_BYTES = 256 * 2**20


def pack(value: Any) -> bytes:
    """`value`, made of plain types, as msgpack."""
    return cast("bytes", msgpack.packb(value, use_bin_type=True))


def unpack(frame: bytes) -> Any:
    """The value of a msgpack frame.

    Raises:
        FrameError: the frame is truncated, malformed, or claims more than it holds.
    """
    if len(frame) > _MAX_VALUES_BYTES:
        raise FrameError(f"a frame of {len(frame)} bytes is above the bound of {_MAX_VALUES_BYTES}")
    try:
        # unpackb bounds every claimed length by the frame's own length before it allocates.
        return msgpack.unpackb(frame, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:  # TypeError: an unhashable key
        raise FrameError(f"malformed msgpack frame of {len(frame)} bytes: {error}") from None


def encode_plain(value: Any, where: str = "data", _depth: int = 0) -> Any:
    """`value` reduced to msgpack types: None, bool, int, float, str, bytes, lists and string-keyed dicts.

    Tuples become lists; numpy arrays, and torch tensors without gradient, travel with their dtype and shape, bfloat16
    among them.

    Raises:
        SubmitError: something in `value` is none of these; the message has the path to it, beginning with `where`.
    """
    if _depth > MAX_DEPTH:
        raise SubmitError(f"{where[:80]}...: nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str) and not value.isascii():
        _check_unicode(value, where)
    if value is None or isinstance(value, (bool, float, str, bytes)):
        return value
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise SubmitError(f"{where}: the integer {value} does not fit 64 bits; pass it as a string")
        return int(value)
    if isinstance(value, np.generic):
        return encode_plain(value.item(), where, _depth)
    if isinstance(value, np.ndarray) or _is_tensor(value):
        return _encode_array(value, where)
    if isinstance(value, (list, tuple)):
        return [encode_plain(item, f"{where}[{at}]", _depth + 1) for at, item in enumerate(value)]
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str) or name == TAG:
                raise SubmitError(f"{where}: the key {name!r} is not allowed; keys are strings other than {TAG!r}")
            _check_unicode(name, where)
        return {name: encode_plain(item, f"{where}[{name!r}]", _depth + 1) for name, item in value.items()}
    raise SubmitError(
        f"{where}: a {type(value).__module__}.{type(value).__qualname__} cannot travel; "
        "use None, bool, int, float, str, bytes, lists, dicts with string keys, or arrays"
    )


def encode_kwargs(
    kwargs: dict[str, Any], where: str = "workflow_kwargs", allow: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """A workflow's arguments: plain values plus settings of ours, tokenizers and processors, and callables.

    Args:
        kwargs: the arguments by name.
        where: what the path to a bad one begins with.
        allow: raises ImportNotAllowedError for an import string that workers refuse.

    Raises:
        WorkflowError: an argument cannot be named on a worker; the message says which and why.
    """
    return {name: _encode_argument(value, f"{where}[{name!r}]", 0, allow) for name, value in kwargs.items()}


def _encode_argument(value: Any, where: str, depth: int, allow: Callable[[str], None] | None) -> Any:
    if (name := settings_name(value)) is not None:
        return {TAG: name, "fields": encode_kwargs(settings_fields(value), where)}
    if (base := settings_base(value)) is not None:
        raise WorkflowError(
            f"{where}: {type(value).__qualname__} is a subclass of {base}, which no worker would make again; pass a "
            f"{base}, or plain values"
        )
    if depth < MAX_DEPTH and isinstance(value, (list, tuple)):
        return [_encode_argument(item, f"{where}[{at}]", depth + 1, allow) for at, item in enumerate(value)]
    if depth < MAX_DEPTH and isinstance(value, dict) and all(isinstance(key, str) and key != TAG for key in value):
        return {key: _encode_argument(item, f"{where}[{key!r}]", depth + 1, allow) for key, item in value.items()}
    kind = _pretrained_kind(value)
    if kind is not None:
        path = _pretrained_path(value)
        if not path:
            raise WorkflowError(
                f"{where}: this {kind} has no name_or_path; pass the path it can be loaded from instead"
            )
        return {TAG: kind, "path": path}
    if callable(value):
        return {TAG: "callable", "name": _allowed_name(value, where, allow)}
    try:
        return encode_plain(value, where, depth)
    except SubmitError as error:
        raise WorkflowError(str(error)) from None


def _allowed_name(value: Callable[..., Any], where: str, allow: Callable[[str], None] | None) -> str:
    name = callable_name(value, where)
    if allow is not None:
        try:
            allow(name)
        except ImportNotAllowedError as error:
            raise ImportNotAllowedError(f"{where}: {error}") from None
    return name


def _pretrained_path(value: Any) -> str:
    # transformers keeps it on tokenizers only; a processor is loaded from where its tokenizer came from.
    path = getattr(value, "name_or_path", None) or getattr(getattr(value, "tokenizer", None), "name_or_path", None)
    return str(path or "")


def _pretrained_kind(value: Any) -> str | None:
    # By class name through the whole ancestry: forebay must not import transformers to look at an argument.
    for base in type(value).__mro__:
        if base.__name__ == "PreTrainedTokenizerBase":
            return "tokenizer"
        if base.__name__ == "ProcessorMixin":
            return "processor"
    return None


def callable_name(value: Callable[..., Any] | type, where: str) -> str:
    """``module:qualified.name`` of a module-level function or class.

    Raises:
        WorkflowError: it is local, a lambda, bound, or lives in ``__main__``, so that no worker could import it.
    """
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if module is None or name is None:
        raise WorkflowError(f"{where}: {value!r} has no importable name; pass a module-level function or class")
    if "<" in name:
        what = "a lambda" if "<lambda>" in name else "a local function or class"
        raise WorkflowError(f"{where}: {name} is {what}, which no worker can import; move it to the top of a module")
    if module == "__main__":
        spec = getattr(sys.modules.get("__main__"), "__spec__", None)
        if spec is None or spec.name.endswith("__main__"):
            raise WorkflowError(
                f"{where}: {name} is defined in the program that was started, which no worker can import; "
                "move it to a module that workers have on their path"
            )
        module = spec.name
    # A program that was started with -m is __main__ in this process, and its own module in every other.
    found: Any = sys.modules.get(value.__module__)
    for part in name.split("."):
        found = getattr(found, part, None)
    if inspect.ismethod(value) and not inspect.isclass(value.__self__):
        raise WorkflowError(
            f"{where}: {name} is a method bound to an instance, which does not travel; pass a module-level function"
        )
    if found is not value and found != value:  # a method of a class is made anew at each look; they are equal
        raise WorkflowError(f"{where}: {module}:{name} does not lead back to the object that was passed")
    return f"{module}:{name}"


def _check_unicode(value: str, where: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise SubmitError(f"{where}: not valid Unicode ({error.reason} at character {error.start})") from None


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "torch" and hasattr(value, "detach")


def _encode_array(value: Any, where: str) -> dict[str, Any]:
    torch_made = _is_tensor(value)
    try:
        array = np.ascontiguousarray(numpy_of(value))
    except (TypeError, RuntimeError) as error:  # numpy has no such type (float8), or no such layout (sparse)
        raise SubmitError(f"{where}: this tensor cannot travel: {error}") from None
    code = array.dtype.str.lstrip("<>=|")
    if code not in _ARRAYS:
        raise SubmitError(f"{where}: arrays of dtype {array.dtype} cannot travel; use bool, integers or floats")
    data = array.astype(array.dtype.newbyteorder("<")).tobytes()
    # bfloat16 crosses as float32, which numpy has and which holds its every value, and is made bfloat16 again.
    made = _BFLOAT16 if torch_made and str(value.dtype) == f"torch.{_BFLOAT16}" else torch_made
    return {TAG: "array", "dtype": code, "shape": list(value.shape), "data": data, "torch": made}


def _decode_array(form: dict[str, Any]) -> Any:
    try:
        if form["dtype"] not in _ARRAYS:
            raise FrameError(f"an array in a frame has dtype {form['dtype']!r}")
        array = np.frombuffer(form["data"], dtype=np.dtype(form["dtype"]).newbyteorder("<"))
        array = array.reshape([operator.index(size) for size in form["shape"]]).astype(form["dtype"])
    except FrameError:
        raise
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise FrameError(f"malformed array in a frame: {error}") from None
    if form.get("torch"):
        import torch

        tensor = torch.from_numpy(array)
        return tensor.bfloat16() if form["torch"] == _BFLOAT16 else tensor
    return array


def decode_plain(value: Any, resolve: Callable[[str, dict[str, Any]], Any] | None = None, _depth: int = 0) -> Any:
    """The inverse of :func:`encode_plain` and :func:`encode_kwargs`; `resolve` makes ``(tag, form)`` an object.

    Raises:
        FrameError: a tagged form is malformed, or of a kind that may not stand here.
    """
    if _depth > MAX_DEPTH + 1:  # arguments are one level deeper than what encode_plain is given
        raise FrameError(f"a frame is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, list):
        return [decode_plain(item, resolve, _depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(TAG)
    if kind is None:
        return {name: decode_plain(item, resolve, _depth + 1) for name, item in value.items()}
    if kind == "array":
        return _decode_array(value)
    if isinstance(kind, str) and kind in SETTINGS:
        return decode_settings(kind, decode_plain(value.get("fields"), resolve, _depth + 1))
    if resolve is None:
        raise FrameError(f"a {kind!r} may not stand in plain data")
    return resolve(str(kind), value)
