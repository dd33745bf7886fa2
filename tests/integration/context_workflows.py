"""Workflows that the tests of context, caches, traces and the watchdog submit by name."""

from __future__ import annotations

import asyncio
import os
import re
import time
import uuid
from pathlib import Path
from typing import Any

import pipeline_workflows

from forebay import AsyncRewardWrapper, InferenceEngine, ModelRequest, trace_session, workflow_context

POISON = "a" * 80 + "b"


def interrupt(**_: Any) -> float:
    """Raise what ends a program."""
    raise KeyboardInterrupt


def endless(**_: Any) -> float:
    """Never return."""
    while True:
        pass


class BlockingWorkflow(pipeline_workflows.EchoWorkflow):
    """The echo workflow, but for prompts that block the thread of the event loop for ever."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """Block as the prompt says."""
        match data.get("block"):
            case "sleep":
                time.sleep(3600)  # noqa: ASYNC251 (the fault)
            case "regex":
                re.match(r"(a|aa)+$", POISON)
        return await super().arun_episode(engine, data)


class RaisingWorkflow(pipeline_workflows.EchoWorkflow):
    """The echo workflow, but for prompts that raise what no workflow should."""

    def __init__(self) -> None:
        self.interrupted = AsyncRewardWrapper(interrupt, max_workers=1)
        self.endless = AsyncRewardWrapper(endless, timeout_s=0.5, max_workers=1, max_retries=0)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """Raise as the prompt says."""
        match data.get("raise"):
            case "GeneratorExit":
                raise GeneratorExit
            case "KeyboardInterrupt":
                raise KeyboardInterrupt
            case "SystemExit":
                raise SystemExit(0)
            case "reward":
                await asyncio.gather(self.interrupted(), asyncio.sleep(0))
            case "endless":
                await self.endless()
        return await super().arun_episode(engine, data)


def _here(folder: Path, task_id: int) -> int:
    return len(list(folder.glob(f"here-{task_id}-*")))


class SharingWorkflow(pipeline_workflows.EchoWorkflow):
    """Computes one value for its group, reads a page of the server, and traces both."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """Leave a mark in ``data["folder"]`` for each computation, and for what each slot saw."""
        context, folder = workflow_context.get(), Path(data["folder"])

        async def compute() -> str:
            name = uuid.uuid4().hex
            (folder / f"computed-{context.task_id}-{name}").touch()
            async with asyncio.timeout(20):  # until all slots of the group are here
                while _here(folder, context.task_id) < context.group_size:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            return name

        (folder / f"here-{context.task_id}-{context.sample_idx}").touch()
        with trace_session("processor"):
            name = await context.processor_cache.aget_or_compute("images", compute)
        (folder / f"saw-{context.task_id}-{name}-{context.sample_idx}").touch()
        session = await workflow_context.get_aiohttp_session()
        client = await workflow_context.get_httpx_client()
        assert session is await workflow_context.get_aiohttp_session()
        assert client is await workflow_context.get_httpx_client()
        with trace_session("tools"):
            async with session.get(f"{data['url']}/model_info") as response:
                assert response.status == 200
            assert (await client.get(f"{data['url']}/model_info")).status_code == 200
        (folder / f"clients-{id(session)}-{id(client)}-{os.getpid()}").touch()
        return await super().arun_episode(engine, data)


class TracedWorkflow(pipeline_workflows.EchoWorkflow):
    """Traces phases, and ends as the prompt says."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """Generate and score under their names."""
        with trace_session("generate"):
            await engine.agenerate(ModelRequest(rid=uuid.uuid4().hex, input_ids=data["ids"]))
        with trace_session("my reward"):
            return await super().arun_episode(engine, data)
