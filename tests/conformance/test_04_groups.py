"""Contract, section 4: grouped rollout, from the slots' outcomes to the group's, sentence by sentence.

Proved elsewhere, by name:

- 4.1 (context of a slot, isolation): ``integration/test_pipeline.py``; deep copies of ``data``: the same.
- 4.2 (outcomes of attempts, budgets by kind, back-off): ``unit/test_attempts.py``, ``integration/test_store.py``
  ``TestSlots``; the words of the closed sets: ``unit/test_public_api.py::TestNames::test_words_on_the_wire``.
- 4.3 (first valid result, duplicates): ``integration/test_store.py::TestSlots::test_first_valid_result_wins`` and
  ``test_late_first_attempt_still_wins_while_open``, ``unit/test_assembler.py::test_contract_4_3_*``.
- 4.4 (each reason alone): ``unit/test_decision.py::TestReasons``; usable slots once, in order: ``TestUsableSlots``;
  the group's deadline: ``integration/test_store.py::TestReaper::test_deadline_closes_the_group``.
- 4.6 (bad values): ``unit/test_minimum_usable.py``.
- 4.8 (bad groups): ``unit/test_tensors.py::TestRolloutGroup``. Numbers of normalization: ``test_05_rewards.py``.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from driver import Driver
from helpers.building import failed, group_of, rejected, rewards, row, row_summary, usable
from hypothesis import example, given
from hypothesis import strategies as st
from services import WORKFLOW, read, services

from forebay import AsyncClient, FailureKind, NormConfig, RejectReason, RolloutGroup, Rollouts, SlotOutcome
from forebay.errors import SettingsError, SubmitError
from forebay.group_rules import minimum_usable
from forebay.options import resolve_rules
from forebay.outcomes import OnSlotError, ResultKind
from forebay.reward_rules import ROLLOUT_NORM, RewardShaping
from forebay.settings import RunSettings, Settings, load
from forebay.store import Store
from forebay.store.records import ResultEntry
from forebay.wire.envelopes import GroupRules, SlotHeader
from forebay_collector.accept import AcceptFilter
from forebay_collector.assembler import Assembled, Assembler
from forebay_collector.committer import Committer
from forebay_collector.decision import Decision, decide
from forebay_collector.dump import Dumper

TASK = 7


def verdict(*headers: SlotHeader, **rules: Any) -> Decision:
    """The decision on a group of `headers`, in the order of their slots."""
    chosen = GroupRules(**{"min_usable_group_size": 1, **rules})
    return decide(TASK, len(headers), chosen, {header.idx: header for header in headers}, RewardShaping())


def interactions(idx: int, *completions: str, reward: float = 1.0) -> SlotHeader:
    """A usable slot whose result is of interactions with these completion ids."""
    header = usable(TASK, idx, [reward] * len(completions))
    header.result_kind = ResultKind.INTERACTIONS.value
    for one, name in zip(header.rows, completions, strict=True):
        one.completion = name
    return header


async def counted(client: AsyncClient, name: str) -> None:
    """Wait until one group is counted as `name`."""
    deadline = time.monotonic() + 20
    while (await client.status()).count(name) < 1:
        assert time.monotonic() < deadline, await client.status()
        await asyncio.sleep(0.02)


# -- 4.2 --------------------------------------------------------------------------------------------------------------


class TestOutcomes:
    """4.2: a slot ends in exactly one recorded outcome; siblings are kept when one slot fails."""

    def test_closed_enums(self) -> None:
        """4.2: usable, rejected, or failed with a kind: infra, data, timeout, contract; a header has no others."""
        assert set(SlotOutcome) == {"usable", "rejected", "failed"}
        assert set(FailureKind) == {"infra", "data", "timeout", "contract"}
        for changes in ({"outcome": "lost"}, {"kind": "unlucky"}):
            with pytest.raises(ValueError, match="is not a valid"):
                SlotHeader(**{"task": 1, "idx": 0, "attempt": 1, "outcome": "failed", **changes})  # type: ignore[arg-type]

    @pytest.mark.parametrize("kind", list(FailureKind))
    def test_siblings_are_kept(self, kind: FailureKind) -> None:
        """4.2: a slot that failed, with whatever kind, costs itself alone."""
        decision = verdict(usable(TASK, 0), failed(TASK, 1, kind), usable(TASK, 2))
        assert decision.reason is None
        assert [rollout.sample_idx for rollout in decision.summary.rollouts] == [0, 2]

    @pytest.mark.parametrize("kind", list(FailureKind))
    def test_on_slot_error_drop_group(self, kind: FailureKind) -> None:
        """4.2: on_slot_error="drop_group" restores AReaL's rule: a failed slot rejects its group, as incomplete."""
        slots = (usable(TASK, 0), failed(TASK, 1, kind, "it broke"))
        decision = verdict(*slots, on_slot_error="drop_group")
        assert decision.reason is RejectReason.INCOMPLETE
        assert f"failed({kind.value}): it broke" in decision.detail

    def test_a_rejected_slot_is_no_error(self) -> None:
        """4.2: a workflow that returned None did not fail: drop_group keeps its siblings, drop_incomplete does not."""
        slots = (usable(TASK, 0), rejected(TASK, 1))
        assert verdict(*slots, on_slot_error="drop_group").reason is None
        assert verdict(*slots, drop_incomplete_group=True).reason is RejectReason.INCOMPLETE

    def test_rules_are_a_closed_set(self) -> None:
        """4.2: there are two rules for a failed slot."""
        assert set(OnSlotError) == {"keep", "drop_group"}
        with pytest.raises(ValueError, match="drop_all"):
            GroupRules(1, on_slot_error="drop_all")


# -- 4.3 --------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.lists(st.integers(1, 8), min_size=2, max_size=30))
def test_case_19_a_group_is_of_one_prompt(seed: int, sizes: list[int]) -> None:
    """4.3, case 19: results of many groups, interleaved, repeated, misdirected: each group is of its own slots only.

    A row's reward names its group and its slot, so that a row of another prompt would be seen.
    """
    shuffled = random.Random(seed)
    entries = [
        ResultEntry("0-0", task, idx, usable(task, idx, [task + idx / 100]).pack())
        for task, size in enumerate(sizes)
        for idx in range(size)
    ]
    entries += shuffled.choices(entries, k=len(entries) // 2)  # repeated: the first counts
    shuffled.shuffle(entries)
    entries += [ResultEntry("0-0", task, size, usable(task, size).pack()) for task, size in enumerate(sizes)]
    stray = ResultEntry("0-0", 0, 0, usable(1, 0).pack())  # another group's header under this group's name
    entries.insert(0, stray)

    assembler, done = Assembler(), {}
    for entry in entries:
        if entry.task_id in done:
            continue  # the service drops what comes after the commit
        assembler.open(entry.task_id, GroupRules(1), sizes[entry.task_id])
        if (group := assembler.add(entry)) is not None:
            done[group.task_id] = decide(
                group.task_id, group.group_size, group.rules, group.headers, RewardShaping(clip=1e20)
            )
    assert sorted(done) == list(range(len(sizes)))
    for task, decision in done.items():
        lost = {0} if task == 0 else set()  # the stray came first and failed its slot
        own = [idx for idx in range(sizes[task]) if idx not in lost]
        assert [rollout.sample_idx for rollout in decision.summary.rollouts] == own
        assert rewards(decision.summary) == [task + idx / 100 for idx in own]
        assert decision.summary.task == task


# -- 4.4 --------------------------------------------------------------------------------------------------------------


def page_reason(headers: Mapping[int, SlotHeader], rules: GroupRules) -> RejectReason | None:
    """4.4 as the page orders it."""
    good = [header for header in headers.values() if header.outcome == "usable"]
    kinds = {header.result_kind for header in good}
    names = [one.completion for header in good for one in header.rows if one.completion is not None]
    normalizing = rules.reward_normalization is not None
    unlike = any(header.reference is None and len({one.reward for one in header.rows}) > 1 for header in good)
    if not good:
        return RejectReason.NO_USABLE_SLOT
    if rules.drop_incomplete_group and len(good) < len(headers):
        return RejectReason.INCOMPLETE
    if rules.on_slot_error == "drop_group" and any(header.outcome == "failed" for header in headers.values()):
        return RejectReason.INCOMPLETE
    if len(good) < rules.min_usable_group_size:
        return RejectReason.BELOW_MINIMUM
    if normalizing and any(one.reward is None for header in good for one in header.rows):
        return RejectReason.MISSING_REWARD
    if len(kinds) > 1 or len(set(names)) < len(names) or (normalizing and unlike):
        return RejectReason.CONTRACT_ERROR
    return None


@st.composite
def headers_of_a_group(draw: st.DrawFn) -> dict[int, SlotHeader]:
    """Slots that ended in all ways, some of them at odds with each other."""
    out = {}
    for idx in range(draw(st.integers(1, 5))):
        match draw(st.sampled_from("uuuirf")):
            case "u":
                values = draw(st.lists(st.sampled_from([1.0, 1.0, 2.0, None]), min_size=1, max_size=2))
                out[idx] = usable(TASK, idx, values, draw(st.sampled_from([None, 1.0])))
            case "i":
                out[idx] = interactions(idx, draw(st.sampled_from("abcd")))
            case "r":
                out[idx] = rejected(TASK, idx)
            case _:
                out[idx] = failed(TASK, idx)
    return out


class TestOrderOfDecisions:
    """4.4: the collector decides in this order."""

    @given(
        headers_of_a_group(),
        st.builds(
            GroupRules,
            min_usable_group_size=st.integers(1, 4),
            drop_incomplete_group=st.booleans(),
            on_slot_error=st.sampled_from(["keep", "drop_group"]),
            reward_normalization=st.sampled_from([None, ROLLOUT_NORM, NormConfig()]),
        ),
    )
    @example({0: usable(TASK, 0, [None]), 1: interactions(1, "a")}, GroupRules(1, reward_normalization=ROLLOUT_NORM))
    def test_against_the_page(self, headers: dict[int, SlotHeader], rules: GroupRules) -> None:
        """4.4: whatever a group's slots ended in, the reason is the first of the page's that applies."""
        decision = decide(TASK, len(headers), rules, headers, RewardShaping())
        assert decision.reason is page_reason(headers, rules)
        kept = [idx for idx, header in headers.items() if header.outcome == "usable"]
        assert [rollout.sample_idx for rollout in decision.summary.rollouts] == kept
        assert bool(decision.detail) == (decision.reason is not None), "a rejection says why"

    def test_case_28_one_finite_reward_among_nan(self) -> None:
        """Case 28: rewards [1, NaN, NaN, NaN] are three failed slots; then the minimum size decides."""
        bad = [failed(TASK, idx, FailureKind.DATA, "row 0: rewards is nan") for idx in (1, 2, 3)]
        for minimum, want in ((2, RejectReason.BELOW_MINIMUM), (1, None)):
            found = verdict(usable(TASK, 0), *bad, min_usable_group_size=minimum, reward_normalization=ROLLOUT_NORM)
            assert found.reason is want
        assert rewards(found.summary) == [0.0]


@pytest.fixture
async def driver(redis_url: str, run_name: str) -> AsyncIterator[Driver]:
    """A driver that leads."""
    store = Store.open(Settings(REDIS_URL=redis_url, experiment_name=run_name.split("/", maxsplit=1)[0]))
    made = Driver(store)
    await made.lead()
    yield made
    await store.close()


async def assembled(driver: Driver, reward: float, rules: GroupRules) -> Assembled:
    """A group of two rollouts with this reward, sampled by version 0, and assembled."""
    (task,) = await driver.submit()
    await driver.admit()
    for attempt in await driver.claim():
        await driver.publish(attempt, 0, reward)
    assembler = Assembler()
    assembler.open(task, rules, 2)
    entries = await driver.store.read_results({0: "0"}, 100, 0.01)
    found = [assembler.add(entry) for entry in entries if entry.task_id == task]
    assert found[-1] is not None
    return found[-1]


@pytest.mark.parametrize(
    ("reward", "version", "filtered", "counted"),
    [(1.0, 0, True, "accepted"), (-1.0, 0, True, "rejected:filtered"), (1.0, 5, True, "evicted"),
     (-1.0, 5, True, "rejected:filtered"), (-1.0, 5, False, "evicted")],
)  # fmt: skip
async def test_the_filter_comes_before_staleness(
    driver: Driver, reward: float, version: int, filtered: bool, counted: str
) -> None:
    """4.4: should_accept_fn, then staleness: a stale group that the filter refuses is rejected, not evicted."""
    name = "helpers.filters:any_positive" if filtered else None
    group = await assembled(driver, reward, GroupRules(1, should_accept_fn=name))
    await driver.store.set_version(version)
    run = load(RunSettings)
    committer = Committer(driver.store, AcceptFilter(["helpers"]), Dumper(run, driver.store.keys.run), run.shaping)
    await committer.commit(driver.epoch, group)
    status = await driver.check()
    ends = {name for name in ("rejected:filtered", "evicted") if status.count(name)} or {"accepted"}
    assert ends == {counted}
    assert status.running == 0


async def test_normalization_comes_before_the_filter(driver: Driver) -> None:
    """4.4: the filter sees normalized rewards: all are zero where all were one, and the raw ones are still there."""
    rules = GroupRules(1, reward_normalization=ROLLOUT_NORM, should_accept_fn="helpers.filters:look")
    from helpers import filters

    filters.SEEN.clear()
    group = await assembled(driver, 1.0, rules)
    run = load(RunSettings)
    committer = Committer(driver.store, AcceptFilter(["helpers"]), Dumper(run, driver.store.keys.run), run.shaping)
    await committer.commit(driver.epoch, group)
    (seen,) = filters.SEEN
    filters.SEEN.clear()
    assert (seen["rewards"].tolist(), seen["original_rewards"].tolist()) == ([0.0, 0.0], [1.0, 1.0])


# -- 4.5 --------------------------------------------------------------------------------------------------------------


class TestInteractions:
    """4.5: interaction dicts of a group are merged; completion ids are unique, and kinds are not mixed."""

    def test_merged_in_order(self) -> None:
        """4.5: the rows of all slots, in sample_idx order, each slot's in its own."""
        decision = verdict(interactions(0, "a", "b"), rejected(TASK, 1), interactions(2, "c"))
        assert decision.reason is None
        assert decision.summary.result_kind == "interactions"
        found = [[one.completion for one in rollout.rows] for rollout in decision.summary.rollouts]
        assert found == [["a", "b"], ["c"]]

    @pytest.mark.parametrize("norm", [None, ROLLOUT_NORM, NormConfig()])
    def test_a_completion_id_that_occurs_twice(self, norm: NormConfig | None) -> None:
        """4.5: it rejects the group, whether or not rewards are normalized, and names the id."""
        decision = verdict(interactions(0, "a", "b"), interactions(1, "c", "b"), reward_normalization=norm)
        assert decision.reason is RejectReason.CONTRACT_ERROR
        assert decision.detail.startswith("the completion id b occurs 2 times")

    def test_of_usable_slots_only(self) -> None:
        """4.5: what a failed slot would have brought is not in the group; another group has ids of its own."""
        lost = failed(TASK, 1)
        lost.rows = interactions(1, "a").rows
        assert verdict(interactions(0, "a"), lost).reason is None
        assert verdict(interactions(0, "a")).reason is None

    @pytest.mark.parametrize("norm", [None, ROLLOUT_NORM])
    def test_mixed_kinds(self, norm: NormConfig | None) -> None:
        """4.5: tensor and Interaction results in one group are a contract error, of usable slots only."""
        decision = verdict(usable(TASK, 0), interactions(1, "a"), reward_normalization=norm)
        assert decision.reason is RejectReason.CONTRACT_ERROR
        assert decision.detail.startswith("results of different kinds in one group: interactions, tensor")
        assert verdict(usable(TASK, 0), failed(TASK, 1)).reason is None


# -- 4.6 --------------------------------------------------------------------------------------------------------------

NORMS: dict[str, NormConfig | None] = {
    "none": None,
    "off": NormConfig(None, std_level=None),
    "batch": NormConfig("batch", std_level="batch"),
    "batch mean": NormConfig("batch", std_level=None),
    "group": NormConfig("group", std_level="group"),
    "group mean": NormConfig("group", std_level=None),
    "group std": NormConfig(None, std_level="group"),
    "group mean, batch std": NormConfig("group", std_level="batch"),
    "batch mean, group std": NormConfig("batch", std_level="group"),
}


def page_minimum(size: int, explicit: int | None, norms: tuple[str, str, str]) -> int | None:
    """4.6 as the page has it; None: a ValueError."""
    statistics = size >= 2 and any("group" in name for name in norms)
    if explicit is None:
        return 2 if statistics else 1
    if not 1 <= explicit <= size or (statistics and explicit < 2):
        return None
    return explicit


class TestMinimumUsable:
    """4.6: explicit value wins; else 2 with group statistics and group_size >= 2; else 1."""

    @pytest.mark.parametrize("explicit", [None, 0, 1, 2, 3, 4])
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_all_combinations(self, size: int, explicit: int | None) -> None:
        """4.6: every collector's norm with every trainer's reward and advantage norm, three ways alike."""
        defaults = load(RunSettings).model_dump()
        for names in itertools.product(NORMS, repeat=3):
            own, of_rewards, of_advantages = (NORMS[name] for name in names)
            want = page_minimum(size, explicit, names)
            trainer = {"trainer_reward_norm": of_rewards, "trainer_adv_norm": of_advantages}
            run = RunSettings.model_construct(**{**defaults, **trainer})  # not checked: its own group size may differ
            options = {"group_size": size, "reward_normalization": own or False, "min_usable_group_size": explicit}
            if want is None:
                with pytest.raises(ValueError, match=f"min_usable_group_size={explicit}: "):
                    minimum_usable(size, explicit, own, of_rewards, of_advantages)
                with pytest.raises(SubmitError, match=f"min_usable_group_size={explicit}: "):
                    resolve_rules(options, run)
            else:
                assert minimum_usable(size, explicit, own, of_rewards, of_advantages) == want, names
                assert resolve_rules(options, run)[1].min_usable_group_size == want, names

    @pytest.mark.parametrize("names", list(itertools.product(["none", "batch", "group", "group std"], repeat=3)))
    def test_at_start(self, names: tuple[str, str, str]) -> None:
        """4.6: an explicit 1 with group statistics is refused when the run starts, unless groups have one slot."""
        values = dict(zip(("reward_normalization", "trainer_reward_norm", "trainer_adv_norm"), names, strict=True))
        options: dict[str, Any] = {name: NORMS[value] or False for name, value in values.items()}
        if page_minimum(4, 1, names) is None:
            with pytest.raises(SettingsError, match=r"min_usable_group_size=1: .* need at least 2") as caught:
                load(RunSettings, group_size=4, min_usable_group_size=1, **options)
            assert isinstance(caught.value, ValueError)
            blamed = [name for name, value in values.items() if "group" in value]
            assert all(name in str(caught.value) for name in blamed), "it names whose statistics they are"
        else:
            load(RunSettings, group_size=4, min_usable_group_size=1, **options)
        load(RunSettings, group_size=1, min_usable_group_size=1, **options)
        load(RunSettings, group_size=4, min_usable_group_size=2, **options)

    def test_the_runs_value_is_for_its_own_group_size(self) -> None:
        """4.6: the run's explicit value holds for groups submitted without one, and at most their size."""
        run = load(RunSettings, group_size=8, min_usable_group_size=6)
        assert resolve_rules({}, run)[1].min_usable_group_size == 6
        assert resolve_rules({"group_size": 4}, run)[1].min_usable_group_size == 4
        assert resolve_rules({"min_usable_group_size": 3}, run)[1].min_usable_group_size == 3

    async def test_the_trainers_norm_rejects_in_the_collector(self, redis_url: str, run_name: str) -> None:
        """4.6: a trainer that declares a group norm has groups with one usable rollout rejected, unnormalized ones."""
        async with services(redis_url, run_name, trainer_adv_norm=NORMS["group"]) as (_, client):
            await client.submit({"ids": [5, 6], "actions": {"1": "reject"}}, WORKFLOW, {})
            await counted(client, "rejected:below_minimum")


async def test_case_28_from_the_workflow_to_the_decision(redis_url: str, run_name: str) -> None:
    """Case 28: rewards [1, NaN, NaN, NaN]: rejected below the minimum of 2; by the batch's statistics, one rollout."""
    data = {"ids": [5, 6], "rewards": {"0": 1.0, "1": float("nan"), "2": float("nan"), "3": float("nan")}}
    async with services(redis_url, run_name, batch_size=1, group_size=4) as (_, client):
        await client.submit(data, WORKFLOW, {}, reward_normalization=True)
        await counted(client, "rejected:below_minimum")
        await client.submit(data, WORKFLOW, {}, reward_normalization=NormConfig())
        (batch,) = await read(client, 1)
    (group,) = batch.rollout_groups
    assert (group.sample_idx, rewards(batch.groups[0])) == ((0,), [0.0])


# -- 4.7 --------------------------------------------------------------------------------------------------------------


async def test_a_group_of_one(redis_url: str, run_name: str) -> None:
    """4.7: group_size 1 goes through the same path: context (sample_idx 0), normalization, filter, metrics."""
    options = {"reward_normalization": True, "should_accept_fn": "pipeline_workflows:accept_good"}
    data = {"ids": [5, 6], "rewards": {"0": 3.0, "1": 1.0}}
    async with services(redis_url, run_name, batch_size=1, max_staleness=4) as (_, client):
        for size in (1, 2):
            await client.submit(data, WORKFLOW, {}, group_size=size, **options)  # type: ignore[arg-type]
        refused = {"ids": [5, 6], "rewards": {"0": 0.1}}
        await client.submit(refused, WORKFLOW, {}, group_size=1, **options)  # type: ignore[arg-type]
        batches = {batch.groups[0].task: batch for batch in await read(client, 2)}
        await counted(client, "rejected:filtered")
    one, two = batches[1], batches[2]
    assert one.rollout_groups == [RolloutGroup(row_counts=(1,), rewards=(3.0,), sample_idx=(0,))]
    assert (one.tensors()["rewards"].tolist(), one.tensors()["original_rewards"].tolist()) == ([0.0], [3.0])
    assert two.tensors()["rewards"].tolist() == pytest.approx([1.0, -1.0], abs=1e-6)
    assert set(one.tensors()) == set(two.tensors())
    told = {f"rollout/{name}" for name in ("usable_group_size", "group_loss_weight/avg", "reward", "staleness/max")}
    assert told <= set(one.metrics) & set(two.metrics)
    assert one.metrics["rollout/usable_group_size"] == 1.0


# -- 4.8 --------------------------------------------------------------------------------------------------------------


class TestRolloutGroups:
    """4.8: one entry per usable rollout: row counts, references, and the real sample_idx of each."""

    def test_real_indices_and_row_counts(self) -> None:
        """4.8: rollouts of several rows among failed slots: indices are the slots', counts sum to the rows."""
        headers = [failed(TASK, 0), usable(TASK, 1, [1.0, 2.0], 5.0), rejected(TASK, 2), usable(TASK, 3, [None])]
        summary = verdict(*headers).summary
        rows = [row([1, 2])] * 3
        (group,) = Rollouts(version=0, groups=[summary], rows=rows).rollout_groups
        assert group == RolloutGroup(row_counts=(2, 1), rewards=(5.0, None), sample_idx=(1, 3))
        assert sum(group.row_counts) == len(rows)
        assert group.usable_size == 2, "rollouts, not rows"

    @given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=5), st.randoms())
    def test_survive_splitting_and_shuffling(self, counts: list[list[int]], order: random.Random) -> None:
        """4.8: any selection of a batch's groups, in any order, keeps each group's rows and entries together."""
        made = [
            group_of({2 * idx: [row([task, idx, at]) for at in range(n)] for idx, n in enumerate(some)}, task)
            for task, some in enumerate(counts)
        ]
        whole = Rollouts(
            version=0, groups=[summary for summary, _ in made], rows=[one for _, some in made for one in some]
        )
        places = order.sample(range(len(counts)), order.randint(1, len(counts)))
        part = whole.select(places)
        for place, summary, group in zip(places, part.groups, part.rollout_groups, strict=True):
            assert summary.task == place
            assert group == whole.rollout_groups[place]
            assert group.row_counts == tuple(counts[place])
        found = [one.tokens["input_ids"].tolist() for one in part.rows]
        assert found == [[task, idx, at] for task in places for idx, n in enumerate(counts[task]) for at in range(n)]

    def test_usable_size_counts_rollouts(self) -> None:
        """4.8: the minimum is of rollouts: a single one of many rows does not reach 2."""
        header = usable(TASK, 0)
        header.rows = [row_summary(1.0) for _ in range(9)]
        found = verdict(header, failed(TASK, 1), min_usable_group_size=2)
        assert found.reason is RejectReason.BELOW_MINIMUM
