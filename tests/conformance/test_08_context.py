"""Contract, section 8: context, clients, rewards, traces.

Proved elsewhere, each for itself: the single flight of the cache (``tests/unit/test_processor_cache.py``), processes of
rewards, cases 30 and 31 (``tests/unit/test_rewards.py``), sessions, their files and the trace
(``tests/unit/test_tracing.py``), ``get`` and ``stat_scope`` (``tests/unit/test_attempts.py``). Here: all of it in
workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from services import WORKFLOW, read, services

from forebay import AsyncClient, workflow_context
from forebay.errors import SettingsError
from forebay.store.store import Store
from forebay.trace_files import read_sessions
from forebay.wire.envelopes import SlotHeader

ALLOWED = ["pipeline_workflows", "context_workflows"]


async def when(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(30):
        while not await holds():  # noqa: ASYNC110 (what is waited for happens in Redis)
            await asyncio.sleep(0.02)


async def settled(client: AsyncClient, **counts: int) -> None:
    """Wait until the counters are at least so high."""

    async def reached() -> bool:
        status = await client.status()
        return all(status.count(name) >= value for name, value in counts.items())

    await when(reached)


def marks(folder: Path, kind: str) -> list[list[str]]:
    """What slots have left in the folder: the parts of the names."""
    return [mark.name.split("-")[1:] for mark in folder.glob(f"{kind}-*")]


async def headers(store: Store) -> list[SlotHeader]:
    """The headers of the slots whose groups are not decided."""
    return [
        SlotHeader.unpack(entry.header) for entry in await store.read_results(dict.fromkeys(range(4), "0"), 100, 0.01)
    ]


class TestClients:
    async def test_pooled_for_each_worker_process_and_closed_at_shutdown(
        self, redis_url: str, run_name: str, tmp_path: Path
    ) -> None:
        """8: all slots of a worker share one aiohttp session and one httpx client, and both are closed with it."""
        async with services(redis_url, run_name, group_size=3, import_allowlist=ALLOWED) as (running, client):
            data = {"ids": [1, 2], "folder": str(tmp_path), "url": running.server.url}
            for _ in range(2):
                await client.submit(data, "context_workflows.SharingWorkflow", {})
            await settled(client, accepted=2)
            session, httpx_client = (
                await workflow_context.get_aiohttp_session(),
                await workflow_context.get_httpx_client(),
            )
            ((*seen, _),) = marks(tmp_path, "clients")
            assert seen == [str(id(session)), str(id(httpx_client))]
            await running.stop("worker")
            assert session.closed
            assert httpx_client.is_closed

    async def test_outside_of_a_worker(self) -> None:
        """8: without a worker the clients work as well, are bounded, keep no cookies, and are closed by aclose."""
        session = await workflow_context.get_aiohttp_session()
        client = await workflow_context.get_httpx_client()
        assert isinstance(session, aiohttp.ClientSession)
        assert isinstance(client, httpx.AsyncClient)
        assert session.connector is not None
        assert session.connector.limit == 512
        await workflow_context.aclose()
        assert session.closed
        assert client.is_closed
        assert not (await workflow_context.get_aiohttp_session()).closed
        await workflow_context.aclose()

    async def test_each_event_loop_has_its_own(self) -> None:
        """8: a thread with an event loop of its own gets clients that work there."""
        mine = await workflow_context.get_aiohttp_session()

        async def other() -> bool:
            session = await workflow_context.get_aiohttp_session()
            await workflow_context.aclose()
            return session is not mine and session.closed

        assert await asyncio.to_thread(asyncio.run, other())
        assert not mine.closed
        await workflow_context.aclose()

    async def test_a_missing_httpx_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """8: without httpx the call is an error with the remedy."""
        monkeypatch.setitem(__import__("sys").modules, "httpx", None)
        with pytest.raises(SettingsError, match=r"install forebay\[workers\]"):
            await workflow_context.get_httpx_client()


async def test_processor_cache_is_shared_by_a_groups_slots(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """8: one computation for all slots of a group in a process, another for another group; nothing is left after."""
    async with services(redis_url, run_name, group_size=4, import_allowlist=ALLOWED) as (running, client):
        data = {"ids": [1, 2], "folder": str(tmp_path), "url": running.server.url}
        tasks = [await client.submit(data, "context_workflows.SharingWorkflow", {}) for _ in range(2)]
        await settled(client, accepted=2)
    computed = {int(task): name for task, name in marks(tmp_path, "computed")}
    assert sorted(computed) == tasks
    assert len(marks(tmp_path, "computed")) == 2
    saw = sorted((int(task), name, int(idx)) for task, name, idx in marks(tmp_path, "saw"))
    assert saw == [(task, computed[task], idx) for task in tasks for idx in range(4)]
    assert workflow_context.get().processor_cache is not workflow_context.get().processor_cache


class TestRewards:
    @pytest.mark.parametrize("how", ["reward", "KeyboardInterrupt", "GeneratorExit", "SystemExit"])
    async def test_whatever_is_raised_is_the_slots_failure(self, redis_url: str, run_name: str, how: str) -> None:
        """8: a reward or a workflow that raises what ends programs fails its slot; the worker goes on."""
        async with services(redis_url, run_name, import_allowlist=ALLOWED) as (running, client):
            await client.submit({"ids": [1], "raise": how}, "context_workflows.RaisingWorkflow", {})
            await settled(client, rejected=1)
            good = [await client.submit({"ids": [1, 2]}, WORKFLOW, {}) for _ in range(2)]
            (batch,) = await read(client, 1)
            assert sorted(group.task for group in batch.groups) == good
            assert (await running.store.status()).count("failures:data") == 2

    async def test_case_30_a_reward_that_never_returns(self, redis_url: str, run_name: str) -> None:
        """8: after its tries the slot is failed(timeout), the group is rejected, and the others flow."""
        rules: dict[str, Any] = {"import_allowlist": ALLOWED, "attempts_timeout": 1, "group_size": 1}
        async with services(redis_url, run_name, **rules) as (running, client):
            await client.submit({"ids": [1], "raise": "endless"}, "context_workflows.RaisingWorkflow", {})
            good = [await client.submit({"ids": [1, 2]}, WORKFLOW, {}) for _ in range(2)]
            (batch,) = await read(client, 1)
            assert sorted(group.task for group in batch.groups) == good
            await settled(client, rejected=1)
            assert (await running.store.status()).count("failures:timeout") == 1


class TestTraces:
    async def test_seconds_per_phase_travel_with_the_slot(self, redis_url: str, run_name: str) -> None:
        """8: the header has the seconds of each phase, by the workflow's own names, without any setting."""
        async with services(redis_url, run_name, import_allowlist=ALLOWED) as (running, client):
            data = {"ids": [1, 2], "actions": {"1": "hang"}}  # keeps the group, and with it the first slot's header
            await client.submit(data, "context_workflows.TracedWorkflow", {})

            async def published() -> bool:
                return bool(await headers(running.store))

            await when(published)
            (header,) = await headers(running.store)
            assert list(header.phases) == ["generate", "my reward"]
            assert 0 < sum(header.phases.values()) <= header.seconds

    async def test_a_line_for_each_episode(
        self, redis_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """8: with FOREBAY_WORKER_TRACE_DIR each attempt leaves a line: slot, status, reason, times and phases."""
        monkeypatch.setenv("FOREBAY_WORKER_TRACE_DIR", str(tmp_path))
        async with services(redis_url, run_name, group_size=3, import_allowlist=ALLOWED) as (_, client):
            data = {"ids": [1, 2], "actions": {"1": "reject", "2": "raise"}}
            task = await client.submit(data, "context_workflows.TracedWorkflow", {})
            hanging = await client.submit({"ids": [1, 2], "action": "hang"}, "context_workflows.TracedWorkflow", {})
            await settled(client, accepted=1)

            async def hang() -> bool:
                return (await client.status()).leased == 3

            await when(hang)
        lines = {(line["task_id"], line["sample_idx"]): line for line in read_sessions(tmp_path)}
        assert {slot: line["status"] for slot, line in lines.items()} == {
            (task, 0): "usable",
            (task, 1): "rejected",
            (task, 2): "failed",
            **{(hanging, idx): "handed_back" for idx in range(3)},
        }
        assert lines[task, 2]["reason"] == "RuntimeError: no such puzzle"
        assert [span[0] for span in lines[task, 0]["spans"]] == ["generate", "my reward"]
        assert [span[3] for span in lines[task, 2]["spans"]] == ["", "RuntimeError"]
        assert lines[hanging, 0]["run"] == run_name
        assert all(line["start"] < line["end"] and line["attempt"] == 1 for line in lines.values())

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        """8: a trace folder that cannot be made is an error at start that names the setting."""
        from forebay_workers.service import _trace_writer
        from forebay_workers.settings import WorkerSettings

        (tmp_path / "file").touch()
        with pytest.raises(SettingsError, match=r"FOREBAY_WORKER_TRACE_DIR=.*/file/x"):
            _trace_writer(WorkerSettings(trace_dir=tmp_path / "file" / "x"), "worker")
