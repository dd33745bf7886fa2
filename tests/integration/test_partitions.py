"""Who owns which partition of the slot results, as the scripts decide it, on Valkey and on Redis."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from driver import Driver

from forebay.errors import FencedError
from forebay.settings import Settings
from forebay.store import Store

LEASE_S = 60.0


@pytest.fixture
async def store(any_redis_url: str, run_name: str) -> AsyncIterator[Store]:
    """The store of a run of one's own."""
    opened = Store.open(Settings(REDIS_URL=any_redis_url, experiment_name=run_name.split("/", maxsplit=1)[0]))
    yield opened
    await opened.close()


@pytest.fixture
async def driver(store: Store) -> Driver:
    """A collector that leads, and owns nothing: the rules ask for two partitions."""
    made = Driver(store)
    await made.lead(partitions=2, max_staleness=20)
    await store.resign("collector-1")
    made.epoch = await store.lead("leader", LEASE_S)
    return made


async def partitions(driver: Driver, count: int) -> None:
    """Publish so many partitions."""
    from forebay.settings import RunSettings

    await driver.store.configure(driver.epoch, RunSettings(batch_size=2, partitions=count, max_staleness=20))


async def beat(store: Store, name: str) -> dict[int, int]:
    """A collector's beat, after which it has given up what is too much: the partitions that it keeps, with epochs."""
    held = await store.hold(name, LEASE_S)
    for one in held:
        if one.surplus:
            assert await store.give_up(name, one.partition)
    return {one.partition: one.epoch for one in held if not one.surplus}


async def settled(store: Store, names: list[str]) -> dict[str, dict[int, int]]:
    """What each owns once another round of beats changes nothing; three rounds must do."""
    for _ in range(3):
        held = {name: await beat(store, name) for name in names}
    assert {name: await beat(store, name) for name in names} == held
    return held


async def expire(store: Store, name: str) -> None:
    """As if `name` had been silent for a lease."""
    for one in (await store.owners()).partitions:
        if one.owner == name:
            await store._ask(("DEL", store.keys.partition_lease(one.number)))
    await store._ask(("ZADD", store.keys.collectors, 1, name))


class TestShares:
    @pytest.mark.parametrize(("count", "collectors"), [(1, 1), (4, 1), (4, 2), (4, 3), (4, 5), (64, 3), (5, 5)])
    async def test_every_partition_has_one_owner_and_shares_are_fair(
        self, store: Store, driver: Driver, count: int, collectors: int
    ) -> None:
        """However many collectors join, one after the other, all is owned once, and shares differ by one at most."""
        await partitions(driver, count)
        names: list[str] = []
        for at in range(collectors):
            names.append(f"c{at}")
            held = await settled(store, names)
            owned = [partition for shares in held.values() for partition in shares]
            assert sorted(owned) == list(range(count))
            sizes = [len(shares) for shares in held.values()]
            assert max(sizes) - min(sizes) <= 1

    @pytest.mark.parametrize("joins", ["A", "z"])
    async def test_who_joins_moves_no_more_than_its_share(self, store: Store, driver: Driver, joins: str) -> None:
        """A third collector gets the smaller share, whatever its name, and nothing moves between the two others."""
        await partitions(driver, 7)
        before = await settled(store, ["a", "b"])
        after = await settled(store, ["a", "b", joins])
        assert after["a"].items() <= before["a"].items()
        assert after["b"].items() <= before["b"].items()
        assert [len(after[name]) for name in ("a", "b", joins)] == [3, 2, 2]

    async def test_a_silent_one_is_followed(self, store: Store, driver: Driver) -> None:
        """Once its lease has ended the others own all, under new epochs; it gets its share back when it beats again."""
        await partitions(driver, 4)
        before = await settled(store, ["a", "b"])
        await expire(store, "a")
        alone = await settled(store, ["b"])
        assert sorted(alone["b"]) == [0, 1, 2, 3]
        assert all(alone["b"][number] > epoch for number, epoch in before["a"].items())
        assert all(alone["b"][number] == epoch for number, epoch in before["b"].items()), "what it had it keeps"
        again = await settled(store, ["a", "b"])
        assert [len(again[name]) for name in "ab"] == [2, 2]

    async def test_all_were_silent(self, store: Store, driver: Driver) -> None:
        """After an absence of Redis in which all leases ended, each takes what it had, under the epoch that it had."""
        await partitions(driver, 4)
        before = await settled(store, ["a", "b"])
        await store._ask(*(("DEL", store.keys.partition_lease(number)) for number in range(4)))
        assert await settled(store, ["a", "b"]) == before

    @pytest.mark.parametrize("seed", range(3))
    async def test_one_owner_under_one_epoch(self, store: Store, driver: Driver, seed: int) -> None:
        """Whoever joins, ends, falls silent or gives up: no two are ever told the same epoch of one partition."""
        rng = random.Random(seed)
        owner_of: dict[tuple[int, int], str] = {}
        names = ["a", "b", "c", "d"]
        for _ in range(150):
            name = rng.choice(names)
            match rng.randrange(8):
                case 0:
                    await expire(store, name)
                case 1:
                    await store.resign(name)
                case 2:
                    await partitions(driver, rng.choice([1, 3, 5]))
                case 3:
                    await store.give_up(name, rng.randrange(5))
                case _:
                    for held in await store.hold(name, LEASE_S):
                        key = (held.partition, held.epoch)
                        assert owner_of.setdefault(key, name) == name
        owned = Counter(one.number for one in (await store.owners()).partitions)
        assert set(owned.values()) == {1}


class TestFencing:
    async def test_the_epoch_fences_its_partition_alone(self, store: Store, driver: Driver) -> None:
        """Whoever lost a partition can neither commit nor set aside in it, and goes on in its others."""
        tasks = await driver.submit(2, size=1)
        await driver.admit()
        for attempt in await driver.claim():
            await driver.publish(attempt)
        driver.held = await beat(store, "a")
        assert sorted(driver.held) == [0, 1]
        lost, kept = (next(task for task in tasks if task % 2 == number) for number in (0, 1))
        await store._ask(("DEL", store.keys.partition_lease(0)))
        assert list(await beat(store, "b")) == [0]
        before = await driver.check()
        (entry,) = await store.read_results({0: "0"}, 10, 0.01)
        with pytest.raises(FencedError):
            await driver.commit(lost, size=1)
        with pytest.raises(FencedError):
            await store.set_aside_result(driver.held[0], entry, "it is odd")
        with pytest.raises(FencedError):
            await store.note_unreadable(driver.held[0], "x", "rows", "it is odd", b"")
        assert replace(await driver.check(), bounds=()) == replace(before, bounds=())
        assert await driver.commit(kept, size=1)
        assert (await driver.check()).count("accepted") == 1

    @pytest.mark.parametrize("way", ["give_up", "resign"])
    async def test_giving_up_fences_at_once(self, store: Store, driver: Driver, way: str) -> None:
        """Whoever has given a partition up changes nothing in it any more, though nobody has taken it yet."""
        (task,) = await driver.submit(1, size=1)
        await driver.admit()
        for attempt in await driver.claim():
            await driver.publish(attempt)
        driver.held = await beat(store, "a")
        if way == "give_up":
            assert await store.give_up("a", task % 2)
            assert not await store.give_up("a", task % 2)
        else:
            await store.resign("a")
        with pytest.raises(FencedError):
            await driver.commit(task, size=1)

    async def test_nobody_gives_up_what_another_owns(self, store: Store, driver: Driver) -> None:
        """Giving up, or ending, frees what is one's own, and nothing else."""
        before = await settled(store, ["a", "b"])
        assert not await store.give_up("a", next(iter(before["b"])))
        await store.resign("a")
        assert [one.owner for one in (await store.owners()).partitions if one.owner] == ["b"]
        assert (await store.owners()).leader == "leader"
        assert (await store.owners()).collectors == ("b",)

    async def test_a_group_is_committed_in_its_own_partition(self, store: Store, driver: Driver) -> None:
        """The owner of another partition cannot commit a group, whatever entries it was shown."""
        (task,) = await driver.submit(1, size=1)
        await driver.admit()
        for attempt in await driver.claim():
            await driver.publish(attempt)
        held = await beat(store, "a")
        other = (task + 1) % 2
        assert await store.commit(held[other], task, "ready", partition=other) is None
        assert await store.group_rules(task, other) is None
        assert await store.group_rules(task, task % 2) is not None
        assert (await driver.check()).count("accepted") == 0

    async def test_a_lead_that_was_given_up_is_fenced(self, store: Store, driver: Driver) -> None:
        """Whoever has ended can do none of the duties, though nobody leads yet; the next one gets a new epoch."""
        await store.resign("leader")
        with pytest.raises(FencedError):
            await store.reap(driver.epoch)
        with pytest.raises(FencedError):
            await store.check_lead(driver.epoch)
        assert await store.lead("leader", LEASE_S) > driver.epoch


class TestNumber:
    async def test_a_group_stays_in_its_partition(self, store: Store, driver: Driver) -> None:
        """All results of a group are in one partition, whatever becomes of their number while it runs."""
        await partitions(driver, 4)
        tasks = await driver.submit(4, size=3)
        await driver.admit()
        claimed = sorted(await driver.claim(), key=lambda attempt: (attempt[1], attempt[0]))
        parts = [claimed[at : at + 4] for at in (0, 4, 8)]
        for count, part in zip((1, 64, 3), parts, strict=True):
            await partitions(driver, count)
            for attempt in part:
                await driver.publish(attempt)
        entries = await store.read_results(dict.fromkeys(range(64), "0"), 100, 0.01)
        assert {(entry.task_id, entry.partition) for entry in entries} == {(task, task % 4) for task in tasks}

    async def test_older_partitions_are_owned_until_they_are_drained(self, store: Store, driver: Driver) -> None:
        """After there are fewer, those that hold entries need an owner until their groups have ended, and no longer."""
        await partitions(driver, 4)
        tasks = await driver.submit(4, size=1)
        await driver.admit()
        for attempt in await driver.claim():
            await driver.publish(attempt)
        driver.held = await beat(store, "a")
        await partitions(driver, 1)
        assert sorted(await beat(store, "a")) == [0, 1, 2, 3]
        for task in tasks[:2]:
            await driver.commit(task, size=1)
        left = sorted({0, *(task % 4 for task in tasks[2:])})
        assert sorted(await beat(store, "a")) == left == [one.number for one in (await store.owners()).partitions]
        for task in tasks[2:]:
            await driver.commit(task, size=1)
        assert sorted(await beat(store, "a")) == [0]
        assert (await driver.check()).count("accepted") == 4

    async def test_results_of_an_older_partition_that_was_drained(self, store: Store, driver: Driver) -> None:
        """A group of a partition that is not used any more ends all the same: its first result makes it needed."""
        await partitions(driver, 4)
        (task,) = (await driver.submit(3, size=1))[-1:]
        await driver.admit()
        attempts = await driver.claim()
        await partitions(driver, 1)
        assert sorted(await beat(store, "a")) == [0]
        await driver.publish(next(attempt for attempt in attempts if attempt[0] == task))
        assert sorted(await beat(store, "a")) == [0, task % 4]


async def test_owners_tell_who_collects(store: Store, driver: Driver) -> None:
    """The status names the leader, the live collectors, the owner of each partition, and what is unread in it."""
    await driver.submit(1, size=2)
    await driver.admit()
    for attempt in await driver.claim():
        await driver.publish(attempt)
    nobody = await store.owners()
    assert (nobody.leader, nobody.collectors, nobody.unowned) == ("leader", (), (0, 1))
    held = await settled(store, ["a", "b"])
    owners = (await store.status()).owners
    assert owners.collectors == ("a", "b")
    assert {one.number: one.owner for one in owners.partitions} == {
        number: name for name, numbers in held.items() for number in numbers
    }
    assert [one.unread for one in owners.partitions] == [0, 2]
