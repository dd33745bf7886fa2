"""How many usable rollouts a group needs (contract 4.6)."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.errors import SubmitError
from forebay.group_rules import minimum_usable
from forebay.reward_rules import norm_of


@pytest.mark.parametrize(
    ("size", "normalize", "want"),
    [(1, False, 1), (1, True, 1), (2, False, 1), (2, True, 2), (8, False, 1), (8, True, 2)],
)
def test_derived(size: int, normalize: bool, want: int) -> None:
    """2 where group statistics normalize a group of at least 2, else 1; a group of one stays at 1."""
    assert minimum_usable(size, None, norm_of(normalize)) == want


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("explicit", [2, 3, 4])
def test_an_explicit_value_wins(normalize: bool, explicit: int) -> None:
    """Any value from 2 to the group's size is taken as it is."""
    assert minimum_usable(4, explicit, norm_of(normalize)) == explicit


def test_an_explicit_one() -> None:
    """1 is right without statistics, and for a group of one."""
    assert minimum_usable(4, 1, None) == 1
    assert minimum_usable(1, 1, norm_of(True)) == 1


def test_one_contradicts_group_statistics() -> None:
    """1 with group statistics is a ValueError with the remedies."""
    with pytest.raises(
        SubmitError, match=r"min_usable_group_size=1: .* need at least 2 usable rollouts; raise it"
    ) as caught:
        minimum_usable(4, 1, norm_of(True))
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("explicit", [0, -1, 5, True, 2.0, "2"])
def test_out_of_range(normalize: bool, explicit: Any) -> None:
    """Contract 2: anything but an integer from 1 to the group's size is a ValueError with both numbers."""
    with pytest.raises(SubmitError, match=r"min_usable_group_size=.* from 1 to group_size=4"):
        minimum_usable(4, explicit, norm_of(normalize))
