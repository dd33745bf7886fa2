"""Plain values on the wire, and the tagged forms of what a workflow's arguments may hold besides (contract, section 2).

Never pickle: what cannot be named or copied as plain data is refused where it enters, with the path to it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from forebay.errors import FrameError, SubmitError, WorkflowError
from forebay.generation import GenerationHyperparameters

__all__ = ["MAX_DEPTH", "callable_name", "decode_plain", "encode_kwargs", "encode_plain", "pack", "unpack"]

TAG = "__forebay__"
"""Key that marks a tagged form; plain data may not use it."""
MAX_DEPTH = 64
_MAX_VALUES_BYTES = 256 * 2**20


def pack(value: Any) -> bytes:
    """`value`, made of plain types, as msgpack."""
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


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
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise FrameError(f"malformed msgpack frame of {len(frame)} bytes: {error}") from None


def encode_plain(value: Any, where: str = "data", _depth: int = 0) -> Any:
    """`value` reduced to msgpack types: None, bool, int, float, str, bytes, lists and string-keyed dicts.

    Tuples become lists; numpy arrays, and torch tensors without gradient, travel with their dtype and shape.

    Raises:
        SubmitError: something in `value` is none of these; the message has the path to it, beginning with `where`.
    """
    if _depth > MAX_DEPTH:
        raise SubmitError(f"{where[:80]}...: nested deeper than {MAX_DEPTH} levels")
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
        return {name: encode_plain(item, f"{where}[{name!r}]", _depth + 1) for name, item in value.items()}
    raise SubmitError(
        f"{where}: a {type(value).__module__}.{type(value).__qualname__} cannot travel; "
        "use None, bool, int, float, str, bytes, lists, dicts with string keys, or arrays"
    )


def encode_kwargs(kwargs: dict[str, Any], where: str = "workflow_kwargs") -> dict[str, Any]:
    """A workflow's arguments: plain values plus hyperparameters, tokenizers and processors, and callables.

    Raises:
        WorkflowError: an argument cannot be named on a worker; the message says which and why.
    """
    return {name: _encode_argument(value, f"{where}[{name!r}]", 0) for name, value in kwargs.items()}


def _encode_argument(value: Any, where: str, depth: int) -> Any:
    if isinstance(value, GenerationHyperparameters):
        return {TAG: "gconfig", "fields": dataclasses.asdict(value)}
    if depth < MAX_DEPTH and isinstance(value, (list, tuple)):
        return [_encode_argument(item, f"{where}[{at}]", depth + 1) for at, item in enumerate(value)]
    if depth < MAX_DEPTH and isinstance(value, dict) and all(isinstance(name, str) and name != TAG for name in value):
        return {name: _encode_argument(item, f"{where}[{name!r}]", depth + 1) for name, item in value.items()}
    kind = _pretrained_kind(value)
    if kind is not None:
        path = getattr(value, "name_or_path", None)
        if not path:
            raise WorkflowError(
                f"{where}: this {kind} has no name_or_path; pass the path it can be loaded from instead"
            )
        return {TAG: kind, "path": str(path)}
    if callable(value):
        return {TAG: "callable", "name": callable_name(value, where)}
    try:
        return encode_plain(value, where, depth)
    except SubmitError as error:
        raise WorkflowError(str(error)) from None


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
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None or getattr(found, "__qualname__", None) != name:
        raise WorkflowError(f"{where}: {module}:{name} does not lead back to the object that was passed")
    return f"{module}:{name}"


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "torch" and hasattr(value, "detach")


def _encode_array(value: Any, where: str) -> dict[str, Any]:
    torch_made = _is_tensor(value)
    array = np.ascontiguousarray(value.detach().cpu().numpy() if torch_made else value)
    if array.dtype.kind not in "biuf":
        raise SubmitError(f"{where}: arrays of dtype {array.dtype} cannot travel; use bool, integers or floats")
    data = array.astype(array.dtype.newbyteorder("<")).tobytes()
    return {TAG: "array", "dtype": array.dtype.str.lstrip("<>=|"), "shape": list(value.shape), "data": data,
            "torch": torch_made}  # fmt: skip


def _decode_array(form: dict[str, Any]) -> Any:
    try:
        array = (
            np.frombuffer(form["data"], dtype=np.dtype(form["dtype"]).newbyteorder("<")).reshape(form["shape"]).copy()
        )
    except (ValueError, TypeError, KeyError) as error:
        raise FrameError(f"malformed array in a frame: {error}") from None
    if form.get("torch"):
        import torch

        return torch.from_numpy(array)
    return array


def decode_plain(value: Any, resolve: Callable[[str, dict[str, Any]], Any] | None = None) -> Any:
    """The inverse of :func:`encode_plain` and :func:`encode_kwargs`; `resolve` makes ``(tag, form)`` an object.

    Raises:
        FrameError: a tagged form is malformed, or of a kind that may not stand here.
    """
    if isinstance(value, list):
        return [decode_plain(item, resolve) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(TAG)
    if kind is None:
        return {name: decode_plain(item, resolve) for name, item in value.items()}
    if kind == "array":
        return _decode_array(value)
    if kind == "gconfig":
        try:
            return GenerationHyperparameters(**value["fields"])
        except (TypeError, KeyError) as error:
            raise FrameError(f"malformed generation settings in a frame: {error}") from None
    if resolve is None:
        raise FrameError(f"a {kind!r} may not stand in plain data")
    return resolve(str(kind), value)
