"""The drop ledger and the dead letters, on real servers (contract, sections 4 and 6).

Invariants: each group that was rejected or evicted has one entry in the drop ledger, with why and where; each slot that
failed for good has one dead letter; a prompt is redriven once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime

import pytest
from driver import Driver, reap_until

from forebay.cli_ledger import By, parse_since, shown, tally
from forebay.errors import QueueFullError, RunStoppedError, SubmitError
from forebay.outcomes import FailureKind
from forebay.settings import Settings
from forebay.store import Store
from forebay.store.ledger_records import Drop
from forebay.store.records import Channel
from forebay.wire.envelopes import GroupSpec
from forebay.wire.values import encode_kwargs, encode_plain


@pytest.fixture
async def store(any_redis_url: str, run_name: str) -> AsyncIterator[Store]:
    """The store of a run of one's own, on Valkey and on Redis."""
    opened = Store.open(Settings(REDIS_URL=any_redis_url, experiment_name=run_name.split("/", maxsplit=1)[0]))
    yield opened
    await opened.close()


@pytest.fixture
async def driver(store: Store) -> Driver:
    """A driver that leads, with batches of 2 groups, one per version, staleness 1."""
    made = Driver(store)
    await made.lead()
    return made


async def running(driver: Driver, size: int = 1) -> tuple[int, list[tuple[int, int, int]]]:
    """A group that runs, and its attempts."""
    (task,) = await driver.submit(1, size)
    await driver.admit()
    return task, await driver.claim()


async def reject(driver: Driver) -> int:
    """A group that the collector rejects."""
    task, attempts = await running(driver)
    await driver.publish(attempts[0])
    await driver.commit(task, size=1, reason="filtered", detail="f said no")
    await driver.commit(task, size=1, reason="filtered", detail="again")
    return task


async def stale_at_assembly(driver: Driver) -> int:
    """A group that is stale when it is committed."""
    task, attempts = await running(driver)
    await driver.publish(attempts[0])
    await driver.store.set_version(5)
    await driver.commit(task, size=1)
    return task


async def stale_while_it_waits(driver: Driver) -> int:
    """A group that goes stale while it waits."""
    (task,) = await driver.finish()
    await driver.store.set_version(5)
    await driver.store.evict_stale(driver.epoch)
    await driver.store.evict_stale(driver.epoch)
    return task


async def stale_at_the_cut(driver: Driver) -> int:
    """A group that is stale when it is cut."""
    (task,) = await driver.finish()
    await driver.store.set_version(5)
    assert await driver.cut() is None
    return task


async def stale_at_the_hand_over(driver: Driver) -> int:
    """A group in a batch that is stale when it is read."""
    (task,) = await driver.finish()
    await driver.cut()
    await driver.store.set_version(5)
    assert (await driver.take()).batch is None
    return task


async def stale_at_the_hand_over_by_id(driver: Driver) -> int:
    """A group that is stale when it is asked for by its id."""
    (task,) = await driver.submit(1, 2, Channel.DIRECT)
    await driver.run_admitted()
    await driver.store.set_version(5)
    assert (await driver.store.collect(task)).state == "evicted"
    return task


async def cancelled(driver: Driver) -> int:
    """A running group that can no longer be fresh."""
    task, attempts = await running(driver, 2)
    await driver.publish(attempts[0])
    await driver.store.set_version(5)
    await driver.store.evict_stale(driver.epoch, running_too=True)
    await driver.commit(task, size=2)
    return task


async def uncollected(driver: Driver) -> int:
    """A result that nobody asks for."""
    await driver.lead(rows_ttl_s=60.001)
    (task,) = await driver.submit(1, 2, Channel.DIRECT)
    await driver.run_admitted()
    await driver.store._ask(("ZADD", driver.store.keys.held, 1, task))
    await driver.store.reap(driver.epoch)
    return task


class TestDrops:
    @pytest.mark.parametrize(
        ("drop", "outcome", "place", "reason", "detail"),
        [
            (reject, "rejected", "assembly", "filtered", "f said no"),
            (stale_at_assembly, "evicted", "assembly", "stale", "head version 0, training at version 5"),
            (stale_while_it_waits, "evicted", "waiting", "stale", "head version 0, training at version 5"),
            (stale_at_the_cut, "evicted", "cut", "stale", "head version 0, training at version 5"),
            (stale_at_the_hand_over, "evicted", "hand-over", "stale", "head version 0, training at version 5"),
            (stale_at_the_hand_over_by_id, "evicted", "hand-over", "stale", "head version 0, training at version 5"),
            (cancelled, "evicted", "cancelled", "stale", "head version 0, training at version 5"),
            (uncollected, "evicted", "uncollected", "uncollected", "nobody asked for its result"),
        ],
    )
    async def test_every_end_has_its_place(
        self,
        store: Store,
        driver: Driver,
        drop: Callable[[Driver], Awaitable[int]],
        outcome: str,
        place: str,
        reason: str,
        detail: str,
    ) -> None:
        """6: for every group that did not reach a trainer, when, why and where, once, whatever is repeated."""
        (before,) = await store._ask(("TIME",))
        task = await drop(driver)
        (found,) = await store.drops()
        assert (found.task_id, found.outcome, found.place, found.reason) == (task, outcome, place, reason)
        assert found.detail == detail
        assert 0 <= found.at_ms - before[0] * 1000 - before[1] // 1000 < 60_000
        status = await store.status()
        assert status.count("rejected") + status.count("evicted") == 1

    async def test_what_reached_a_trainer_is_not_in_it(self, store: Store, driver: Driver) -> None:
        """6: delivered groups are no drops, not even after the ack."""
        await driver.finish(2)
        await driver.cut()
        batch, _ = await driver.take_batch()
        await store.ack("trainer", batch)
        assert await store.drops() == []

    async def test_parent_child_and_prompt(self, store: Store, driver: Driver) -> None:
        """6: an evicted group names the one under which its prompt comes again, and the other way round."""
        await driver.lead(requeue_evicted=True)
        task, _ = await store.submit(b"spec", b"rules", 1, "question 7")
        await driver.admit()
        for version in (5, 50):
            for attempt in await driver.claim():
                await driver.publish(attempt, version - 5)
            await store.set_version(version)
            await driver.commit(task if version == 5 else task + 1, size=1, version=version - 5)
            await driver.admit()
        second, first = await store.drops()
        assert (first.task_id, first.parent, first.child) == (task, None, task + 1)
        assert (second.task_id, second.parent, second.child) == (task + 1, task, None)
        assert first.prompt == second.prompt == "question 7"
        await driver.check()

    async def test_bounded(self, store: Store, driver: Driver) -> None:
        """7: the ledger keeps drop_ledger_entries, the newest; with 0 it keeps none. The counters stay."""
        await driver.lead(drop_ledger_entries=3)
        tasks = [await reject(driver) for _ in range(5)]
        assert [drop.task_id for drop in await store.drops()] == tasks[:1:-1]
        assert [drop.task_id for drop in await store.drops(limit=2)] == tasks[:2:-1]
        await driver.lead(drop_ledger_entries=0)
        await reject(driver)
        assert len(await store.drops()) == 3
        assert (await driver.check()).count("rejected") == 6

    async def test_pages_and_times(self, store: Store, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
        """All entries are read, however many; `since` leaves the older out."""
        monkeypatch.setattr("forebay.store.ledgers._PAGE", 2)
        tasks = [await reject(driver) for _ in range(5)]
        found = await store.drops()
        assert [drop.task_id for drop in found] == tasks[::-1]
        assert await store.drops(since_ms=found[0].at_ms + 1) == []
        assert len(await store.drops(since_ms=found[-1].at_ms)) == 5


def drop_of(reason: str, place: str, at_ms: int, prompt: str = "") -> Drop:
    """An entry as it is read."""
    return Drop(1, at_ms, "evicted", place, reason, "", None, None, prompt)


def test_tally() -> None:
    """Drops are counted by reason, place and prompt, the most frequent first, and by hour in order."""
    hour = 3_600_000
    found = [drop_of("stale", "cut", 2 * hour, "a"), drop_of("stale", "waiting", 0), drop_of("x", "cut", hour, "a")]
    assert tally(found, By.REASON) == [("evicted: stale", 2), ("evicted: x", 1)]
    assert tally(found, By.PLACE) == [("cut", 2), ("waiting", 1)]
    assert tally(found, By.PROMPT) == [("a", 2), ("(unknown)", 1)]
    assert tally(found, By.HOUR) == [(f"1970-01-01T0{at}Z", 1) for at in range(3)]


def test_since() -> None:
    """--since takes a span or a time; what is neither is refused with what to write."""
    now = datetime(2026, 1, 2, tzinfo=UTC)
    assert parse_since("10m", now) == now.timestamp() - 600
    assert parse_since("1d", now) == parse_since("2026-01-01", now) == parse_since("2026-01-01T01:00+01:00", now)
    with pytest.raises(SubmitError, match="give 90s"):
        parse_since("yesterday", now)


def test_prompts_are_shown_plainly() -> None:
    """Arrays and bytes are shown by their size, nested values as they are."""
    import numpy as np

    data = encode_plain({"image": np.zeros((2, 3), np.int32), "raw": b"1234", "messages": [{"content": "hi"}]})
    assert shown(data) == {
        "image": "<array i4 [2, 3]>",
        "raw": "<4 bytes>",
        "messages": [{"content": "hi"}],
    }
    assert shown(encode_kwargs({"f": parse_since})) == {"f": {"<callable>": {"name": "forebay.cli_ledger:parse_since"}}}


SPEC = GroupSpec("forebay:x", {}, {"question": "1+1"}).pack()


async def dead(driver: Driver, size: int = 1, *, key: str | None = None, kind: FailureKind = FailureKind.DATA) -> int:
    """A rejected group all of whose slots failed for good."""
    task, _ = await driver.store.submit(SPEC, b"rules", size, key)
    await driver.admit()
    for attempt in await driver.claim():
        await driver.fail(attempt, kind)
    await driver.commit(task, size=size, reason="no_usable_slot")
    return task


class TestDeadLetters:
    async def test_what_a_letter_says(self, store: Store, driver: Driver) -> None:
        """4.2: a slot whose attempts are used up has a letter with kind, reason, worker, attempts and time."""
        await driver.lead(attempts_infra=2)
        task, _ = await store.submit(SPEC, b"rules", 2, "q")
        await driver.admit()
        first, second = await driver.claim()
        await driver.publish(second)
        assert await driver.fail(first) == "retry"
        assert await store.dead_groups() == [], "one attempt is left"
        (again,) = await driver.claim()
        assert await driver.fail(again) == "accepted"
        assert await driver.fail(again) == "accepted"
        (group,) = await store.dead_groups()
        (slot,) = group.slots
        assert (group.task_id, group.group_size, group.prompt, group.spec) == (task, 2, "q", SPEC)
        assert (group.ended, group.next_task) == (None, None)
        assert (slot.sample_idx, slot.kind, slot.reason, slot.worker) == (first[1], "infra", "it failed", "w1")
        assert slot.attempts == 2
        assert slot.at_ms > 0
        assert (await store.status()).count("dead_letters") == 1
        assert await store.dead_groups("infra") == [group]
        assert await store.dead_groups("data") == []

    async def test_of_a_silent_worker_and_of_a_deadline(self, store: Store, driver: Driver) -> None:
        """4.2: slots that the reaper fails have letters too."""
        await driver.lead(attempts_infra=1)
        await driver.submit(1, size=2)
        await driver.admit(deadline_s=0.2)
        await driver.claim(1, lease_s=0.001)
        await reap_until(driver, lambda status: status.count("slots:failed") == 2)
        (group,) = await store.dead_groups()
        assert sorted((slot.kind, slot.reason, slot.worker) for slot in group.slots) == [
            ("infra", "worker w1 fell silent", "w1"),
            ("timeout", "the deadline of the group passed", ""),
        ]

    async def test_bounded(self, store: Store, driver: Driver) -> None:
        """7: at most dead_letter_entries groups and dead_letter_bytes of prompts are kept, the newest."""
        await driver.lead(dead_letter_entries=2)
        tasks = [await dead(driver) for _ in range(3)]
        assert [group.task_id for group in await store.dead_groups()] == tasks[1:]
        size = len(SPEC) + len(b"rules")
        await driver.lead(dead_letter_bytes=size * 2 - 1)
        last = await dead(driver)
        assert [group.task_id for group in await store.dead_groups()] == [last]
        await driver.lead(dead_letter_bytes=size - 1)
        larger = await dead(driver)
        (kept,) = await store.dead_groups()
        assert (kept.task_id, kept.spec) == (larger, None)
        assert (await store.redrive(larger)).state == "no_prompt"
        (left,) = await store._ask(("HGET", store.keys.state, "dead_bytes"))
        assert int(left) == 0
        await driver.lead(dead_letter_entries=0)
        await dead(driver)
        assert len(await store.dead_groups()) == 1
        assert (await driver.check()).count("dead_letters") == 6

    async def test_kept_for_a_time(self, store: Store, driver: Driver) -> None:
        """7: letters vanish after dead_letter_ttl_s, and their bytes are free then."""
        task = await dead(driver)
        (left,) = await store._ask(("PTTL", store.keys.dead_group(task)))
        assert 6 * 86400_000 < left <= 7 * 86400_000
        await store._ask(("ZADD", store.keys.dead, 1, task))
        newest = await dead(driver)
        assert [group.task_id for group in await store.dead_groups()] == [newest]
        sizes, total = await store._ask(
            ("HKEYS", store.keys.prefix + "dead:sizes"), ("HGET", store.keys.state, "dead_bytes")
        )
        assert sizes == [b"%d" % newest]
        assert int(total) == len(SPEC) + len(b"rules")


class TestRedrive:
    async def test_once(self, store: Store, driver: Driver) -> None:
        """4.2: the prompt comes again once, as a new group that names the old one; conservation holds."""
        task = await dead(driver, 2, key="q")
        answer = await store.redrive(task)
        assert (answer.state, answer.new_task) == ("created", task + 1)
        assert (await store.redrive(task)).state == "exists"
        assert (await store.redrive(task)).new_task == task + 1
        status = await driver.check()
        assert (status.count("submitted"), status.count("redriven"), status.queued) == (2, 1, 1)
        await driver.admit()
        leases = await store.claim("w1", 10, 5)
        assert [lease.attempt for lease in leases] == [(task + 1, 0, 1), (task + 1, 1, 1)]
        assert {lease.spec for lease in leases} == {SPEC}
        assert await store.group_rules(task + 1) == (b"rules", 2, task)
        (group,) = await store.dead_groups()
        assert (group.ended, group.next_task) == ("rejected", task + 1)

    async def test_again(self, store: Store, driver: Driver) -> None:
        """Who says so gets it once more."""
        task = await dead(driver)
        await store.redrive(task)
        assert (await store.redrive(task, again=True)).new_task == task + 2
        assert (await driver.check()).queued == 2

    async def test_a_lost_answer_changes_nothing(self, store: Store, driver: Driver) -> None:
        """The same call repeated, as after a lost answer, submits once, also with `again`."""
        task = await dead(driver)
        answers = [await store._run("redrive", task, "word", 1) for _ in range(2)]
        assert answers[0] == answers[1] == [b"created", b"%d" % (task + 1)]
        assert (await driver.check()).queued == 1

    async def test_not_while_the_group_is_open(self, store: Store, driver: Driver) -> None:
        """A group whose other slots still run is not doubled."""
        task, attempts = await running(driver, 2)
        await driver.fail(attempts[0], FailureKind.DATA)
        assert (await store.redrive(task)).state == "open"
        assert (await store.redrive(task, again=True)).state == "open"
        await driver.publish(attempts[1])
        await driver.commit(task)
        assert (await store.redrive(task)).state == "open"
        assert (await driver.check()).queued == 0

    async def test_not_what_was_delivered(self, store: Store, driver: Driver) -> None:
        """A group that a trainer got with its other slots comes again only on demand, before and after the ack."""
        (task,) = await driver.submit(1, 2)
        await driver.admit()
        attempts = await driver.claim()
        await driver.fail(attempts[0], FailureKind.DATA)
        await driver.publish(attempts[1])
        await driver.commit(task)
        await driver.cut()
        batch, _ = await driver.take_batch()
        assert (await store.redrive(task)).state == "delivered"
        await store.ack("trainer", batch)
        assert (await store.redrive(task)).state == "delivered"
        (group,) = await store.dead_groups()
        assert group.ended == "delivered"
        assert (await store.redrive(task, again=True)).state == "created"
        assert (await driver.check()).queued == 1

    async def test_not_what_was_requeued(self, store: Store, driver: Driver) -> None:
        """6: an evicted group whose prompt was requeued has come again."""
        await driver.lead(requeue_evicted=True)
        task, attempts = await running(driver, 2)
        await driver.fail(attempts[0], FailureKind.DATA)
        await driver.publish(attempts[1])
        await store.set_version(5)
        await driver.commit(task)
        answer = await store.redrive(task)
        assert (answer.state, answer.new_task) == ("exists", task + 1)

    async def test_refusals(self, store: Store, driver: Driver) -> None:
        """A full queue and a run that has stopped refuse, as for submit; an unknown group is said to be one."""
        task = await dead(driver)
        await driver.lead(max_queued_groups=1)
        await driver.submit()
        with pytest.raises(QueueFullError, match="1 groups wait"):
            await store.redrive(task)
        await store._ask(("HSET", store.keys.state, "stopped", "why"))
        with pytest.raises(RunStoppedError, match="why"):
            await store.redrive(task)
        assert (await store.redrive(999)).state == "unknown"
        await store.resume()
        await driver.admit()
        assert (await store.redrive(task)).state == "created"

    async def test_the_data_is_open_again(self, store: Store, driver: Driver) -> None:
        """13: after the end of the data a redrive opens it, as a submit does."""
        task = await dead(driver)
        await store.end_of_data()
        await store.redrive(task)
        assert not (await driver.take()).end
