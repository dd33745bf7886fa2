"""A workflow that blocks its worker's thread for ever: the worker ends, and nothing else is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from services import WORKFLOW, read, services

from forebay_workers.watchdog import EXIT_CODE

RULES = {"import_allowlist": ["pipeline_workflows", "context_workflows"], "attempts_infra": 2, "retry_backoff_s": 0.0}


@pytest.mark.slow
async def test_blocking_workflow_fails_and_others_flow(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """A group that blocks every worker is rejected when its attempts are used up; the others are delivered.

    They are, although the same workers hold them: each worker hands them back before it ends itself.
    """
    log = tmp_path / "worker.log"
    async with services(redis_url, run_name, worker=False, group_size=1, **RULES) as (running, client):
        await running.kill("worker")
        bad = await client.submit({"ids": [1], "block": "sleep"}, "context_workflows.BlockingWorkflow", {})
        good = [await client.submit({"ids": [1, 2]}, WORKFLOW, {}) for _ in range(2)]
        codes = []

        async def supervise() -> None:
            while True:
                running.start_process("worker", "worker", stderr=log, FOREBAY_WORKER_WATCHDOG_S="2")
                while (code := running.ended("worker")) is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                codes.append(code)

        supervisor = asyncio.create_task(supervise())
        try:
            (batch,) = await read(client, 1, timeout_s=60)
            assert sorted(group.task for group in batch.groups) == good
            async with asyncio.timeout(60):
                while (status := await client.status()).count("rejected") < 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        finally:
            supervisor.cancel()
        assert status.count("rejected:no_usable_slot") == 1
        assert status.in_flight == 0
        assert codes == [EXIT_CODE] * 2
    text = log.read_text()
    assert text.count("worker.blocked") == 2
    assert f"{bad}:0 attempt 1" in text
    assert 'context_workflows.py"' in text
