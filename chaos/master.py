"""Runs the processes, hits them as the seed says, lets them come to rest, and judges."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import RedisError

from chaos import producer, trainer
from chaos.journal import Journal, read_journal
from chaos.ledger import ledger_faults
from chaos.recovery import Recovery, percentile
from chaos.schedule import Action, Blow, Target, blows
from chaos.stack import ChaosConfig, Fleet, own_redis, stack_config
from chaos.verdict import Verdict, judge
from chaos.workflow import is_doomed
from forebay import load
from forebay.errors import ConnectionLostError
from forebay.settings import Settings
from forebay.store import Store
from forebay.store.connection import connect
from forebay_ops.supervisor import LocalStack

__all__ = ["Progress", "Result", "run_chaos"]

RECOVERY_SLACK_S = 5.0
"""A killed worker's slots run again within a lease and this."""

_LOOK_S = 0.05
_BALANCE_S = 1.0
_AUDIT_S = 10.0
_ASK_S = 1.0
"""Longest wait for an answer of Redis while looking."""
_UP_S = 60.0
"""How long after the last blow everything may take to be up."""
_DRAIN_S = 120.0
"""And from then on until all that was submitted has ended."""
_AWAY = (RedisError, OSError, TimeoutError, ConnectionLostError)
_SIGNALS = {Action.KILL: signal.SIGKILL, Action.TERM: signal.SIGTERM, Action.STOP: signal.SIGSTOP}


@dataclass(slots=True)
class Progress:
    """Where a run stands."""

    phase: str = "starting"
    began: float = field(default_factory=time.monotonic)
    kills: Counter[str] = field(default_factory=Counter)
    signals: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By target and signal."""
    counters: dict[str, int] = field(default_factory=dict)
    in_flight: int = 0
    version: int = 0
    last: str = ""
    """The last blow."""


@dataclass(slots=True)
class Result:
    """What came out of a run."""

    seed: int
    seconds: float
    """Of blows."""
    kills: dict[str, int]
    signals: dict[tuple[str, str], int]
    """The same by target and signal."""
    verdict: Verdict
    recoveries: int
    recovery_p50_s: float | None
    recovery_p99_s: float | None
    recovery_max_s: float | None
    """Among those that nothing else disturbed."""
    dissolved: int
    """Batches that had gone stale when they were to be handed over."""
    faults: list[str]
    """What else is wrong: conservation, recovery, draining."""

    @property
    def failed(self) -> bool:
        """Whether anything is wrong."""
        verdict = self.verdict
        return bool(verdict.lost or verdict.duplicated or verdict.stale or verdict.wrong or self.faults)

    def line(self) -> str:
        """The one JSON object."""
        verdict = self.verdict
        return json.dumps({
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "groups": verdict.groups,
            "kills": self.kills,
            "lost": len(verdict.lost),
            "duplicated": len(verdict.duplicated),
            "stale": len(verdict.stale),
            "recovery_p50_s": None if self.recovery_p50_s is None else round(self.recovery_p50_s, 2),
            "recovery_p99_s": None if self.recovery_p99_s is None else round(self.recovery_p99_s, 2),
        })  # fmt: skip


async def run_chaos(config: ChaosConfig, duration_s: float, progress: Progress) -> Result:
    """Run for `duration_s` of blows; keeps `progress` up to date.

    Raises:
        StackFailedError: a process could not be started.
        SystemExit: a signal asked for the end; nothing runs any more.
    """
    own_redis()
    (config.folder / "books").mkdir(parents=True, exist_ok=True)
    async with LocalStack(stack_config(config)) as stack:
        settings = load(
            Settings,
            redis_url=stack.redis_url,
            experiment_name="chaos",
            trial_name=f"seed{config.seed}",
            redis_timeout_s=_ASK_S,
            redis_away_s=_ASK_S,
        )
        store, client = Store.open(settings, max_connections=4), connect(stack.redis_url, max_connections=4)
        fleet = Fleet(stack)
        try:
            return await _Master(config, fleet, store, client, progress).run(duration_s)
        finally:
            fleet.all_go_on()
            await store.close()
            await client.aclose(close_connection_pool=True)


class _Master:
    def __init__(self, config: ChaosConfig, fleet: Fleet, store: Store, client: Any, progress: Progress) -> None:
        self._config = config
        self._books = config.folder / "books"
        self._fleet = fleet
        self._store = store
        self._redis = client
        self._progress = progress
        self._recovery = Recovery(client, store.keys)
        self._blows = Journal(config.folder / "blows.jsonl")
        self._outcomes: dict[int, str] = {}
        self._faults: list[str] = []
        self._releases: set[asyncio.TimerHandle] = set()

    async def run(self, duration_s: float) -> Result:
        looks = [
            asyncio.create_task(self._every(_LOOK_S, self._look)),
            asyncio.create_task(self._every(_BALANCE_S, self._balance)),
            asyncio.create_task(self._every(_AUDIT_S, self._audit)),
        ]
        try:
            seconds = await self._strike(duration_s)
            await self._come_to_rest()
        finally:
            for task in looks:
                task.cancel()
            await asyncio.gather(*looks, return_exceptions=True)
            for release in self._releases:
                release.cancel()
        for task in looks:
            if not task.cancelled():
                task.result()  # a look that failed would have seen nothing
        await self._last_look()
        verdict = judge(
            read_journal(self._books / producer.BOOK),
            read_journal(self._books / trainer.BOOK),
            self._outcomes,
            self._config.max_staleness,
        )
        self._judge_recovery()
        recovered = self._recovery.seconds
        return Result(
            seed=self._config.seed,
            seconds=seconds,
            kills={target.value: self._progress.kills[target] for target in Target},
            signals=dict(self._progress.signals),
            verdict=verdict,
            recoveries=len(recovered),
            recovery_p50_s=percentile(recovered, 0.5),
            recovery_p99_s=percentile(recovered, 0.99),
            recovery_max_s=max(self._recovery.calm_seconds, default=None),
            dissolved=self._progress.counters.get("batches_dissolved", 0),
            faults=self._faults,
        )

    # -- blows --------------------------------------------------------------------------------------------------------

    async def _strike(self, duration_s: float) -> float:
        """Hit for `duration_s`; the seconds that it took."""
        self._progress.phase = "chaos"
        began = time.monotonic()
        for blow in blows(self._config.seed, self._config.lease_s):
            left = began + duration_s - time.monotonic()
            if left <= blow.gap_s:
                await asyncio.sleep(max(0.0, left))
                break
            await asyncio.sleep(blow.gap_s)
            while time.monotonic() < began + duration_s:
                if await self._hit(blow):
                    break
                await asyncio.sleep(_LOOK_S)  # all of its kind are down just now
        return time.monotonic() - began

    async def _hit(self, blow: Blow) -> bool:
        up = self._fleet.up(blow.target)
        if not up:
            return False
        process = up[int(blow.place * len(up))]
        measured = blow.target is Target.WORKER and blow.action is Action.KILL
        held = await self._held_by(process.pid or 0) if measured else []
        if process not in self._fleet.up(blow.target):  # it ended by itself meanwhile
            return False
        pid = self._fleet.hit(process, _SIGNALS[blow.action])
        self._recovery.begin(held)
        if blow.hold_s:
            loop = asyncio.get_running_loop()
            self._releases.add(loop.call_later(blow.hold_s, self._fleet.go_on, pid))
        self._blows.write(
            "blow", at=time.time(), target=process.spec.name, pid=pid, action=blow.action, hold_s=blow.hold_s, held=held
        )
        self._progress.kills[blow.target] += 1
        self._progress.signals[blow.target, blow.action] += 1
        self._progress.last = f"{blow.action} {process.spec.name}"
        return True

    async def _held_by(self, pid: int) -> list[tuple[int, int, int]]:
        try:
            async with asyncio.timeout(_ASK_S):
                return await self._recovery.held_by(pid)
        except _AWAY:
            return []  # not to be learnt: this kill is not measured

    async def _come_to_rest(self) -> None:
        """No more blows: everything comes up, the data ends, and all that was submitted ends."""
        self._progress.phase = "drain"
        self._fleet.all_go_on()
        if not await self._until(lambda: self._fleet.all_up, _UP_S):
            self._faults.append(f"not everything was up {_UP_S:g} s after the last blow")
        (self._books / producer.END).touch()
        if not await self._until(self._trainer_is_done, _DRAIN_S):
            self._faults.append(f"the trainer had not come to the end of the data after {_DRAIN_S:g} s of rest")
        await self._until(lambda: not self._recovery.waiting, _DRAIN_S)

    def _trainer_is_done(self) -> bool:
        records = read_journal(self._books / trainer.BOOK)
        return bool(records) and records[-1]["kind"] == "end"

    @staticmethod
    async def _until(condition: Callable[[], bool], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.2)
        return True

    # -- looks --------------------------------------------------------------------------------------------------------

    @staticmethod
    async def _every(seconds: float, look: Callable[[], Awaitable[None]]) -> None:
        while True:
            with contextlib.suppress(*_AWAY):
                async with asyncio.timeout(_ASK_S + 1):
                    await look()
            await asyncio.sleep(seconds)

    async def _look(self) -> None:
        needed = (Target.REDIS, Target.COLLECTOR, Target.SERVER, Target.WORKER)
        if not all(self._fleet.up(target) for target in needed):
            self._recovery.disturb()
        try:
            await self._recovery.look()
        except _AWAY:
            self._recovery.disturb()
            raise

    async def _balance(self) -> None:
        """Conservation, at this instant."""
        status = await self._store.status()
        progress = self._progress
        progress.counters, progress.in_flight, progress.version = status.counters, status.in_flight, status.version
        came = status.count("submitted") + status.count("requeued")
        went = status.count("delivered") + status.count("rejected") + status.count("evicted") + status.in_flight
        if came != went and len(self._faults) < 20:
            self._faults.append(f"conservation: {came} groups submitted and requeued, {went} ended or in flight")

    async def _audit(self) -> None:
        """How every task id that was ever given out has ended. What is known stays: tombstones expire in an hour."""
        keys = self._store.keys
        last = int(await self._redis.hget(keys.state, "task_seq") or 0)
        final = {"delivered", "rejected", "evicted"}
        unknown = [task for task in range(1, last + 1) if self._outcomes.get(task) not in final]
        for at in range(0, len(unknown), 500):
            part = unknown[at : at + 500]
            pipe = self._redis.pipeline(transaction=False)
            for task in part:
                pipe.hget(keys.group(task), "st")
            states = await pipe.execute()
            self._outcomes |= {
                task: "gone" if state is None else state.decode() for task, state in zip(part, states, strict=True)
            }

    async def _last_look(self) -> None:
        await self._audit()
        await self._balance()
        status = await self._store.status()
        if status.in_flight:
            self._faults.append(f"{status.in_flight} groups are still in flight")
        if status.stopped is not None:
            self._faults.append(f"the run has stopped itself: {status.stopped}")
        self._faults += ledger_faults(
            self._outcomes,
            await self._store.drops(),
            status.counters,
            lambda prompt: is_doomed(self._config.seed, prompt),
        )

    def _judge_recovery(self) -> None:
        bound_s = self._config.lease_s + RECOVERY_SLACK_S
        slow = [seconds for seconds in self._recovery.calm_seconds if seconds > bound_s]
        if slow:
            self._faults.append(
                f"{len(slow)} slots of killed workers stood still for longer than {bound_s:g} s, up to "
                f"{max(slow):.1f} s, with Redis, a collector, a server and a worker up"
            )
        if self._recovery.waiting:
            self._faults.append(f"{self._recovery.waiting} slots of killed workers never came back")
