"""Redis has no memory left (``maxmemory``, noeviction), on servers of the tests' own (contract, section 13).

Invariants: each command of ours is then refused and changes nothing, or done whole; whatever frees memory is done; what
was refused is done later, and nothing is lost, doubled or counted as a failure.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
import redis as redis_py
import redis_servers
from aiohttp import web
from conditions import eventually
from driver import Driver, a_row, reap_until
from rich.console import Console
from scripted_server import fast_settings
from services import Services, read, services
from structlog.testing import capture_logs

from forebay import AsyncClient, Settings
from forebay.cli_client import run_table
from forebay.errors import QueueFullError, SettingsError, StoreFullError
from forebay.http_metrics import Listen
from forebay.outcomes import FailureKind
from forebay.settings import RunSettings
from forebay.stalls import diagnose
from forebay.store import Store
from forebay.store.server_check import check_server
from forebay.wire.codec import encode_rows
from forebay_collector.dump import Dumper
from forebay_collector.exposition import Exposition
from forebay_ops.embedded_redis import path_binary, wheel_binary
from forebay_workers.service import Worker
from forebay_workers.settings import WorkerSettings

WORKFLOW = "bounds_workflows.LargeWorkflow"
SHORT = 500_000
"""Below what a server uses that holds nothing."""


@pytest.fixture(params=["valkey", "redis"])
def own_redis(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a server of this test's own, whose memory it may bound: a Valkey, then a Redis."""
    binary = wheel_binary() if request.param == "valkey" else path_binary()
    if binary is None:
        pytest.skip(f"no {request.param} to start")
    with redis_servers.running(binary, tmp_path) as url:
        yield url


def bound_memory(url: str, maxmemory: int, policy: str = "noeviction") -> None:
    """Set the server's bound; 0: none."""
    with redis_py.Redis.from_url(url) as client:
        client.config_set("maxmemory-policy", policy)
        client.config_set("maxmemory", maxmemory)


def used_memory(url: str) -> int:
    """What the server uses."""
    with redis_py.Redis.from_url(url) as client:
        return int(client.info("memory")["used_memory"])


async def everything(store: Store) -> dict[bytes, Any]:
    """All keys of the server with their values, but for the rows that nobody counts."""
    names = [name async for name in store._redis.scan_iter(match="*")]
    return {name: await store._redis.dump(name) for name in names if b":rows:" not in name}


@pytest.fixture
async def driver(own_redis: str, run_name: str) -> Any:
    """A driver that leads, with batches of 2 groups, one per version, staleness 1."""
    store = Store.open(Settings(REDIS_URL=own_redis, experiment_name=run_name.split("/", maxsplit=1)[0]))
    made = Driver(store)
    await made.lead()
    yield made
    await store.close()


class TestTransitions:
    async def test_what_begins_something_is_refused_whole(self, driver: Driver, own_redis: str) -> None:
        """Case 42: submit, admit, claim and a result with rows are refused with the numbers, and not a byte changes."""
        store = driver.store
        await driver.submit(1, size=1)
        await driver.admit()
        (attempt,) = await driver.claim()
        (dead,) = await driver.submit(1, size=1)
        await driver.admit()
        (failing,) = await driver.claim()
        await driver.fail(failing, FailureKind.DATA)
        await driver.commit(dead, size=1, reason="no_usable_slot")
        await driver.submit(1)
        calls: list[Callable[[], Awaitable[object]]] = [
            driver.submit,
            driver.admit,
            driver.claim,
            lambda: driver.publish(attempt),
            lambda: store.redrive(dead),
        ]
        bound_memory(own_redis, SHORT)
        before = await everything(store)
        for call in calls:
            with pytest.raises(StoreFullError, match=rf"of maxmemory={SHORT} bytes.*raise maxmemory") as caught:
                await call()
            assert caught.value.used > caught.value.maximum == SHORT
            assert await everything(store) == before
        bound_memory(own_redis, 0)
        for call in calls[:-1]:
            await call()
        assert (await store.redrive(dead)).state == "created"

    async def test_rows_that_were_refused_are_not_counted(self, driver: Driver, own_redis: str) -> None:
        """Case 42: a header whose rows found no memory, although it would itself, changes nothing."""
        await driver.submit(1, size=1)
        await driver.admit()
        (attempt,) = await driver.claim()
        before = await everything(driver.store)
        answer = await driver.store._run("publish", *attempt, "usable", "", b"header", 0, "", 100)
        assert answer == b"no_rows"
        assert await everything(driver.store) == before

    async def test_what_frees_memory_goes_on(self, driver: Driver, own_redis: str) -> None:
        """Case 42: collector and trainer do all of theirs, and workers keep or give up what they have."""
        store = driver.store
        await driver.finish(2)
        await driver.submit(2, size=2)
        await driver.admit()
        attempts = await driver.claim()
        for attempt in attempts[:2]:
            await driver.publish(attempt)
        bound_memory(own_redis, SHORT)
        assert await store.heartbeat("w1", {}, 5.0, attempts[2:]) == []
        assert await driver.fail(attempts[2]) == "retry"
        assert await store.release(*attempts[3])
        assert await store.first_keys("w", ["input_ids"]) == {"input_ids"}
        await store.reap(driver.epoch)
        await store.sweep(driver.epoch)
        await store.evict_stale(driver.epoch)
        await driver.lead()
        assert await driver.commit(attempts[0][0])
        assert await driver.cut() is not None
        batch, tasks = await driver.take_batch()
        assert len(tasks) == 2
        assert await store.ack("trainer", batch)
        await store.set_version(1)
        await store.end_of_data()
        await store.set_dynamic(True)
        status = await driver.check()
        assert (status.count("delivered"), status.ready) == (2, 1)
        assert "Redis has no memory left" in diagnose(await driver.store.look(), RunSettings(batch_size=2)).verdict

    async def test_a_worker_that_comes_back_needs_no_memory(self, driver: Driver, own_redis: str) -> None:
        """Case 42: servers that are registered already are not written again."""
        await driver.store.add_servers(["http://localhost:1/"])
        bound_memory(own_redis, SHORT)
        await driver.store.add_servers(["http://localhost:1"])
        with pytest.raises(StoreFullError):
            await driver.store.add_servers(["http://localhost:2"])

    async def test_a_deadline_ends_a_group(self, driver: Driver, own_redis: str) -> None:
        """Case 42: a group whose results find no memory ends at its deadline all the same."""
        await driver.submit(1)
        await driver.admit(deadline_s=0.001)
        bound_memory(own_redis, SHORT)
        await reap_until(driver, lambda status: status.count("failures:timeout") == 2)
        assert await driver.commit(1, reason="no_usable_slot")


class TestServerRules:
    @pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "allkeys-random", "volatile-lfu"])
    async def test_a_server_that_drops_keys_is_refused(self, driver: Driver, own_redis: str, policy: str) -> None:
        """Case 42: with a policy that evicts groups would vanish in silence: the collector does not start."""
        bound_memory(own_redis, 2**30, policy)
        with pytest.raises(SettingsError, match=f"maxmemory-policy={policy}.*set maxmemory-policy noeviction"):
            await check_server(driver.store)
        bound_memory(own_redis, 0, policy)
        await check_server(driver.store)  # it cannot, until somebody sets maxmemory: a warning

    async def test_weaker_promises_are_told(self, driver: Driver, own_redis: str) -> None:
        """13: what a crash may cost is one line in the log, and no error."""

        async def told() -> list[str]:
            with capture_logs() as logs:
                await check_server(driver.store)
            return [f"{line['event']}: {line['reason']}" for line in logs]

        assert await told() == []
        with redis_py.Redis.from_url(own_redis) as client:
            client.config_set("appendfsync", "everysec")
            (line,) = await told()
            assert line.startswith("redis.may_forget: appendfsync everysec: ")
            assert "may forget the last second" in line
            client.config_set("appendonly", "no")
            (line,) = await told()
            assert line.startswith("redis.may_forget: appendonly no: ")
        bound_memory(own_redis, 0, "allkeys-lru")
        assert [line.split(":")[0] for line in await told()] == ["redis.may_evict", "redis.may_forget"]


async def test_a_user_who_may_not_ask(driver: Driver, own_redis: str, run_name: str) -> None:
    """13: without INFO and CONFIG, which managed servers withhold, nothing is judged and all else is there."""
    with redis_py.Redis.from_url(own_redis) as client:
        client.execute_command("ACL", "SETUSER", "run", "on", ">secret", "~*", "&*", "+@all", "-info", "-config")
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", 2**30)
    url = own_redis.replace("redis://", "redis://run:secret@")
    store = Store.open(Settings(REDIS_URL=url, experiment_name=run_name.split("/", maxsplit=1)[0]))
    try:
        await check_server(store)
        status = await store.status()
        assert status.bound("rows_bytes") is not None
        assert status.bound("redis_memory_bytes") is None
        bound_memory(own_redis, SHORT)
        with pytest.raises(StoreFullError, match="no memory left"):
            await Driver(store).submit(1)
    finally:
        await store.close()


async def held(client: AsyncClient) -> int:
    """Results that the workers hold."""
    return sum(about.get("held", 0) for about in (await client.status()).workers.values())


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for `condition`, within 20 s."""
    try:
        async with asyncio.timeout(20):
            while not await condition():  # noqa: ASYNC110 (the condition is in Redis)
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"waited for {what}") from None


async def four_answers_while_memory_is_short(running: Services, client: AsyncClient, url: str) -> None:
    """Two groups of two slots run; their episodes end after memory has become short."""
    gate = asyncio.Event()
    default = running.server.default

    async def wait_then_answer(_: dict[str, Any]) -> Any:
        await gate.wait()
        return web.json_response(default)

    running.server.default = wait_then_answer
    for _ in range(2):
        await client.submit({"ids": [1, 2, 3]}, "pipeline_workflows.EchoWorkflow", {}, group_size=2)
    await eventually(lambda: len(running.server.requests) == 4, "four slots in flight")
    bound_memory(url, SHORT)
    gate.set()


class TestPipeline:
    async def test_short_memory_loses_nothing(self, own_redis: str, run_name: str) -> None:
        """Case 42: finished episodes wait with their leases, producers are told, and then all of it arrives."""
        async with services(own_redis, run_name, lease_s=1.0) as (running, client):
            await four_answers_while_memory_is_short(running, client, own_redis)

            async def all_held() -> bool:
                return await held(client) == 4

            await until(all_held, "four results to be held")
            with pytest.raises(StoreFullError, match="has no memory left"):
                await client.submit({"ids": [1]}, "pipeline_workflows.EchoWorkflow", {}, group_size=2)
            assert "Redis has no memory left" in diagnose(await running.store.look(), running.rules).verdict
            beats = (await running.store._redis.zrange(running.store.keys.workers_seen, 0, 0, withscores=True))[0][1]

            async def two_leases_later() -> bool:
                seen = await running.store._redis.zrange(running.store.keys.workers_seen, 0, 0, withscores=True)
                return bool(seen[0][1] > beats + 2000)

            await until(two_leases_later, "two leases to pass")
            assert await held(client) == 4
            bound_memory(own_redis, 0)
            (batch,) = await read(client, 1)
            status = await client.status()
            attempts = [rollout.attempt for group in batch.groups for rollout in group.rollouts]
            assert attempts == [1, 1, 1, 1]
            assert (status.count("leases_lost"), status.count("failures:infra"), status.count("slots:usable")) == (
                0,
                0,
                4,
            )

    async def test_metrics_tell(self, own_redis: str, run_name: str) -> None:
        """12, case 42: a worker tells what it holds and how full its pools are, a collector tells each bound."""
        async with services(own_redis, run_name, worker=False) as (running, client):
            await running.kill("worker")
            store = Store.open(running.settings)
            settings = WorkerSettings(max_http_connections=3, max_reward_processes=2)
            worker = Worker(store, running.settings, running.rules, fast_settings(), settings, Listen(0))
            stop = asyncio.Event()
            task = asyncio.create_task(worker.serve(stop))
            await four_answers_while_memory_is_short(running, client, own_redis)

            async def scraped() -> str:
                assert worker._metrics is not None
                async with aiohttp.ClientSession() as session, session.get(worker._metrics.url) as reply:
                    return await reply.text()

            async def all_held() -> bool:
                return "forebay_worker_results_held 4.0" in await scraped()

            await until(all_held, "four results to be held")
            text = await scraped()
            assert 'forebay_worker_pool_limit{pool="aiohttp"} 3.0' in text
            assert 'forebay_worker_pool_limit{pool="rewards"} 2.0' in text
            assert 'forebay_worker_pool_used{pool="servers"} 0.0' in text
            exposition = Exposition(running.store, Dumper(running.rules, run_name))

            async def told() -> bool:
                return "forebay_fleet_results_held 4.0" in (await exposition.render()).decode()

            await until(told, "the worker to say so")
            text = (await exposition.render()).decode()
            assert 'forebay_bound_limit{bound="redis_memory_bytes"} 500000.0' in text
            assert 'forebay_bound_used{bound="running_groups"} 2.0' in text
            console = Console(file=io.StringIO(), width=500)
            console.print(run_table(await running.store.look(), running.rules, "run"))
            shown = cast("io.StringIO", console.file).getvalue()
            assert "running_groups 2 of 1024" in shown
            assert "of 488.3 KiB" in shown
            assert "Redis has no memory left" in shown
            bound_memory(own_redis, 0)
            await read(client, 1)
            stop.set()
            await task
            await store.close()

    async def test_a_drain_hands_back_what_is_held(self, own_redis: str, run_name: str) -> None:
        """Case 42: a worker that ends while memory is short gives its attempts back; no budget is touched."""
        async with services(own_redis, run_name) as (running, client):
            await four_answers_while_memory_is_short(running, client, own_redis)

            async def all_held() -> bool:
                return await held(client) == 4

            await until(all_held, "four results to be held")
            await running.stop("worker")
            assert (await client.status()).count("handed_back") == 4
            bound_memory(own_redis, 0)
            await running.start_worker("another")
            (batch,) = await read(client, 1)
            attempts = [rollout.attempt for group in batch.groups for rollout in group.rollouts]
            assert attempts == [2, 2, 2, 2]
            assert (await client.status()).count("failures:infra") == 0

    async def test_a_wait_that_is_too_long_is_a_failure_of_infrastructure(
        self, own_redis: str, run_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Case 42: the wait is bounded; its end is counted as infra, with the reason, although memory is short."""
        monkeypatch.setenv("FOREBAY_WORKER_MEMORY_WAIT_S", "0.3")
        async with services(own_redis, run_name, attempts_infra=1) as (running, client):
            await four_answers_while_memory_is_short(running, client, own_redis)

            async def failed() -> bool:
                return (await client.status()).count("slots:failed") == 4

            await until(failed, "four slots to fail")
            bound_memory(own_redis, 0)
            letters = await client.dead_letters(kind="infra")
            reasons = [slot.reason for letter in letters for slot in letter.slots]
            assert len(reasons) == 4
            assert all("Redis had no memory for its rows for 0.3 s" in reason for reason in reasons)

    async def test_rows_above_the_servers_memory_are_a_failure_of_data(self, own_redis: str, run_name: str) -> None:
        """Case 42: what the server could never hold is not waited for."""
        async with services(own_redis, run_name, import_allowlist=["bounds_workflows"]) as (_, client):
            bound_memory(own_redis, used_memory(own_redis) + 3_000_000)
            await client.submit({"tokens": 2_000_000}, WORKFLOW, {}, group_size=1)

            async def failed() -> bool:
                return (await client.status()).count("failures:data") == 1

            await until(failed, "the slot to fail")
            (letter,) = await client.dead_letters(kind="data")
            assert "Redis may use maxmemory=" in letter.slots[0].reason


class TestProcesses:
    async def test_a_paused_trainer_bounds_bytes(self, own_redis: str, run_name: str) -> None:
        """Case 32: under load, rows stay below max_stored_bytes, producers wait, and all of it is delivered later."""
        limit = 1_500_000
        async with services(
            own_redis, run_name, collector=False, worker=False, import_allowlist=["bounds_workflows"],
            max_staleness=50, max_stored_bytes=limit, max_queued_bytes=2_000, lease_s=10.0,
        ) as (_, client):  # fmt: skip
            most = 0

            async def look() -> bool:
                nonlocal most
                bound = (await client.status()).bound("rows_bytes")
                assert bound is not None
                most = max(most, bound.used)
                return bound.reached

            submitted = 0

            async def submit_until_full() -> bool:
                nonlocal submitted
                await look()
                try:
                    for _ in range(20):
                        await client.submit({"tokens": 7_000}, WORKFLOW, {}, group_size=2)
                        submitted += 1
                except QueueFullError:
                    status = await client.status()
                    return status.running == 0 and await look()
                return False

            await until(submit_until_full, "the trainer's pause to stop the producer")
            assert limit * 0.7 < most <= limit
            await client.end_of_data()
            delivered = 0
            async with client.batches(timeout_s=30) as stream:
                while (batch := await stream.next()) is not None:
                    delivered += len(batch.groups)
                    await batch.ack()
                    await client.set_version(0)
                    await look()
            assert delivered == submitted > 10
            assert most <= limit
            status = await client.status()
            assert (status.count("rejected"), status.count("evicted")) == (0, 0)

    async def test_a_small_maxmemory_loses_nothing(self, own_redis: str, run_name: str) -> None:
        """Case 42: with a small server producers are told, and all that was taken is delivered once."""
        bound_memory(own_redis, used_memory(own_redis) + 8_000_000)
        async with services(
            own_redis, run_name, collector=False, worker=False, import_allowlist=["bounds_workflows"],
            max_staleness=1000, lease_s=10.0,
        ) as (_, client):  # fmt: skip
            submitted: list[int] = []
            prompt = {"tokens": 10_000, "context": "x" * 20_000}

            async def submit_until_refused() -> bool:
                try:
                    for _ in range(20):
                        submitted.append(await client.submit(prompt, WORKFLOW, {}, group_size=2))  # noqa: PERF401
                except QueueFullError:
                    return True
                return False

            await until(submit_until_refused, "a prompt to be refused")
            seen: list[int] = []
            await client.end_of_data()
            async with client.batches(timeout_s=60) as stream:
                while (batch := await stream.next()) is not None:
                    seen += [group.task for group in batch.groups]
                    await batch.ack()
            assert sorted(seen) == sorted(submitted)
            assert len(seen) * 2 * 80_000 > 8_000_000, "more than there is memory for at once"
            status = await client.status()
            assert (status.count("rejected"), status.count("evicted"), status.count("failures:infra")) == (0, 0, 0)


async def test_bounds_leave_room_in_the_server(driver: Driver, own_redis: str) -> None:
    """Case 42: with the settings' defaults a small server is full neither of rows nor of prompts; 0 is no bound."""
    bound_memory(own_redis, 10_000_000)
    await driver.lead()
    status = await driver.store.status()
    limits = {bound.name: bound.limit for bound in status.bounds}
    assert (limits["rows_bytes"], limits["queued_bytes"]) == (5_000_000, 2_000_000)
    await driver.lead(max_stored_bytes=0, max_queued_bytes=1000)
    limits = {bound.name: bound.limit for bound in (await driver.store.status()).bounds}
    assert (limits["rows_bytes"], limits["queued_bytes"]) == (0, 1000)


def test_the_row_of_the_driver_is_small() -> None:
    """What the tests of transitions write is far below the bound that they set."""
    assert len(encode_rows([a_row()])) < SHORT // 1000
