"""Reward statistics (contract 5), against a slow reference that is written from the contract's page."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction

import pytest
from forebay_collector.normalization import EPS, group_scale, normalize_group, reference_of
from hypothesis import assume, example, given
from hypothesis import strategies as st

from forebay.errors import ContractError

rewards = st.floats(-1e6, 1e6, width=32)
rollout = st.tuples(st.lists(rewards, min_size=1, max_size=3), rewards)
small = st.sampled_from([-1.0, 0.0, 0.5, 1.0])


def slow(rollouts: list[list[float]], references: list[float], eps: float) -> list[list[float]]:
    """The page, with exact arithmetic: the mean of the references; scale = std + eps, 1 if std <= eps or n <= 1."""
    exact = [Fraction(value) for value in references]
    mean = sum(exact) / len(exact)
    std = math.sqrt(statistics.pvariance(exact, mean))
    scale = 1.0 if len(exact) <= 1 or std <= eps else std + eps
    return [[float(Fraction(row) - mean) / scale for row in rows] for rows in rollouts]


class TestWorkedExample:
    """contract 5, last line."""

    def test_of_the_page(self) -> None:
        """Rollouts {rows 1 (reference 1), 2} and {3}: rows -1, 0, 1, to within eps."""
        (first, second) = normalize_group([[1, 2], [3]], [1.0, None])
        assert [*first, *second] == pytest.approx([-1, 0, 1], abs=1e-7)

    def test_rows_do_not_weigh(self) -> None:
        """Statistics are over references, one for each rollout: more rows of a rollout change nothing."""
        once = normalize_group([[1.0], [3.0]], [None, None])
        often = normalize_group([[1.0] * 50, [3.0]], [None, None])
        assert often[0] == [once[0][0]] * 50
        assert often[1] == once[1]

    def test_case_14_groups_stand_alone(self) -> None:
        """Case 14: rewards [1, 3] and [5]: each group is centred alone and the singleton is finite, at zero."""
        pair = normalize_group([[1.0], [3.0]], [None, None])
        assert [pair[0][0], pair[1][0]] == pytest.approx([-1, 1], abs=1e-7)
        assert normalize_group([[5.0]], [None]) == [[0.0]]

    def test_biased_standard_deviation(self) -> None:
        """reward_normalization=True is the biased rule: [0, 0, 3] has the deviation sqrt(2)."""
        mean, scale = group_scale([0.0, 0.0, 3.0])
        assert (mean, scale) == pytest.approx((1.0, math.sqrt(2) + EPS), abs=1e-15)
        assert EPS == 1e-8


class TestAgainstTheSlowReference:
    """Every value against exact arithmetic."""

    @given(st.lists(rollout, min_size=1, max_size=8))
    @example([([0.0], 0.0), ([1e-8], 1e-8)])
    @example([([0.0], 0.0), ([2.5e-8], 2.5e-8)])
    def test_supplied_references(self, group: list[tuple[list[float], float]]) -> None:
        """Any rows with any references agree with the page's formula."""
        rows = [rollout_rows for rollout_rows, _ in group]
        references = [reference for _, reference in group]
        std = math.sqrt(statistics.pvariance([Fraction(value) for value in references]))
        assume(abs(std - EPS) > 1e-12)  # on the border itself rounding decides
        spread = max(map(abs, references)) + 1
        for got, want in zip(normalize_group(rows, list(references)), slow(rows, references, EPS), strict=True):
            # Centring loses at most some rounding of the largest reference; the scale magnifies it.
            scale = 1.0 if std <= EPS else std
            assert got == pytest.approx(want, rel=1e-6, abs=1e-13 * spread / scale + 1e-9)

    @given(st.lists(small, min_size=1, max_size=8))
    def test_derived_references(self, group: list[float]) -> None:
        """Rollouts of one row are their own references."""
        rows = [[value] for value in group]
        got = normalize_group(rows, [None] * len(rows))
        assert [one[0] for one in got] == pytest.approx([one[0] for one in slow(rows, group, EPS)], abs=1e-9)

    @given(st.lists(rewards, min_size=2, max_size=8).filter(lambda values: statistics.pstdev(values) > 1e-3))
    def test_centred_and_scaled(self, group: list[float]) -> None:
        """Normalized references have mean 0 and deviation 1."""
        values = [one[0] for one in normalize_group([[value] for value in group], [None] * len(group))]
        assert math.fsum(values) == pytest.approx(0, abs=1e-6)
        assert statistics.pstdev(values) == pytest.approx(1, abs=1e-4)

    @given(st.lists(rollout, min_size=1, max_size=6), st.randoms())
    def test_order_does_not_matter(self, group: list[tuple[list[float], float]], random: object) -> None:
        """Shuffling the rollouts shuffles the results, to the bit."""
        shuffled = list(group)
        random.shuffle(shuffled)  # type: ignore[attr-defined]
        results = [
            normalize_group([rows for rows, _ in one], [reference for _, reference in one]) for one in (group, shuffled)
        ]
        assert sorted(map(tuple, results[0])) == sorted(map(tuple, results[1]))


class TestNoVariance:
    """contract 5: equal rewards give exact zeros; the scale is exactly 1 where there is nothing to scale by."""

    @given(rewards | st.floats(allow_nan=False, allow_infinity=False, width=32), st.integers(1, 9))
    @example(0.1, 3)
    @example(1 / 3, 7)
    def test_case_29_equal_rewards_are_exact_zeros(self, value: float, size: int) -> None:
        """Case 29: equal rewards, of any value and number, are zeros to the bit."""
        assert normalize_group([[value]] * size, [None] * size) == [[0.0]] * size
        assert group_scale([value] * size) == (value, 1.0)

    def test_a_deviation_of_at_most_eps_is_none(self) -> None:
        """Below eps rewards are centred and not blown up; just above it they are scaled."""
        assert group_scale([0.0, 1.9e-8])[1] == 1.0
        assert group_scale([0.0, 2.1e-8])[1] == pytest.approx(2.05e-8)

    @given(rewards, st.lists(rewards, min_size=1, max_size=4))
    def test_a_singleton_is_centred_only(self, reference: float, rows: list[float]) -> None:
        """One rollout: its rows minus its reference, whatever their number."""
        assert normalize_group([rows], [reference]) == [[row - reference for row in rows]]

    def test_the_largest_rewards_stay_finite(self) -> None:
        """The largest float32 rewards, which the wire admits, give finite results."""
        big = 3.4e38
        assert [one[0] for one in normalize_group([[big], [-big]], [None, None])] == pytest.approx([1, -1])


class TestReferences:
    """contract 5: what a rollout supplies, else the common reward of its rows."""

    def test_supplied_wins(self) -> None:
        """A supplied reference is taken as it is, zero too, also where the rows agree on another."""
        assert reference_of([1.0, 2.0], 7.0) == 7.0
        assert reference_of([1.0, 1.0], 0.0) == 0.0

    def test_common_reward(self) -> None:
        """Rows that agree need none."""
        assert reference_of([0.5, 0.5, 0.5], None) == 0.5

    @pytest.mark.parametrize("rows", [[1.0, 2.0], [0.0, 0.0, 1e-9]])
    def test_rows_that_differ_are_a_contract_error(self, rows: list[float]) -> None:
        """Rows that differ at all without a supplied reference are an error that says what to supply."""
        with pytest.raises(ContractError, match=r"rewards from .* no rollout_reward; supply one"):
            normalize_group([[1.0], rows], [None, None])
