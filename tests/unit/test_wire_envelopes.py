"""The messages between the processes."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Any

import pytest
from helpers.building import group_of, headers_of, row, row_summary, usable
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import NormConfig
from forebay.errors import FrameError
from forebay.reward_rules import ROLLOUT_NORM
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

NORM = NormConfig("batch", mean_leave1out=True, std_level=None)
SUMMARY = GroupSummary(
    task=3,
    group_size=4,
    rollouts=[
        RolloutSummary(
            0, 1, [row_summary(0.5, original=1.0, head=2, tail=4), row_summary(None, head=-1, tail=-1)], 0.25
        ),
        RolloutSummary(2, 2, [row_summary(-1.0, head=1, tail=3)]),
    ],
    rewards_normalized=True,
    rows_bytes=20,
    batch_norm=NORM,
)
MESSAGES = [
    GroupSpec("package.module:Name", {"a": [1]}, {"messages": []}, is_eval=True),
    GroupRules(2, drop_incomplete_group=True, reward_normalization=NORM, should_accept_fn="a.b:c", is_eval=True),
    usable(1, 2, [1.0, None], 0.5),
    SlotHeader(1, 2, 3, "failed", kind="infra", reason="no", traceback="Traceback", worker="w", seconds=1.5),
    SUMMARY,
    BatchIndex([SUMMARY, SUMMARY], partial=True, metrics={"rollout/reward": 0.5}),
]
TYPES = [GroupSpec, GroupRules, SlotHeader, GroupSummary, BatchIndex]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_back_equal(message: Any) -> None:
    """A message is equal after its trip, nested messages with their types."""
    back = type(message).unpack(message.pack())
    assert back == message
    assert all(isinstance(group, GroupSummary) for group in getattr(back, "groups", []))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_newer_release_may_know_more(message: Any) -> None:
    """Fields that this release does not know are ignored at every level, so that releases may differ."""

    def more(value: Any) -> Any:
        if isinstance(value, list):
            return [more(item) for item in value]
        if isinstance(value, dict):
            known = {name: item if name in free else more(item) for name, item in value.items()}
            return known | {"of_the_future": 1.0}
        return value

    free = {"kwargs", "data", "metrics", "phases"}  # maps whose keys are anyone's
    assert type(message).unpack(pack(more(dataclasses.asdict(message)))) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_an_older_release_may_know_less(message: Any) -> None:
    """Fields that have a default may be absent; a missing required one is a FrameError that names the message."""
    form = unpack(message.pack())
    for field in dataclasses.fields(message):
        rest = pack({name: value for name, value in form.items() if name != field.name})
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if optional and not (field.name == "rows" and message.outcome == "usable"):
            assert isinstance(type(message).unpack(rest), type(message))
        else:
            with pytest.raises(FrameError, match=f"malformed {type(message).__name__}"):
                type(message).unpack(rest)


names = st.sampled_from(sorted({field.name for kind in TYPES for field in dataclasses.fields(kind)}))
messages = st.recursive(
    st.none() | st.integers(0, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=8),
    max_leaves=10,
)


@pytest.mark.parametrize("kind", TYPES)
@given(st.binary(max_size=100) | messages.map(pack))
@settings(max_examples=150)
def test_damage_is_a_frame_error(kind: Any, frame: bytes) -> None:
    """Random bytes and random maps are a message or a FrameError."""
    with suppress(FrameError):
        assert isinstance(kind.unpack(frame), kind)


@pytest.mark.parametrize(
    "change",
    [
        {"outcome": "splendid"},
        {"outcome": []},
        {"kind": "bad luck"},
        {"result_kind": "text"},
        {"rows": None},
        {"rows": [3]},
        {"rows": [{}]},
        {"rows": []},
    ],
)
def test_a_header_is_of_closed_sets(change: dict[str, Any]) -> None:
    """A header with an unknown outcome, kind or result, or a usable one without rows (contract 1), is a FrameError."""
    form = unpack(usable(1, 2).pack())
    assert SlotHeader.unpack(pack(form)).outcome == "usable"
    with pytest.raises(FrameError):
        SlotHeader.unpack(pack(form | change))


@pytest.mark.parametrize(
    ("form", "want"),
    [
        (None, None),
        (False, None),
        (True, ROLLOUT_NORM),
        ({}, NormConfig()),
        ({"mean_level": "group", "of_the_future": {"a": 1}}, NormConfig("group")),
        ({"mean_level": None, "std_level": None}, None),
    ],
)
def test_a_rule_in_a_message(form: Any, want: NormConfig | None) -> None:
    """A rule may have fields that this release does not know, lack some, or be the word of an older one."""
    packed = pack({"min_usable_group_size": 1, "reward_normalization": form})
    assert GroupRules.unpack(packed).reward_normalization == want
    assert (
        GroupSummary.unpack(pack({"task": 1, "group_size": 1, "rollouts": [], "batch_norm": form})).batch_norm == want
    )


@pytest.mark.parametrize("form", [3, "group", [], {"mean_level": "token"}, {"eps": "small"}])
def test_a_rule_that_means_nothing_here(form: Any) -> None:
    """A rule that cannot be followed is a FrameError, not another rule."""
    with pytest.raises(FrameError, match="malformed GroupRules"):
        GroupRules.unpack(pack({"min_usable_group_size": 1, "reward_normalization": form}))


@pytest.mark.parametrize("change", [{"reference": float("nan")}, {"reference": "1"}, {"rows": float("-inf")}])
def test_rewards_in_a_header_are_finite(change: dict[str, Any]) -> None:
    """Case 28: a reward that is no finite number is a FrameError: clipping would make a number of it."""
    form = unpack(usable(1, 2).pack())
    if "rows" in change:
        change = {"rows": [form["rows"][0] | {"reward": change["rows"]}]}
    with pytest.raises(FrameError, match="malformed SlotHeader"):
        SlotHeader.unpack(pack(form | change))


class TestSummaries:
    """contract 1: head and tail."""

    def test_of_a_row(self) -> None:
        """A row's summary counts its trained tokens and takes versions from them alone."""
        one = row([1, 2, 3, 4], mask=[0, 1, 0, 1], versions=[-1, 4, -1, 2], reward=0.5, truncated=True)
        assert RowSummary.of(one) == RowSummary(4, 1, 2, 2, 4, 0.5, None, truncated=True, turns=2)

    def test_of_a_row_without_trained_tokens(self) -> None:
        """Without a trained token, head and tail are -1 and the prompt is the whole row."""
        assert RowSummary.of(row([1, 2], mask=[0, 0])) == RowSummary(2, 2, 0, -1, -1, 1.0, turns=0)

    def test_head_and_tail_of_a_group(self) -> None:
        """Staleness counts from the smallest head >= 0 of any row; rows without trained tokens do not count."""
        assert (SUMMARY.head, SUMMARY.tail) == (1, 4)
        untrained, _ = group_of({0: [row([1, 2], mask=[0, 0])]})
        assert (untrained.head, untrained.tail) == (-1, -1)
        assert (GroupSummary(1, 1, []).head, GroupSummary(1, 1, []).tail) == (-1, -1)

    def test_headers_carry_what_summaries_need(self) -> None:
        """Summaries that went through headers are the same."""
        summary, _ = group_of({0: [row([1, 2, 3])], 1: [row([1, 2]), row([3, 4])]})
        for idx, header in headers_of(summary).items():
            assert SlotHeader.unpack(header.pack()).rows == summary.rollouts[idx].rows
