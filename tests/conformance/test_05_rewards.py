"""Contract, section 5: reward shaping and normalization, sentence by sentence.

The slow reference below is written from the page, in exact fractions. Proved elsewhere: what a rollout's interactions
supply must agree and be finite (``unit/test_interactions.py``), NaN and infinite rewards never get here
(``unit/test_wire_rows.py``), what a filter sees (``unit/test_accept.py``), bad settings (``unit/test_settings.py``,
``unit/test_options.py``), minimum sizes (``test_04_groups.py``).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
from helpers.building import decided, failed, originals, rewards, usable
from helpers.reward_page import RefusedError, page_normalized, page_rollout, page_scale
from hypothesis import assume, example, given
from hypothesis import strategies as st

from forebay import NormConfig, RejectReason
from forebay.errors import ContractError
from forebay.group_rewards import normalized_batch
from forebay.normalization import ShapedRollout, normalize, overlong_penalty, shape, shape_rollout
from forebay.outcomes import ResultKind
from forebay.reward_rules import ROLLOUT_NORM, RewardShaping
from forebay.settings import RunSettings, load
from forebay.wire.envelopes import GroupSummary, SlotHeader

# -- strategies and helpers -------------------------------------------------------------------------------------------

LEVELS = (None, "group", "batch")
values = st.sampled_from([-1.0, 0.0, 0.1, 1.0, 3.0]) | st.floats(-20, 20, width=32)
rollouts = st.tuples(st.lists(values, min_size=1, max_size=3), values)
batches = st.lists(st.lists(rollouts, min_size=1, max_size=5), min_size=1, max_size=4)


@st.composite
def norms(draw: st.DrawFn) -> NormConfig:
    """Any rule."""
    mean = draw(st.sampled_from(LEVELS))
    return NormConfig(
        mean_level=mean,  # type: ignore[arg-type]
        mean_leave1out=draw(st.booleans()) if mean is not None else False,
        std_level=draw(st.sampled_from(LEVELS)),  # type: ignore[arg-type]
        std_unbiased=draw(st.booleans()),
        eps=draw(st.sampled_from([1e-12, 1e-8, 1e-5, 0.5])),
    )


@st.composite
def shapings(draw: st.DrawFn) -> RewardShaping:
    """Any shaping."""
    overlong = draw(st.none() | st.integers(1, 8))
    return RewardShaping(
        bias=draw(st.sampled_from([0.0, -0.5, 2.0])),
        scaling=draw(st.sampled_from([1.0, -1.0, 0.1, 5.0])),
        clip=draw(st.sampled_from([0.5, 2.0, 20.0, 1e20])),
        overlong_tokens=overlong,
        overlong_factor=1.0 if overlong is None else draw(st.sampled_from([0.0, 0.5, 1.0])),
        max_new_tokens=None if overlong is None else 8,
    )


def shaped(*rows_and_reference: tuple[Sequence[float], float]) -> list[ShapedRollout]:
    """A group of rollouts."""
    return [ShapedRollout(tuple(rows), reference) for rows, reference in rows_and_reference]


def singles(*references: float) -> list[ShapedRollout]:
    """A group of rollouts of one row each."""
    return shaped(*(([reference], reference) for reference in references))


def flat(groups: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """All rows of all groups."""
    return [value for group in groups for rows in group for value in rows]


def close(got: Sequence[float | None], want: Sequence[Fraction], norm: NormConfig, largest: float) -> None:
    """Assert equality up to the rounding of one mean, magnified by the smallest scale that the rule admits."""
    smallest = norm.eps if norm.std_level is not None else 1.0
    assert got == pytest.approx([float(value) for value in want], rel=1e-12, abs=2**-50 * (largest + 1) / smallest)


# -- shaping ----------------------------------------------------------------------------------------------------------


class TestShaping:
    """5: row reward -> overlong penalty -> clip((x + bias) * scaling) -> normalization; raw in original_rewards."""

    def test_defaults(self) -> None:
        """5: defaults 0, 1, 20: bias, scaling, clip."""
        assert RewardShaping() == RewardShaping(bias=0, scaling=1, clip=20)
        run = load(RunSettings)
        assert run.shaping == RewardShaping()
        assert [shape(value, run.shaping) for value in (-21.0, -20.0, 0.1, 20.0, 1e30)] == [-20, -20, 0.1, 20, 20]

    @pytest.mark.parametrize(
        ("changes", "reward", "want"),
        [
            ({"bias": -0.5}, 1.0, 0.5),
            ({"scaling": 4}, 1.5, 6.0),
            ({"bias": 1, "scaling": 3}, 1.0, 6.0),  # the bias is scaled: not 1 * 3 + 1
            ({"scaling": -2}, 1.5, -3.0),
            ({"clip": 2}, 5.0, 2.0),
            ({"clip": 2}, -5.0, -2.0),
            ({"bias": 1, "scaling": 10, "clip": 15}, 1.0, 15.0),  # clipped last: 20 becomes 15
            ({"clip": 1e20, "scaling": 1e300}, 1e38, 1e20),
        ],
    )
    def test_by_hand(self, changes: dict[str, float], reward: float, want: float) -> None:
        """5: each option, and the order of them."""
        assert shape(reward, RewardShaping(**changes)) == want  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("trained", "factor", "want"),
        [
            (0, 1, 0),
            (79, 1, 0),
            (80, 1, 0),
            (81, 1, -0.05),
            (90, 1, -0.5),
            (100, 1, -1),
            (120, 1, -2),
            (90, 0.5, -0.25),
        ],
    )
    def test_overlong_by_hand(self, trained: int, factor: float, want: float) -> None:
        """5: with max_new_tokens 100, the last 20 cost linearly, by the row's trained tokens."""
        shaping = RewardShaping(overlong_tokens=20, max_new_tokens=100, overlong_factor=factor)
        assert overlong_penalty(trained, shaping) == pytest.approx(want)
        assert shape_rollout([3.0], [trained], None, shaping, normalizing=True).rows == pytest.approx((3 + want,))

    def test_no_penalty_without_overlong_tokens(self) -> None:
        """5: unset, length costs nothing."""
        assert overlong_penalty(10**9, RewardShaping(max_new_tokens=1)) == 0

    def test_the_penalty_comes_first(self) -> None:
        """5: 25 - 10 is 15, below the clip of 20; clipped first it would be 10; bias and scaling apply after it."""
        shaping = RewardShaping(overlong_tokens=1, max_new_tokens=1, overlong_factor=10)
        assert shape_rollout([25.0], [1], None, shaping, normalizing=False).rows == (15.0,)
        shaping = dataclasses.replace(shaping, bias=1, scaling=0.5)
        assert shape_rollout([25.0], [1], None, shaping, normalizing=False).rows == (8.0,)

    def test_rows_and_supplied_references_alike(self) -> None:
        """5: a supplied reference is shifted, scaled and clipped as rows are, and bypasses the penalty."""
        shaping = RewardShaping(bias=1, scaling=2, clip=9, overlong_tokens=4, max_new_tokens=4)
        found = shape_rollout([1.0, 2.0], [4, 0], 3.0, shaping, normalizing=True)
        assert found == ShapedRollout((2.0, 6.0), 8.0)
        assert shape_rollout([1.0], [4], 30.0, shaping, normalizing=True).reference == 9.0

    @given(st.lists(st.tuples(values, st.integers(0, 12)), min_size=1, max_size=4), st.none() | values, shapings())
    @example([(1.0, 5), (1.0, 8)], None, RewardShaping(overlong_tokens=2, max_new_tokens=8))
    def test_against_the_page(
        self, rows: list[tuple[float, int]], supplied: float | None, shaping: RewardShaping
    ) -> None:
        """5: any rollout under any shaping is as the slow reference says, its refusals too."""
        given_rewards, trained = [reward for reward, _ in rows], [count for _, count in rows]
        try:
            want = page_rollout(given_rewards, trained, supplied, shaping)
        except RefusedError:
            with pytest.raises(ContractError, match="supply one finite rollout_reward"):
                shape_rollout(given_rewards, trained, supplied, shaping, normalizing=True)
            return
        got = shape_rollout(given_rewards, trained, supplied, shaping, normalizing=True)
        assert got.rows == pytest.approx([float(value) for value in want[0]], rel=1e-12, abs=1e-12)
        assert got.reference == pytest.approx(float(want[1]), rel=1e-12, abs=1e-12)

    def test_the_raw_value_stays(self) -> None:
        """5: original_rewards has the raw value once a reward was shaped or normalized, of all rows of the group."""
        headers = [usable(1, 0, [30.0]), usable(1, 1, [1.0])]
        clipped = decided(headers, None, RewardShaping()).summary
        assert (rewards(clipped), originals(clipped)) == ([20.0, 1.0], [30.0, 1.0])
        untouched = decided([usable(1, 0, [1.0])], None, RewardShaping()).summary
        assert (rewards(untouched), originals(untouched)) == ([1.0], [None])

    def test_also_where_normalizing_changes_no_number(self) -> None:
        """5: zeros stay zeros when they are normalized, and the raw value is there all the same."""
        summary = decided([usable(1, 0, [0.0]), usable(1, 1, [0.0])], ROLLOUT_NORM, RewardShaping()).summary
        assert (rewards(summary), originals(summary)) == ([0.0, 0.0], [0.0, 0.0])


class TestReferences:
    """5: the reference of a rollout, and when its absence is a contract error."""

    def test_supplied_wins(self) -> None:
        """5: what is supplied is the reference, zero too, also where the rows agree on another."""
        assert shape_rollout([1.0, 1.0], [1, 1], 0.0, RewardShaping(), normalizing=True).reference == 0.0

    def test_common_reward_after_the_penalty(self) -> None:
        """5: rows that agree are their own reference, derived after the penalty."""
        shaping = RewardShaping(overlong_tokens=2, max_new_tokens=4)
        assert shape_rollout([1.0, 1.0], [4, 4], None, shaping, normalizing=True) == ShapedRollout((0.0, 0.0), 0.0)

    @pytest.mark.parametrize(
        ("given_rewards", "trained", "when"),
        [
            ([1.0, 2.0], [1, 1], "have rewards from 1 to 2, and"),
            ([1.0, 1.0], [1, 4], "have rewards from 0 to 1 after the overlong penalty"),
            ([1.0, 2.0], [3, 4], "have rewards from 1 to 2, and"),
            ([1.5, 2.0], [3, 4], "have rewards from 1.5 to 2, and"),  # equal after the penalty, but not before
            ([25.0, 30.0], [1, 1], "have rewards from 25 to 30, and"),  # equal once clipped
        ],
    )
    def test_rows_that_differ(self, given_rewards: list[float], trained: list[int], when: str) -> None:
        """5: only when normalizing, rows that differ before or after the penalty are a contract error."""
        shaping = RewardShaping(overlong_tokens=2, max_new_tokens=4)
        with pytest.raises(ContractError, match=when):
            shape_rollout(given_rewards, trained, None, shaping, normalizing=True)
        free = shape_rollout(given_rewards, trained, None, shaping, normalizing=False)
        assert free.reference is None
        assert shape_rollout(given_rewards, trained, 1.0, shaping, normalizing=True).reference == 1.0

    @pytest.mark.parametrize("norm", [ROLLOUT_NORM, NormConfig()])
    def test_in_the_collector(self, norm: NormConfig) -> None:
        """5: the group is rejected(contract_error) at once, also where the statistics are the batch's."""
        headers = [usable(1, 0, [1.0, 2.0]), usable(1, 1)]
        assert decided(headers, norm, RewardShaping()).reason is RejectReason.CONTRACT_ERROR
        free = decided(headers, None, RewardShaping())
        assert free.reason is None
        assert [rollout.reference for rollout in free.summary.rollouts] == [None, 1.0]


# -- normalization ----------------------------------------------------------------------------------------------------


class TestRolloutNorm:
    """5: reward_normalization: False, True (group mean and std, biased, eps 1e-8) or a NormConfig."""

    def test_what_true_is(self) -> None:
        """5: True is AReaL's rule at rollout time; defaults of a NormConfig: std_unbiased True, eps 1e-5."""
        rule = {
            "mean_level": "group",
            "mean_leave1out": False,
            "std_level": "group",
            "std_unbiased": False,
            "eps": 1e-8,
        }
        assert dataclasses.asdict(ROLLOUT_NORM) == rule
        assert (NormConfig().std_unbiased, NormConfig().eps) == (True, 1e-5)

    def test_false_normalizes_nothing(self) -> None:
        """5: False leaves the rewards as shaped and says so."""
        summary = decided([usable(1, 0, [1.0]), usable(1, 1, [3.0])], None, RewardShaping()).summary
        assert (rewards(summary), summary.rewards_normalized) == ([1.0, 3.0], False)

    def test_worked_example_of_the_page(self) -> None:
        """5, last line: rollouts {rows 1 (reference 1), 2} and {3}: rows -1, 0, 1, to within eps."""
        headers = [usable(1, 0, [1.0, 2.0], 1.0), usable(1, 1, [3.0])]
        summary = decided(headers, ROLLOUT_NORM, RewardShaping()).summary
        assert rewards(summary) == pytest.approx([-1, 0, 1], abs=2e-8)
        assert originals(summary) == [1.0, 2.0, 3.0]
        assert summary.rewards_normalized

    @pytest.mark.parametrize("kind", list(ResultKind))
    def test_tensor_and_interaction_results_alike(self, kind: ResultKind) -> None:
        """5: results of interactions are normalized as tensors are."""
        headers = [usable(1, idx, [reward]) for idx, reward in enumerate((1.0, 3.0))]
        for header in headers:
            header.result_kind = kind.value
        summary = decided(headers, ROLLOUT_NORM, RewardShaping()).summary
        assert rewards(summary) == pytest.approx([-1, 1], abs=2e-8)
        assert summary.result_kind == kind.value


A, B = (1.0, 2.0, 3.0), (5.0, 9.0)
"""Two groups. Means: 2 and 7, of the batch 4. Squares around them: 2 and 8, of the batch 40."""
R8, R10 = math.sqrt(8), math.sqrt(10)
CENTRED = {
    (None, False): [1, 2, 3, 5, 9],
    ("group", False): [-1, 0, 1, -2, 2],
    ("group", True): [-1.5, 0, 1.5, -4, 4],  # baselines 2.5, 2, 1.5 and 9, 5
    ("batch", False): [-3, -2, -1, 1, 5],
    ("batch", True): [-3.75, -2.5, -1.25, 1.25, 6.25],  # baselines 19/4, 18/4, 17/4, 15/4, 11/4
}
STD = {
    (None, True): (1, 1),
    (None, False): (1, 1),
    ("group", True): (1, R8),  # 2 / 2 and 8 / 1
    ("group", False): (math.sqrt(2 / 3), 2),  # 2 / 3 and 8 / 2
    ("batch", True): (R10, R10),  # 40 / 4
    ("batch", False): (R8, R8),  # 40 / 5
}


class TestNormConfig:
    """5: mean_level, std_level in {batch, group, None}, mean_leave1out, std_unbiased, eps."""

    @pytest.mark.parametrize(("centring", "scaling"), list(itertools.product(CENTRED, STD)))
    def test_every_combination_by_hand(self, centring: tuple[Any, bool], scaling: tuple[Any, bool]) -> None:
        """5: groups [1, 2, 3] and [5, 9] under each rule; the deviation is the same with leave-one-out."""
        norm = NormConfig(*centring, *scaling, eps=1e-12)
        first, second = STD[scaling]
        want = [value / std for value, std in zip(CENTRED[centring], [first] * 3 + [second] * 2, strict=True)]
        assert flat(normalize([singles(*A), singles(*B)], norm)) == pytest.approx(want, rel=1e-11)

    def test_leave_one_out_does_not_inflate_the_deviation(self) -> None:
        """5: AReaL takes it around the leave-one-out baselines: sqrt(1.5) for [1, 2, 3]. Ours is sqrt(2 / 3)."""
        norm = NormConfig("group", True, "group", std_unbiased=False, eps=1e-12)
        (rows,) = normalize([singles(*A)], norm)
        assert rows[0][0] == pytest.approx(-1.5 / math.sqrt(2 / 3))
        assert rows[0][0] != pytest.approx(-1.5 / math.sqrt(1.5))

    def test_scale_is_std_plus_eps(self) -> None:
        """5: scale = std + eps: [0, 4] has the biased deviation 2, and with eps 1 the scale 3."""
        norm = NormConfig("group", False, "group", std_unbiased=False, eps=1.0)
        assert flat(normalize([singles(0.0, 4.0)], norm)) == [-2 / 3, 2 / 3]

    def test_scale_is_one_up_to_eps(self) -> None:
        """5: exactly 1 when std <= eps: [0, 2] has the biased deviation 1."""
        norm = NormConfig("group", False, "group", std_unbiased=False, eps=1.0)
        assert flat(normalize([singles(0.0, 2.0)], norm)) == [-1.0, 1.0]

    def test_each_row_by_its_own_reward(self) -> None:
        """5: statistics over references, one per rollout; a row is centred and scaled with its own reward."""
        group = shaped(([1.0, 7.0, 1.0, -5.0], 1.0), ([3.0], 3.0))
        norm = NormConfig("group", False, None)
        assert normalize([group], norm) == [[[-1.0, 5.0, -1.0, -7.0], [1.0]]]
        scaled = normalize([group], NormConfig("group", False, "group", std_unbiased=True, eps=1e-12))
        assert flat(scaled) == pytest.approx([value / math.sqrt(2) for value in (-1, 5, -1, -7, 1)])

    def test_rows_do_not_weigh(self) -> None:
        """5: more rows of a rollout change no statistic."""
        once, often = ([singles(1.0, 3.0)], [shaped(([1.0] * 50, 1.0), ([3.0], 3.0))])
        for norm in (ROLLOUT_NORM, NormConfig()):
            assert set(flat(normalize(once, norm))) == set(flat(normalize(often, norm)))

    def test_all_rows_of_a_rollout_leave_together(self) -> None:
        """5: leave-one-out: baselines of references [1, 3, 8] are 5.5, 4.5 and 2, for each row of the rollout."""
        group = shaped(([1.0, 2.0], 1.0), ([3.0], 3.0), ([8.0, 8.0, 9.0], 8.0))
        for level in ("group", "batch"):
            norm = NormConfig(level, True, None)  # type: ignore[arg-type]
            assert normalize([group], norm) == [[[-4.5, -3.5], [-1.5], [6.0, 6.0, 7.0]]]

    @pytest.mark.parametrize("leave_out", [False, True])
    @pytest.mark.parametrize("unbiased", [False, True])
    @pytest.mark.parametrize("level", ["group", "batch"])
    def test_a_singleton(self, level: Any, leave_out: bool, unbiased: bool) -> None:
        """5: n <= 1: the scale is 1, and the baseline of a leave-one-out singleton is itself."""
        norm = NormConfig(level, leave_out, level, unbiased)
        assert normalize([shaped(([5.0, 7.0], 4.0))], norm) == [[[1.0, 3.0]]]

    @given(batches, norms())
    @example([[([0.0], 0.0), ([1e-8], 1e-8)]], ROLLOUT_NORM)
    @example([[([0.0], 0.0), ([2.5e-8], 2.5e-8)]], ROLLOUT_NORM)
    def test_against_the_page(self, groups: list[list[tuple[list[float], float]]], norm: NormConfig) -> None:
        """5: any batch under any rule is as the slow reference says."""
        exact = [[([Fraction(v) for v in rows], Fraction(reference)) for rows, reference in group] for group in groups]
        references = [[reference for _, reference in group] for group in exact]
        for some in [*references, list(itertools.chain(*references))]:
            spread = page_scale(some, dataclasses.replace(norm, eps=1e-12))
            assume(abs(float(spread) - norm.eps) > 1e-11)  # on the border itself rounding decides
        got = normalize([shaped(*group) for group in groups], norm)
        for found, want in zip(got, page_normalized(exact, norm), strict=True):
            for rows, slow in zip(found, want, strict=True):
                close(rows, slow, norm, 20)

    @given(st.lists(rollouts, min_size=1, max_size=6), norms(), st.randoms())
    def test_order_does_not_matter(self, group: list[tuple[list[float], float]], norm: NormConfig, random: Any) -> None:
        """5: shuffling the rollouts of a group shuffles the results, to the bit."""
        shuffled = list(group)
        random.shuffle(shuffled)
        results = [normalize([shaped(*some)], norm)[0] for some in (group, shuffled)]
        assert sorted(map(tuple, results[0])) == sorted(map(tuple, results[1]))

    @given(st.lists(values, min_size=2, max_size=40))
    def test_baselines_are_exact(self, references: list[float]) -> None:
        """5: each leave-one-out baseline is the float next to the true mean of the others."""
        (rows,) = normalize([singles(*references)], NormConfig("batch", True, None))
        for at, (value,) in enumerate(rows):
            others = [Fraction(other) for place, other in enumerate(references) if place != at]
            assert value == references[at] - float(sum(others) / len(others))

    @pytest.mark.timeout(20)
    def test_time_is_linear(self) -> None:
        """5: baselines and deviations of 200,000 rollouts take a second or so (quadratic time would be hours)."""
        groups = [singles(*(float((number * 7 + idx) % 11) for idx in range(8))) for number in range(25_000)]
        got = normalize(groups, NormConfig("batch", True, "batch"))
        assert sum(map(len, got)) == 200_000
        assert math.fsum(flat(got)) == pytest.approx(0, abs=1e-5)


class TestZeroVariance:
    """5: centering stays where nothing is scaled, so that equal rewards give exact zeros. Case 29."""

    @given(
        st.floats(allow_nan=False, allow_infinity=False, width=32),
        st.lists(st.integers(1, 9), min_size=1, max_size=4),
        norms(),
    )
    @example(0.1, [3], ROLLOUT_NORM)
    @example(1 / 3, [7, 2], NormConfig("batch", True, "batch"))
    def test_case_29_equal_rewards_are_exact_zeros(self, value: float, sizes: list[int], norm: NormConfig) -> None:
        """Case 29: equal rewards of any value and number are zeros to the bit; without a mean they stay."""
        got = flat(normalize([singles(*[value] * size) for size in sizes], norm))
        assert got == [value if norm.mean_level is None else 0.0] * sum(sizes)

    def test_case_29_in_the_collector(self) -> None:
        """Case 29: an accepted group of equal rewards, one of whose slots failed, has zeros."""
        headers = [usable(1, 0, [0.1, 0.1]), usable(1, 1, [0.1]), failed(1, 2), usable(1, 3, [0.1])]
        assert rewards(decided(headers, ROLLOUT_NORM, RewardShaping(scaling=3)).summary) == [0.0] * 4

    def test_the_largest_values_stay_finite(self) -> None:
        """5: with the largest clip and the smallest eps, what comes out is finite in float32."""
        group = shaped(([1e20, -1e20], 0.0), ([1e20], 3e-12))
        norm = NormConfig("group", False, "group", std_unbiased=False, eps=1e-12)
        assert max(map(abs, flat(normalize([group], norm)))) < 3.4e38


class TestCase14:
    """Case 14: uneven groups share no statistics."""

    def test_usable_sizes_4_3_4(self) -> None:
        """Case 14: usable sizes [4, 3, 4]: each group is centred alone."""
        for size, offset in ((4, 0), (3, 100), (4, -7)):
            headers = [usable(1, idx, [offset / 10 + idx]) for idx in range(size)]
            headers += [failed(1, idx) for idx in range(size, 4)]
            found = rewards(decided(headers, ROLLOUT_NORM, RewardShaping()).summary)
            assert len(found) == size
            assert sum(value or 0.0 for value in found) == pytest.approx(0, abs=1e-6)

    def test_a_singleton_beside_a_pair(self) -> None:
        """Case 14: rewards [1, 3] and [5]: -1, 1 and the singleton finite, at zero."""
        assert flat(normalize([singles(1.0, 3.0), singles(5.0)], ROLLOUT_NORM)) == pytest.approx([-1, 1, 0], abs=2e-8)


# -- through the collector --------------------------------------------------------------------------------------------


@st.composite
def slots(draw: st.DrawFn) -> list[list[SlotHeader]]:
    """Groups of usable and failed slots, rollouts of several rows among them, with or without references."""
    groups = []
    for task in range(1, draw(st.integers(1, 4)) + 1):
        headers = []
        for idx in range(draw(st.integers(1, 4))):
            if idx and draw(st.integers(0, 5)) == 0:
                headers.append(failed(task, idx))
                continue
            some = draw(st.lists(values, min_size=1, max_size=3))
            header = usable(task, idx, some if draw(st.booleans()) else some[:1] * len(some), draw(st.none() | values))
            for one in header.rows:
                one.trained = draw(st.sampled_from([3, 3, 8]))
            headers.append(header)
        groups.append(headers)
    return groups


@given(slots(), norms(), shapings())
def test_headers_to_batch_against_the_page(
    groups: list[list[SlotHeader]], norm: NormConfig, shaping: RewardShaping
) -> None:
    """5: from the slots' headers to the rewards of a batch, as the slow reference says; refused groups drop out."""
    assume(not norm.off)
    exact, summaries = [], []
    for task, headers in enumerate(groups, start=1):
        decision = decided(headers, norm, shaping, task)
        chosen = [header for header in headers if header.outcome == "usable"]
        try:
            exact.append(
                [
                    page_rollout([r.reward or 0.0 for r in h.rows], [r.trained for r in h.rows], h.reference, shaping)
                    for h in chosen
                ]
            )
        except RefusedError:
            assert decision.reason is RejectReason.CONTRACT_ERROR
            continue
        assert decision.reason is None
        assert decision.summary.batch_norm == (norm if norm.uses_batch else None)
        assert decision.summary.rewards_normalized is not norm.uses_batch
        summaries.append(GroupSummary.unpack(decision.summary.pack()))
    references = [[reference for _, reference in group] for group in exact]
    for some in [*references, list(itertools.chain(*references))]:
        assume(abs(float(page_scale(some, dataclasses.replace(norm, eps=1e-12))) - norm.eps) > 1e-9 if some else True)
        # Rounding in shaping makes references differ where the page's are equal; a small eps would magnify that.
        assume(len(set(some)) == 1 or float(page_scale(some, dataclasses.replace(norm, eps=1e-12))) > 1e-6)
    batch = normalized_batch(summaries)
    for group, slow in zip(batch, page_normalized(exact, norm), strict=True):
        raw = [row.reward for header in groups[group.task - 1] for row in header.rows]
        assert group.rewards_normalized
        assert originals(group) == raw
        want = [float(value) for rows in slow for value in rows]
        assert rewards(group) == pytest.approx(want, rel=1e-6, abs=1e-6)
