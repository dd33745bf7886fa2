"""Several collectors at work on one run: they share the partitions, and follow each other."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from conditions import eventually
from services import WORKFLOW, Services, read, services
from structlog.testing import capture_logs

from forebay import AsyncClient
from forebay.errors import CollectorUnavailableError, FencedError
from forebay.settings import RunSettings
from forebay.stalls import diagnose
from forebay.store.records import Owners, RunStatus
from forebay_collector.service import Collector

SLACK_S = 4.0
"""Above a lease: how long a take-over may take on a busy machine."""


async def submit(client: AsyncClient, count: int, **fields: Any) -> list[int]:
    """Submit that many groups of two slots."""
    return [await client.submit({"ids": [1, 2], **fields}, WORKFLOW, {}) for _ in range(count)]


async def until(running: Services, condition: Callable[[Owners], bool], timeout_s: float = 20.0) -> Owners:
    """The owners once `condition` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition(owners := await running.store.owners()):  # noqa: ASYNC110 (it is in Redis)
            await asyncio.sleep(0.02)
        return owners


async def counted(client: AsyncClient, condition: Callable[[RunStatus], bool], timeout_s: float = 30.0) -> RunStatus:
    """The status once `condition` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition(status := await client.status()):  # noqa: ASYNC110 (it is in Redis)
            await asyncio.sleep(0.02)
        return status


def shares(owners: Owners) -> list[int]:
    """How many partitions each live collector owns."""
    return sorted(sum(one.owner == name for one in owners.partitions) for name in owners.collectors)


def shared(*expected: int) -> Callable[[Owners], bool]:
    """Whether so many own so many each, and all is owned."""
    return lambda owners: shares(owners) == sorted(expected) and not owners.unowned


def faults(loop: asyncio.AbstractEventLoop) -> list[str]:
    """What tasks raise that nobody looks at, from now on."""
    found: list[str] = []
    loop.set_exception_handler(lambda _, context: found.append(str(context)))
    return found


@asynccontextmanager
async def pair(
    redis_url: str, run_name: str, **rules: Any
) -> AsyncIterator[tuple[Services, AsyncClient, dict[str, Collector]]]:
    """Two collectors of this event loop that share the partitions."""
    async with services(redis_url, run_name, max_staleness=50, **rules) as (running, client):
        await running.start_collector("second")
        count = running.rules.partitions
        await until(running, lambda owners: shared(count // 2, count - count // 2)(owners) and bool(owners.leader))
        yield running, client, running.collectors


async def test_two_share(redis_url: str, run_name: str) -> None:
    """Both decide on groups, each on those of its partitions; batches have all of them, and tell of each once."""
    async with pair(redis_url, run_name) as (_, client, made):
        tasks = await submit(client, 16)
        batches = await read(client, 8, step=True)
        assert sorted(group.task for batch in batches for group in batch.groups) == tasks
        assert sum(batch.metrics["rollout/accepted"] for batch in batches) == 16
        assert sorted(number for one in made.values() for number in one.partitions) == [0, 1, 2, 3]
        assert [one.leads for one in made.values()].count(True) == 1
        status = await client.status()
        assert (status.in_flight, status.count("accepted"), status.count("batches_cut")) == (0, 16, 8)


async def test_a_third_joins_and_leaves(redis_url: str, run_name: str) -> None:
    """A third collector gets its share within seconds, under load; once it has ended the others have it at once."""
    async with pair(redis_url, run_name, collector_lease_s=30.0, partitions=6) as (running, client, _):
        tasks = await submit(client, 10)
        await running.start_collector("third")
        await until(running, shared(2, 2, 2), 10)
        tasks += await submit(client, 10)
        began = time.monotonic()
        await running.stop("third")
        await until(running, shared(3, 3), 10)
        assert time.monotonic() - began < 10, "without waiting for the lease"
        batches = await read(client, 10, step=True)
        assert sorted(group.task for batch in batches for group in batch.groups) == tasks


async def test_the_leader_ends(redis_url: str, run_name: str) -> None:
    """SIGTERM frees the lead and the partitions at once: another one goes on long before the lease would end."""
    async with pair(redis_url, run_name, collector_lease_s=60.0) as (running, client, made):
        leads, other = sorted(made, key=lambda name: not made[name].leads)
        began = time.monotonic()
        await running.stop(leads)
        owners = await until(running, lambda owners: owners.leader == made[other].name and not owners.unowned, 10)
        assert owners.collectors == (made[other].name,)
        await submit(client, 2)
        await read(client, 1)
        assert time.monotonic() - began < 20


async def test_a_lost_partition_ends_alone(redis_url: str, run_name: str) -> None:
    """Who loses the lease of one partition goes on in the others, and leads on; nothing is lost in that one."""
    seen = faults(asyncio.get_running_loop())
    with capture_logs() as logs:
        async with services(redis_url, run_name, max_staleness=50, collector_lease_s=5.0) as (running, client):
            owners = await until(running, lambda owners: not owners.unowned and bool(owners.collectors))
            (name,) = owners.collectors
            keys = running.store.keys
            # A stranger takes partition 1, as if this collector had slept for a lease.
            await running.store._ask(("SET", keys.partition_lease(1), "stranger", "PX", 2500))
            await running.store._ask(("HSET", keys.partitions, "owner:1", "stranger"))
            await running.store._ask(("HINCRBY", keys.partitions, "epoch:1", 1))
            tasks = await submit(client, 8)
            status = await counted(client, lambda status: status.count("accepted") >= 6)
            assert (status.count("accepted"), status.owners.leader) == (6, name)
            assert [one.unread for one in status.owners.partitions] == [0, 4, 0, 0]
            batches = await read(client, 4, step=True)
            assert sorted(group.task for batch in batches for group in batch.groups) == tasks
    taken = [(log["partition"], log["epoch"]) for log in logs if log["event"] == "partition.taken"]
    assert [epoch for number, epoch in taken if number == 1] == [1, 3]
    assert [epoch for number, epoch in taken if number != 1] == [1, 1, 1]
    assert seen == []


async def test_a_lost_lead_ends_the_duties_alone(redis_url: str, run_name: str) -> None:
    """Who loses the lead reads its partitions on, competes for the lead anew, and its process goes on (case 16)."""
    seen = faults(asyncio.get_running_loop())
    with capture_logs() as logs:
        async with services(redis_url, run_name, max_staleness=50, collector_lease_s=5.0) as (running, client):
            await until(running, lambda owners: not owners.unowned and bool(owners.leader))
            await running.store._ask(("DEL", running.store.keys.collector))
            epoch = await running.store.lead("stranger", 3)
            await submit(client, 2)
            status = await counted(client, lambda status: status.ready == 2)
            assert (status.owners.leader, status.owners.unowned) == ("stranger", ())
            assert await running.store.reap(epoch) == (0, 0)
            await read(client, 1)
            with pytest.raises(FencedError):
                await running.store.reap(epoch)
    events = [log["event"] for log in logs if log["event"].startswith("lead.")]
    assert events == ["lead.taken", "lead.lost", "lead.taken"]
    assert seen == []


async def test_a_partition_that_nobody_reads_is_said(redis_url: str, run_name: str) -> None:
    """Case 4: one leads and nobody owns a partition: a clear error within seconds; the same reader goes on after."""
    async with services(redis_url, run_name, collector_lease_s=1.0) as (running, client):
        await running.stop("collector")
        epoch = await running.store.lead("crippled", 60)
        assert epoch
        stream = client.batches()
        began = time.monotonic()
        with pytest.raises(
            CollectorUnavailableError, match=r"no collector reads partition 0, 1, 2, 3 .* though one leads"
        ):
            await stream.next()
        assert time.monotonic() - began < 15
        await submit(client, 2)
        assert (
            "no collector reads the results of partition 0, 1, 2, 3"
            in diagnose(await running.store.look(), running.rules).verdict
        )
        await running.store.resign("crippled")
        await running.start_collector()
        batch = await stream.next()
        assert batch is not None
        assert len(batch.groups) == 2


@pytest.mark.parametrize(("before", "after"), [(1, 5), (5, 1), (4, 3)])
async def test_their_number_changes_in_mid_run(redis_url: str, run_name: str, before: int, after: int) -> None:
    """A leader with another number publishes it: groups under way end where they began, and all are delivered once."""
    async with services(redis_url, run_name, max_staleness=50, partitions=before) as (running, client):
        tasks = await submit(client, 6, actions={"0": "slow"})
        tasks += await submit(client, 6)
        await running.start_collector("second", partitions=after)
        await running.stop("collector")
        await until(running, lambda owners: bool(owners.leader))
        tasks += await submit(client, 8)
        batches = await read(client, 10, step=True)
        assert sorted(group.task for batch in batches for group in batch.groups) == tasks
        owners = await until(running, lambda owners: not owners.unowned)
        assert [one.number for one in owners.partitions] == list(range(after)), "what is drained needs no owner"
        assert (await client.status()).in_flight == 0


# -- real processes ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def processes(
    redis_url: str, run_name: str, tmp_path: Path, **rules: Any
) -> AsyncIterator[tuple[Services, AsyncClient, dict[str, str]]]:
    """Two collector processes that share the partitions, by name -> what it calls itself; the first one leads."""
    changes = {"max_staleness": 200, "batch_size": 4, **rules}
    async with services(redis_url, run_name, collector=False, **changes) as (running, client):
        (first,) = (await until(running, lambda owners: bool(owners.leader and owners.collectors))).collectors
        running.start_process("second", "collector", stderr=tmp_path / "second.log", FOREBAY_LOG_JSON="1")
        owners = await until(running, shared(2, 2), 40)
        (second,) = set(owners.collectors) - {first}
        yield running, client, {"collector": first, "second": second}


@asynccontextmanager
async def load(client: AsyncClient) -> AsyncIterator[list[int]]:
    """Submits until the end of the block: the tasks."""
    tasks: list[int] = []

    stop = asyncio.Event()  # not a cancellation: a submit that it meets would be done, and not be in the list

    async def work() -> None:
        while not stop.is_set():
            tasks.extend(await submit(client, 1))
            await asyncio.sleep(0.02)

    task = asyncio.create_task(work())
    try:
        yield tasks
    finally:
        stop.set()
        await task


async def delivered(client: AsyncClient) -> list[int]:
    """The tasks of all batches to the end of the data, in the order of hand-over."""
    await client.end_of_data()
    found: list[int] = []
    async with client.batches(timeout_s=30) as stream:
        while (batch := await stream.next()) is not None:
            found += [group.task for group in batch.groups]
            await batch.ack()
            await client.set_version(await client.version() + 1)
    return found


async def open_group(running: Services, task: int) -> bool:
    """Whether a group has not been decided."""
    (state,) = await running.store._ask(("HGET", running.store.keys.group(task), "st"))
    return state in (b"queued", b"running")


@pytest.mark.parametrize("victim", ["collector", "second"])
async def test_killed_collector(redis_url: str, run_name: str, tmp_path: Path, victim: str) -> None:
    """Case 16: SIGKILL of either under load: the other has all within lease + 4 s, and nothing is lost or doubled."""
    async with processes(redis_url, run_name, tmp_path) as (running, client, names):
        (survivor,) = set(names.values()) - {names[victim]}
        async with load(client) as tasks:
            await counted(client, lambda status: status.count("accepted") >= 20)
            owners = await running.store.owners()
            lost = [one.number for one in owners.partitions if one.owner == names[victim]]
            assert len(lost) == 2
            await running.kill(victim)
            killed = time.monotonic()
            waiting = [task for task in tasks if task % 4 in lost and await open_group(running, task)]
            await until(running, lambda owners: all(one.owner == survivor for one in owners.partitions), 60)
            taken_s = time.monotonic() - killed
            async with asyncio.timeout(60):
                while all([await open_group(running, task) for task in waiting or tasks[-8:]]):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            committed_s = time.monotonic() - killed
            await until(running, lambda owners: owners.leader == survivor)
        print(f"{victim} killed; all taken over after {taken_s:.2f} s, first commit there after {committed_s:.2f} s")
        assert taken_s < running.rules.collector_lease_s + SLACK_S
        assert committed_s < running.rules.collector_lease_s + SLACK_S
        found = await delivered(client)
        assert sorted(found) == sorted(tasks)
        status = await client.status()
        assert (status.in_flight, status.count("delivered")) == (0, len(tasks))


async def test_stopped_collector(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """Case 16: one that sleeps for longer than its lease changes nothing in what it lost, and takes part again."""
    async with processes(redis_url, run_name, tmp_path) as (running, client, names):
        async with load(client) as tasks:
            await counted(client, lambda status: status.count("accepted") >= 10)
            running.signal("second", signal.SIGSTOP)
            await until(running, lambda owners: all(one.owner == names["collector"] for one in owners.partitions), 60)
            epochs = await running.store._ask(("HGETALL", running.store.keys.partitions))
            already = (await client.status()).count("accepted")
            await counted(client, lambda status: status.count("accepted") >= already + 10)
            running.signal("second", signal.SIGCONT)
            await until(running, shared(2, 2), 60)
            after = await running.store._ask(("HGETALL", running.store.keys.partitions))
            already = (await client.status()).count("accepted")
            await counted(client, lambda status: status.count("accepted") >= already + 10)
        assert running.ended("second") is None, "it was fenced, not ended"
        changed = [name for name, value in after[0].items() if name.startswith(b"epoch") and value != epochs[0][name]]
        assert len(changed) == 2, "its share came back to it under new epochs"
        found = await delivered(client)
        assert sorted(found) == sorted(tasks)
    events = [json.loads(line)["event"] for line in (tmp_path / "second.log").read_text().splitlines()]
    assert events.count("partition.taken") >= 4


async def test_duties_have_one_owner(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """Case 16: once the leader has slept for a lease another one leads, under a new epoch, and it is fenced."""
    async with processes(redis_url, run_name, tmp_path) as (running, client, names):
        async with load(client) as tasks:
            await counted(client, lambda status: status.count("batches_cut") >= 2)
            (old,) = await running.store._ask(("HGET", running.store.keys.state, "epoch"))
            running.signal("collector", signal.SIGSTOP)
            await until(running, lambda owners: owners.leader == names["second"], 60)
            with pytest.raises(FencedError):
                await running.store.check_lead(int(old))
            already = (await client.status()).count("batches_cut")
            await counted(client, lambda status: status.count("batches_cut") >= already + 2)
            running.signal("collector", signal.SIGCONT)
            await until(running, shared(2, 2), 60)
            (now,) = await running.store._ask(("HGET", running.store.keys.state, "epoch"))
            assert int(now) == int(old) + 1
            assert (await running.store.owners()).leader == names["second"]
        assert running.ended("collector") is None
        found = await delivered(client)
        assert sorted(found) == sorted(tasks)
        assert len(found) == len(set(found))


async def test_rules_that_differ_are_said(redis_url: str, run_name: str) -> None:
    """A collector that was started with other settings than those published says which."""
    with capture_logs() as logs:
        async with services(redis_url, run_name) as (running, _):
            await running.start_collector("second", partitions=8, batch_size=3)
            await eventually(lambda: any(log["event"] == "settings.differ" for log in logs), "the warning")
    (differ,) = [log["settings"] for log in logs if log["event"] == "settings.differ"]
    assert differ == ["batch_size", "partitions"]


def test_partitions_are_bounded() -> None:
    """1 to 64; 4 unless told otherwise."""
    assert RunSettings().partitions == 4
    for bad in (0, 65):
        with pytest.raises(ValueError, match="partitions"):
            RunSettings(partitions=bad)
