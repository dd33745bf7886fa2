"""What may be said of a group when it is submitted; every call that submits takes the same (contract 2 and 4)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from forebay.errors import SettingsError, SubmitError
from forebay.group_rules import minimum_usable
from forebay.imports import import_object
from forebay.outcomes import OnSlotError
from forebay.reward_rules import NormConfig, norm_of
from forebay.settings import MAX_GROUP_SIZE, RunSettings
from forebay.wire.envelopes import GroupRules
from forebay.workflow import name_callable

__all__ = ["GroupOptions", "resolve_rules"]


class GroupOptions(TypedDict, total=False):
    """Each is as the run's settings say where it is left out or None."""

    group_size: int | None
    """Slots of the group, from 1 to 4096."""
    reward_normalization: bool | NormConfig | None
    """False, True (AReaL's rule at rollout time: group mean and biased deviation), or a NormConfig."""
    drop_incomplete_group: bool | None
    """Reject the group if any of its slots is unusable."""
    on_slot_error: Literal["keep", "drop_group"] | None
    """``drop_group``: reject it if any of its slots failed, as AReaL does."""
    min_usable_group_size: int | None
    """Usable rollouts below which the group is rejected; derived from the normalizations where nobody says."""
    should_accept_fn: Callable[[dict[str, Any]], bool] | str | None
    """A module-level function of the assembled group, or its import string; False rejects the group."""


def resolve_rules(options: Mapping[str, Any], run: RunSettings, *, is_eval: bool = False) -> tuple[int, GroupRules]:
    """``(group size, rules)`` of a group that is submitted with `options` to a run with the settings `run`.

    Raises:
        SubmitError: an option is unknown, out of its range, or contradicts another.
    """
    if unknown := sorted(set(options) - GroupOptions.__annotations__.keys()):
        raise SubmitError(f"unknown option {', '.join(unknown)}; there are {', '.join(GroupOptions.__annotations__)}")

    def chosen(name: str) -> Any:
        value = options.get(name)
        return getattr(run, name) if value is None else value

    size = chosen("group_size")
    if type(size) is not int or not 1 <= size <= MAX_GROUP_SIZE:
        raise SubmitError(f"group_size={size!r}: must be an integer from 1 to {MAX_GROUP_SIZE}")
    try:
        norm = norm_of(chosen("reward_normalization"))
    except SettingsError as error:
        raise SubmitError(str(error)) from None
    if type(drop := chosen("drop_incomplete_group")) is not bool:
        raise SubmitError(f"drop_incomplete_group={drop!r}: must be True or False")
    try:
        on_slot_error = OnSlotError(chosen("on_slot_error"))
    except ValueError:
        raise SubmitError(f"on_slot_error={options.get('on_slot_error')!r}: must be 'keep' or 'drop_group'") from None
    accept = options.get("should_accept_fn")
    return size, GroupRules(
        min_usable_group_size=_minimum(options.get("min_usable_group_size"), size, norm, run),
        drop_incomplete_group=drop,
        on_slot_error=on_slot_error.value,
        reward_normalization=norm,
        should_accept_fn=None if accept is None else _filter_name(accept, run.import_allowlist),
        is_eval=is_eval,
    )


def _minimum(explicit: int | None, size: int, norm: NormConfig | None, run: RunSettings) -> int:
    asked = explicit
    if asked is None and run.min_usable_group_size is not None:
        asked = min(run.min_usable_group_size, size)  # the run's default is for its own group size
    try:
        return minimum_usable(size, asked, norm, run.trainer_reward_norm, run.trainer_adv_norm)
    except SubmitError as error:
        where = "" if explicit is not None else " (the run's own setting; pass another with this group)"
        raise SubmitError(f"{error}{where}") from None


def _filter_name(function: Any, allowlist: Sequence[str]) -> str:
    name = name_callable(function, allowlist, "should_accept_fn")
    found = import_object(name, allowlist) if isinstance(function, str) else function
    if inspect.iscoroutinefunction(found):
        raise SubmitError(f"should_accept_fn: {name} is a coroutine function; a filter is a plain one")
    if inspect.isclass(found):
        raise SubmitError(
            f"should_accept_fn: {name} is a class, whose instances would accept everything; pass a function"
        )
    try:
        inspect.signature(found).bind({})
    except TypeError as error:
        raise SubmitError(f"should_accept_fn: {name} cannot be called with the group alone: {error}") from None
    except ValueError:
        pass  # a builtin without a signature
    return name
