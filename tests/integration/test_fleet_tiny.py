"""Fleet and weight updates against the development server: real tokens, logprobs, pauses and weights."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from forebay.errors import GenerationError, SlotDataError, WeightUpdateError
from forebay.generation import GenerationHyperparameters, ModelRequest, StopReason
from forebay.settings import EngineSettings
from forebay.weights import update_weights_from_disk
from forebay_workers.engines import Fleet

pytest.importorskip("torch")
pytest.importorskip("transformers")
from forebay_ops.tiny_model import CONTEXT_LENGTH, VOCABULARY, create_tiny_model
from forebay_ops.tiny_server.app import create_runner
from forebay_ops.tiny_server.engine import Engine
from forebay_ops.tiny_server.engine import EngineSettings as ServerSettings
from forebay_ops.tiny_server.model import ServedModel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of different weights."""
    folder = tmp_path_factory.mktemp("models")
    return [create_tiny_model(folder / f"seed{seed}", seed=seed) for seed in (0, 1)]


def settings(**changes: Any) -> EngineSettings:
    """Short waits."""
    return EngineSettings(**{"health_interval_s": 0.1, "pause_poll_s": 0.01, "no_server_timeout_s": 20, **changes})


@asynccontextmanager
async def tiny(model: Path) -> AsyncIterator[tuple[Engine, str, web.AppRunner]]:
    """A running server: its engine, its URL, and what stops it."""
    engine = Engine(ServedModel.load(model), ServerSettings(), "0")
    runner = create_runner(engine)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield engine, f"http://127.0.0.1:{runner.addresses[0][1]}", runner
    finally:
        await runner.cleanup()


@asynccontextmanager
async def setting(model: Path, count: int, **changes: Any) -> AsyncIterator[tuple[Fleet, list[Engine], list[Any]]]:
    """`count` servers of one model and a fleet on them: (fleet, engines, (url, runner) pairs)."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(tiny(model)) for _ in range(count)]
        fleet = await stack.enter_async_context(Fleet(settings(**changes)))
        fleet.set_servers(url for _, url, _ in servers)
        await until(lambda: all(stat.healthy for stat in fleet.stats().values()))
        yield fleet, [engine for engine, _, _ in servers], [(url, runner) for _, url, runner in servers]


async def until(condition: Any, timeout_s: float = 30.0) -> None:
    """Return once `condition` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not come true in time")
        await asyncio.sleep(0.005)


def long_requests(count: int, tokens: int) -> list[ModelRequest]:
    """Requests that run for exactly `tokens` tokens."""
    gconfig = GenerationHyperparameters(max_new_tokens=tokens, ignore_eos=True)
    return [ModelRequest(f"r{i}", [14, 15, 4, 5, 6, 7, 16], gconfig) for i in range(count)]


async def test_greedy_equals_seeded_repeats(models: list[Path]) -> None:
    """Greedy and seeded generations repeat exactly; every hyperparameter is accepted by the server."""
    gconfig = GenerationHyperparameters(
        max_new_tokens=16, min_new_tokens=4, greedy=True, top_k=5, top_p=0.9, stop_token_ids=[0], frequency_penalty=0.1
    )
    async with setting(models[0], 1) as (fleet, _, _):
        prompt = [14, 15, 4, 5]
        for choice in (gconfig, gconfig.new(greedy=False, seed=5)):
            first = await fleet.agenerate(ModelRequest("a", prompt, choice))
            again = await fleet.agenerate(ModelRequest("b", prompt, choice))
            assert first.output_tokens == again.output_tokens
            assert first.output_versions == [0] * first.output_len
            assert all(value <= 0 for value in first.output_logprobs)


async def test_server_refusals(models: list[Path]) -> None:
    """An id outside the vocabulary never reaches the server; a context overflow is the server's own 400."""
    async with setting(models[0], 1) as (fleet, engines, _):
        with pytest.raises(SlotDataError, match="outside the vocabulary"):
            await fleet.agenerate(ModelRequest("a", [len(VOCABULARY)]))
        assert engines[0].total_requests == 0
        with pytest.raises(GenerationError, match="exceed the context"):
            await fleet.agenerate(ModelRequest("a", [1], GenerationHyperparameters(max_new_tokens=CONTEXT_LENGTH)))


@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
async def test_update_during_generation(models: list[Path], mode: str) -> None:
    """Cases 22 and 24: an update mid-request leaves exact versions per token and a whole generation, in every mode."""
    count, tokens = 6, 300
    async with setting(models[0], 2, pause_mode=mode) as (fleet, engines, servers):
        pending = [asyncio.create_task(fleet.agenerate(req)) for req in long_requests(count, tokens)]
        await until(lambda: all(engine.total_tokens > 30 for engine in engines))
        result = await update_weights_from_disk(
            [url for url, _ in servers], str(models[1]), 1, settings(pause_mode=mode)
        )
        fleet.set_version(1)
        responses = await asyncio.gather(*pending)
        after = await fleet.agenerate(ModelRequest("after", [4, 5], GenerationHyperparameters(max_new_tokens=4)))
    assert result.out == []
    for response in responses:
        assert response.stop_reason is StopReason.LENGTH
        assert len(response.output_logprobs) == len(response.output_versions) == response.output_len == tokens
        assert response.output_versions == sorted(response.output_versions)
        assert set(response.output_versions) == {0, 1}
    assert set(after.output_versions) == {1}


async def test_refused_weights(models: list[Path], tmp_path: Path) -> None:
    """Weights that are not there leave every server running on its old ones, under the old version."""
    async with setting(models[0], 2) as (fleet, engines, servers):
        with pytest.raises(WeightUpdateError):
            await update_weights_from_disk([url for url, _ in servers], str(tmp_path / "none"), 1, settings())
        assert not any(engine.paused for engine in engines)
        assert (await fleet.agenerate(long_requests(1, 5)[0])).output_versions == [0] * 5


async def test_server_dies_mid_request(models: list[Path]) -> None:
    """Case 35: one of two servers goes down with requests in flight; every request finishes in full."""
    async with setting(models[0], 2) as (fleet, engines, servers):
        pending = [asyncio.create_task(fleet.agenerate(req)) for req in long_requests(8, 200)]
        await until(lambda: all(engine.total_tokens > 20 for engine in engines))
        await servers[0][1].cleanup()
        responses = await asyncio.gather(*pending)
        assert {response.output_len for response in responses} == {200}
        assert not fleet.stats()[servers[0][0]].healthy
