"""Sentinels say where Redis is: a primary that dies or is demoted has a successor, and everything goes on there."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis_asyncio
from aiohttp import web
from conditions import eventually
from services import read, services

from forebay import Settings
from forebay.errors import ConnectionLostError, RolledBackError, SettingsError
from forebay.store import Store
from forebay.store.connection import address, connect
from forebay_ops.embedded_redis import check_url, path_binary, wheel_binary
from forebay_ops.ports import find_free_port

PASSWORD = "of/redis@1"
SENTINEL_PASSWORD = "of-sentinel"

_SERVER = """\
bind 127.0.0.1
port {port}
dir {dir}
save ""
appendonly yes
requirepass "{password}"
masterauth "{password}"
repl-diskless-sync-delay 0
"""
_SENTINEL = """\
bind 127.0.0.1
port {port}
dir {dir}
requirepass "{own}"
sentinel monitor mymaster 127.0.0.1 {primary} 1
sentinel auth-pass mymaster "{password}"
sentinel down-after-milliseconds mymaster 500
sentinel failover-timeout mymaster 3000
"""


class Trio:
    """A primary, its replica, and a Sentinel that watches them."""

    def __init__(self, binary: Path, home: Path) -> None:
        self.binary = binary
        self.home = home
        self.ports = {name: find_free_port() for name in ("primary", "replica", "sentinel")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        """By way of the Sentinel, after one that is not there."""
        gone = find_free_port()
        hosts = f"127.0.0.1:{gone},127.0.0.1:{self.ports['sentinel']}"
        return f"redis+sentinel://:of%2Fredis%401@{hosts}/mymaster/0?sentinel_password={SENTINEL_PASSWORD}"

    def client(self, name: str) -> redis_asyncio.Redis:
        """A plain client of one of the three."""
        password = SENTINEL_PASSWORD if name == "sentinel" else PASSWORD
        return redis_asyncio.Redis(port=self.ports[name], password=password, decode_responses=True)

    async def ask(self, name: str, *words: Any) -> Any:
        """The answer of one of the three; None while it does not answer."""
        async with self.client(name) as client:
            try:
                return await client.execute_command(*words)
            except (redis_asyncio.RedisError, OSError):
                return None

    async def start(self) -> None:
        """Start all, and wait until the Sentinel knows the replica."""
        for name in ("primary", "replica"):
            self._spawn(name, _SERVER.format(port=self.ports[name], dir=self.home, password=PASSWORD))
        await self.until("primary", ("PING",), lambda answer: answer is True)
        await self.until("replica", ("PING",), lambda answer: answer is True)
        await self.ask("replica", "REPLICAOF", "127.0.0.1", self.ports["primary"])
        await self.until("replica", ("INFO",), lambda info: bool(info) and info["master_link_status"] == "up")
        ports = {"port": self.ports["sentinel"], "primary": self.ports["primary"]}
        self._spawn(
            "sentinel", _SENTINEL.format(dir=self.home, own=SENTINEL_PASSWORD, password=PASSWORD, **ports), "--sentinel"
        )
        await self.until("sentinel", ("SENTINEL", "REPLICAS", "mymaster"), _has_a_good_replica)

    async def until(self, name: str, words: tuple[Any, ...], condition: Any) -> None:
        """Wait until the answer is as it should be."""
        async with asyncio.timeout(20):
            for _ in iter(int, 1):
                if condition(await self.ask(name, *words)):
                    return
                await asyncio.sleep(0.05)

    def _spawn(self, name: str, config: str, *options: str) -> None:
        folder = self.home / name
        folder.mkdir()
        (folder / "own.conf").write_text(config.replace(str(self.home), str(folder)))
        self._processes[name] = subprocess.Popen(
            [str(self.binary), str(folder / "own.conf"), *options], stdout=subprocess.DEVNULL
        )

    def signal(self, name: str, number: int) -> None:
        """Send one of them a signal."""
        self._processes[name].send_signal(number)

    def close(self) -> None:
        """Kill all."""
        for process in self._processes.values():
            process.kill()
            process.wait(10)


def _has_a_good_replica(answer: Any) -> bool:
    return bool(answer) and "master-link-status" in str(answer) and "s_down" not in str(answer)


@pytest.fixture(params=["valkey", "redis"])
async def trio(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Trio]:
    """Three processes of Valkey's, then of Redis's."""
    binary = wheel_binary() if request.param == "valkey" else path_binary()
    if binary is None:
        pytest.skip(f"no {request.param}-server, which is also the Sentinel, on this host")
    found = Trio(binary, tmp_path)
    try:
        await found.start()
        yield found
    finally:
        found.close()


def store_of(url: str, run_name: str) -> Store:
    """A store of the test's run."""
    return Store.open(Settings(REDIS_URL=url, experiment_name=run_name.split("/", maxsplit=1)[0]))


async def test_everything_goes_on_at_the_promoted_replica(trio: Trio, run_name: str) -> None:
    """39: the primary dies with slots in flight; worker, collector and trainer go on, and no attempt is burned."""
    async with services(
        trio.url, run_name, collector=False, worker=False, max_staleness=50, collector_lease_s=10.0
    ) as (running, client):
        gate = asyncio.Event()
        default = running.server.default

        async def wait_then_answer(_: dict[str, Any]) -> Any:
            await gate.wait()
            return web.json_response(default)

        running.server.default = wait_then_answer
        tasks = [await submit(client) for _ in range(2)]
        await eventually(lambda: len(running.server.requests) == 4, "four slots in flight")
        async with trio.client("primary") as primary:
            assert await primary.execute_command("WAIT", 1, 5000) == 1
        trio.signal("primary", signal.SIGKILL)
        tasks += [await submit(client) for _ in range(2)]  # which waits for the successor
        role = await trio.ask("replica", "ROLE")
        assert role[0] == "master"
        gate.set()
        batches = await read(client, 2, timeout_s=30)
        assert sorted(task for batch in batches for task in batch.task_ids) == tasks
        attempts = [rollout.attempt for batch in batches for group in batch.groups for rollout in group.rollouts]
        assert attempts == [1] * 8


async def test_a_demoted_primary_is_left(trio: Trio, run_name: str) -> None:
    """39: a fail-over by hand leaves the old primary alive; who is connected to it goes to the new one."""
    store = store_of(trio.url, run_name)
    try:
        await store.submit(b"spec", b"rules", 1, "a")
        await trio.until("replica", ("HGET", store.keys.state, "task_seq"), lambda seen: seen == "1")
        await trio.until("sentinel", ("SENTINEL", "FAILOVER", "mymaster"), bool)  # once it deems the replica good
        named = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster")
        await trio.until("sentinel", named, lambda found: found[1] == str(trio.ports["replica"]))
        # As the Sentinel itself does after its next look, some ten seconds later.
        await trio.ask("primary", "REPLICAOF", "127.0.0.1", trio.ports["replica"])
        await store.submit(b"spec", b"rules", 1, "b")
        assert await trio.ask("replica", "HGET", store.keys.state, "task_seq") == "2"
    finally:
        await store.close()


async def test_a_replica_without_the_last_writes_is_found(trio: Trio, run_name: str) -> None:
    """13: what the primary had acknowledged and the replica never got is missed when the replica is promoted."""
    store = store_of(trio.url, run_name)
    try:
        await store.submit(b"spec", b"rules", 1, "a")
        async with trio.client("primary") as primary:
            assert await primary.execute_command("WAIT", 1, 5000) == 1
        await trio.ask("replica", "REPLICAOF", "127.0.0.1", find_free_port())  # replication breaks
        await store.submit(b"spec", b"rules", 1, "b")
        trio.signal("primary", signal.SIGKILL)
        await trio.ask("replica", "REPLICAOF", "NO", "ONE")
        with pytest.raises(RolledBackError, match="task_seq was 2 and is 1"):
            await store.submit(b"spec", b"rules", 1, "c")
    finally:
        await store.close()


async def test_read_only_answers_at_a_plain_url(trio: Trio, run_name: str) -> None:
    """39: a server that is demoted for a while is waited for, with new connections, as one that is away."""
    store = store_of(f"redis://:of%2Fredis%401@127.0.0.1:{trio.ports['primary']}", run_name)
    trio.signal("sentinel", signal.SIGSTOP)
    try:
        await store.submit(b"spec", b"rules", 1, "a")
        # What the demoted server takes from the other one has it all: else it would have gone back in time.
        await trio.until("replica", ("HGET", store.keys.state, "task_seq"), lambda seen: seen == "1")
        await trio.ask("primary", "REPLICAOF", "127.0.0.1", trio.ports["replica"])
        waiting = asyncio.create_task(store.submit(b"spec", b"rules", 1, "b"))
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
        await trio.ask("primary", "REPLICAOF", "NO", "ONE")
        assert await asyncio.wait_for(waiting, 10) == (2, True)
    finally:
        trio.signal("sentinel", signal.SIGCONT)
        await store.close()


def test_the_stack_takes_it(trio: Trio) -> None:
    """39: ``make up`` accepts the URL as that of a Redis that is there."""
    check_url(trio.url)


@pytest.mark.parametrize(
    "url",
    ["redis+sentinel://:hunter2@/mymaster", "redis+sentinel://:hunter2@host:26379", "redis+sentinel://:hunter2@h:x/m"],
)
def test_bad_urls(url: str) -> None:
    """A Sentinel URL that cannot be read is an error that shows nothing of it."""
    with pytest.raises(SettingsError, match="redis\\+sentinel://") as caught:
        connect(url)
    assert "hunter2" not in str(caught.value)


def test_the_address_has_no_secrets() -> None:
    """What is logged of a Sentinel URL is where the Sentinels are and the name."""
    url = "rediss+sentinel://user:hunter2@a:1,b:2/mymaster/0?sentinel_password=hunter3"
    assert address(url) == "rediss+sentinel://a:1,b:2/mymaster/0"


async def test_no_sentinel_answers(run_name: str) -> None:
    """Without any Sentinel the error comes after redis_timeout_s and names no password."""
    url = f"redis+sentinel://:hunter2@127.0.0.1:{find_free_port()}/mymaster"
    settings = Settings(REDIS_URL=url, experiment_name=run_name.split("/", maxsplit=1)[0], redis_timeout_s=0.3)
    store = Store.open(settings)
    with pytest.raises(ConnectionLostError, match="mymaster") as caught:
        await store.ping()
    assert "hunter2" not in str(caught.value)
    await store.close()


async def submit(client: Any) -> int:
    """Submit a group of two slots."""
    task: int = await client.submit({"ids": [1, 2, 3]}, "pipeline_workflows.EchoWorkflow", {}, group_size=2)
    return task
