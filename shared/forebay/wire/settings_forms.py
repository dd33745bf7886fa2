"""The settings objects that travel among a workflow's arguments: an explicit list, never a class named by a frame."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from forebay.errors import FrameError
from forebay.generation import GenerationHyperparameters
from forebay.reward_rules import NormConfig, RewardShaping
from forebay.settings import EngineSettings

__all__ = ["SETTINGS", "decode_settings", "settings_base", "settings_fields", "settings_name"]

SETTINGS: Final[Mapping[str, type[Any]]] = MappingProxyType(
    {
        # "gconfig" is older than the list; its name stays, so that groups of an older producer still run.
        "gconfig": GenerationHyperparameters,
        "settings.NormConfig": NormConfig,
        "settings.RewardShaping": RewardShaping,
        "settings.EngineSettings": EngineSettings,
    }
)
"""The class of each tag. ``Settings`` is not one: it may hold the password of Redis."""


def settings_name(value: Any) -> str | None:
    """The tag of `value`, if it is exactly of a class of the list: a subclass would come back as its base."""
    return next((name for name, kind in SETTINGS.items() if type(value) is kind), None)


def settings_base(value: Any) -> str | None:
    """The name of the listed class that `value` is an instance of a subclass of, if any."""
    return next((kind.__name__ for kind in SETTINGS.values() if isinstance(value, kind)), None)


def settings_fields(value: Any) -> dict[str, Any]:
    """The fields of `value`, not copied."""
    if isinstance(value, EngineSettings):
        return value.model_dump(mode="json", exclude={"api_key"})  # a worker has its own from its environment
    return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}


def decode_settings(name: str, fields: Any) -> Any:
    """The object with tag `name`.

    Raises:
        FrameError: the fields are not those of its class, or it refuses their values.
    """
    try:
        # Every field is given, so nothing but the key of the servers is read from the environment of the worker.
        return SETTINGS[name](**fields)
    except (TypeError, ValueError) as error:  # pydantic's ValidationError and our SettingsError are ValueErrors
        raise FrameError(f"malformed {SETTINGS[name].__name__} in a frame: {error}") from None
