"""Contract, section 5: statistics of the batch, and what a batch says of its rewards.

The numbers of each rule are proved in ``test_05_rewards.py``; here, when they are computed, and over which groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

import pytest
from driver import Driver
from helpers.building import decided, group_of, originals, rewards, row, usable
from services import WORKFLOW, read, services

from forebay import NormConfig, Rollouts
from forebay.group_rewards import normalized_batch
from forebay.reward_rules import ROLLOUT_NORM, RewardShaping
from forebay.settings import RunSettings, Settings, load
from forebay.store import Store
from forebay.wire.envelopes import BatchIndex, GroupRules, GroupSummary
from forebay_collector.cutter import Cutter
from forebay_collector.decision import decide


class TestBatchLevel:
    """5: batch level statistics need the batch: computed when it is cut, before the first delivery."""

    def test_groups_wait_as_shaped(self) -> None:
        """5: until the cut the rewards are as shaped, and the group says which rule it waits for."""
        norm = NormConfig()
        summary = decided([usable(1, 0, [1.0]), usable(1, 1, [3.0])], norm, RewardShaping(scaling=2)).summary
        assert (rewards(summary), originals(summary)) == ([2.0, 6.0], [1.0, 3.0])
        assert (summary.batch_norm, summary.rewards_normalized) == (norm, False)
        assert [rollout.reference for rollout in summary.rollouts] == [2.0, 6.0]

    def test_together_and_once(self) -> None:
        """5: groups of one rule are normalized together, those given do not change, and twice is once."""
        norm = NormConfig(std_level=None)
        waiting = [decided([usable(task, 0, [float(task)])], norm, RewardShaping(), task).summary for task in (1, 2, 6)]
        batch = normalized_batch(waiting)
        assert [rewards(group) for group in batch] == [[-2.0], [-1.0], [3.0]]
        assert [originals(group) for group in batch] == [[1.0], [2.0], [6.0]]
        assert all(group.rewards_normalized for group in batch)
        assert [rewards(group) for group in waiting] == [[1.0], [2.0], [6.0]]
        assert normalized_batch(batch) == batch

    def test_rules_that_differ_in_one_batch(self) -> None:
        """5: each rule's statistics are over its own groups; a group's own rule and no rule stay as they are."""
        whole, centred = NormConfig(std_level=None), NormConfig("batch", True, None)
        chosen = [whole, centred, None, whole, ROLLOUT_NORM, centred]
        summaries = [
            decided([usable(task, 0, [float(task)])], norm, RewardShaping(), task).summary
            for task, norm in enumerate(chosen)
        ]
        batch = normalized_batch(summaries)
        assert [group.task for group in batch] == list(range(6))
        assert [rewards(group) for group in batch] == [[-1.5], [-4.0], [2.0], [1.5], [0.0], [4.0]]
        assert [group.rewards_normalized for group in batch] == [True, True, False, True, True, True]

    def test_mean_of_the_batch_and_deviation_of_the_group(self) -> None:
        """5: mixed levels: [1, 3] and [5], batch mean 3, deviations 1 (biased) and, of a singleton, the scale 1."""
        norm = NormConfig("batch", False, "group", std_unbiased=False, eps=1e-12)
        pair = decided([usable(1, 0, [1.0]), usable(1, 1, [3.0])], norm, RewardShaping(), 1).summary
        single = decided([usable(2, 0, [5.0])], norm, RewardShaping(), 2).summary
        assert [rewards(group) for group in normalized_batch([pair, single])] == [
            pytest.approx([-2, 0]),
            pytest.approx([2]),
        ]


class TestTheBatchSaysSo:
    """5: the batch says rewards_normalized."""

    def batch(self, *normalized: bool) -> Rollouts:
        """A batch of groups of one row, normalized or not."""
        found = [group_of({0: [row([1, 2])]}, task) for task in range(len(normalized))]
        groups = [
            dataclasses.replace(summary, rewards_normalized=known)
            for (summary, _), known in zip(found, normalized, strict=True)
        ]
        rows = [one for _, some in found for one in some]
        return Rollouts(version=0, groups=groups, rows=rows)

    @pytest.mark.parametrize(
        ("normalized", "want"), [((True, True), True), ((False, False), False), ((False, True), True)]
    )
    def test_for_the_batch_and_for_each_group(self, normalized: tuple[bool, ...], want: bool) -> None:
        """5: true where any group's rewards are normalized, so that nobody does it twice; and for each group."""
        batch = self.batch(*normalized)
        assert batch.rewards_normalized is want
        assert batch.normalized_groups == list(normalized)

    def test_original_rewards_of_a_mixed_batch(self) -> None:
        """3: original_rewards, present once a reward was changed, are the rewards of rows where nothing was."""
        batch = self.batch(True, False)
        batch.rows[0].reward, batch.rows[0].original_reward = -1.0, 4.0
        arrays = batch.arrays()
        assert (arrays["rewards"].tolist(), arrays["original_rewards"].tolist()) == ([-1.0, 1.0], [4.0, 1.0])
        assert "original_rewards" not in self.batch(False, False).arrays()


@pytest.fixture
async def driver(redis_url: str, run_name: str) -> AsyncIterator[Driver]:
    """A driver that leads: batches of 2 groups, staleness 1."""
    store = Store.open(Settings(REDIS_URL=redis_url, experiment_name=run_name.split("/", maxsplit=1)[0]))
    made = Driver(store)
    await made.lead()
    yield made
    await store.close()


async def ready(driver: Driver, head: int, *given_rewards: float, norm: NormConfig) -> int:
    """A group that waits for its batch, made by version `head`, with one rollout for each reward: its task id."""
    (task,) = await driver.submit(size=len(given_rewards))
    await driver.admit()
    headers = {}
    for attempt in await driver.claim():
        header = usable(task, attempt[1], [given_rewards[attempt[1]]])
        header.rows[0].head = header.rows[0].tail = head
        headers[attempt[1]] = header
        assert await driver.publish(attempt, head) == "accepted"
    decision = decide(task, len(headers), GroupRules(1, reward_normalization=norm), headers, RewardShaping())
    assert decision.reason is None
    summary = decision.summary
    assert await driver.store.commit(driver.epoch, task, "ready", summary=summary.pack(), head=summary.head)
    return task


async def test_a_dissolved_batch_is_normalized_anew(driver: Driver) -> None:
    """5: statistics are computed again where a stale group dissolved the batch, before the first delivery."""
    norm = NormConfig(std_level=None)
    cutter = Cutter(driver.store, load(RunSettings, batch_size=2))
    old = await ready(driver, 0, 0.0, 1.0, norm=norm)
    await driver.store.set_version(1)
    kept = await ready(driver, 1, 4.0, 7.0, norm=norm)
    assert await cutter.cut(driver.epoch) == 1
    await driver.store.set_version(2)  # nobody has read the batch, and its first group is stale now
    assert (await driver.take()).batch is None
    status = await driver.check()
    assert (status.count("batches_dissolved"), status.count("evicted"), status.ready) == (1, 1, 1)
    (_, waiting), *_ = await driver.store.ready(1)
    assert rewards(GroupSummary.unpack(waiting)) == [4.0, 7.0], "nothing of the first cut is left in the group"

    new = await ready(driver, 2, 10.0, 11.0, norm=norm)
    assert await cutter.cut(driver.epoch) == 1
    taken = (await driver.take()).batch
    assert taken is not None
    groups = BatchIndex.unpack(taken.index).groups
    assert [group.task for group in groups] == [kept, new]
    assert [rewards(group) for group in groups] == [[-4.0, -1.0], [2.0, 3.0]], "around 8, not around 3"
    assert [originals(group) for group in groups] == [[4.0, 7.0], [10.0, 11.0]]
    assert all(group.rewards_normalized for group in groups)
    again = await driver.store.take("trainer", "reader", "0")
    assert again.batch is not None
    assert again.batch.index == taken.index, "after the hand-over it is frozen"
    assert old not in {group.task for group in groups}


class TestEndToEnd:
    """5: from submit to the trainer's tensors."""

    async def test_batch_level(self, redis_url: str, run_name: str) -> None:
        """5: a batch of groups with rewards [0, 2] and [4, 6] is centred around 3, unscaled; it says so."""
        norm = NormConfig(std_level=None)
        async with services(redis_url, run_name, reward_normalization=norm) as (_, client):
            for low in (0.0, 4.0):
                data = {"ids": [5, 6], "rewards": {"0": low, "1": low + 2}}
                await client.submit(data, WORKFLOW, {})
            (batch,) = await read(client, 1)
        order = [group.task for group in batch.groups]
        tensors = batch.tensors()
        by_task = dict(zip(order, (tensors["rewards"][:2].tolist(), tensors["rewards"][2:].tolist()), strict=True))
        assert by_task == {1: [-3.0, -1.0], 2: [1.0, 3.0]}
        assert sorted(tensors["original_rewards"].tolist()) == [0.0, 2.0, 4.0, 6.0]
        assert batch.rewards_normalized
        assert [found.rewards for found in batch.rollout_groups] == [
            (0.0, 2.0) if task == 1 else (4.0, 6.0) for task in order
        ]

    async def test_groups_of_different_rules(self, redis_url: str, run_name: str) -> None:
        """5: what is submitted with a group wins over the run's setting, and shaping applies to all."""
        async with services(redis_url, run_name, reward_normalization=True, reward_scaling=2) as (_, client):
            data = {"ids": [5, 6], "rewards": {"0": 1.0, "1": 3.0}}
            raw = await client.submit(data, WORKFLOW, {}, reward_normalization=False)
            own = await client.submit(data, WORKFLOW, {})
            (batch,) = await read(client, 1)
        found = {group.task: group for group in batch.groups}
        assert (rewards(found[raw]), found[raw].rewards_normalized) == ([2.0, 6.0], False)
        assert rewards(found[own]) == pytest.approx([-1, 1], abs=1e-6)
        assert batch.tensors()["original_rewards"].tolist() == [1.0, 3.0, 1.0, 3.0]
        assert (batch.rewards_normalized, sorted(batch.normalized_groups)) == (True, [False, True])
