"""A pipeline whose processes have users of Redis of their own, with exactly the rules that `forebay acl` prints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import guarded_redis
import pytest
from guarded_redis import Certificates, Guarded
from scripted_server import ScriptedServer, answer, fast_settings
from services import WORKFLOW, read, run_settings

from forebay import AsyncClient, Settings
from forebay.errors import RedisRefusedError
from forebay.store import Store
from forebay.store.acl import Role
from forebay_collector.service import Collector
from forebay_workers.service import Worker
from forebay_workers.settings import WorkerSettings

WAYS = ["valkey", "redis", "tls"]


@pytest.fixture(scope="module", params=WAYS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Guarded, str]]:
    """A server with users, and what its URLs have after the ``?``: None without TLS."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "tls":
        binary = guarded_redis.tls_binary()
        if binary is None:
            pytest.skip(guarded_redis.NO_TLS)
        certificates = Certificates.make(folder)
        with guarded_redis.guarded(binary, folder, tls=certificates) as running:
            yield running, f"ssl_ca_certs={certificates.file('ca.pem')}"
        return
    binary = guarded_redis.binaries().get(request.param)
    if binary is None:
        pytest.skip(f"no {request.param} server here")
    with guarded_redis.guarded(binary, folder) as running:
        yield running, ""


def denials(server: Guarded) -> list[tuple[str, str, str]]:
    """What was refused: user, reason and object. redis-py introduces itself, and does not mind a refusal of that."""
    entries: Any = server.admin.execute_command("ACL", "LOG")
    if entries and isinstance(entries[0], list):
        entries = [dict(zip(entry[::2], entry[1::2], strict=True)) for entry in entries]
    text = [{str(_text(key)): str(_text(value)) for key, value in entry.items()} for entry in entries]
    return [
        (entry["username"], entry["reason"], entry["object"])
        for entry in text
        if not entry["object"].startswith("client")
    ]


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


class Roles:
    """A collector, a worker and a client, each with a user of its own."""

    def __init__(self, server: Guarded, tls: str, run: str, engine: ScriptedServer) -> None:
        self.guarded = server
        self._tls = tls or None
        self._run = run
        self._engine = engine
        self._tasks: list[tuple[asyncio.Event, asyncio.Task[None], Store]] = []

    def settings(self, role: Role, *, less: tuple[str, ...] = ()) -> Settings:
        """Those of a process of `role`; its user is made for that."""
        user = self.guarded.add_role(role, f"pw-of-{role.value}", self._run, less=less)
        url = self.guarded.url(user, f"pw-of-{role.value}", tls=self._tls)
        name = self._run.split("/", maxsplit=1)[0]
        return Settings(REDIS_URL=url, experiment_name=name, servers=[self._engine.url])

    async def collector(self, **changes: Any) -> asyncio.Task[None]:
        """Start a collector."""
        store = Store.open(self.settings(Role.COLLECTOR))
        collector = Collector(store, run_settings(**changes))
        await collector.open()
        return self._start(store, collector.serve)

    async def worker(self, *, less: tuple[str, ...] = ()) -> asyncio.Task[None]:
        """Start a worker, without some of its rights."""
        settings = self.settings(Role.WORKER, less=less)
        store = Store.open(settings)
        rules = await store.wait_for_settings(10, asyncio.sleep)
        await store.add_servers(settings.servers)
        worker = Worker(store, settings, rules, fast_settings(), WorkerSettings(drain_timeout_s=1.0))
        return self._start(store, worker.serve)

    def _start(self, store: Store, serve: Any) -> asyncio.Task[None]:
        stop = asyncio.Event()
        task = asyncio.create_task(serve(stop))
        self._tasks.append((stop, task, store))
        return task

    async def close(self) -> None:
        """End all, in good order."""
        for stop, task, store in reversed(self._tasks):
            stop.set()
            await asyncio.wait([task], timeout=20)
            await store.close()


@asynccontextmanager
async def roles(server: tuple[Guarded, str], run: str) -> AsyncIterator[Roles]:
    """Roles in a new run."""
    engine = ScriptedServer()
    engine.default = answer([7, 8, 9])
    await engine.start()
    made = Roles(*server, run, engine)
    try:
        yield made
    finally:
        await made.close()
        await engine.stop()


async def test_a_pipeline_with_the_least_rights(server: tuple[Guarded, str], run_name: str) -> None:
    """9: with exactly the rules of `forebay acl`, everything that a run does is allowed, scripts included."""
    async with roles(server, run_name) as run, AsyncExitStack() as stack:
        server[0].admin.execute_command("ACL", "LOG", "RESET")
        await run.collector(check_trajectory_format=True, requeue_evicted=True, batch_size=2, retain_batches=2)
        await run.worker()
        client = await stack.enter_async_context(await AsyncClient.connect(run.settings(Role.TRAINER), wait_s=20))
        await _by_task_id(client)
        for number in range(4):
            await client.submit({"ids": [1, number]}, WORKFLOW, {}, group_size=2, idempotency_key=f"k{number}")
        batches = await read(client, 2, step=True)
        assert [len(batch.groups) for batch in batches] == [2, 2]
        await _read_beside_it_and_go_back(client)
        await _what_goes_wrong(client)
        await client.end_of_data()
        assert (await client.status()).count("delivered") >= 4
    assert denials(server[0]) == []


async def _read_beside_it_and_go_back(client: AsyncClient) -> None:
    async with client.batches("viewer", follows=True, timeout_s=10) as stream:
        seen = await stream.next()
        assert seen is not None
        await seen.ack()
    async with client.batches(resume_after=seen.batch_id, timeout_s=10) as stream:
        again = await stream.next()
        assert again is not None
        await again.ack()


async def _by_task_id(client: AsyncClient) -> None:
    task = await client.submit({"ids": [1, 10]}, WORKFLOW, {}, group_size=1, batched=False)
    assert len((await client.wait_for_task(task, timeout_s=20)).groups) == 1
    scores = await client.evaluate([{"ids": [1, 11]}], WORKFLOW, {}, group_size=1)
    assert len(scores.groups) == 1
    version = await client.version()
    await client.recover(version)


async def _what_goes_wrong(client: AsyncClient) -> None:
    task = await client.submit({"action": "raise"}, WORKFLOW, {}, group_size=1)
    async with asyncio.timeout(20):
        while not await client.drops():  # noqa: ASYNC110 (what is waited for is in Redis)
            await asyncio.sleep(0.05)
    assert [group.task_id for group in await client.dead_letters()] == [task]
    assert await client.redrive(task)
    assert await client.poison() == []
    await client.resume()


async def test_a_run_of_another_name_is_out_of_reach(server: tuple[Guarded, str], run_name: str) -> None:
    """9: whoever may read one run may not read another: one line says so, at once."""
    async with roles(server, run_name) as run:
        own = run.settings(Role.TRAINER)
        other = own.model_copy(update={"experiment_name": "of-somebody-else"})
        async with asyncio.timeout(5):
            with pytest.raises(RedisRefusedError, match=r"user 'forebay-trainer' a command.*key.*`forebay acl`"):
                await AsyncClient.connect(other, wait_s=30)


@pytest.mark.parametrize("role", [Role.TRAINER, Role.WORKER])
async def test_the_settings_are_the_collectors(server: tuple[Guarded, str], run_name: str, role: Role) -> None:
    """9: neither a worker's nor a trainer's user can publish another allowlist of imports; both can read it."""
    async with roles(server, run_name) as run:
        await run.collector()
        store = Store.open(run.settings(role))
        rules = await store.wait_for_settings(10, asyncio.sleep)
        for command in (("SET", store.keys.settings, "{}"), ("UNLINK", store.keys.settings)):
            with pytest.raises(RedisRefusedError):
                await store._ask(command)
        assert await store.run_settings() == rules
        await store.close()


async def test_a_worker_that_may_not_do_its_work_ends(server: tuple[Guarded, str], run_name: str) -> None:
    """9: a command that is not allowed ends the service with one error that names command, user and remedy."""
    async with roles(server, run_name) as run:
        await run.collector()
        worker = await run.worker(less=("zadd",))  # a script wants it
        with pytest.raises(RedisRefusedError) as caught:
            await asyncio.wait_for(worker, 10)
    text = str(caught.value)
    assert "the user 'forebay-worker'" in text
    assert "`forebay acl`" in text
    assert "(script " in text
    assert "pw-of" not in text


async def test_arqs_own_calls_are_told_too(server: tuple[Guarded, str], run_name: str) -> None:
    """9: what arq itself may not do ends the worker as well, and is no retry loop."""
    async with roles(server, run_name) as run:
        await run.collector()
        worker = await run.worker(less=("psetex",))
        with pytest.raises(RedisRefusedError, match="psetex"):
            await asyncio.wait_for(worker, 10)


async def test_a_password_that_changes_ends_the_services(
    server: tuple[Guarded, str], run_name: str, tmp_path: Path
) -> None:
    """9: credentials that are taken away meanwhile end a worker and a collector, each with one error, in seconds."""
    async with roles(server, run_name) as run:
        collector = await run.collector()
        worker = await run.worker()
        for role in (Role.WORKER, Role.COLLECTOR):
            server[0].admin.execute_command("ACL", "SETUSER", f"forebay-{role.value}", "resetpass", ">another")
        server[0].admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        for task in (worker, collector):
            with pytest.raises(RedisRefusedError, match="refused the user 'forebay-"):
                await asyncio.wait_for(task, 20)
