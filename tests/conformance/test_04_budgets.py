"""Contract, sections 4.2 and 4.5: a run that fails too much stops itself, with the first cause, and never loops."""

from __future__ import annotations

import pytest
from driver import Driver, reap_until

from forebay.errors import RunStoppedError
from forebay.outcomes import FailureKind
from forebay.store import Store


@pytest.fixture
async def driver(store: Store) -> Driver:
    """A driver that leads a run with one attempt for everything and room for many groups."""
    made = Driver(store)
    await made.lead(max_staleness=99, attempts_infra=1, attempts_timeout=1, max_contract_errors=3, failure_window=10)
    return made


async def fail_slots(driver: Driver, kind: FailureKind, count: int) -> None:
    """Let that many slots fail for good, each in a group of its own."""
    await driver.submit(count, size=1)
    await driver.admit()
    for attempt in await driver.claim():
        await driver.fail(attempt, kind)


async def succeed_slots(driver: Driver, count: int) -> None:
    """Let that many slots succeed."""
    await driver.submit(count, size=1)
    await driver.admit()
    for attempt in await driver.claim():
        await driver.publish(attempt)


class TestContractErrors:
    """4.5: max_contract_errors in a row, of slots or of groups."""

    async def test_slots_in_a_row_stop_the_run(self, store: Store, driver: Driver) -> None:
        """4.5: the third contract error in a row stops the run, with the first one's text."""
        await fail_slots(driver, FailureKind.CONTRACT, 2)
        assert await store.stopped() is None
        await fail_slots(driver, FailureKind.CONTRACT, 1)
        assert await store.stopped() == (
            "3 slots in a row broke the contract (max_contract_errors); the first: it failed"
        )

    async def test_a_usable_slot_ends_the_row(self, store: Store, driver: Driver) -> None:
        """4.5: in a row means in a row."""
        for _ in range(3):
            await fail_slots(driver, FailureKind.CONTRACT, 2)
            await succeed_slots(driver, 1)
        assert await store.stopped() is None

    async def test_groups_in_a_row_stop_the_run(self, store: Store, driver: Driver) -> None:
        """4.5: groups that break the contract count likewise, although their slots were usable; others end the row."""
        for count, stops in ((2, False), (3, True)):
            await succeed_slots(driver, 1)
            (good,) = [task for task, _ in driver.attempts][-1:]
            await driver.commit(good, size=1)
            tasks = await driver.submit(count, size=1)
            await driver.admit()
            for attempt in await driver.claim():
                await driver.publish(attempt)
            for task in tasks:
                await driver.commit(task, size=1, reason="contract_error", detail=f"mixed kinds in {task}")
            reason = await store.stopped()
            assert (reason is not None) == stops
        assert (
            reason
            == f"3 groups in a row broke the contract (max_contract_errors); the first: mixed kinds in {tasks[0]}"
        )

    async def test_other_endings_end_the_row(self, store: Store, driver: Driver) -> None:
        """4.5: in a row: a rejected slot, a failure of another kind, or a filtered group comes in between."""
        for _ in range(3):
            await fail_slots(driver, FailureKind.CONTRACT, 2)
            await fail_slots(driver, FailureKind.TIMEOUT, 1)
            await reject(driver, 2, "contract_error")
            await reject(driver, 1, "filtered")
        assert await store.stopped() is None


class TestBarrenGroups:
    """Case 6: a run that brings nothing to train on stops, whatever the reasons."""

    async def test_in_a_row_whatever_the_reason(self, store: Store, driver: Driver) -> None:
        """Case 6: the run stops with the first group's reason and text, also where the reasons differ."""
        await driver.lead(max_staleness=99, max_barren_groups=4)
        await reject(driver, 1, "no_usable_slot", "2 x failed(data): boom")
        await reject(driver, 2, "accept_error")
        assert await store.stopped() is None
        await reject(driver, 1, "below_minimum")
        assert await store.stopped() == (
            "4 groups in a row brought nothing to train on (max_barren_groups); the first: "
            "no_usable_slot: 2 x failed(data): boom"
        )

    @pytest.mark.parametrize("good", ["filtered", ""])
    async def test_a_judged_group_ends_the_row(self, store: Store, driver: Driver, good: str) -> None:
        """A group that was accepted, or that the filter has judged, shows that the run works."""
        await driver.lead(max_staleness=99, max_barren_groups=3)
        for _ in range(3):
            await reject(driver, 2, "missing_reward")
            await reject(driver, 1, good)
        assert await store.stopped() is None


class TestShares:
    """4.2: a budget per kind for the run, a share of recent slots."""

    @pytest.mark.parametrize("kind", [FailureKind.INFRA, FailureKind.TIMEOUT, FailureKind.DATA])
    async def test_too_large_a_share_stops_the_run(self, store: Store, driver: Driver, kind: FailureKind) -> None:
        """Case 6: every slot fails: the run stops after a bounded number, naming kind, setting and cause."""
        await fail_slots(driver, kind, 40)
        reason = await store.stopped() or ""
        assert f"failed with kind {kind.value} (max_failed_share_{kind.value}); the first: it failed" in reason

    async def test_a_few_do_not(self, store: Store, driver: Driver) -> None:
        """4.2: failures among successes stop nothing, however many there are in all."""
        for _ in range(15):
            await fail_slots(driver, FailureKind.DATA, 4)
            await succeed_slots(driver, 1)
        assert await store.stopped() is None

    async def test_one_means_never(self, store: Store, driver: Driver) -> None:
        """4.2: a share of 1 switches the budget off."""
        await driver.lead(max_staleness=99, failure_window=10, max_failed_share_data=1.0)
        await fail_slots(driver, FailureKind.DATA, 60)
        assert await store.stopped() is None

    async def test_slots_that_the_reaper_closes_count(self, store: Store, driver: Driver) -> None:
        """4.2: dead workers use the budget up as well."""
        await driver.submit(40, size=1)
        await driver.admit()
        await driver.claim(lease_s=0.001)
        await reap_until(driver, lambda status: status.count("slots:failed") == 40)
        assert "worker w1 fell silent" in (await store.stopped() or "")


class TestStopped:
    """4.5: the run stops loudly, loses nothing, and goes on when told to."""

    async def test_nothing_starts_and_everybody_is_told(self, store: Store, driver: Driver) -> None:
        """4.5: submit and readers raise the reason; nothing starts; what was cut is handed over first."""
        await driver.finish(2)
        await driver.cut()
        await driver.submit(5, size=1)
        await driver.admit()
        waiting = await driver.submit(2, size=1)
        await fail_slots_directly(driver, 3)
        with pytest.raises(RunStoppedError, match=r"in a row broke .* mend the cause, then `forebay resume`"):
            await driver.submit(1)
        assert await driver.admit() == 0
        assert await driver.claim() == []
        assert (await driver.take()).batch is not None
        assert "broke the contract" in ((await driver.take()).stopped or "")
        assert (await store.collect(waiting[0])).state == "stopped"
        await driver.check()

    async def test_resume(self, store: Store, driver: Driver) -> None:
        """4.5: after resume everything goes on where it was, with the budgets anew."""
        await fail_slots(driver, FailureKind.CONTRACT, 3)
        assert await store.resume()
        assert not await store.resume()
        await fail_slots(driver, FailureKind.CONTRACT, 2)
        assert await store.stopped() is None
        await succeed_slots(driver, 1)
        assert (await driver.check()).count("stops") == 1


async def reject(driver: Driver, count: int, reason: str, detail: str = "") -> None:
    """Let that many groups, whose slots are usable, be rejected for `reason`, or accepted without one."""
    tasks = await driver.submit(count, size=1)
    await driver.admit()
    for attempt in await driver.claim():
        await driver.publish(attempt)
    for task in tasks:
        await driver.commit(task, size=1, reason=reason, detail=detail)


async def fail_slots_directly(driver: Driver, count: int) -> None:
    """Let that many of the admitted slots break the contract."""
    for attempt in await driver.claim(count):
        await driver.fail(attempt, FailureKind.CONTRACT)
