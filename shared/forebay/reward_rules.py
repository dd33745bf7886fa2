"""The settings of reward shaping and normalization (contract, section 5); :mod:`forebay.normalization` does it.

The bounds of ``clip`` and ``eps`` are chosen so that whatever is shaped and normalized stays finite in float32, the
type of rewards in tensors: at most ``2 * 1e20 / 1e-12``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from forebay.errors import SettingsError

__all__ = ["ROLLOUT_NORM", "NormConfig", "RewardShaping", "norm_of"]

Level = Literal["batch", "group"] | None

_MAX_CLIP = 1e20
_MIN_EPS = 1e-12


def _number(value: object) -> bool:
    """Whether `value` is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


@dataclass(frozen=True, slots=True)
class NormConfig:
    """Which statistics rewards are centred and scaled by. The names and defaults are AReaL's."""

    mean_level: Level = "batch"
    """Whose mean is subtracted: the batch's, the group's, or (None) nothing is."""
    mean_leave1out: bool = False
    """The baseline of a rollout is the mean of the other rollouts' references."""
    std_level: Level = "batch"
    """Whose standard deviation divides; None: nothing does."""
    std_unbiased: bool = True
    """Divide the sum of squares by n - 1, not by n."""
    eps: float = 1e-5
    """Added to the deviation, and the bound up to which it counts as none."""

    def __post_init__(self) -> None:
        """Check each field.

        Raises:
            SettingsError: names the field, its value, and what is allowed.
        """
        for name in ("mean_level", "std_level"):
            value = getattr(self, name)
            if not (value is None or (isinstance(value, str) and value in ("batch", "group"))):
                raise SettingsError(f"{name}={value!r}: must be 'batch', 'group' or None")
        for name in ("mean_leave1out", "std_unbiased"):
            if type(getattr(self, name)) is not bool:
                raise SettingsError(f"{name}={getattr(self, name)!r}: must be True or False")
        if not _number(self.eps) or not self.eps >= _MIN_EPS:
            raise SettingsError(f"eps={self.eps!r}: must be a finite number of at least {_MIN_EPS:g}")
        if self.mean_leave1out and self.mean_level is None:
            raise SettingsError(
                "mean_leave1out=True with mean_level=None: no mean is subtracted, so nothing can be left out of it; "
                "set mean_level to 'group' or 'batch', or mean_leave1out to False"
            )

    @property
    def uses_group(self) -> bool:
        """Whether a statistic is the group's, which needs two usable rollouts."""
        return "group" in (self.mean_level, self.std_level)

    @property
    def uses_batch(self) -> bool:
        """Whether a statistic is the batch's, so that rewards are known when the batch is cut."""
        return "batch" in (self.mean_level, self.std_level)

    @property
    def off(self) -> bool:
        """Whether it changes nothing."""
        return self.mean_level is None and self.std_level is None

    @classmethod
    def of(cls, form: Mapping[str, Any]) -> Self:
        """From a map of its fields, as a user writes it: one that it does not have is refused. Raises SettingsError."""
        names = {item.name for item in dataclasses.fields(cls)}
        if unknown := sorted(str(name) for name in set(form) - names):
            raise SettingsError(
                f"unknown field {', '.join(unknown)} of a NormConfig; it has {', '.join(sorted(names))}"
            )
        return cls(**form)


ROLLOUT_NORM: Final = NormConfig(mean_level="group", std_level="group", std_unbiased=False, eps=1e-8)
"""What ``reward_normalization=True`` stands for: AReaL's rule at rollout time."""


def norm_of(value: bool | NormConfig | Mapping[str, Any] | None) -> NormConfig | None:
    """What `reward_normalization` stands for: None where nothing is normalized.

    Raises:
        SettingsError: it is none of False, True, a NormConfig, or a map of its fields; names the bad field.
    """
    if value is None or value is False:
        return None
    if value is True:
        return ROLLOUT_NORM
    if isinstance(value, Mapping):
        try:
            value = NormConfig.of(value)
        except SettingsError as error:
            raise SettingsError(f"reward_normalization: {error}") from None
    if not isinstance(value, NormConfig):
        raise SettingsError(f"reward_normalization={value!r}: must be False, True or a NormConfig")
    return None if value.off else value


@dataclass(frozen=True, slots=True)
class RewardShaping:
    """What is done to each reward before it is normalized."""

    bias: float = 0.0
    scaling: float = 1.0
    clip: float = 20.0
    """Bound on the absolute value after bias and scaling."""
    overlong_tokens: int | None = None
    """The last so many tokens of `max_new_tokens` cost a penalty; None: no penalty."""
    overlong_factor: float = 1.0
    """The penalty of a row that used up `max_new_tokens`."""
    max_new_tokens: int | None = None
    """The budget that the penalty is counted from."""

    def __post_init__(self) -> None:
        """Check each field.

        Raises:
            SettingsError: names the field, its value, and the remedy.
        """
        for name in ("bias", "scaling", "overlong_factor"):
            if not _number(getattr(self, name)):
                raise SettingsError(f"{name}={getattr(self, name)!r}: must be a finite number")
        if self.scaling == 0:
            raise SettingsError(
                f"scaling={self.scaling!r}: every reward would be 0; leave it at 1, or do not train on this reward"
            )
        if not _number(self.clip) or not 0 < self.clip <= _MAX_CLIP:
            raise SettingsError(
                f"clip={self.clip!r}: must be above 0 and at most {_MAX_CLIP:g}, which is as good as no bound"
            )
        if self.overlong_factor < 0:
            raise SettingsError(
                f"overlong_factor={self.overlong_factor!r}: must be at least 0; it is subtracted already"
            )
        self._check_overlong()

    def _check_overlong(self) -> None:
        tokens, budget = self.overlong_tokens, self.max_new_tokens
        if tokens is None:
            if self.overlong_factor != 1:
                raise SettingsError(
                    f"overlong_factor={self.overlong_factor!r}: there is no penalty without overlong_tokens; "
                    "set overlong_tokens and max_new_tokens, or leave the factor out"
                )
            return
        if budget is None:
            raise SettingsError(
                f"overlong_tokens={tokens!r}: the penalty is counted from max_new_tokens, which is not set; "
                "set max_new_tokens to what the workflow's gconfig has"
            )
        if type(tokens) is not int or type(budget) is not int or not 1 <= tokens <= budget:
            raise SettingsError(f"overlong_tokens={tokens!r}: must be an integer from 1 to max_new_tokens={budget!r}")
