"""What may be said of a group at submit: each bad option is one line with the name, the value and what to do.

How ``min_usable_group_size`` is derived is proved in ``conformance/test_04_groups.py::TestMinimumUsable``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import filters

from forebay import NormConfig, RunSettings, load
from forebay.errors import SettingsError, SubmitError
from forebay.options import GroupOptions, resolve_rules
from forebay.reward_rules import ROLLOUT_NORM, RewardShaping, norm_of
from forebay.wire.envelopes import GroupRules


def run(**values: Any) -> RunSettings:
    """The rules of a run."""
    return load(RunSettings, **{"group_size": 4, "import_allowlist": ["helpers"], **values})


class TestGood:
    """What is said wins, what is left out or None is as the run's settings say."""

    def test_the_runs_defaults(self) -> None:
        """Without a word it is the run's."""
        settings = run(drop_incomplete_group=True, on_slot_error="drop_group", reward_normalization=True)
        want = GroupRules(2, drop_incomplete_group=True, on_slot_error="drop_group", reward_normalization=ROLLOUT_NORM)
        assert resolve_rules({}, settings) == (4, want)
        assert resolve_rules(dict.fromkeys(GroupOptions.__annotations__), settings) == (4, want)

    def test_what_is_said_wins(self) -> None:
        """False is said, too."""
        settings = run(drop_incomplete_group=True, on_slot_error="drop_group", reward_normalization=True)
        said = {"group_size": 2, "drop_incomplete_group": False, "on_slot_error": "keep", "reward_normalization": False}
        assert resolve_rules(said, settings) == (2, GroupRules(1))

    @pytest.mark.parametrize(
        ("value", "want"),
        [
            (True, ROLLOUT_NORM),
            (NormConfig("group"), NormConfig("group")),
            ({"mean_level": "group"}, NormConfig("group")),
            ({}, NormConfig()),
            (NormConfig(None, std_level=None), None),
            (False, None),
        ],
    )
    def test_normalizations(self, value: Any, want: NormConfig | None) -> None:
        """A bool, a NormConfig, or a map of its fields; one that changes nothing is none."""
        assert resolve_rules({"reward_normalization": value}, run())[1].reward_normalization == want

    def test_filters(self) -> None:
        """A function or its import string."""
        for said in (filters.look, "helpers.filters:look"):
            assert resolve_rules({"should_accept_fn": said}, run())[1].should_accept_fn == "helpers.filters:look"


class TestBad:
    """Refused before anything is enqueued."""

    @pytest.mark.parametrize(
        ("option", "value", "said"),
        [
            ("group_sise", 4, "unknown option group_sise; there are group_size, "),
            ("group_size", 0, "group_size=0: must be an integer from 1 to 4096"),
            ("group_size", 4097, "group_size=4097: must be"),
            ("group_size", 2.0, "group_size=2.0: must be"),
            ("group_size", True, "group_size=True: must be"),
            ("group_size", "8", "group_size='8': must be"),
            ("drop_incomplete_group", "yes", "drop_incomplete_group='yes': must be True or False"),
            ("drop_incomplete_group", 1, "drop_incomplete_group=1: must be True or False"),
            ("on_slot_error", "drop", "on_slot_error='drop': must be 'keep' or 'drop_group'"),
            ("on_slot_error", ["keep"], "on_slot_error=['keep']: must be 'keep' or 'drop_group'"),
            ("min_usable_group_size", 5, "min_usable_group_size=5: must be an integer from 1 to group_size=4"),
            ("min_usable_group_size", 0, "min_usable_group_size=0: must be"),
            ("min_usable_group_size", True, "min_usable_group_size=True: must be"),
            ("reward_normalization", 1, "reward_normalization=1: must be False, True or a NormConfig"),
            ("reward_normalization", "group", "reward_normalization='group': must be"),
            (
                "reward_normalization",
                {"mean_levle": "group"},
                "reward_normalization: unknown field mean_levle of a NormConfig; it has eps, mean_leave1out",
            ),
            (
                "reward_normalization",
                {"std_level": "token"},
                "reward_normalization: std_level='token': must be 'batch', 'group' or None",
            ),
            ("should_accept_fn", 3, "should_accept_fn: 3 has no importable name"),
            ("should_accept_fn", "", "is no import string; write package.module:Name"),
            ("should_accept_fn", lambda _: True, "is a lambda, which no worker can import"),
            ("should_accept_fn", "os:getcwd", "not in the run's import allowlist"),
            ("should_accept_fn", "helpers.filters:absent", "has no absent"),
            ("should_accept_fn", "helpers.filters:NUMBER", "is not callable"),
            (
                "should_accept_fn",
                "helpers.filters:eventually",
                "eventually is a coroutine function; a filter is a plain",
            ),
            ("should_accept_fn", filters.eventually, "eventually is a coroutine function; a filter is a plain one"),
        ],
    )
    def test_one_line(self, option: str, value: Any, said: str) -> None:
        """A ValueError of one line that names the option, its value, and what is allowed."""
        with pytest.raises(SubmitError) as caught:
            resolve_rules({option: value}, run())
        assert isinstance(caught.value, ValueError)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_contradictions_name_both_sides(self) -> None:
        """What contradicts the run's settings says so, and that it is the run's."""
        with pytest.raises(SubmitError, match=r"min_usable_group_size=1: .*by trainer_adv_norm\) need at least 2"):
            resolve_rules({"min_usable_group_size": 1}, run(trainer_adv_norm=NormConfig("group")))
        with pytest.raises(
            SubmitError, match=r"=1: .*by reward_normalization\).*\(the run's own setting; pass another"
        ):
            resolve_rules({"reward_normalization": True}, run(min_usable_group_size=1))


class TestNormConfig:
    """contract 5: mean_level, std_level, mean_leave1out, std_unbiased, eps."""

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"mean_level": "token"}, "mean_level='token': must be 'batch', 'group' or None"),
            ({"mean_level": ["batch"]}, r"mean_level=\['batch'\]: must be"),
            ({"std_level": False}, "std_level=False: must be"),
            ({"mean_leave1out": 1}, "mean_leave1out=1: must be True or False"),
            ({"std_unbiased": None}, "std_unbiased=None: must be True or False"),
            ({"eps": 0}, "eps=0: must be a finite number of at least 1e-12"),
            ({"eps": float("nan")}, "eps=nan: must be"),
            ({"eps": float("inf")}, "eps=inf: must be"),
            ({"eps": 10**400}, "eps=1000.*: must be"),
            ({"eps": True}, "eps=True: must be"),
            ({"eps": "1e-5"}, "eps='1e-5': must be"),
            (
                {"mean_level": None, "mean_leave1out": True},
                "mean_leave1out=True with mean_level=None: .*set mean_level to 'group' or 'batch', or mean_leave1o",
            ),
        ],
    )
    def test_bad(self, fields: dict[str, Any], said: str) -> None:
        """Each bad field is named with its value and what is allowed, however the rule is written."""
        for make in (lambda: NormConfig(**fields), lambda: NormConfig.of(fields), lambda: norm_of(fields)):
            with pytest.raises(SettingsError, match=said):
                make()

    @pytest.mark.parametrize("eps", [1, np.float64(0.5), 1e-12])
    def test_numbers(self, eps: float) -> None:
        """Any finite number is one."""
        assert NormConfig(eps=eps).eps == eps


class TestShaping:
    """contract 5: bias, scaling, clip, overlong penalty."""

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"bias": float("inf")}, "bias=inf: must be a finite number"),
            ({"bias": None}, "bias=None: must be"),
            ({"scaling": 0}, "scaling=0: every reward would be 0"),
            ({"scaling": float("nan")}, "scaling=nan: must be"),
            ({"clip": 0}, r"clip=0: must be above 0 and at most 1e\+20, which is as good as no bound"),
            ({"clip": float("inf")}, "clip=inf: must be above 0"),
            ({"overlong_factor": 2}, "overlong_factor=2: there is no penalty without overlong_tokens"),
            ({"overlong_tokens": 4}, "overlong_tokens=4: .*from max_new_tokens, which is not set; set max_new_tokens"),
            ({"overlong_tokens": 9, "max_new_tokens": 8}, "overlong_tokens=9: must be an integer from 1 to max_new_t"),
            ({"overlong_tokens": 0, "max_new_tokens": 8}, "overlong_tokens=0: must be an integer from 1"),
            ({"overlong_tokens": 1.5, "max_new_tokens": 8}, "overlong_tokens=1.5: must be an integer from 1"),
            (
                {"overlong_tokens": 1, "max_new_tokens": 8, "overlong_factor": -1},
                "overlong_factor=-1: must be at least",
            ),
        ],
    )
    def test_bad(self, fields: dict[str, Any], said: str) -> None:
        """Each bad field is named with its value and what is allowed."""
        with pytest.raises(SettingsError, match=said):
            RewardShaping(**fields)
