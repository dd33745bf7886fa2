"""Slots per second and their CPU time from ``submit`` to the trainer, against the same episodes without any queue.

Compared: ``pipeline`` is what runs in production, one process each: the client, which submits groups of 8 and reads
and acknowledges batches of 16 groups; a worker; the collector; Redis; an inference server that answers at once.
``direct`` is the least that could do the work: the same workflow with the same engine client in one process, as many
episodes at once, results checked and kept in memory; nothing survives a crash, nothing is shared with other machines,
no group is assembled, judged or cut. Both once with answers of 64 tokens, where the fixed cost of a slot shows, and
once with 2048, where the tokens do.

Why it is fair: same server process, same machine, in turns. All processes share the machine's cores and an answer
costs no time, so slots per second say how much CPU work a slot is, not how fast a fleet is; CPU milliseconds by
process say where it is spent, and they do not depend on the number of cores.

What it does not show: a real server, whose generation takes thousands of times longer than all of this; several
workers or machines; rewards, tokenizers and dumps, which cost CPU time of their own.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Report, Say
from benchmarks.server import Server, cpu_s, running_server
from benchmarks.sides import SLOTS
from benchmarks.stub_server import VOCABULARY
from forebay import AsyncBatchStream, AsyncClient, GenerationHyperparameters, RolloutWorkflow, Settings, load
from forebay.aio import named_task, stop_tasks
from forebay.errors import ForebayError
from forebay.generation import InferenceEngine, ModelRequest
from forebay.settings import EngineSettings
from forebay.wire.rows import rows_from_tensors
from forebay_ops.logs import last_lines
from forebay_ops.spawning import launch_argv
from forebay_workers.engines.fleet import Fleet

__all__ = ["OneCall", "run"]

_GROUP = 8
_BATCH = 16
_BATCHES = {64: 4, 2048: 2}
"""Batches a round, by the tokens of an answer."""
_PROMPT = 256
_ROUNDS = 3
_LIMIT_S = 60.0
_EXPERIMENT = "benchmark"

_PIPELINE = "pipeline"
_DIRECT = "direct"


class OneCall(RolloutWorkflow):
    """One generation, one row; nothing is tokenized or judged."""

    def __init__(self, max_new_tokens: int) -> None:
        self.gconfig = GenerationHyperparameters(max_new_tokens=max_new_tokens)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """The row of one call."""
        prompt: list[int] = data["input_ids"]
        response = await engine.agenerate(ModelRequest(os.urandom(8).hex(), prompt, self.gconfig))
        zeros = [0] * len(prompt)
        return {
            "input_ids": np.array([prompt + response.output_tokens], dtype=np.int32),
            "attention_mask": np.ones((1, len(prompt) + response.output_len), dtype=np.bool_),
            "loss_mask": np.array([zeros + [1] * response.output_len], dtype=np.int32),
            "logprobs": np.array([zeros + response.output_logprobs], dtype=np.float32),
            "versions": np.array([zeros + response.output_versions], dtype=np.int32),
            "rewards": np.ones(1, dtype=np.float32),
        }


def _prompt(seed: int) -> dict[str, Any]:
    return {"input_ids": np.random.default_rng(seed).integers(0, VOCABULARY, _PROMPT).tolist()}


class _Processes:
    """The processes of the pipeline, their logs in `folder`; they end with this one at the latest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start ``python -m WORDS``."""
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 -- our own modules
                launch_argv([sys.executable, "-m", *words]),
                env={**os.environ, **(env or {})},
                stdout=subprocess.PIPE if name == "stub server" else log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is for us; we then end them in our order
            )
        self._running[name] = process
        return process

    def pids(self) -> dict[str, int]:
        """By name. Raises ForebayError if one has ended."""
        for name, process in self._running.items():
            if process.poll() is not None:
                tail = "\n  ".join(last_lines(self._folder / f"{name}.log", 10))
                raise ForebayError(f"the {name} has ended with code {process.returncode}:\n  {tail}")
        return {name: process.pid for name, process in self._running.items()}

    def stop(self) -> None:
        """End them, the last one first."""
        for process in reversed(self._running.values()):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


@contextmanager
def _started(server: Server) -> Iterator[tuple[_Processes, str]]:
    """All processes of the pipeline, and the URL of the inference server."""
    processes = _Processes(server.home)
    try:
        stub = processes.start("stub server", "benchmarks.stub_server")
        url = stub.stdout.readline().decode().strip() if stub.stdout else ""
        env = {
            "REDIS_URL": server.url,
            "FOREBAY_EXPERIMENT_NAME": _EXPERIMENT,
            "FOREBAY_LOG_LEVEL": "warning",
            "FOREBAY_IMPORT_ALLOWLIST": "benchmarks",
            "FOREBAY_GROUP_SIZE": str(_GROUP),
            "FOREBAY_BATCH_SIZE": str(_BATCH),
            # Workers look at the version once a second; here it moves many times in one, and nothing shall be evicted.
            "FOREBAY_MAX_STALENESS": "64",
            "FOREBAY_SERVERS": url,
        }
        processes.start("collector", "forebay", "collector", env=env)
        processes.start("worker", "forebay", "worker", env=env)
        yield processes, url
    finally:
        processes.stop()


@dataclass(frozen=True, slots=True)
class _Cost:
    rate: float
    cpu_ms: dict[str, float]
    """For each slot, by process."""


_Clocks = dict[str, Callable[[], float]]
"""CPU seconds so far, by process."""


class _Meter:
    """Wall and CPU time of some slots; begins when it is made."""

    def __init__(self, clocks: _Clocks) -> None:
        self._clocks = clocks
        self._used = {name: clock() for name, clock in clocks.items()}
        self._began = time.perf_counter()

    def stop(self, slots: int) -> _Cost:
        """What each of `slots` has cost."""
        seconds = time.perf_counter() - self._began
        used = {name: (clock() - self._used[name]) * 1000 / slots for name, clock in self._clocks.items()}
        return _Cost(slots / seconds, used)


async def _pipeline(client: AsyncClient, stream: AsyncBatchStream, tokens: int, clocks: _Clocks, batches: int) -> _Cost:
    groups = batches * _BATCH
    prompts = [_prompt(seed) for seed in range(groups)]
    meter = _Meter(clocks)

    async def submit() -> None:
        await asyncio.gather(*(client.submit(data, OneCall, {"max_new_tokens": tokens}) for data in prompts))

    submitting = named_task("submit", submit())
    try:
        for _ in range(batches):
            batch = await stream.next()
            if batch is None or len(batch.rows) != _BATCH * _GROUP:
                raise ForebayError("the pipeline brought another batch than was submitted")
            await batch.ack()
            await client.set_version(await client.version() + 1)
        await submitting
    finally:
        await stop_tasks([submitting])
    return meter.stop(groups * _GROUP)


async def _direct(fleet: Fleet, tokens: int, clocks: _Clocks, batches: int) -> _Cost:
    workflow = OneCall(tokens)
    prompts = [data for seed in range(batches * _BATCH) for data in [_prompt(seed)] * _GROUP]
    meter = _Meter(clocks)
    gate = asyncio.Semaphore(SLOTS)

    async def episode(data: dict[str, Any]) -> Any:
        async with gate:
            result = await workflow.arun_episode(fleet, data)
        return rows_from_tensors(result or {})

    await asyncio.gather(*(episode(data) for data in prompts))
    return meter.stop(len(prompts))


async def _measure(server: Server, processes: _Processes, url: str, say: Say) -> Report:
    settings = load(Settings, redis_url=server.url, experiment_name=_EXPERIMENT)
    costs: dict[tuple[str, int], list[_Cost]] = {}
    async with await AsyncClient.connect(settings) as client, Fleet(load(EngineSettings)) as fleet:
        fleet.set_servers([url])
        await fleet.wait_ready(10)
        clocks: _Clocks = {
            "client": time.process_time,
            "redis": server.cpu_s,
            **{name: partial(cpu_s, pid) for name, pid in processes.pids().items()},
        }
        direct_clocks = {name: clocks[name] for name in ("client", "stub server")}
        async with client.batches(timeout_s=_LIMIT_S) as stream:
            say("starting")
            await _pipeline(client, stream, 64, clocks, 1)  # waits for the worker to be ready, and loads scripts
            for at in range(_ROUNDS):
                for tokens, batches in _BATCHES.items():
                    slots = batches * _BATCH * _GROUP
                    say(f"round {at + 1} of {_ROUNDS}: {slots} slots of {tokens} tokens, both ways")
                    processes.pids()
                    cost = await _pipeline(client, stream, tokens, clocks, batches)
                    costs.setdefault((_PIPELINE, tokens), []).append(cost)
                    costs.setdefault((_DIRECT, tokens), []).append(await _direct(fleet, tokens, direct_clocks, batches))
        status = await client.status()
    report = Report("End to end", reference=_DIRECT)
    for tokens in _BATCHES:
        _add(report, tokens, costs[_PIPELINE, tokens], costs[_DIRECT, tokens])
    report.notes.append(
        f"prompts of {_PROMPT} tokens; groups of {_GROUP}, batches of {_BATCH} groups; up to {SLOTS} slots at once; "
        f"{status.count('evicted')} groups evicted, {status.count('leases_lost')} leases lost"
    )
    return report


def _add(report: Report, tokens: int, pipeline: list[_Cost], direct: list[_Cost]) -> None:
    both = {_PIPELINE: pipeline, _DIRECT: direct}
    what = f"{tokens} tokens: "
    report.add(what + "slots per second", "1/s", {way: [one.rate for one in costs] for way, costs in both.items()})
    # The stub server is the same in both and no part of either.
    report.add(
        what + "CPU, all but the stub server",
        "ms/slot",
        {
            way: [sum(used for name, used in one.cpu_ms.items() if name != "stub server") for one in costs]
            for way, costs in both.items()
        },
    )
    parts = ("client", "worker", "collector", "redis", "stub server")
    report.add(what + "CPU by process", "ms/slot", {name: [one.cpu_ms[name] for one in pipeline] for name in parts})


def run(say: Say) -> Report:
    """Run the benchmark."""
    with running_server() as server, _started(server) as (processes, url):
        return asyncio.run(_measure(server, processes, url, say))
