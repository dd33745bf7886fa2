"""What workers say of their attempts: the message, and how it is made (an open slot's worker, server and phase)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from aiohttp import web
from scripted_server import ScriptedServer, answer, fast_settings, scripted, until

from forebay import workflow_context
from forebay.errors import FrameError
from forebay.generation import GenerationHyperparameters, ModelRequest
from forebay.tracing import Session
from forebay.wire.doing import MAX_ATTEMPTS, AttemptDoing, Doing, ServerSeen
from forebay.wire.values import pack
from forebay_workers.doing import what_runs
from forebay_workers.engines import Fleet

URL = "http://gpu1:30000"


def test_round_trip() -> None:
    """What was packed comes back, times to a tenth of a second."""
    said = Doing(
        {(1, 2, 3): AttemptDoing(4.0, "generating", 3.5, URL), (1, 3, 1): AttemptDoing(9.0, "reward", 1.0)},
        {URL: ServerSeen(True, paused_s=2.0), "http://b": ServerSeen(False, down_s=7.5, error="HTTP 503")},
    )
    assert Doing.unpack(said.pack()) == said


def test_size_is_bounded() -> None:
    """Of many attempts the oldest are told, in a few bytes each; texts are cut."""
    many = {(10**6 + task, 7, 1): AttemptDoing(float(task), "generating", 1.0, URL) for task in range(2 * MAX_ATTEMPTS)}
    frame = Doing(many, {URL: ServerSeen(False, error="x" * 5000)}).pack()
    assert len(frame) < MAX_ATTEMPTS * 48 + 1000
    found = Doing.unpack(frame)
    assert min(one.age_s for one in found.attempts.values()) == MAX_ATTEMPTS
    assert (len(found.attempts), len(found.servers[URL].error)) == (MAX_ATTEMPTS, 200)


@pytest.mark.parametrize(
    "form",
    [
        None, [], {}, {"a": 1}, {"a": [1, [1], [1, 2, 3, "x", 4, 5, 6]], "s": [[]]}, {"s": [["u", 1, 2, 3, 4]]},
        {"a": [[1, 2, 3, 4.0, "p", 5.0, 99], [1, 2, 4, 4.0, "p", 5.0, -7]]}, {"a": {"b": 1}, "s": "s"},
    ],
)  # fmt: skip
def test_odd_entries_are_left_out(form: Any) -> None:
    """What another release may say differently is left out, not an error."""
    found = Doing.unpack(pack(form))
    assert all(one.server == "" for one in found.attempts.values())


def test_random_bytes_are_a_frame_error() -> None:
    """Bytes that are no message are a FrameError or an empty message, never another exception."""
    rng = random.Random(7)
    whole = Doing({(1, 2, 3): AttemptDoing(1.0, "p", 1.0, URL)}, {URL: ServerSeen(True)}).pack()
    for _ in range(500):
        cut = bytearray(whole[: rng.randrange(len(whole) + 1)])
        for _ in range(rng.randrange(4)):
            if cut:
                cut[rng.randrange(len(cut))] = rng.randrange(256)
        try:
            Doing.unpack(bytes(cut))
        except FrameError:
            continue


def episode(attempt: tuple[int, int, int]) -> workflow_context.WorkflowContext:
    """The context of an episode."""
    return workflow_context.WorkflowContext(task_id=attempt[0], sample_idx=attempt[1], attempt=attempt[2])


async def test_phases_of_attempts() -> None:
    """An attempt generates at a server, runs a traced phase, waits, or runs its workflow's own code."""
    gate = asyncio.Event()

    async def hold(_: dict[str, Any]) -> Any:
        await gate.wait()
        return web.json_response(answer([1]))

    async def generate(fleet: Fleet, attempt: tuple[int, int, int], session: Session) -> None:
        span = session.enter("generate")
        with workflow_context.scope(episode(attempt)):
            await fleet.agenerate(ModelRequest("r", [5], GenerationHyperparameters()))
        session.leave(span)

    attempt, scored, own = (1, 0, 1), (1, 1, 2), (2, 0, 1)
    sessions = {name: Session() for name in (attempt, scored, own)}
    sessions[scored].enter("reward")
    async with scripted() as (server,), Fleet(fast_settings()) as fleet:
        server.default = hold
        task = asyncio.create_task(generate(fleet, attempt, sessions[attempt]))
        await until(lambda: fleet.generating().get(attempt) is not None)
        assert what_runs(sessions, fleet).attempts[attempt].phase == "waiting for a server"
        fleet.set_servers([server.url])
        await until(lambda: server.requests)
        said = what_runs(sessions, fleet)
        assert (said.attempts[attempt].phase, said.attempts[attempt].server) == ("generating", server.url)
        assert (said.attempts[scored].phase, said.attempts[scored].server) == ("reward", "")
        assert said.attempts[own].phase == "workflow"
        assert said.servers[server.url].healthy
        assert what_runs(sessions, fleet, own).attempts[own].phase == "blocking the event loop"
        gate.set()
        await task
        assert attempt not in fleet.generating()
        assert what_runs(sessions, fleet).attempts[attempt].phase == "workflow"


async def test_servers_that_are_down_or_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    """For how long a server has been paused or down is told, and what it failed with."""
    async with scripted(2) as servers, Fleet(fast_settings()) as fleet:
        paused, down = servers
        fleet.set_servers([paused.url, down.url])
        await until(lambda: all(one.healthy for one in fleet.stats().values()))
        assert [one.down_s for one in fleet.stats().values()] == [None, None]
        paused.info["paused"] = True
        down.healthy = False
        await until(lambda: fleet.stats()[paused.url].paused and not fleet.stats()[down.url].healthy)
        seen = what_runs({}, fleet).servers
        assert seen[paused.url].paused_s is not None
        assert seen[paused.url].down_s is None
        assert seen[down.url].down_s is not None
        assert "503" in seen[down.url].error
        paused.info["paused"] = False
        await until(lambda: not fleet.stats()[paused.url].paused)
        assert what_runs({}, fleet).servers[paused.url].paused_s is None


async def test_waiting_for_a_weight_update() -> None:
    """An attempt whose generation was aborted by an update waits for it, and is said to."""
    async with scripted() as servers, Fleet(fast_settings()) as fleet:
        server: ScriptedServer = servers[0]
        server.info["paused"] = True
        server.script.append(answer([1], stop="abort"))
        fleet.set_servers([server.url])
        task = asyncio.create_task(_one(fleet))
        await until(lambda: any(one.doing == "waiting for a weight update" for one in fleet.generating().values()))
        server.info["paused"] = False
        await task


async def _one(fleet: Fleet) -> None:
    with workflow_context.scope(episode((1, 0, 1))):
        await fleet.agenerate(ModelRequest("r", [5], GenerationHyperparameters()))
