"""The user's filter on assembled groups (contract 2, should_accept_fn)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import structlog.testing
import torch
from helpers import filters
from helpers.building import group_of, headers_of, rejected, row

from forebay import NormConfig, RejectReason, RolloutGroup
from forebay.reward_rules import ROLLOUT_NORM, RewardShaping
from forebay.wire.envelopes import GroupRules, GroupSummary
from forebay.wire.rows import Row
from forebay_collector.accept import AcceptFilter
from forebay_collector.decision import decide


@pytest.fixture(autouse=True)
def seen() -> Iterator[list[dict[str, Any]]]:
    """What the looking filter was given in this test."""
    filters.SEEN.clear()
    yield filters.SEEN
    filters.SEEN.clear()


def group(*rewards: float | None) -> tuple[GroupSummary, list[Row]]:
    """A group of rollouts of one row each."""
    return decided_group({idx: [row([1, 2, 3], reward=reward)] for idx, reward in enumerate(rewards)})


def decided_group(
    rollouts: dict[int, list[Row]], norm: NormConfig | None = None, **shaping: float
) -> tuple[GroupSummary, list[Row]]:
    """A group as the collector has decided on it, and its rows as they were written."""
    summary, rows = group_of(rollouts)
    headers = {header.idx: header for header in headers_of(summary).values()}
    size = max(headers) + 1
    for idx in set(range(size)) - set(headers):
        headers[idx] = rejected(summary.task, idx)
    rules = GroupRules(1, reward_normalization=norm)
    decision = decide(summary.task, size, rules, headers, RewardShaping(**shaping))  # type: ignore[arg-type]
    assert decision.reason is None
    return decision.summary, rows


async def judged(name: str, summary: GroupSummary, rows: list[Row]) -> tuple[RejectReason | None, str]:
    """The verdict of a filter of the helpers."""
    return await AcceptFilter(["forebay", "helpers"]).judge(f"helpers.filters:{name}", summary, rows)


class TestVerdicts:
    """False: rejected(filtered). An exception: rejected(accept_error)."""

    async def test_true_and_false(self) -> None:
        """True accepts, false rejects with the filter's name; torch scalars are answers too."""
        assert await judged("any_positive", *group(0.0, 1.0)) == (None, "")
        assert await judged("any_positive", *group(0.0, -1.0)) == (
            RejectReason.FILTERED,
            "helpers.filters:any_positive said no",
        )

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("explode", "KeyError: 'absent'"),
            ("leave", "SystemExit: 1"),
            ("ambiguous", "RuntimeError: "),
            ("eventually", "WorkflowError: helpers.filters:eventually is a coroutine function"),
            ("absent", "has no absent"),
            ("NUMBER", "is not callable"),
        ],
    )
    async def test_whatever_goes_wrong_rejects_the_group(self, name: str, said: str) -> None:
        """An exception, an exit, a vector, a coroutine and a bad import reject the group with the cause."""
        reason, detail = await judged(name, *group(1.0, 2.0))
        assert reason is RejectReason.ACCEPT_ERROR
        assert detail.startswith(f"helpers.filters:{name}: ")
        assert said in detail

    async def test_a_module_outside_the_allowlist_rejects_the_group(self) -> None:
        """Anything else is a rejected group for should_accept_fn, never an import."""
        reason, detail = await AcceptFilter(["forebay"]).judge("helpers.filters:look", *group(1.0))
        assert reason is RejectReason.ACCEPT_ERROR
        assert "not in the run's import allowlist" in detail
        assert filters.SEEN == []

    async def test_logged_once_for_each_distinct_error(self) -> None:
        """The traceback is logged once per distinct error, however often it comes."""
        accept = AcceptFilter(["helpers"])
        with structlog.testing.capture_logs() as logs:
            for _ in range(3):
                await accept.judge("helpers.filters:explode", *group(1.0))
            for size in (1, 2, 2):
                await accept.judge("helpers.filters:explode_anew", *group(*[1.0] * size))
        assert [entry["function"] for entry in logs] == ["helpers.filters:explode"] + 2 * [
            "helpers.filters:explode_anew"
        ]
        assert all(entry["exc_info"] for entry in logs)


class TestWhatItSees:
    """It sees the tensor dict with group metadata, original_rewards always, rewards as normalized so far."""

    async def test_padded_tensors_and_the_group(self, seen: list[dict[str, Any]]) -> None:
        """Rows of all rollouts, padded, and which rollout each belongs to."""
        summary, rows = decided_group(
            {1: [row([1, 2, 3], reward=0.5), row([4, 5], reward=0.5)], 3: [row([6, 7], reward=2.0)]}
        )
        assert await judged("look", summary, rows) == (None, "")
        (found,) = seen
        assert found["input_ids"].tolist() == [[1, 2, 3], [4, 5, 0], [6, 7, 0]]
        assert found["attention_mask"].dtype is torch.bool
        assert found["rollout_group"] == RolloutGroup(row_counts=(2, 1), rewards=(0.5, 2.0), sample_idx=(1, 3))

    async def test_raw_rewards_without_normalization(self, seen: list[dict[str, Any]]) -> None:
        """Without normalization, both are the raw rewards."""
        await judged("look", *group(1.0, 3.0))
        assert seen[0]["rewards"].tolist() == seen[0]["original_rewards"].tolist() == [1.0, 3.0]

    async def test_both_rewards_with_normalization(self, seen: list[dict[str, Any]]) -> None:
        """After normalization, rewards are the normalized and original_rewards the raw ones; references are shaped."""
        rollouts = {idx: [row([1, 2, 3], reward=reward)] for idx, reward in enumerate((1.0, 3.0))}
        await judged("look", *decided_group(rollouts, ROLLOUT_NORM, bias=1.0))
        assert seen[0]["rewards"].tolist() == pytest.approx([-1.0, 1.0])
        assert seen[0]["original_rewards"].tolist() == [1.0, 3.0]
        assert seen[0]["rollout_group"].rewards == (2.0, 4.0)

    async def test_both_rewards_before_the_batch_is_cut(self, seen: list[dict[str, Any]]) -> None:
        """Where statistics are the batch's, rewards are as shaped; the raw ones are there as ever."""
        rollouts = {idx: [row([1, 2, 3], reward=reward)] for idx, reward in enumerate((1.0, 30.0))}
        await judged("look", *decided_group(rollouts, NormConfig()))
        assert seen[0]["rewards"].tolist() == [1.0, 20.0]
        assert seen[0]["original_rewards"].tolist() == [1.0, 30.0]

    async def test_without_a_reward(self, seen: list[dict[str, Any]]) -> None:
        """Contract 2 and 3: a row without a reward has NaN, and the others' rewards are there all the same."""
        await judged("look", *group(1.0, None))
        for name in ("rewards", "original_rewards"):
            assert np.array_equal(seen[0][name].numpy(), [1.0, np.nan], equal_nan=True)
        assert seen[0]["rollout_group"].rewards == (1.0, None)

    async def test_its_changes_go_nowhere(self) -> None:
        """What a filter does to its tensors does not reach the rows."""
        summary, rows = group(1.0, 3.0)
        await judged("spoil", summary, rows)
        assert rows[0].tokens["input_ids"].tolist() == [1, 2, 3]
        assert [rollout.rows[0].reward for rollout in summary.rollouts] == [1.0, 3.0]
