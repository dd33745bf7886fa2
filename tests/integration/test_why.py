"""Why the next batch does not come, asked of real runs: ``forebay why``, the collector's watch, a waiting reader."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from conditions import eventually
from driver import Driver
from explaining import why, why_json
from redis_servers import running as redis_running
from scripted_server import answer, fast_settings
from services import WORKFLOW, services
from structlog.testing import capture_logs
from typer.testing import CliRunner

from forebay.cli import build_app
from forebay.cli_why import look_at_run
from forebay.errors import ConnectionLostError, StallError
from forebay.settings import RunSettings, Settings
from forebay.stalls import Cause, diagnose
from forebay.store import Store
from forebay.store.records import Channel
from forebay.tracing import Session
from forebay.wire.doing import AttemptDoing, Doing, ServerSeen
from forebay_ops.embedded_redis import path_binary, wheel_binary
from forebay_workers.doing import what_runs
from forebay_workers.engines import Fleet

URL = "http://gpu1:30000"


@pytest.fixture
async def store(any_redis_url: str, run_name: str) -> AsyncIterator[Store]:
    """The store of a run of one's own, on Valkey and on Redis."""
    opened = Store.open(Settings(REDIS_URL=any_redis_url, experiment_name=run_name.split("/", maxsplit=1)[0]))
    yield opened
    await opened.close()


async def never(_: dict[str, Any]) -> Any:
    """A server's step that does not answer."""
    await asyncio.Event().wait()


class TestLook:
    """What one look shows of a run, on Valkey and on Redis."""

    async def test_open_slots_are_shown_as_they_are(self, store: Store) -> None:
        """Running, queued, backing off and lost slots, with worker, server, phase, ages and the last failure."""
        driver = Driver(store)
        await driver.lead(retry_backoff_s=30, max_staleness=9)
        await driver.submit(1, size=5)
        await driver.admit(deadline_s=60)
        first = (await driver.claim(1))[0]
        failed = (await driver.claim(1))[0]
        await driver.fail(failed)
        done = (await driver.claim(1))[0]
        await driver.publish(done)
        with_password = f"http://user:hunter2@{URL[7:]}"
        doing = Doing({first: AttemptDoing(7.0, "generating", 6.0, with_password)}, {with_password: ServerSeen(True)})
        await store.heartbeat("w1", {"slots": 4, "busy": 1}, 5, [first], doing.pack())
        await store.add_servers([URL])
        lost = store.keys.job_id(1, 4, 1)
        await store._redis.zrem(store.keys.jobs, lost)
        look = await store.look()
        (group,) = look.groups
        assert (group.task_id, group.size, group.open_slots, group.direct) == (1, 5, 4, False)
        assert 50 < group.deadline_in_s <= 60
        slots = {slot.sample_idx: slot for slot in group.slots}
        runs = slots[first[1]]
        assert (runs.state, runs.worker, runs.phase, runs.server) == ("running", "w1", "generating", URL)
        assert 6.0 <= runs.phase_s < 9
        assert 0 <= runs.age_s < 5
        assert (slots[failed[1]].state, slots[failed[1]].attempt) == ("backing off", 2)
        assert 20 < slots[failed[1]].due_in_s <= 30
        assert slots[failed[1]].last_failure == "infra: it failed"
        assert [slots[idx].state for idx in (3, 4)] == ["queued", "lost"]
        assert done[1] not in slots
        assert (look.due_attempts, look.later_attempts) == (1, 1)
        assert group.oldest == runs
        assert look.servers == {URL: ServerSeen(True)}
        assert diagnose(look, RunSettings()).cause is Cause.RUNNING

    async def test_the_lease_that_ended_says_which_worker_fell_silent(self, store: Store) -> None:
        """The next attempt of a slot whose worker died says so."""
        driver = Driver(store)
        await driver.lead(max_staleness=9)
        await driver.submit(1, size=1)
        await driver.admit()
        await driver.claim(1, lease_s=0.01)
        async with asyncio.timeout(5):
            while not (await store.reap(driver.epoch))[0]:
                pass
        (slot,) = (await store.look()).groups[0].slots
        assert (slot.attempt, slot.last_failure) == (2, "infra: worker w1 fell silent")

    async def test_groups_of_the_batches_come_before_others(self, store: Store) -> None:
        """Groups that are asked for by their id are shown only where no group runs for a batch; the oldest first."""
        driver = Driver(store)
        await driver.lead(max_staleness=9)
        direct = await driver.submit(2, channel=Channel.DIRECT)
        await driver.admit(deadline_s=10)
        look = await store.look()
        assert [(group.task_id, group.direct) for group in look.groups] == [(task, True) for task in direct]
        batched = await driver.submit(3)
        await driver.admit(deadline_s=60)
        assert [group.task_id for group in (await store.look(groups=2)).groups] == batched[:2]

    async def test_drops_since_the_last_cut(self, store: Store) -> None:
        """Groups that were rejected since the last batch are counted by reason, earlier ones are not."""
        driver = Driver(store)
        await driver.lead(max_staleness=9)
        for _ in range(2):
            await driver.finish(2)
        await driver.submit(1, size=1)
        await driver.run_rejected("filtered", "too easy")
        assert await driver.cut() is not None
        await asyncio.sleep(0.002)  # ids of the ledger are of milliseconds
        for _ in range(3):
            await driver.submit(1, size=1)
            await driver.run_rejected("no_usable_slot", "1 x failed(data)")
        look = await store.look()
        assert (look.drops, look.drop_details) == (
            {"rejected: no_usable_slot": 3},
            {"rejected: no_usable_slot": "1 x failed(data)"},
        )
        assert look.since_cut_s is not None
        assert 0 <= look.since_cut_s < 5

    async def test_who_submits_and_who_reads(self, store: Store) -> None:
        """The last submission, and when the driving consumer last asked for a batch; a follower does not count."""
        driver = Driver(store)
        await driver.lead()
        empty = await store.look(leading=True)
        assert (empty.since_submit_s, empty.reader_idle_s, empty.since_watched_s) == (None, None, 0.0)
        await driver.submit(1)
        assert (await driver.take()).batch is None
        look = await store.look()
        assert look.since_submit_s is not None
        assert look.reader_idle_s is not None
        assert look.since_submit_s < 5
        assert look.reader_idle_s < 5
        assert look.driver == "trainer"

    async def test_looking_changes_nothing(self, store: Store) -> None:
        """A look leaves every key as it was, but for the time of a leading collector's."""
        driver = Driver(store)
        await driver.lead()
        await driver.submit(2)
        await driver.admit()
        await driver.claim(2)
        await driver.take()

        async def dump() -> dict[bytes, Any]:
            names = sorted(await store._redis.keys(f"{store.keys.prefix}*"))
            return {name: await store._redis.dump(name) for name in names if b"batches" not in name}

        before = await dump()
        await store.look()
        assert await dump() == before

    async def test_unreadable_words_of_a_worker_are_no_error(self, store: Store) -> None:
        """A worker of another release, or damaged words of one, leave the slot without a phase."""
        driver = Driver(store)
        await driver.lead()
        await driver.submit(1, size=1)
        await driver.admit()
        held = await driver.claim(1)
        await store.heartbeat("w1", {"slots": 4}, 5, held, b"\xc1\xff")
        (slot,) = (await store.look()).groups[0].slots
        assert (slot.state, slot.worker, slot.phase) == ("running", "w1", "")

    async def test_a_worker_that_signs_off_leaves_nothing(self, store: Store) -> None:
        """What a worker said of its attempts goes with it."""
        await Driver(store).lead()
        await store.heartbeat("w1", {}, 5, [], Doing().pack())
        assert await store._redis.hlen(store.keys.workers_doing) == 1
        await store.sign_off("w1")
        assert await store._redis.hlen(store.keys.workers_doing) == 0


async def test_heartbeat_of_200_slots_stays_small() -> None:
    """What 200 running slots do is told in under 8 KB, and made in a few milliseconds."""
    sessions = {(10_000 + at // 8, at % 8, 1): Session() for at in range(200)}
    for session in sessions.values():
        session.enter("generate")
    async with Fleet(fast_settings()) as fleet:
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            frame = what_runs(sessions, fleet).pack()
            seconds.append(time.perf_counter() - began)
    assert len(frame) < 8192
    assert min(seconds) < 0.02


async def test_redis_that_is_full_is_named(tmp_path: Path, run_name: str) -> None:
    """Case 42: a Redis at its maxmemory still says so: the look works, and it is the first cause."""
    binary = wheel_binary() or path_binary()
    if binary is None:
        pytest.skip("no Redis of our own")
    with redis_running(binary, tmp_path) as url:
        store = Store.open(Settings(REDIS_URL=url, experiment_name=run_name.split("/", maxsplit=1)[0]))
        try:
            driver = Driver(store)
            await driver.lead()
            await driver.submit(1)
            assert diagnose(await store.look(), RunSettings()).cause is not Cause.REDIS_FULL
            await store._redis.config_set("maxmemory", "1mb")
            found = diagnose(await store.look(leading=True), RunSettings())
            assert found.cause is Cause.REDIS_FULL
            assert "raise maxmemory" in found.verdict
        finally:
            await store.close()


class TestCommand:
    """``forebay why`` as it is typed."""

    async def test_page(self, redis_url: str, run_name: str) -> None:
        """The verdict, what it was judged by, and each open slot of the oldest groups, in this order; exit code 0."""
        async with services(redis_url, run_name, worker=False) as (running, client):
            running.server.default = never
            task_id = await client.submit({"ids": [1, 2]}, WORKFLOW, {})
            await eventually(lambda: len(running.server.requests) == 2, "two requests in flight")
            await why_json(running, lambda form: form["groups"][0]["slots"][0]["server"] != "")
            done = await why(running)
        assert (done.returncode, done.stderr) == (0, "")
        verdict, *rest = done.stdout.splitlines()
        assert verdict.startswith("running: 0 groups queued, 1 running, 0 of 2 ready; the oldest, group 1, runs for")
        text = "\n".join(rest)
        for part in ("has not asked for a batch yet", "none yet", "1 with 128 slots", f"{running.server.url} healthy"):
            assert part in text
        assert "generating (" in text
        assert f"│     {task_id} │" in text

    @pytest.mark.parametrize("command", ["why", "status"])
    def test_redis_away_is_said_within_seconds(self, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A Redis that refuses, or takes the connection and says nothing, is an error within few seconds."""
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen(8)
            for port in (1, silent.getsockname()[1]):
                monkeypatch.setenv("REDIS_URL", f"redis://user:hunter2@127.0.0.1:{port}/0")
                began = time.monotonic()
                done = CliRunner().invoke(build_app(), [command])
                assert time.monotonic() - began < 4.5
                assert isinstance(done.exception, ConnectionLostError)
                assert f"Redis at redis://127.0.0.1:{port}/0" in str(done.exception)
                assert "hunter2" not in str(done.exception)

    def test_a_run_that_nobody_serves(self, redis_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where no collector has ever been, that is the answer, and no error."""
        monkeypatch.setenv("REDIS_URL", redis_url)
        monkeypatch.setenv("FOREBAY_EXPERIMENT_NAME", run_name.split("/", maxsplit=1)[0])
        done = CliRunner().invoke(build_app(), ["why"])
        assert (done.exit_code, "no collector has published the settings" in done.stdout) == (0, True)
        form = json.loads(CliRunner().invoke(build_app(), ["why", "--json"]).stdout)
        assert form["cause"] == "no_collector"
        assert look_at_run().look is None


async def test_what_is_missing_is_named(redis_url: str, run_name: str) -> None:
    """No prompts, no worker, servers down, servers paused for an update, a killed collector: each is the verdict."""
    async with services(redis_url, run_name, collector=False) as (running, client):
        assert (await client.explain()).cause is Cause.NO_PROMPTS
        await running.stop("worker")
        await client.submit({"ids": [1, 2]}, WORKFLOW, {})
        assert (await client.explain()).cause is Cause.NO_WORKER
        running.server.healthy = False
        await running.start_worker(slots=4)
        assert "HTTP 503" in await named(client, Cause.SERVERS_DOWN, "503")
        running.server.info["paused"] = True
        running.server.default = never
        running.server.healthy = True
        assert "paused for a weight update, for" in await named(client, Cause.SERVERS_PAUSED)
        await running.kill("collector")
        text = await named(client, Cause.NO_COLLECTOR)
        assert "no collector is alive, since" in text


async def named(client: Any, cause: Cause, part: str = "") -> str:
    """The verdict, once it is of this cause and has this part."""
    async with asyncio.timeout(20):
        while True:
            found = await client.explain()
            if found.cause is cause and part in found.verdict:
                return str(found.verdict)
            await asyncio.sleep(0.05)


async def test_the_collector_logs_a_stall_and_its_end(redis_url: str, run_name: str) -> None:
    """``batch.stalled`` names slot, worker, server and age, twice as late each time; ``batch.flows_again`` ends it."""
    with capture_logs() as logs:
        async with services(redis_url, run_name, stall_warn_s=0.6, lease_s=1.0) as (running, client):
            gate = asyncio.Event()

            async def hold(_: dict[str, Any]) -> Any:
                await gate.wait()
                return web.json_response(answer([7], weight_version="0"))

            running.server.default = hold
            tasks = [await client.submit({"ids": [1, 2]}, WORKFLOW, {}) for _ in range(2)]

            def stalls() -> list[Any]:
                return [entry for entry in logs if entry["event"] == "batch.stalled"]

            await eventually(
                lambda: any("server" in entry for entry in stalls()) and len(stalls()) >= 3, "three warnings"
            )
            gate.set()
            await eventually(
                lambda: any(entry["event"] == "batch.flows_again" for entry in logs), "the end of the stall"
            )
            told = next(entry for entry in stalls() if "server" in entry)
    assert (told["task_id"], told["cause"], told["server"]) == (tasks[0], "running", running.server.url)
    assert (told["attempt"], told["state"], told["phase"]) == (1, "running", "generating")
    assert told["worker"].split(":")[1].isdigit()
    assert told["slot_age_s"] > 0
    times = [entry["seconds"] for entry in stalls()]
    assert all(later >= 2 * earlier - 0.2 for earlier, later in pairwise(times)), times


async def test_a_waiting_reader_says_what_it_waits_for(redis_url: str, run_name: str) -> None:
    """A reader logs ``batch.waiting`` after stall_warn_s, and its StallError names slot, worker and server."""
    async with services(redis_url, run_name, stall_warn_s=0.5, lease_s=1.0) as (running, client):
        running.server.default = never
        await client.submit({"ids": [1, 2]}, WORKFLOW, {})
        with capture_logs() as logs, pytest.raises(StallError) as caught:
            await client.batches(timeout_s=2.5).next()
        told = [entry for entry in logs if entry["event"] == "batch.waiting"]
        assert len(told) >= 2
        assert told[-1]["server"] == running.server.url
        for part in ("no batch in 2.5 s", "group 1", "slot 0, attempt 1", "on worker", f"at {running.server.url}"):
            assert part in str(caught.value)
        found = await client.explain()
        assert found.trainer_waits
        assert found.cause is Cause.RUNNING
