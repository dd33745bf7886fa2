"""Messages whose fields are of foreign types: a FrameError where they are read, so that nothing behind it can crash."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

import pytest
from helpers.building import usable
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forebay import NormConfig
from forebay.errors import FrameError
from forebay.reward_rules import ROLLOUT_NORM, RewardShaping
from forebay.wire.envelopes import (
    BatchIndex,
    GroupRules,
    GroupSpec,
    GroupSummary,
    RolloutSummary,
    RowSummary,
    SlotHeader,
)
from forebay.wire.values import pack, unpack
from forebay_collector.decision import decide
from forebay_collector.uneven_keys import uneven_keys

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
HEADER = unpack(usable(1, 0, [1.0, 1.0]).pack())
FIELDS = [field.name for field in dataclasses.fields(SlotHeader)]
ROW_FIELDS = [field.name for field in dataclasses.fields(RowSummary)]
RULES = st.sampled_from(
    [GroupRules(1), GroupRules(2, reward_normalization=ROLLOUT_NORM), GroupRules(1, reward_normalization=NormConfig())]
)


def forms() -> st.SearchStrategy[dict[str, Any]]:
    """Headers with some fields, and some fields of their rows, replaced by anything."""
    changes = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=2)
    rows = st.dictionaries(st.sampled_from(ROW_FIELDS), VALUES, max_size=2)
    return st.builds(
        lambda change, row: HEADER | {"rows": [HEADER["rows"][0] | row, HEADER["rows"][1]]} | change, changes, rows
    )


@settings(max_examples=400)
@given(forms(), RULES)
@example(HEADER | {"phases": {"a": "b"}}, GroupRules(1))
@example(HEADER | {"keys": 3}, GroupRules(1))
@example(HEADER | {"seconds": "1"}, GroupRules(1))
@example(HEADER | {"reference": 10**19}, GroupRules(2, reward_normalization=ROLLOUT_NORM))
def test_what_can_be_read_can_be_decided_on(form: dict[str, Any], rules: GroupRules) -> None:
    """9: a header with fields of any kind is a FrameError, or nothing behind it fails."""
    try:
        header = SlotHeader.unpack(pack(form))
    except FrameError:
        return
    headers = {0: header, 1: usable(1, 1)}
    uneven_keys(headers.values())
    decision = decide(1, 2, rules, headers, RewardShaping())
    assert GroupSummary.unpack(decision.summary.pack()).task == 1


@pytest.mark.parametrize("kind", [GroupSpec, GroupRules, SlotHeader, GroupSummary, BatchIndex])
def test_every_field_is_of_its_type(kind: Any) -> None:
    """9: no field of a message, but those that hold anything, takes a value of another type; the field is named."""
    good: dict[str, Any] = {
        "GroupSpec": {"workflow": "a:b", "kwargs": {}, "data": {}},
        "GroupRules": {"min_usable_group_size": 1},
        "SlotHeader": HEADER,
        "GroupSummary": {"task": 1, "group_size": 1, "rollouts": []},
        "BatchIndex": {"groups": []},
    }[kind.__name__]
    assert kind.unpack(pack(good)) is not None
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if hints[field.name] is Any:
            continue
        with pytest.raises(FrameError, match=f"malformed {kind.__name__}"):
            kind.unpack(pack(good | {field.name: ["x", [1]]}))


def test_numbers_are_numbers() -> None:
    """A whole number may stand for a float, a bool for none; a float is no integer."""
    summary = {"task": 1, "group_size": 2, "rollouts": [{"sample_idx": 0, "attempt": 1, "rows": [], "reference": 1}]}
    assert GroupSummary.unpack(pack(summary)).rollouts == [RolloutSummary(0, 1, [], 1)]
    for change in ({"task": True}, {"task": 1.0}, {"seconds": False}, {"phases": {"a": None}}, {"parent": "1"}):
        with pytest.raises(FrameError):
            GroupSummary.unpack(pack(summary | change))
