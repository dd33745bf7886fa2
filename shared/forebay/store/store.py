"""One typed method for each transition. Nothing else in the project talks to Redis.

Invariants, each held by the scripts and proved by the named test (``tests/integration/``):

- Conservation: submitted = delivered + rejected + evicted + in flight (``test_store.py::test_conservation``).
- A slot has one counted result (``test_store.py::test_first_valid_result_wins``); repeating any call changes nothing
  (``test_store.py::test_repeating_any_call_changes_nothing``).
- running + ready + cut + delivered_ahead <= (s + 1) * k * B (``test_store.py::test_admission_honours_capacity``).
- No first hand-over contains a stale group (``test_store.py::test_stale_batch_is_dissolved``).
- Who lost its lease changes nothing (``test_store.py::test_fencing``).
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import msgpack
import redis.asyncio as redis_asyncio
from pydantic import ValidationError
from redis.exceptions import NoScriptError

from forebay.errors import FencedError, QueueFullError, RunNotReadyError, RunStoppedError, VersionError
from forebay.outcomes import FailureKind, SlotOutcome
from forebay.settings import RunSettings, Settings
from forebay.store.connection import connect, riding_through
from forebay.store.keys import Keys
from forebay.store.pipelining import Pipeliner
from forebay.store.records import BatchEntry, Channel, Collected, CutRule, Lease, ResultEntry, RunStatus, Taken
from forebay.store.scripts import source

__all__ = ["Store", "run_stopped"]

T = TypeVar("T")

_IDEMPOTENCY_TTL_S = 7 * 86400
_REPEAT_TTL_S = 600
_BLOCK_MAX_S = 1.0


class Store:
    """The state of one run."""

    def __init__(self, client: redis_asyncio.Redis, url: str, run: str, timeout_s: float) -> None:
        self._redis = client
        self._url = url
        self._timeout_s = timeout_s
        self.keys = Keys(run)
        self._pipeliner = Pipeliner(client)

    @classmethod
    def open(cls, settings: Settings, *, max_connections: int = 64) -> Store:
        """The store of the run that `settings` name; connects on the first call."""
        url = settings.resolved_redis_url()
        return cls(connect(url, max_connections=max_connections), url, settings.run, settings.redis_timeout_s)

    async def close(self) -> None:
        """Close the connections."""
        await self._pipeliner.close()
        await self._redis.aclose(close_connection_pool=True)

    # -- calling ------------------------------------------------------------------------------------------------------

    async def _ride(self, call: Callable[[], Awaitable[T]]) -> T:
        return await riding_through(call, self._url, self._timeout_s)

    async def _ask(self, *commands: tuple[Any, ...]) -> list[Any]:
        """The answers to repeatable `commands`; the first that is an error is raised."""

        async def once() -> list[Any]:
            answers = await self._pipeliner.send(*commands)
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            return answers

        return await self._ride(once)

    async def _run(self, name: str, *args: Any, before: tuple[Any, ...] | None = None) -> Any:
        """Run script `name`, with the command `before` ahead of it in the same breath."""
        script = source(name)
        call = ("EVALSHA", script.sha1, 1, self.keys.prefix, *args)
        commands = [call] if before is None else [before, call]
        try:
            answers = await self._ask(*commands)
        except NoScriptError:  # the first call, or the server was restarted
            answers = await self._ask(*commands[:-1], ("SCRIPT", "LOAD", script.text), call)
        return answers[-1]

    async def ping(self) -> None:
        """Raise ConnectionLostError unless Redis answers."""
        await self._ask(("PING",))

    # -- the producer -------------------------------------------------------------------------------------------------

    async def submit(
        self,
        spec: bytes,
        rules: bytes,
        group_size: int,
        idempotency_key: str | None = None,
        channel: Channel = Channel.BATCHES,
    ) -> tuple[int, bool]:
        """Enqueue a group: its task id, and whether this call created it.

        Without an `idempotency_key` one is made that lives just long enough for a repetition after a lost answer.

        Raises:
            QueueFullError: the queue is at its bound.
            RunStoppedError: the run has stopped itself.
        """
        key, ttl_s = idempotency_key, _IDEMPOTENCY_TTL_S
        if key is None:
            key, ttl_s = uuid.uuid4().hex, _REPEAT_TTL_S
        first, second = await self._run("submit", key, ttl_s, spec, group_size, rules, channel.value)
        if first == b"stopped":
            raise run_stopped(second.decode())
        if first == b"full":
            raise QueueFullError(
                f"{int(second)} groups wait to start, the bound max_queued_groups; submit again when some have started"
            )
        return int(first), second == b"created"

    async def queued(self) -> int:
        """How many groups for the batches wait to start."""
        (count,) = await self._ask(("XLEN", self.keys.prompts))
        return int(count)

    async def end_of_data(self) -> None:
        """No more groups: the last batch may be partial, and readers come to an end."""
        await self._run("end_of_data")

    # -- the worker ---------------------------------------------------------------------------------------------------

    async def admit(self, most: int, deadline_s: float) -> tuple[int, int]:
        """Start up to `most` queued groups: ``(started, capacity left)``."""
        started, left = await self._run("admit", most, int(deadline_s * 1000))
        return int(started), int(left)

    async def claim(self, worker: str, most: int, lease_s: float) -> list[Lease]:
        """Up to `most` attempts that are due and still wanted, leased to `worker`."""
        claimed, specs = await self._run("claim", worker, most, int(lease_s * 1000))
        by_task = {int(task): spec for task, spec in zip(specs[::2], specs[1::2], strict=True)}
        leases = []
        for job, size, left_ms in claimed:
            job_id = job.decode()
            attempt = Keys.parse_job_id(job_id)
            leases.append(Lease(job_id, attempt, by_task[attempt[0]], int(size), int(left_ms) / 1000))
        return leases

    async def heartbeat(
        self, worker: str, about: dict[str, Any], lease_s: float, held: Iterable[tuple[int, int, int]]
    ) -> list[tuple[int, int, int]]:
        """Say that `worker` lives and renew what it holds: the attempts that it has lost meanwhile."""
        flat = [part for attempt in held for part in attempt]
        lost = await self._run("heartbeat", worker, msgpack.packb(about), int(lease_s * 1000), *flat)
        return [cast("tuple[int, int, int]", tuple(int(part) for part in item.split(b":"))) for item in lost]

    async def sign_off(self, worker: str) -> None:
        """Take `worker` off the list of live workers."""
        await self._ask(("HDEL", self.keys.workers, worker), ("ZREM", self.keys.workers_seen, worker))

    async def publish(
        self,
        task_id: int,
        sample_idx: int,
        attempt: int,
        *,
        outcome: SlotOutcome,
        kind: FailureKind | None,
        header: bytes,
        rows: bytes | None,
        rows_ttl_s: float,
        head: int = -1,
        reason: str = "",
    ) -> str:
        """Record how an attempt ended, its rows first: accepted, retry, duplicate, superseded or late."""
        before = None
        if rows is not None:
            before = ("SET", self.keys.rows(task_id, sample_idx, attempt), rows, "PX", int(rows_ttl_s * 1000))
        answer = await self._run(
            "publish", task_id, sample_idx, attempt, outcome.value, kind or "", header, head, reason, before=before
        )
        return str(answer.decode())

    async def release(self, task_id: int, sample_idx: int, attempt: int) -> bool:
        """Hand an attempt back, to run again at once on another worker."""
        return bool(await self._run("release", task_id, sample_idx, attempt))

    async def first_keys(self, workflow: str, keys: Iterable[str]) -> frozenset[str]:
        """The key set of the first tensor result of `workflow` in the run: `keys`, if there was none before."""
        mine = msgpack.packb(sorted(keys))
        name = self.keys.first_keys
        _, first = await self._ask(("HSETNX", name, workflow, mine), ("HGET", name, workflow))
        return frozenset(msgpack.unpackb(first))

    # -- the collector ------------------------------------------------------------------------------------------------

    async def lead(self, owner: str, lease_s: float) -> int:
        """Take or renew the collector lease: the fencing epoch, or 0 if another collector holds it."""
        return int(await self._run("lead", owner, int(lease_s * 1000)))

    async def resign(self, owner: str) -> None:
        """Give the collector lease up, if `owner` holds it."""
        (holder,) = await self._ask(("GET", self.keys.collector))
        if holder == owner.encode():
            await self._ask(("DEL", self.keys.collector))

    async def configure(self, epoch: int, settings: RunSettings) -> None:
        """Publish the run's rules. Raises FencedError."""
        fields: dict[str, Any] = {
            "B": settings.batch_size,
            "k": settings.batches_per_version,
            "s": settings.max_staleness,
            "max_concurrent": settings.max_concurrent,
            "max_queued": settings.max_queued_groups,
            "max_direct": settings.max_concurrent_direct,
            "max_requeues": settings.max_requeues if settings.requeue_evicted else 0,
            "max_contract_errors": settings.max_contract_errors,
            "window": settings.failure_window,
            "held_ms": int(settings.rows_ttl_s * 1000),
            "backoff_ms": int(settings.retry_backoff_s * 1000),
            **{f"share:{kind.value}": settings.max_failed_share(kind) for kind in FailureKind},
            **{f"attempts:{kind.value}": settings.attempts(kind) for kind in FailureKind},
        }
        flat = [part for item in fields.items() for part in item]
        if not await self._run("configure", epoch, settings.model_dump_json(), *flat):
            raise _fenced()

    async def read_results(self, after: str, count: int, block_s: float) -> list[ResultEntry]:
        """Entries of the results stream after entry `after` (``"0"``: from the start), waiting up to `block_s`.

        Entries stay in the stream until their group is committed, so a new collector begins at the start.
        """
        read = await self._ride(
            lambda: self._redis.xread({self.keys.results: after}, count=count, block=_block_ms(block_s))
        )
        if not read:
            return []
        return [
            ResultEntry(entry.decode(), int(fields[b"t"]), int(fields[b"i"]), fields[b"h"])
            for entry, fields in read[0][1]
        ]

    async def group_rules(self, task_id: int) -> tuple[bytes, int, int | None] | None:
        """``(rules, group size, parent)`` of a running group; None of one that has ended."""
        ((state, rules, size, parent),) = await self._ask(
            ("HMGET", self.keys.group(task_id), "st", "rules", "n", "parent")
        )
        return (rules, int(size), int(parent) if parent else None) if state == b"running" else None

    async def outcome(self, task_id: int) -> tuple[str, str]:
        """``(state, reason)`` of a group, empty where it is not known."""
        ((state, why),) = await self._ask(("HMGET", self.keys.group(task_id), "st", "why"))
        return (state or b"").decode(), (why or b"").decode()

    async def commit(
        self, epoch: int, task_id: int, decision: str, *, reason: str = "", summary: bytes = b"", head: int = -1,
        dump_folder: str = "", detail: str = "",
    ) -> bool:  # fmt: skip
        """Record the decision (ready, rejected, evicted) on a group; False: it had ended before. Raises FencedError."""
        answer = await self._run("commit", epoch, task_id, decision, reason, summary, head, dump_folder, detail)
        if answer == b"fenced":
            raise _fenced()
        return bool(answer == b"done")

    async def ready(self, most: int) -> list[tuple[int, bytes]]:
        """The oldest ready groups with their summaries."""
        (names,) = await self._ask(("ZRANGE", self.keys.ready, 0, most - 1))
        if not names:
            return []
        found = await self._ask(*(("HGET", self.keys.group(int(name)), "sum") for name in names))
        return [(int(name), summary) for name, summary in zip(names, found, strict=True) if summary is not None]

    async def evict_stale(self, epoch: int, *, running_too: bool = False) -> list[int]:
        """Evict waiting groups that can no longer be fresh, and cancel running ones if `running_too`."""
        return [int(task) for task in await self._run("evict", epoch, int(running_too))]

    async def cut(self, epoch: int, index: bytes, task_ids: Sequence[int]) -> int | None:
        """Cut a batch of `task_ids`: its id, or None if one of them is not ready or was evicted. Raises FencedError."""
        answer = await self._run("cut", epoch, index, *task_ids)
        if answer[0] == b"fenced":
            raise _fenced()
        return int(answer[1]) if answer[0] == b"cut" else None

    async def cut_rule(self) -> CutRule:
        """What the next cut depends on."""
        keys = self.keys
        # In this order: a group moves from queued to running, and a submit takes the end of data back.
        ready, queued, running, state = await self._ask(
            ("ZCARD", keys.ready),
            ("XLEN", keys.prompts),
            ("SCARD", keys.running),
            ("HMGET", keys.state, "eod", "dynamic", "settled"),
        )
        ended, dynamic, settled = state
        return CutRule(int(ready), bool(ended) and queued + running == 0, dynamic == b"1", int(settled or 0))

    async def set_dynamic(self, dynamic: bool) -> None:
        """Whether batches are cut once accepted and rejected groups reach the batch size."""
        await self._ask(("HSET", self.keys.state, "dynamic", int(dynamic)), ("LPUSH", self.keys.wake_cutter, "1"))

    async def reap(self, epoch: int, most: int = 500) -> tuple[int, int]:
        """Supersede attempts with ended leases, close groups past their deadline: how many of each."""
        leases, groups = await self._run("reap", epoch, most)
        if int(leases) < 0:
            raise _fenced()
        return int(leases), int(groups)

    async def sweep(self, epoch: int, chunk: int = 200) -> int:
        """Queue again the open slots that are neither queued nor leased: how many were lost."""
        members = await self._ask(("SMEMBERS", self.keys.running), ("SMEMBERS", self.keys.running_direct))
        tasks = [task for running in members for task in running]
        lost = 0
        for at in range(0, len(tasks), chunk):
            lost += int(await self._run("sweep", epoch, *tasks[at : at + chunk]))
        return lost

    async def evicted_dumps(self, most: int = 100) -> list[tuple[int, str, str]]:
        """``(task_id, dump folder, reason)`` of the first evicted groups whose files are not marked yet.

        They stay until :meth:`forget_evicted_dump`, so that who dies in between is followed by one that marks them.
        The folder is "" where an hour has passed, and nothing is known of them any more.
        """
        (tasks,) = await self._ask(("LRANGE", self.keys.evicted, -most, -1))
        if not tasks:
            return []
        fields = await self._ask(*(("HMGET", self.keys.group(int(task)), "dump", "why") for task in tasks))
        return [
            (int(task), (folder or b"").decode(), (why or b"").decode())
            for task, (folder, why) in zip(tasks, fields, strict=True)
        ]

    async def forget_evicted_dump(self, task_id: int) -> None:
        """The file of an evicted group is marked."""
        await self._ask(("LREM", self.keys.evicted, 0, task_id))

    async def dump_folders(self, task_ids: Sequence[int]) -> list[str]:
        """Where the groups' dumps lie; "" where there is none."""
        if not task_ids:
            return []
        found = await self._ask(*(("HGET", self.keys.group(task_id), "dump") for task_id in task_ids))
        return [(folder or b"").decode() for folder in found]

    async def wait_for_wake(self, name: str, timeout_s: float) -> None:
        """Wait until ``admission``, ``cutter`` or ``jobs`` is woken, or `timeout_s` has passed."""
        keys = self.keys
        key = {"admission": keys.wake_admission, "cutter": keys.wake_cutter, "jobs": keys.wake_jobs}[name]
        wait_s = min(timeout_s, _BLOCK_MAX_S)
        # redis-py wants whole seconds here, the server does not.
        await self._ride(lambda: cast("Awaitable[Any]", self._redis.blpop([key], timeout=cast("int", wait_s))))

    # -- rows ---------------------------------------------------------------------------------------------------------

    async def read_rows(self, names: Sequence[tuple[int, int, int]]) -> list[bytes | None]:
        """Encoded rows of ``(task_id, sample_idx, attempt)``; None where they are gone."""
        if not names:
            return []
        (frames,) = await self._ask(("MGET", *(self.keys.rows(*name) for name in names)))
        return cast("list[bytes | None]", frames)

    # -- the trainer --------------------------------------------------------------------------------------------------

    async def join(self, consumer_group: str) -> None:
        """Make a cursor on the batches stream that begins at its start; one that exists is kept."""

        async def create() -> None:
            try:
                await self._redis.xgroup_create(self.keys.batches, consumer_group, id="0", mkstream=True)
            except redis_asyncio.ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

        await self._ride(create)

    async def take(self, consumer_group: str, consumer: str, after: str) -> Taken:
        """Ask for the batch after entry `after`, without waiting."""
        answer = await self._run("take", consumer_group, consumer, after)
        match answer[0]:
            case b"batch":
                _, entry, batch, index, version, again = answer
                return Taken(batch=BatchEntry(entry.decode(), int(batch), index, int(version), bool(again)))
            case b"end":
                return Taken(end=True)
            case b"blocked":
                return Taken(blocked_at_version=int(answer[1]))
            case b"stopped":
                return Taken(stopped=answer[1].decode())
            case _:
                return Taken()

    async def wait_for_batch(self, after: str, timeout_s: float) -> None:
        """Wait until the batches stream has an entry after `after`, or `timeout_s` has passed."""
        await self._ride(lambda: self._redis.xread({self.keys.batches: after}, count=1, block=_block_ms(timeout_s)))

    async def ack(self, consumer_group: str, batch: BatchEntry) -> bool:
        """The trainer is done with `batch`: its rows go. False if that was so already."""
        return bool(await self._run("ack", consumer_group, batch.entry_id, batch.batch_id))

    async def collect(self, task_id: int) -> Collected:
        """Ask for one group, without waiting; what was handed over comes again until :meth:`discard`."""
        state, *rest = await self._run("collect", task_id)
        if state == b"group":
            return Collected("group", summary=rest[0], version=int(rest[1] or 0))
        return Collected(state.decode(), detail=rest[0].decode() if rest else "")

    async def discard(self, task_ids: Sequence[int]) -> int:
        """The rows of collected groups are read: they go. How many there were."""
        return int(await self._run("discard", *task_ids)) if task_ids else 0

    async def stopped(self) -> str | None:
        """Why the run has stopped itself; None: it has not."""
        (reason,) = await self._ask(("HGET", self.keys.state, "stopped"))
        return None if reason is None else str(reason.decode())

    async def resume(self) -> bool:
        """Let a run that has stopped itself go on: whether it had."""
        return bool(await self._run("resume"))

    async def set_version(self, version: int) -> None:
        """The trainer has stepped. Raises VersionError if that would go backwards."""
        answer, current = await self._run("set_version", version)
        if answer == b"backwards":
            raise VersionError(
                f"version {version} is below the run's version {int(current)}; versions only grow: "
                "resume from a checkpoint of that version or later, or use a new trial_name"
            )

    async def recover(self, version: int) -> int:
        """A trainer begins again at `version`, which may be an older one: the version before."""
        return int(await self._run("recover", version))

    async def version(self) -> int:
        """The version in force; 0 before the first."""
        (value,) = await self._ask(("HGET", self.keys.state, "version"))
        return int(value or 0)

    # -- the run ------------------------------------------------------------------------------------------------------

    async def run_settings(self) -> RunSettings | None:
        """The published rules of the run; None before a collector has published them."""
        (text,) = await self._ask(("GET", self.keys.settings))
        if text is None:
            return None
        try:
            return RunSettings(**json.loads(text))
        except ValidationError as error:
            raise RunNotReadyError(
                f"the published settings of run {self.keys.run} do not fit this release ({error.error_count()} "
                "fields); run the same release everywhere, or use a new trial_name"
            ) from None

    async def collector_alive(self) -> bool:
        """Whether a collector holds the lease."""
        (alive,) = await self._ask(("EXISTS", self.keys.collector))
        return bool(alive)

    async def add_servers(self, urls: Iterable[str]) -> None:
        """Add inference servers to the registry."""
        names = [url.rstrip("/") for url in urls]
        if names:
            await self._ask(("SADD", self.keys.servers, *names))

    async def remove_servers(self, urls: Iterable[str]) -> None:
        """Take inference servers out of the registry."""
        names = [url.rstrip("/") for url in urls]
        if names:
            await self._ask(("SREM", self.keys.servers, *names))

    async def servers(self) -> list[str]:
        """Base URLs of the registered inference servers, sorted."""
        (found,) = await self._ask(("SMEMBERS", self.keys.servers))
        return sorted(url.decode() for url in found)

    async def status(self, *, live_within_s: float = 15.0) -> RunStatus:
        """One consistent look at the run."""
        keys = self.keys

        async def ask() -> list[Any]:
            pipe = self._redis.pipeline(transaction=True)
            pipe.hgetall(keys.state)
            pipe.hgetall(keys.counters)
            pipe.xlen(keys.prompts)
            pipe.scard(keys.running)
            pipe.zcard(keys.ready)
            pipe.hlen(keys.cut)
            pipe.zcard(keys.jobs)
            pipe.zcard(keys.leases)
            pipe.exists(keys.collector)
            pipe.hgetall(keys.workers)
            pipe.zrange(keys.workers_seen, 0, -1, withscores=True)
            pipe.smembers(keys.servers)
            pipe.xlen(keys.prompts_direct)
            pipe.scard(keys.running_direct)
            pipe.zcard(keys.held)
            pipe.time()
            return await pipe.execute()

        (
            state,
            counters,
            queued,
            running,
            ready,
            cut,
            jobs,
            leased,
            alive,
            about,
            seen,
            servers,
            direct_queued,
            direct_running,
            held,
            clock,
        ) = await self._ride(ask)
        now_ms = clock[0] * 1000 + clock[1] // 1000
        silent = {name: (now_ms - at) / 1000 for name, at in seen}
        workers = {
            name.decode(): {**msgpack.unpackb(text), "silent_s": silent[name]}
            for name, text in about.items()
            if silent.get(name, live_within_s) < live_within_s
        }
        number = {name.decode(): value for name, value in state.items()}
        capacity = (int(number.get("s", 0)) + 1) * int(number.get("k", 1)) * int(number.get("B", 1))
        return RunStatus(
            version=int(number.get("version", 0)),
            delivered_ahead=int(number.get("ahead", 0)),
            capacity=capacity,
            queued=queued,
            running=running,
            ready=ready,
            cut=cut,
            queued_jobs=jobs,
            leased=leased,
            collector_alive=bool(alive),
            counters={name.decode(): int(value) for name, value in counters.items()},
            workers=workers,
            servers=tuple(sorted(url.decode() for url in servers)),
            direct_queued=direct_queued,
            direct_running=direct_running,
            held=held,
            stopped=state[b"stopped"].decode() if b"stopped" in state else None,
            cut_batches=int(number.get("cut_batches", 0)),
        )

    async def wait_for_settings(self, timeout_s: float, pause: Callable[[float], Awaitable[None]]) -> RunSettings:
        """The published rules, waiting up to `timeout_s` for a collector. Raises RunNotReadyError."""
        deadline = time.monotonic() + timeout_s
        while (settings := await self.run_settings()) is None:
            if time.monotonic() >= deadline:
                raise RunNotReadyError(
                    f"no collector has published the settings of run {self.keys.run}; start one "
                    "(`make up` or `forebay collector`) with the same FOREBAY_EXPERIMENT_NAME and FOREBAY_TRIAL_NAME"
                )
            await pause(0.1)
        return settings


def _block_ms(wait_s: float) -> int:
    # BLOCK 0 would wait for ever, and a BLOCK longer than the socket's time-out would look like a lost connection.
    return max(1, int(min(wait_s, _BLOCK_MAX_S) * 1000))


def run_stopped(reason: str) -> RunStoppedError:
    """The error of a run that has stopped itself."""
    return RunStoppedError(f"the run has stopped itself: {reason}; mend the cause, then `forebay resume`")


def _fenced() -> FencedError:
    return FencedError("another collector has taken the lease of this run; this one stops")
