"""One typed method for each transition. Nothing else in the project talks to Redis.

Invariants, each held by the scripts and proved by the named test (``tests/integration/``):

- Conservation: submitted + requeued = delivered + rejected + evicted + in flight
  (``test_store.py::test_conservation``).
- A slot has one counted result (``test_store.py::test_first_valid_result_wins``); repeating any call changes nothing
  (``test_store.py::test_repeating_any_call_changes_nothing``).
- running + ready + cut + delivered_ahead <= (s + 1) * k * B (``test_store.py::test_admission_honours_capacity``).
- No first hand-over contains a stale group (``test_store.py::test_stale_batch_is_dissolved``).
- Who lost its lease changes nothing (``test_store.py::test_fencing``).
- Bytes of rows are counted from the step that counts a result to the one that ends or acknowledges its group
  (``test_bounds.py::TestRows``).
- Without memory a call is refused and changes nothing, or is done whole (``test_memory_short.py::TestTransitions``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from pydantic import ValidationError
from redis.exceptions import OutOfMemoryError

from forebay.errors import FrameError, RunNotReadyError
from forebay.redaction import without_userinfo
from forebay.settings import RunSettings, check_server_url
from forebay.store.base import run_stopped
from forebay.store.bounds import bounds_of
from forebay.store.leading import LeaderCalls
from forebay.store.looking import LookCalls
from forebay.store.owning import OwnerCalls
from forebay.store.producing import ProducerCalls
from forebay.store.reconciling import ReconcileCalls
from forebay.store.records import RunStatus
from forebay.store.training import TrainerCalls
from forebay.store.working import WorkerCalls
from forebay.wire.values import unpack

__all__ = ["Store", "run_stopped"]


class Store(ProducerCalls, WorkerCalls, OwnerCalls, LeaderCalls, TrainerCalls, LookCalls, ReconcileCalls):
    """The state of one run: what each role does (the bases), and what everybody may ask."""

    async def run_settings(self) -> RunSettings | None:
        """The published rules of the run; None before a collector has published them."""
        (text,) = await self._ask(("GET", self.keys.settings))
        if text is None:
            return None
        try:
            return RunSettings(**json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:  # pydantic's ValidationError is a ValueError
            wrong = f"{error.error_count()} fields" if isinstance(error, ValidationError) else "it is no JSON object"
            raise RunNotReadyError(
                f"the published settings of run {self.keys.run} do not fit this release ({wrong}); "
                "run the same release everywhere, or use a new trial_name"
            ) from None

    async def collector_alive(self) -> bool:
        """Whether a collector leads."""
        (alive,) = await self._ask(("EXISTS", self.keys.collector))
        return bool(alive)

    async def add_servers(self, urls: Iterable[str]) -> None:
        """Add inference servers to the registry. Raises SettingsError for what is no URL, or holds a secret."""
        names = {url.rstrip("/") for url in urls}
        for name in names:
            check_server_url(name)
        # A worker that comes back finds its servers there, and needs no memory for them.
        if missing := sorted(names.difference(await self.servers() if names else ())):
            await self._ask(("SADD", self.keys.servers, *missing))

    async def remove_servers(self, urls: Iterable[str]) -> None:
        """Take inference servers out of the registry."""
        names = [url.rstrip("/") for url in urls]
        if names:
            await self._ask(("SREM", self.keys.servers, *names))

    async def servers(self) -> list[str]:
        """Base URLs of the registered inference servers, sorted."""
        (found,) = await self._ask(("SMEMBERS", self.keys.servers))
        return sorted(url.decode(errors="replace") for url in found)

    async def status(self, *, live_within_s: float = 15.0) -> RunStatus:
        """One look at the run, of one instant unless Redis has no memory left; who collects is looked at beside it."""
        keys = self.keys

        async def ask(transaction: bool = True) -> list[Any]:
            pipe = self._redis.pipeline(transaction=transaction)
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
            try:
                return await pipe.execute()
            except OutOfMemoryError:  # a server may refuse to keep even reads for a transaction then
                return await ask(transaction=False)

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
        owners = await self.owners()
        now_ms = clock[0] * 1000 + clock[1] // 1000
        silent = {name: (now_ms - at) / 1000 for name, at in seen}
        workers = {
            name.decode(errors="replace"): {**_about(text), "silent_s": silent[name]}
            for name, text in about.items()
            if silent.get(name, live_within_s) < live_within_s
        }
        number = {name.decode(errors="replace"): value for name, value in state.items()}
        capacity = (_int(number.get("s"), 0) + 1) * _int(number.get("k"), 1) * _int(number.get("B"), 1)
        return RunStatus(
            version=_int(number.get("version"), 0),
            delivered_ahead=_int(number.get("ahead"), 0),
            capacity=capacity,
            queued=queued,
            running=running,
            ready=ready,
            cut=cut,
            queued_jobs=jobs,
            leased=leased,
            collector_alive=bool(alive),
            counters={name.decode(errors="replace"): _int(value, 0) for name, value in counters.items()},
            workers=workers,
            servers=tuple(sorted(without_userinfo(url.decode(errors="replace")) for url in servers)),
            direct_queued=direct_queued,
            direct_running=direct_running,
            held=held,
            stopped=state[b"stopped"].decode(errors="replace") if b"stopped" in state else None,
            cut_batches=_int(number.get("cut_batches"), 0),
            owners=owners,
            bounds=bounds_of(
                {name: _int(value, 0) for name, value in number.items()},
                queued=queued,
                direct_queued=direct_queued,
                running=running,
                direct_running=direct_running,
                unread=sum(partition.unread for partition in owners.partitions),
                open_slots=jobs + leased,
                held_by=number.get("held_by", b"").decode(errors="replace"),
                memory=await self.memory(),
            ),
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


def _int(value: bytes | None, default: int) -> int:
    """As the scripts read a field: what is no integer counts as absent."""
    try:
        return default if value is None else int(value)
    except ValueError:
        return default


def _about(text: bytes) -> dict[str, Any]:
    """What a worker said of itself; of what cannot be read, why."""
    try:
        about = unpack(text)
        if not isinstance(about, dict):
            raise FrameError(f"a worker said a {type(about).__name__} of itself")
    except FrameError as error:
        return {"unreadable": str(error)}
    numbers = {
        name: about[name] if type(about[name]) is int else 0 for name in ("busy", "slots", "held") if name in about
    }
    return {**{str(name): value for name, value in about.items()}, **numbers}
