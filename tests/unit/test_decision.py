"""What becomes of an assembled group (contract 4.4)."""

from __future__ import annotations

import itertools

import pytest
from helpers.building import failed, rejected, usable
from hypothesis import given
from hypothesis import strategies as st

from forebay import FailureKind, RejectReason
from forebay.outcomes import ResultKind
from forebay.reward_rules import RewardShaping, norm_of
from forebay.wire.envelopes import GroupRules, GroupSummary, SlotHeader
from forebay_collector.decision import Decision, decide

TASK = 7


def verdict(*headers: SlotHeader, minimum: int = 1, drop: bool = False, normalize: bool = False) -> Decision:
    """The decision on a group of `headers`, in the order of their slots."""
    rules = GroupRules(minimum, drop_incomplete_group=drop, reward_normalization=norm_of(normalize))
    return decide(TASK, len(headers), rules, {header.idx: header for header in headers}, RewardShaping())


def rewards(summary: GroupSummary) -> list[list[float | None]]:
    """The rows' rewards of each rollout."""
    return [[row.reward for row in rollout.rows] for rollout in summary.rollouts]


def mixed(idx: int, values: list[float | None] | None = None) -> SlotHeader:
    """A usable slot whose result is of interactions."""
    header = usable(TASK, idx, values or [1.0])
    header.result_kind = ResultKind.INTERACTIONS.value
    return header


class TestReasons:
    """contract 4.4: each reason alone."""

    @pytest.mark.parametrize("normalize", [False, True])
    def test_accepted(self, normalize: bool) -> None:
        """All slots usable: accepted, with a rollout for each slot."""
        decision = verdict(usable(TASK, 0, [1.0]), usable(TASK, 1, [3.0]), minimum=2, normalize=normalize)
        assert decision.reason is None
        assert [rollout.sample_idx for rollout in decision.summary.rollouts] == [0, 1]
        assert decision.summary.rewards_normalized is normalize

    def test_no_usable_slot(self) -> None:
        """Nothing usable is rejected(no_usable_slot), with the causes, most frequent first."""
        decision = verdict(
            rejected(TASK, 0),
            failed(TASK, 1, FailureKind.DATA, "HTTP 422: too long"),
            failed(TASK, 2, FailureKind.DATA, "HTTP 422: too long"),
        )
        assert decision.reason is RejectReason.NO_USABLE_SLOT
        assert decision.detail == "2 x failed(data): HTTP 422: too long; 1 x the workflow returned None"
        assert decision.summary.rollouts == []

    @pytest.mark.parametrize("lost", [failed(TASK, 1), rejected(TASK, 1)])
    def test_incomplete(self, lost: SlotHeader) -> None:
        """With drop_incomplete_group, one slot that is not usable rejects the group, whatever the minimum."""
        decision = verdict(usable(TASK, 0), lost, usable(TASK, 2), drop=True)
        assert decision.reason is RejectReason.INCOMPLETE
        assert decision.detail.startswith("2 of 3 slots usable; 1 x ")
        assert verdict(usable(TASK, 0), lost, usable(TASK, 2)).reason is None

    def test_below_minimum(self) -> None:
        """Fewer usable slots than the minimum reject the group; as many do not."""
        slots = [usable(TASK, 0), failed(TASK, 1), usable(TASK, 2)]
        assert verdict(*slots, minimum=2).reason is None
        decision = verdict(*slots, minimum=3)
        assert decision.reason is RejectReason.BELOW_MINIMUM
        assert decision.detail == "2 usable slots, 3 needed; 1 x failed(infra): it broke"

    def test_missing_reward(self) -> None:
        """A row without a reward rejects the group when normalizing (contract 3: else it is the trainer's)."""
        slots = [usable(TASK, 0, [1.0, None]), usable(TASK, 1)]
        assert verdict(*slots, normalize=True).reason is RejectReason.MISSING_REWARD
        decision = verdict(*slots)
        assert decision.reason is None
        assert rewards(decision.summary) == [[1.0, None], [1.0]]

    def test_a_supplied_reference_does_not_stand_for_a_missing_reward(self) -> None:
        """A row without a reward is one with or without a reference."""
        assert verdict(usable(TASK, 0, [None], 1.0), normalize=True).reason is RejectReason.MISSING_REWARD

    def test_contract_error_of_differing_rows(self) -> None:
        """Rows that differ without a reference reject the group when normalizing, and not otherwise."""
        slots = [usable(TASK, 0, [1.0, 2.0]), usable(TASK, 1)]
        decision = verdict(*slots, normalize=True)
        assert decision.reason is RejectReason.CONTRACT_ERROR
        assert "supply one finite rollout_reward" in decision.detail
        assert decision.summary.rewards_normalized is False
        assert rewards(decision.summary) == [[1.0, 2.0], [1.0]]
        assert verdict(*slots).reason is None

    @pytest.mark.parametrize("normalize", [False, True])
    def test_contract_error_of_mixed_kinds(self, normalize: bool) -> None:
        """Contract 4.5: tensor and Interaction results in one group are a contract error."""
        decision = verdict(usable(TASK, 0), mixed(1), normalize=normalize)
        assert decision.reason is RejectReason.CONTRACT_ERROR
        assert decision.detail == (
            "results of different kinds in one group: interactions, tensor; a workflow returns one kind for all slots"
        )


def test_the_order_is_the_contracts() -> None:
    """A group with several faults is rejected for the first of the contract's list, whichever they are."""
    order = [
        RejectReason.NO_USABLE_SLOT,
        RejectReason.INCOMPLETE,
        RejectReason.BELOW_MINIMUM,
        RejectReason.MISSING_REWARD,
        RejectReason.CONTRACT_ERROR,
    ]
    assert list(RejectReason)[:5] == order
    for faults in itertools.product([False, True], repeat=4):
        incomplete, below, missing, broken = faults
        slots = [usable(TASK, 0, [1.0, 2.0] if broken else [1.0]), usable(TASK, 1, [None] if missing else [1.0])]
        slots.append(failed(TASK, 2))
        decision = verdict(*slots, minimum=3 if below else 1, drop=incomplete, normalize=True)
        first = next((reason for reason, on in zip(order[1:], faults, strict=True) if on), None)
        assert decision.reason is first, faults
        nothing = [failed(TASK, idx) for idx in range(3)]
        unusable = verdict(*nothing, minimum=3 if below else 1, drop=incomplete, normalize=True)
        assert unusable.reason is RejectReason.NO_USABLE_SLOT


class TestUsableSlots:
    """contract 4.4: usable slots are kept once each, in ``sample_idx`` order, never copied or re-weighted."""

    @given(st.lists(st.sampled_from("urf"), min_size=1, max_size=8), st.randoms())
    def test_kept_once_in_order(self, outcomes: list[str], random: object) -> None:
        """Whatever ended how and arrived when, the rollouts are the usable slots in order."""
        make = {"u": usable, "r": rejected, "f": failed}
        headers = [make[letter](TASK, idx) for idx, letter in enumerate(outcomes)]  # type: ignore[operator]
        random.shuffle(headers)  # type: ignore[attr-defined]
        decision = verdict(*headers)
        want = [idx for idx, letter in enumerate(outcomes) if letter == "u"]
        assert [rollout.sample_idx for rollout in decision.summary.rollouts] == want
        assert decision.summary.group_size == len(outcomes)
        assert decision.summary.rows_bytes == 10 * len(want)
        assert (decision.reason is None) == bool(want)

    def test_attempts_name_the_rows(self) -> None:
        """Each rollout has the attempt that counts, which names its rows."""
        late = usable(TASK, 1)
        late.attempt = 4
        assert [rollout.attempt for rollout in verdict(usable(TASK, 0), late).summary.rollouts] == [1, 4]

    def test_case_28_one_finite_reward_among_nan(self) -> None:
        """Case 28: rewards [1, NaN, NaN, NaN] are one usable and three failed slots; the minimum size decides."""
        bad = [failed(TASK, idx, FailureKind.DATA, "row 0: rewards is nan") for idx in (1, 2, 3)]
        decision = verdict(usable(TASK, 0, [1.0]), *bad, minimum=2, normalize=True)
        assert decision.reason is RejectReason.BELOW_MINIMUM
        assert "3 x failed(data): row 0: rewards is nan" in decision.detail
        kept = verdict(usable(TASK, 0, [1.0]), *bad, minimum=1, normalize=True)
        assert rewards(kept.summary) == [[0.0]]


class TestNormalizing:
    """contract 5: the collector's normalization; its numbers are proved in ``conformance/test_05_rewards.py``."""

    def test_the_raw_reward_is_kept(self) -> None:
        """The raw value stays in the original reward, or the workflow's own one; headers do not change."""
        headers = [usable(TASK, 0, [1.0, 2.0], 1.0), usable(TASK, 1, [3.0])]
        headers[1].rows[0].original_reward = 30.0
        summary = verdict(*headers, normalize=True).summary
        assert [[row.original_reward for row in rollout.rows] for rollout in summary.rollouts] == [[1.0, 2.0], [30.0]]
        flat = [row.reward for rollout in summary.rollouts for row in rollout.rows]
        assert flat == pytest.approx([-1, 0, 1], abs=1e-7)
        assert [row.reward for row in headers[0].rows] == [1.0, 2.0]

    def test_zero_is_a_reward(self) -> None:
        """A reward of zero is not a missing one."""
        decision = verdict(usable(TASK, 0, [0.0]), usable(TASK, 1, [0.0]), normalize=True)
        assert decision.reason is None
        assert rewards(decision.summary) == [[0.0], [0.0]]

    @pytest.mark.parametrize("normalize", [False, True])
    def test_contract_4_7_a_group_of_one(self, normalize: bool) -> None:
        """A group of one goes the same way."""
        decision = verdict(usable(TASK, 0, [5.0]), normalize=normalize)
        assert decision.reason is None
        assert rewards(decision.summary) == [[0.0 if normalize else 5.0]]
