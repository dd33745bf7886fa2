"""Every script on real servers: in the wrong state it does nothing, repeated nothing more, fenced nothing.

One table: each script has how to come to a state in which it does something, the call, and how to come to a state in
which it must not do anything. "Nothing" is judged by all keys of the run. What a script does when it does something is
tested where its rule is: ``test_store.py``, ``test_ledgers.py``, ``test_poison.py`` and the conformance suite.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import pytest
from driver import Driver
from snapshot import Snapshot

from forebay.errors import BatchGoneError, ConsumerError, FencedError, QueueFullError, RunStoppedError, VersionError
from forebay.outcomes import FailureKind, SlotOutcome
from forebay.settings import RunSettings, Settings
from forebay.store import Store
from forebay.store.records import BatchEntry, Channel, Cursor, ResultEntry
from forebay.wire.envelopes import GroupSpec

REFUSALS = (FencedError, BatchGoneError, ConsumerError, QueueFullError, RunStoppedError, VersionError)
Act = Callable[[Driver], Awaitable[Any]]
TRAINER = Cursor("trainer")


@pytest.fixture
async def driver(any_redis_url: str, run_name: str) -> AsyncIterator[Driver]:
    """A driver that leads, with batches of 2 groups, one per version, staleness 1, on Valkey and on Redis."""
    store = Store.open(Settings(REDIS_URL=any_redis_url, experiment_name=run_name.split("/", maxsplit=1)[0]))
    made = Driver(store)
    await made.lead()
    yield made
    await store.close()


async def nothing(driver: Driver) -> None:
    """A run in which nothing was submitted."""


async def queued(driver: Driver) -> None:
    """Group 1 waits to start."""
    await driver.submit(1)


async def admitted(driver: Driver) -> None:
    """Group 1 runs, its slots are queued."""
    await driver.submit(1)
    await driver.admit()


async def running(driver: Driver) -> None:
    """Group 1 runs, both its slots are leased."""
    await driver.submit(1)
    await driver.admit()
    await driver.claim()


async def filled(driver: Driver) -> None:
    """Both slots of group 1 have ended."""
    await running(driver)
    for idx in (0, 1):
        await driver.publish((1, idx, 1))


async def ready(driver: Driver) -> None:
    """Groups 1 and 2 wait for a batch."""
    await driver.finish(2)


async def stale(driver: Driver) -> None:
    """Groups 1 and 2 wait, and are too old."""
    await ready(driver)
    await driver.store.set_version(5)


async def held(driver: Driver) -> None:
    """Group 1 is held for whoever asks for it."""
    await driver.submit(1, channel=Channel.DIRECT)
    await driver.run_admitted()


async def collected(driver: Driver) -> None:
    """Group 1 was handed over by its id."""
    await held(driver)
    await driver.store.collect(1)


async def cut(driver: Driver) -> None:
    """Batch 1 waits for a reader."""
    await ready(driver)
    await driver.cut()


async def taken(driver: Driver) -> None:
    """Batch 1 was handed over."""
    await cut(driver)
    await driver.take()


async def lapsed(driver: Driver) -> None:
    """The leases of group 1 have ended."""
    await running(driver)
    for idx in (0, 1):
        await driver.store._ask(("ZADD", driver.store.keys.leases, 1, f"1:{idx}:1"))


async def lost(driver: Driver) -> None:
    """The leases of group 1 are lost."""
    await running(driver)
    await driver.store._ask(("DEL", driver.store.keys.leases))


async def dead(driver: Driver) -> None:
    """Group 1 was rejected, with dead letters."""
    await driver.store.submit(GroupSpec("forebay:x", {}, "p").pack(), b"rules", 1, "k")
    await driver.admit()
    for attempt in await driver.claim():
        await driver.store.publish(
            *attempt,
            outcome=SlotOutcome.FAILED,
            kind=FailureKind.DATA,
            header=b"",
            rows=None,
            rows_ttl_s=60,
            reason="no",
        )
    await driver.commit(1, size=1, reason="no_usable_slot")


async def stopped(driver: Driver) -> None:
    """The run has stopped itself."""
    await driver.lead(max_barren_groups=1)
    await filled(driver)
    await driver.commit(1, reason="below_minimum")


async def no_lease(driver: Driver) -> None:
    """Nobody leads."""
    await driver.store.resign("collector-1")


async def poisoned(driver: Driver) -> None:
    """An entry in the results that is none."""
    await driver.store._ask(("XADD", driver.store.keys.results(0), "1-1", "odd", "1"))


async def at_version_3(driver: Driver) -> None:
    """The trainer has stepped three times."""
    await driver.store.set_version(3)


async def ended(driver: Driver) -> None:
    """The data has ended."""
    await driver.store.end_of_data()


async def unowned(driver: Driver) -> None:
    """Nobody owns the partition of the results."""
    await driver.store.give_up("collector-1", 0)


async def resigned(driver: Driver) -> None:
    """Nobody leads, and nobody owns the partition of the results."""
    await driver.store.resign("collector-1")


async def submitted(driver: Driver) -> None:
    """Group 1 waits to start under a key that is known."""
    await _submit(driver)


async def key_of_another(driver: Driver) -> None:
    """The key names another group."""
    await submitted(driver)
    await driver.store._ask(("SET", driver.store.keys.prefix + "submitted:key", "7", "EX", 60))


async def back(driver: Driver) -> None:
    """Redis has gone back in time."""
    await taken(driver)
    await _rolled_back(driver)


async def reconciled(driver: Driver) -> None:
    """The run was reconciled with the trainer's checkpoint."""
    await back(driver)
    await _reconcile(driver)


async def acked(driver: Driver) -> None:
    """Batch 1 is done with, and its groups are gone."""
    await taken(driver)
    await _ack(driver)


async def followed(driver: Driver) -> None:
    """`trainer` follows, and another consumer drives."""
    await driver.store.join("other")


def _publish(driver: Driver) -> Awaitable[Any]:
    return driver.publish((1, 0, 1))


def _fail(driver: Driver) -> Awaitable[Any]:
    return driver.fail((1, 0, 1))


def _redrive(driver: Driver) -> Awaitable[Any]:
    return driver.store._run("redrive", 1, "word", 0)


def _spoil_batch(driver: Driver) -> Awaitable[Any]:
    return driver.store.spoil_batch(TRAINER, BatchEntry("0-1", 1, b"", 0, redelivered=False), "odd")


def _ack(driver: Driver) -> Awaitable[Any]:
    return driver.store.ack(TRAINER, BatchEntry("0-1", 1, b"", 0, redelivered=False))


def _set_aside(driver: Driver) -> Awaitable[Any]:
    entry = ResultEntry("1-1", -1, -1, b"", "odd", 0)
    return driver.store.set_aside_result(driver.held[0], entry, "odd")


def _rolled_back(driver: Driver) -> Awaitable[Any]:
    return driver.store._run("rolled_back", "it has", 0, "", "state", "task_seq", 100)


def _reconcile(driver: Driver) -> Awaitable[Any]:
    return driver.store.settle_checkpoint(0, 0, "trainer", whole=False)


def _commit(driver: Driver) -> Awaitable[Any]:
    return driver.commit(1)


def _cut(driver: Driver) -> Awaitable[Any]:
    return driver.store.cut(driver.epoch, b"index", [1, 2])


def _submit(driver: Driver) -> Awaitable[Any]:
    return driver.store.submit(b"spec", b"rules", 2, "key")


def _configure(driver: Driver) -> Awaitable[Any]:
    return driver.store.configure(driver.epoch, RunSettings(batch_size=3))


@dataclass(frozen=True)
class Case:
    """One script."""

    script: str
    works: Act
    """Comes to a state in which the call does something."""
    call: Act
    idle: Act | None
    """Comes to a state in which it must do nothing; None: it does something in any."""
    epoch: bool = False
    """It takes the epoch of whoever leads."""
    owned: bool = False
    """It takes the epoch of a partition's owner."""
    again: tuple[str, ...] = ()
    """Fields of counters and state that a repetition may change."""
    looks: bool = False
    """It changes nothing at all."""


CASES = [
    Case("submit", nothing, _submit, stopped),
    Case("admit", queued, lambda d: d.store.admit(10, 60), stopped),
    Case("claim", admitted, lambda d: d.store.claim("w1", 10, 60), running),
    Case("heartbeat", running, lambda d: d.store.heartbeat("w1", {}, 60, [(1, 0, 1)]), None),
    Case("publish", running, _publish, filled),
    Case("publish", running, _fail, filled),
    Case("release", running, lambda d: d.store.release(1, 0, 1), filled),
    Case("lead", no_lease, lambda d: d.store.lead("collector-2", 60), nothing),
    Case("configure", nothing, _configure, None, epoch=True),
    Case("commit", filled, _commit, running, owned=True),
    Case("cut", ready, _cut, cut, epoch=True),
    Case("evict", stale, lambda d: d.store.evict_stale(d.epoch, running_too=True), ready, epoch=True),
    Case("reap", lapsed, lambda d: d.store.reap(d.epoch), running, epoch=True),
    Case("sweep", lost, lambda d: d.store.sweep(d.epoch), running, epoch=True),
    Case("spoil_group", ready, lambda d: d.store.spoil_group(d.epoch, 1, "odd", b""), taken, epoch=True),
    Case("set_aside", poisoned, _set_aside, nothing, owned=True),
    Case("hold", unowned, lambda d: d.store.hold("collector-1", 60), nothing),
    Case("give_up", nothing, lambda d: d.store.give_up("collector-1", 0), unowned),
    Case("resign", nothing, lambda d: d.store.resign("collector-1"), resigned),
    Case("owners", running, lambda d: d.store.owners(), None, looks=True),
    Case("look", running, lambda d: d.store._run("look", 0, 8, 16), None, looks=True),
    Case("look", running, lambda d: d.store._run("look", 1, 8, 16), None, again=("watched_at",)),
    Case("first_keys", nothing, lambda d: d.store.first_keys("flow", ["rewards"]), None),
    Case("forget_key", submitted, lambda d: d.store.forget_key("key", 1), key_of_another),
    Case("rolled_back", nothing, _rolled_back, reconciled),
    Case("take_back", queued, lambda d: d.store.take_back([1]), acked),
    Case("take_back", filled, lambda d: d.store.take_back([1]), acked),
    Case("take_back", cut, lambda d: d.store.take_back([1]), acked),
    Case("reconcile", taken, _reconcile, None),
    Case("reconcile", back, _reconcile, reconciled),
    Case("join", nothing, lambda d: d.store.join(TRAINER), followed),
    Case("take", cut, lambda d: d.take(), followed),
    Case("ack", taken, _ack, cut),
    Case("resume_after", taken, lambda d: d.store.resume_after(TRAINER, 1), followed),
    Case("spoil_batch", taken, _spoil_batch, cut),
    Case("set_version", nothing, lambda d: d.store.set_version(2), at_version_3),
    Case("recover", at_version_3, lambda d: d.store.recover(1), None, again=("recoveries",)),
    Case("dynamic", nothing, lambda d: d.store.set_dynamic(True), None),
    Case("end_of_data", nothing, lambda d: d.store.end_of_data(), ended),
    Case("resume", stopped, lambda d: d.store.resume(), running),
    Case("collect", held, lambda d: d.store.collect(1), running),
    Case("discard", collected, lambda d: d.store.discard([1]), held),
    Case("redrive", dead, _redrive, running),
]
NAMES = [f"{case.script}-{number}" for number, case in enumerate(CASES)]


async def attempt(case: Case, driver: Driver) -> Any:
    """The answer, or the refusal."""
    try:
        return await case.call(driver)
    except REFUSALS as refusal:
        return refusal


def test_every_script_is_here() -> None:
    """A script without a line in the table has no test of this kind."""
    scripts = {entry.name.removesuffix(".lua") for entry in (files("forebay.store") / "lua").iterdir()}
    assert {name for name in scripts if not name.startswith("_")} == {case.script for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=NAMES)
async def test_a_repetition_changes_nothing(driver: Driver, case: Case) -> None:
    """Contract 6: a call may be repeated after a lost answer, whatever it is; the first one did something."""
    await case.works(driver)
    before = await Snapshot.of(driver.store)
    await case.call(driver)
    first = await Snapshot.of(driver.store)
    assert bool(before.changes(first)) is not case.looks, "the first call must do something, unless it only looks"
    await case.call(driver)
    assert first.changes(await Snapshot.of(driver.store), case.again) == []


@pytest.mark.parametrize("case", [case for case in CASES if case.idle is not None])
async def test_in_the_wrong_state_it_does_nothing(driver: Driver, case: Case) -> None:
    """Contract 6: each transition checks the state that it expects."""
    assert case.idle is not None
    await case.idle(driver)
    before = await Snapshot.of(driver.store)
    await attempt(case, driver)
    assert before.changes(await Snapshot.of(driver.store)) == []


@pytest.mark.parametrize("case", [case for case in CASES if case.owned])
async def test_fenced_by_the_partition_alone_it_does_nothing(driver: Driver, case: Case) -> None:
    """Whoever leads still, but gave the partition up, changes nothing in it."""
    await case.works(driver)
    await driver.store.give_up("collector-1", 0)
    before = await Snapshot.of(driver.store)
    assert isinstance(await attempt(case, driver), FencedError)
    assert before.changes(await Snapshot.of(driver.store)) == []


@pytest.mark.parametrize("case", [case for case in CASES if case.epoch or case.owned])
async def test_fenced_it_does_nothing(driver: Driver, case: Case) -> None:
    """A collector that lost its lease changes nothing, in whatever state the run is."""
    await case.works(driver)
    await driver.store.resign("collector-1")
    await driver.store.lead("collector-2", 60)
    await driver.store.hold("collector-2", 60)
    before = await Snapshot.of(driver.store)
    answer = await attempt(case, driver)
    assert before.changes(await Snapshot.of(driver.store)) == []
    assert isinstance(answer, FencedError) or answer in ([], 0, -1)


def test_what_takes_an_epoch_is_tested_for_it() -> None:
    """The scripts that ask whether they are fenced, by the lead or a partition, are those marked so in the table."""
    folder = files("forebay.store") / "lua"
    texts = {case.script: (folder / f"{case.script}.lua").read_text() for case in CASES}
    led = {script for script, text in texts.items() if re.search(r"\bif fenced\(", text)}
    owned = {script for script, text in texts.items() if "partition_fenced(" in text}
    assert led == {case.script for case in CASES if case.epoch}
    assert owned == {case.script for case in CASES if case.owned}


async def test_a_sum_may_lose_nothing(driver: Driver) -> None:
    """What has no bytes is taken off a sum as 0: Redis refuses the -0 that Lua makes of it, and the call with it."""
    store, prefix = driver.store, driver.store.keys.prefix
    await store.submit(b"", b"", 1, "no bytes")
    await driver.admit()
    await driver.claim()
    await driver.fail((1, 0, 1), FailureKind.DATA)
    await driver.commit(1, size=1, reason="no_usable_slot")
    await driver.lead(dead_letter_entries=1)
    await dead_after(driver, 2)
    assert await store._redis.zrange(store.keys.dead, 0, -1) == [b"2"], "the one of no bytes is forgotten"
    assert int(await store._redis.hget(prefix + "state", "queued_bytes") or 0) == 0


async def dead_after(driver: Driver, task: int) -> None:
    """One more group with dead letters."""
    await driver.submit(1, size=1)
    await driver.admit()
    await driver.claim()
    await driver.fail((task, 0, 1), FailureKind.DATA)
