"""Random interleavings of all calls on real servers, held to a reference in Python after every step.

Rules: every call of every role, by workers and collectors of which some die or come too late, with what Redis or a
process may lose in between. A call may be made twice, as after a lost answer. What is checked is in
``reference_checks``; at the end of each example everything alive must bring every group to its end.

``FOREBAY_TEST_EXAMPLES`` and ``FOREBAY_TEST_STEPS`` make the walk longer.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Coroutine
from typing import Any

import pytest
from checked_run import Attempt, Collector
from checked_training import CheckedTraining, Reader
from draws import AGAIN, COLLECTORS, ENDS, PICK, REASONS, RULES, WORKERS
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from snapshot import Snapshot

from forebay.outcomes import FailureKind, SlotOutcome
from forebay.settings import RunSettings
from forebay.store import Store
from forebay.store.connection import Absence
from forebay.store.records import Channel

EXAMPLES = int(os.environ.get("FOREBAY_TEST_EXAMPLES", "25"))
STEPS = int(os.environ.get("FOREBAY_TEST_STEPS", "40"))


class Machine(RuleBasedStateMachine):
    """One run, from its first collector to the end of its data."""

    steps = 0
    """Made so far, by all examples."""

    def __init__(self, runner: asyncio.Runner, store: Store) -> None:
        super().__init__()
        self.runner = runner
        self.store = store
        self.broken = False

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run to the end."""
        try:
            return self.runner.run(work)
        except BaseException:
            self.broken = True  # so that nothing more is asked of this run
            raise

    @initialize(rules=RULES)
    def begin(self, rules: dict[str, Any]) -> None:
        """The first collector publishes the rules."""
        shares = {f"max_failed_share_{kind.value}": 1.0 for kind in FailureKind}
        self.run = CheckedTraining(self.store, RunSettings(retry_backoff_s=0, **shares, **rules))
        self.collectors = [Collector("c0"), Collector("c1")]
        self.do(self.run.lead(self.collectors[0]))

    @invariant()
    def all_is_as_it_must_be(self) -> None:
        """Every invariant, after every step."""
        Machine.steps += 1
        self.do(self.run.check())

    def teardown(self) -> None:
        """Everything alive ends every group; then nothing is left of the run in Redis."""
        try:
            if not self.broken:
                self.do(self.run.drain())
        finally:
            self.runner.run(forget(self.store))
            self.runner.run(self.store.close())

    # -- producers ----------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 4), size=st.integers(1, 4), channel=st.sampled_from(["", "", "", "direct", "eval"]),
          key=PICK, again=AGAIN)  # fmt: skip
    def submit(self, count: int, size: int, channel: str, key: int, again: bool) -> None:
        """Groups, some under keys that were used before."""
        for number in range(count):
            self.do(self.run.submit(f"k{key + number}", size, Channel(channel), again=again))

    @rule(again=AGAIN)
    def end_of_data(self, again: bool) -> None:
        """Until the next submit."""
        self.do(self.run.end_of_data(again=again))

    @precondition(lambda self: self.run.model.letters)
    @rule(pick=PICK, twice=st.booleans())
    def redrive(self, pick: int, twice: bool) -> None:
        """A dead letter."""
        letters = sorted(self.run.model.letters)
        self.do(self.run.redrive(letters[pick % len(letters)], twice=twice))

    @precondition(lambda self: self.run.model.stopped)
    @rule(again=AGAIN)
    def resume(self, again: bool) -> None:
        """A run that has stopped itself."""
        self.do(self.run.resume(again=again))

    # -- workers ------------------------------------------------------------------------------------------------------

    @rule(most=st.integers(1, 6))
    def admit(self, most: int) -> None:
        """By any worker."""
        self.do(self.run.admit(most))

    @precondition(lambda self: self.run.model.open_slots("queued"))
    @rule(worker=WORKERS, most=st.integers(1, 8))
    def claim(self, worker: str, most: int) -> None:
        """Attempts for a worker."""
        self.do(self.run.claim(worker, most))

    @precondition(lambda self: any(self.run.held.values()))
    @rule(ends=st.lists(st.tuples(PICK, ENDS, st.integers(-3, 1)), min_size=1, max_size=6), again=AGAIN)
    def publish(self, ends: list[tuple[int, Any, int]], again: bool) -> None:
        """Attempts that workers believe to be theirs, whether or not they still are."""
        for pick, end, age in ends:
            held = [attempt for attempts in self.run.held.values() for attempt in attempts]
            if held:
                self.end(held[pick % len(held)], end, age, again)

    @precondition(lambda self: self.run.tried)
    @rule(pick=PICK, end=ENDS, age=st.integers(-3, 0), again=AGAIN)
    def publish_late(self, pick: int, end: Any, age: int, again: bool) -> None:
        """Any attempt that ever was, a second time or after its supersession; what its worker did is repeated."""
        attempt = self.run.tried[pick % len(self.run.tried)]
        slot = self.run.model.groups[attempt[0]].slots[attempt[1]]
        if slot.by != attempt[2]:
            self.end(attempt, end, age, again)
        elif slot.outcome == "usable":
            self.end(attempt, (SlotOutcome.USABLE, None), slot.head - self.run.model.version, again)

    def end(self, attempt: Attempt, end: Any, age: int, again: bool) -> None:
        """Publish, with tokens of a version that is `age` away from the one in force."""
        outcome, kind = end
        version = max(0, self.run.model.version + age) if outcome is SlotOutcome.USABLE else -1
        self.do(self.run.publish(attempt, outcome, kind, version, again=again))

    @rule(worker=WORKERS)
    def heartbeat(self, worker: str) -> None:
        """Of a worker that may have been silent for too long."""
        self.do(self.run.heartbeat(worker))

    @precondition(lambda self: any(self.run.held.values()))
    @rule(worker=WORKERS, reap=COLLECTORS, comes_back=st.booleans())
    def fall_silent(self, worker: str, reap: int, comes_back: bool) -> None:
        """A worker is dead, or comes back and goes on with what it has."""
        self.do(self.run.lapse(worker))
        if not comes_back:
            self.run.held[worker] = []
        self.do(self.run.reap(self.collector(reap)))

    @rule(first=st.booleans(), again=AGAIN)
    def overtake(self, first: bool, again: bool) -> None:
        """A worker comes back after its leases: both it and its successor bring results, either of them first."""
        self.do(self.run.submit(uuid.uuid4().hex, 2, Channel.EVAL))
        self.do(self.run.admit())
        old = self.do(self.run.claim("w1"))
        self.do(self.run.lapse("w1"))
        self.do(self.run.reap(self.collector(2)))
        new = self.do(self.run.claim("w2")) if first else []
        for attempt in [*new, *old] if first else old:
            self.end(attempt, (SlotOutcome.USABLE, None), 0, again)
        self.do(self.run.claim("w2"))

    @precondition(lambda self: any(self.run.held.values()))
    @rule(pick=PICK, again=AGAIN)
    def release(self, pick: int, again: bool) -> None:
        """A worker drains."""
        held = [attempt for attempts in self.run.held.values() for attempt in attempts]
        self.do(self.run.release(held[pick % len(held)], again=again))

    @rule(picks=st.lists(PICK, min_size=1, max_size=4), leased=st.booleans())
    def lose_records(self, picks: list[int], leased: bool) -> None:
        """Jobs, or leases of workers that do not know it, that Redis has lost."""
        known = self.run.model.open_slots("leased" if leased else "queued")
        lost = sorted({known[pick % len(known)] for pick in picks}) if known else []
        self.do(self.run.lose(lost))

    # -- collectors ---------------------------------------------------------------------------------------------------

    def collector(self, one: int) -> Collector:
        """One of the two, or the one that leads."""
        leads = [number for number, collector in enumerate(self.collectors) if collector.epoch == self.run.model.epoch]
        return self.collectors[one if one < 2 else (leads or [0])[0]]

    @rule(one=COLLECTORS, again=AGAIN)
    def lead(self, one: int, again: bool) -> None:
        """A collector asks for the lease."""
        self.do(self.run.lead(self.collector(one), again=again))

    @rule(one=st.integers(0, 1))
    def take_over(self, one: int) -> None:
        """The lease ends, and a collector takes it; the other does not know yet."""
        self.do(self.run.lapse_lead())
        self.do(self.run.lead(self.collector(one)))

    @precondition(lambda self: self.collector(2).epoch == self.run.model.epoch)
    @rule(worker=WORKERS, loses=st.booleans(), steps=st.sampled_from([0, 5]))
    def depose(self, worker: str, loses: bool, steps: int) -> None:
        """The collector that leads does not know that it leads no more; there would be much for it to do."""
        old = self.collector(2)
        for until in ("commit", "publish"):
            for _ in range(self.run.rules.batch_size):
                self.do(self.run.submit(uuid.uuid4().hex, 1))
            self.do(self.run.advance(old, groups=self.run.rules.batch_size, until=until))
        self.do(self.run.fetch(old))
        self.do(self.run.set_version(self.run.model.version + steps))
        self.do(self.run.lapse(worker))
        if loses:
            self.do(self.run.submit(uuid.uuid4().hex, 1, Channel.EVAL))
            self.do(self.run.admit())
            self.do(self.run.lose(self.run.model.open_slots("queued")[-1:]))
        self.do(self.run.depose(old, self.collectors[old is self.collectors[0]]))

    @rule(one=st.integers(0, 1), again=AGAIN)
    def hold(self, one: int, again: bool) -> None:
        """A collector beats."""
        self.do(self.run.hold(self.collectors[one], again=again))

    @rule(pick=PICK)
    def lose_partition(self, pick: int) -> None:
        """The lease of a partition has ended, and its owner does not know."""
        self.do(self.run.lapse_partition(pick % self.run.rules.partitions))

    @rule(pick=PICK, one=st.integers(0, 1), again=AGAIN)
    def give_up(self, pick: int, one: int, again: bool) -> None:
        """A collector gives a partition up, and goes on with what it had of it."""
        self.do(self.run.give_up(self.collectors[one], pick % self.run.rules.partitions, again=again))

    @rule(one=st.integers(0, 1))
    def crash_collector(self, one: int) -> None:
        """What it had put together is put together again from the stream, by its successor."""
        collector = self.collector(one)
        collector.crash()
        self.crashes = getattr(self, "crashes", 0) + 1
        collector.name = f"c{one}-{self.crashes}"

    @rule(one=COLLECTORS)
    def read(self, one: int) -> None:
        """Results, whether or not it leads."""
        self.do(self.run.read(self.collector(one)))

    @rule(one=COLLECTORS, most=st.integers(1, 4), dumped=st.booleans(), again=AGAIN, reason=REASONS)
    def commit(self, one: int, most: int, dumped: bool, again: bool, reason: str) -> None:
        """What it can put together."""
        collector = self.collector(one)
        self.do(self.run.read(collector))
        for _ in range(min(most, len(collector.assembled))):
            self.do(self.run.commit(collector, reason, dumped=dumped, again=again))

    @precondition(lambda self: self.run.model.ready)
    @rule(one=COLLECTORS)
    def fetch(self, one: int) -> None:
        """Look at what waits for a batch."""
        self.do(self.run.fetch(self.collector(one)))

    @precondition(lambda self: any(collector.plan for collector in self.collectors))
    @rule(one=COLLECTORS, again=AGAIN)
    def cut(self, one: int, again: bool) -> None:
        """Cut what it has seen."""
        self.do(self.run.cut(self.collector(one), again=again))

    @rule(one=COLLECTORS, running_too=st.booleans(), again=AGAIN)
    def evict(self, one: int, running_too: bool, again: bool) -> None:
        """With and without early cancel."""
        self.do(self.run.evict(self.collector(one), running_too=running_too, again=again))

    @rule(one=COLLECTORS, again=AGAIN)
    def reap(self, one: int, again: bool) -> None:
        """Whatever is due."""
        self.do(self.run.reap(self.collector(one), again=again))

    @rule(one=COLLECTORS, again=AGAIN)
    def sweep(self, one: int, again: bool) -> None:
        """Whatever was lost; then every open slot is queued or leased."""
        self.do(self.run.sweep(self.collector(one), again=again))
        if self.collector(one).epoch == self.run.model.epoch:
            assert not self.run.model.open_slots("lost")

    @precondition(lambda self: self.run.model.tasks("running"))
    @rule(pick=PICK, one=COLLECTORS)
    def pass_deadline(self, pick: int, one: int) -> None:
        """Of a running group."""
        running = self.run.model.tasks("running")
        self.do(self.run.pass_deadline(running[pick % len(running)]))
        self.do(self.run.reap(self.collector(one)))

    @precondition(lambda self: self.run.model.groups)
    @rule(pick=PICK, one=COLLECTORS, again=AGAIN)
    def spoil_group(self, pick: int, one: int, again: bool) -> None:
        """A group that waits, or one that does not any more."""
        tasks = self.run.model.ready or sorted(self.run.model.groups)
        self.do(self.run.spoil_group(self.collector(one), tasks[pick % len(tasks)], again=again))

    # -- trainers -----------------------------------------------------------------------------------------------------

    def reader(self, pick: int, *, held: bool = False) -> Reader:
        """A rank of the trainer, or the follower; one that has something in hand, if `held`."""
        readers = [*self.run.trainer, *self.run.trainer, self.run.follower]
        if held:
            readers = [reader for reader in readers if reader.held]
        return readers[pick % len(readers)]

    @rule(pick=PICK, most=st.integers(1, 3), again=AGAIN)
    def take(self, pick: int, most: int, again: bool) -> None:
        """Batches, as far as there are some."""
        for _ in range(most):
            if self.do(self.run.take(self.reader(pick), again=again)) != "batch":
                break

    @precondition(lambda self: any(reader.held for reader in [*self.run.trainer, self.run.follower]))
    @rule(pick=PICK, most=st.integers(1, 3), again=AGAIN)
    def ack(self, pick: int, most: int, again: bool) -> None:
        """Batches that a reader has in hand."""
        reader = self.reader(pick, held=True)
        for _ in range(min(most, len(reader.held))):
            self.do(self.run.ack(reader, again=again))

    @rule(size=st.integers(1, 3), follower=st.booleans())
    def restart_readers(self, size: int, follower: bool) -> None:
        """A trainer crashes with batches in hand, and begins anew, perhaps in another world; or the follower does."""
        if follower:
            self.run.restart_follower()
        else:
            self.do(self.run.refuse_second_driver())
            self.run.restart(size)

    @rule(pick=PICK, again=AGAIN)
    def resume_after(self, pick: int, again: bool) -> None:
        """The trainer goes back to a checkpoint."""
        self.do(self.run.resume_after(pick % (self.run.model.numbers + 2), again=again))

    @precondition(lambda self: any(reader.held for reader in [*self.run.trainer, self.run.follower]))
    @rule(pick=PICK, again=AGAIN)
    def spoil_batch(self, pick: int, again: bool) -> None:
        """A batch in hand cannot be read."""
        self.do(self.run.spoil_batch(self.reader(pick, held=True), again=again))

    @rule(by=st.sampled_from([-1, 0, 1, 1, 1, 2]), again=AGAIN)
    def set_version(self, by: int, again: bool) -> None:
        """The trainer steps, or tries to go back."""
        self.do(self.run.set_version(self.run.model.version + by, again=again))

    @rule(by=st.integers(-2, 1), again=AGAIN)
    def recover(self, by: int, again: bool) -> None:
        """The trainer begins again from a checkpoint."""
        self.do(self.run.recover(max(0, self.run.model.version + by), again=again))

    @rule(dynamic=st.booleans(), again=AGAIN)
    def set_dynamic(self, dynamic: bool, again: bool) -> None:
        """The trainer takes batches of any size."""
        self.do(self.run.set_dynamic(dynamic=dynamic, again=again))

    @rule(pick=PICK, discard=st.booleans(), again=AGAIN)
    def collect(self, pick: int, discard: bool, again: bool) -> None:
        """A group by its id, most often one that is held."""
        tasks = self.run.model.tasks("held") or [*self.run.model.groups, 1000]
        task = tasks[pick % len(tasks)]
        if self.do(self.run.collect(task, again=again)) == "group" and discard:
            self.do(self.run.discard(task, again=again))

    @rule(pick=PICK, one=COLLECTORS)
    def outlast(self, pick: int, one: int) -> None:
        """Nobody asks for a result, or says that its rows are read."""
        kept = [g.task for g in self.run.model.groups.values() if g.state == "held" or (g.collected and not g.gone)]
        if kept:
            self.do(self.run.outlast(kept[pick % len(kept)]))
            self.do(self.run.reap(self.collector(one)))

    # -- passes -------------------------------------------------------------------------------------------------------

    @rule(one=COLLECTORS, groups=st.integers(1, 6), again=AGAIN, reason=REASONS,
          until=st.sampled_from(["admit", "claim", "publish", "commit", "cut", "cut"]))  # fmt: skip
    def advance(self, one: int, groups: int, again: bool, reason: str, until: str) -> None:
        """Submit, run, commit and cut, or a part of that, so that a short walk comes far."""
        if self.collector(2).epoch != self.run.model.epoch:
            self.do(self.run.lapse_lead())
            self.do(self.run.lead(self.collectors[one % 2]))
        for _ in range(groups):
            self.do(self.run.submit(uuid.uuid4().hex, 1 + groups % 2))
        self.do(self.run.advance(self.collector(one), groups=groups, until=until, reason=reason, again=again))

    @precondition(lambda self: self.run.model.batches)
    @rule(most=st.integers(1, 3), follower=st.booleans(), again=AGAIN)
    def train(self, most: int, follower: bool, again: bool) -> None:
        """Every rank takes a batch and acknowledges it, and the trainer steps."""
        for _ in range(most):
            if follower:
                self.do(self.run.take(self.run.follower, again=again))
            self.do(self.run.train(again=again))


async def forget(store: Store) -> None:
    """Nothing of the run is left."""
    look = await Snapshot.of(store)
    names = [name if name.startswith("arq:") else store.keys.prefix + name for name in look.values]
    if names:
        await store._ask(("UNLINK", *names))


@pytest.mark.timeout(600 + EXAMPLES * STEPS // 10)
def test_random_interleavings(any_redis_url: str) -> None:
    """Contract, sections 4, 6 and 13: whatever is called in whatever order, each group has one outcome and is fresh."""
    Machine.steps = 0
    with asyncio.Runner() as runner:
        runner.run(asyncio.sleep(0))

        def machine() -> Machine:
            absence = Absence(any_redis_url, 30.0, 30.0)
            return Machine(runner, Store(any_redis_url, f"machine-{uuid.uuid4().hex[:8]}/t", absence, marked=False))

        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                print_blob=True,
                # A failing walk is printed whole: to shrink one takes minutes of walks.
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
    assert Machine.steps > EXAMPLES, "the walk must go somewhere"
