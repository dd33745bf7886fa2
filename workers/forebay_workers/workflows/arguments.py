"""Checks of the built-in workflows' arguments, made where they are submitted and where they are built.

Each check returns what is wrong with a value and what to do about it, or an empty string. None of them loads or
imports anything heavy: they also run in a trainer that has neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forebay.errors import WorkflowError
from forebay.generation import GenerationHyperparameters
from forebay.notices import ForebayWarning

__all__ = ["Checks", "as_gconfig", "check", "check_common", "check_integer", "check_processor", "warn_of_missing_path"]

Checks = Mapping[str, Callable[[str, Any], str]]
"""By argument: ``(its name, its value)`` to what is wrong with it, or an empty string."""

_MAX_SHOWN = 120
_PENALTY = 2.0
"""SGLang and vLLM refuse a frequency penalty beyond this."""


def check(workflow: type, arguments: Mapping[str, Any], checks: Checks) -> None:
    """Refuse the first of `arguments` that its check finds wrong; those that are not given have their defaults.

    Raises:
        WorkflowError: names the workflow, the argument and its value, and says what to pass instead.
    """
    for name, value in arguments.items():
        if name in checks and (problem := checks[name](name, value)):
            raise WorkflowError(f"{workflow.__qualname__}: {problem}")


def as_gconfig(value: GenerationHyperparameters | Mapping[str, Any]) -> GenerationHyperparameters:
    """A checked `gconfig` as an object: it comes as a dict from a command line."""
    return value if isinstance(value, GenerationHyperparameters) else GenerationHyperparameters(**value)


def warn_of_missing_path(arguments: Mapping[str, Any], *names: str) -> None:
    """Warn of local-looking folders that are not on this host.

    No more than a warning: the workers that load them may be on hosts of their own.
    """
    for name in names:
        value = arguments.get(name)
        # A hub name has at most one slash.
        if isinstance(value, str) and (value[0] in "./~" or value.count("/") > 1) and not Path(value).exists():
            warnings.warn(
                f"{name}={value!r} is not on this host; workers that do not have it either fail every slot",
                ForebayWarning,
                stacklevel=4,
            )


def check_integer(name: str, value: Any, low: int, why: str = "") -> str:
    """An integer of at least `low`."""
    if type(value) is int and value >= low:
        return ""
    return f"{name}={_shown(value)}: must be an integer of at least {low}{why}"


def _number(name: str, value: Any, allowed: Callable[[float], bool], what: str) -> str:
    if type(value) in (int, float) and math.isfinite(value) and allowed(value):
        return ""
    return f"{name}={_shown(value)}: must be {what}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _reward_fn(name: str, value: Any) -> str:
    if callable(value):
        return ""
    how = "pass the function itself, from the top of a module that workers may import"
    if isinstance(value, str):
        how += " (on the command line its import string is --reward)"
    return f"{name}={_shown(value)}: is not callable; {how}"


def _tokenizer(name: str, value: Any) -> str:
    methods = ("apply_chat_template", "decode", "encode")
    return _loadable(name, value, methods, "tokenizer") or _template(name, value)


def check_processor(name: str, value: Any) -> str:
    """A processor, or the folder or name to load one from."""
    problem = _loadable(name, value, ("__call__", "apply_chat_template"), "processor")
    if not problem and not isinstance(value, str) and not hasattr(value, "image_processor"):
        return f"{name}={_shown(value)}: has no image_processor; pass the processor of a vision-language model"
    return problem or _template(name, value)


def _loadable(name: str, value: Any, methods: tuple[str, ...], kind: str) -> str:
    if isinstance(value, str):
        return "" if value.strip() else f"{name}={value!r}: is empty; pass the {kind}'s folder or name"
    if all(callable(getattr(value, method, None)) for method in methods):
        return ""
    text = " (a path as a string)" if isinstance(value, Path) else ""
    return f"{name}={_shown(value)}: is no {kind}; pass one, or the folder or name to load it from{text}"


def _template(name: str, value: Any) -> str:
    if not isinstance(value, str) and getattr(value, "chat_template", "") is None:
        return f"{name}={_shown(getattr(value, 'name_or_path', value))}: has no chat template; set its chat_template"
    return ""


def _flag(name: str, value: Any) -> str:
    return "" if type(value) is bool else f"{name}={_shown(value)}: must be True or False"


def _timeout(name: str, value: Any) -> str:
    return _number(name, value, lambda seconds: seconds > 0, "a number of seconds above 0")


def check_gconfig(name: str, value: Any) -> str:
    """:class:`GenerationHyperparameters`, or a dict of its fields, with values that a server can use."""
    if isinstance(value, GenerationHyperparameters):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, dict):
        known = {field.name for field in dataclasses.fields(GenerationHyperparameters)}
        if unknown := sorted(str(field) for field in value if field not in known):
            return f"{name}: unknown field {', '.join(unknown)}; there are {', '.join(sorted(known))}"
        fields = {**dataclasses.asdict(GenerationHyperparameters()), **value}
    else:
        return f"{name}={_shown(value)}: must be GenerationHyperparameters or a dict of its fields"
    for field, one in fields.items():
        if problem := _GCONFIG[field](f"{name}.{field}", one):
            return problem
    if fields["min_new_tokens"] > fields["max_new_tokens"]:
        return (
            f"{name}.min_new_tokens={fields['min_new_tokens']}: is above "
            f"max_new_tokens={fields['max_new_tokens']}; lower one or raise the other"
        )
    return ""


def _n_samples(name: str, value: Any) -> str:
    if type(value) is int and value == 1:
        return ""
    return f"{name}={_shown(value)}: must be 1; to sample a prompt more often submit it with a larger group_size"


def _top_k(name: str, value: Any) -> str:
    if type(value) is int and (value >= 1 or value == -1):
        return ""
    return f"{name}={_shown(value)}: must be an integer of at least 1, or -1 for the whole vocabulary"


def _token_ids(name: str, value: Any) -> str:
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return ""
    return f"{name}={_shown(value)}: must be a list of token ids"


def _stop(name: str, value: Any) -> str:
    if value is None or (isinstance(value, list) and all(isinstance(item, str) and item for item in value)):
        return ""
    return f"{name}={_shown(value)}: must be None or a list of non-empty strings"  # a string would be cut into letters


_GCONFIG: Checks = {
    "n_samples": _n_samples,
    "max_new_tokens": lambda name, value: check_integer(name, value, 1),
    "min_new_tokens": lambda name, value: check_integer(name, value, 0),
    "max_tokens": lambda name, value: check_integer(name, value, 2, ": one token of prompt and one of completion"),
    "greedy": _flag,
    "top_p": lambda name, value: _number(name, value, lambda p: 0 < p <= 1, "above 0 and at most 1"),
    "top_k": _top_k,
    "temperature": lambda name, value: _number(name, value, lambda t: t >= 0, "a number of at least 0"),
    "stop_token_ids": _token_ids,
    "ignore_eos": _flag,
    "skip_special_tokens": _flag,
    "stop": _stop,
    "frequency_penalty": lambda name, value: _number(
        name, value, lambda penalty: abs(penalty) <= _PENALTY, f"between -{_PENALTY:g} and {_PENALTY:g}"
    ),
    "seed": lambda name, value: "" if value is None else check_integer(name, value, 0, ", or None"),
}


def check_common() -> dict[str, Callable[[str, Any], str]]:
    """The checks of what all built-in workflows take."""
    return {
        "reward_fn": _reward_fn,
        "gconfig": check_gconfig,
        "tokenizer": _tokenizer,
        "enable_thinking": _flag,
        "reward_timeout_s": _timeout,
    }


def check_discount(name: str, value: Any) -> str:
    """A factor above 0 and at most 1."""
    return _number(name, value, lambda factor: 0 < factor <= 1, "above 0 and at most 1 (1: no discount)")


def check_text(name: str, value: Any) -> str:
    """A string that is more than spaces."""
    if isinstance(value, str) and value.strip():
        return ""
    return f"{name}={_shown(value)}: must be a string that is not empty"
