"""The fleet: versions, resumption after aborts, dead servers, bounds on every wait."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from scripted_server import DIE, ScriptedServer, answer, fast_settings, scripted, spans, until

from forebay.backends import Segment
from forebay.errors import GenerationError, ServerUnavailableError, SlotDataError
from forebay.generation import GenerationHyperparameters, ModelRequest, ModelResponse, StopReason
from forebay_workers.engines import Fleet
from forebay_workers.engines.progress import token_versions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def fleet_of(*servers: ScriptedServer, **settings: Any) -> AsyncIterator[Fleet]:
    """A fleet whose servers are all up."""
    async with Fleet(fast_settings(**settings)) as fleet:
        fleet.set_servers(server.url for server in servers)
        await until(lambda: all(stat.healthy for stat in fleet.stats().values()))
        yield fleet


def request(rid: str = "r", prompt: list[int] | None = None, **gconfig: Any) -> ModelRequest:
    """A request of a few tokens."""
    return ModelRequest(rid, [5, 6] if prompt is None else prompt, GenerationHyperparameters(**gconfig))


class Gate:
    """A step that waits until it is opened, then answers with `body`; `seen` once the request is there."""

    def __init__(self, body: Any) -> None:
        self.body = body
        self.seen = asyncio.Event()
        self.opened = asyncio.Event()
        self.cancelled = False

    async def __call__(self, _: dict[str, Any]) -> web.StreamResponse:
        """Hold the answer until the test opens it."""
        self.seen.set()
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return web.json_response(self.body)


async def test_one_call() -> None:
    """A generation that is not disturbed is one call; all lists have one entry per token."""
    async with scripted() as [server], fleet_of(server) as fleet:
        server.default = answer([7, 8], weight_versions=spans(("4", 2)))
        response = await fleet.agenerate(request())
        stats = fleet.stats()[server.url]
    assert (response.output_tokens, response.output_logprobs) == ([7, 8], [-0.507, -0.508])
    assert response.output_versions == [4, 4]
    assert response.stop_reason is StopReason.STOP
    assert 0 < response.ttft <= response.latency
    assert (stats.requests, stats.tokens, stats.errors, stats.in_flight) == (1, 2, 0, 0)


async def test_bad_requests() -> None:
    """What can never work is refused before anything is sent."""
    async with scripted() as [server], fleet_of(server) as fleet:
        with pytest.raises(ValueError, match="n_samples=2"):
            await fleet.agenerate(request(n_samples=2))
        with pytest.raises(SlotDataError, match="no token may be generated"):
            await fleet.agenerate(request(prompt=[1] * 10, max_tokens=10))
        with pytest.raises(SlotDataError, match="no token may be generated"):
            await fleet.agenerate(request(max_new_tokens=0))
        with pytest.raises(SlotDataError, match="prompt is empty"):
            await fleet.agenerate(request(prompt=[]))
        with pytest.raises(SlotDataError, match="-1 in input_ids is no token id"):
            await fleet.agenerate(request(prompt=[-1]))
        as_dict: Any = {"input_ids": [5, 6], "attention_mask": [1, 1]}  # of apply_chat_template in transformers 5
        for prompt in (as_dict, list(as_dict), "text", None):
            with pytest.raises(SlotDataError, match="return_dict=False"):
                await fleet.agenerate(ModelRequest("r", prompt))
        assert server.requests == []


async def test_budget() -> None:
    """The budget is the smaller of max_new_tokens and what max_tokens leaves."""
    async with scripted() as [server], fleet_of(server) as fleet:
        await fleet.agenerate(request(max_new_tokens=9))
        await fleet.agenerate(request(max_new_tokens=9, max_tokens=7))
        assert [sent["sampling_params"]["max_new_tokens"] for sent in server.requests] == [9, 5]


async def test_prompt_outside_the_vocabulary() -> None:
    """An id that would kill the server is never sent."""
    async with scripted() as [server]:
        server.info["vocab_size"] = 20
        async with fleet_of(server) as fleet:
            with pytest.raises(SlotDataError, match="token id 20 is outside the vocabulary"):
                await fleet.agenerate(request(prompt=[3, 20]))
            assert server.requests == []
            assert fleet.stats()[server.url].in_flight == 0


@pytest.mark.parametrize("label", [None, "default", "3"])
async def test_bump_during_a_request(label: str | None) -> None:
    """Cases 22 and 27: after a bump mid-request, tokens keep the version that was pinned before, or the label."""
    meta = {} if label is None else {"weight_version": label}
    gate = Gate(answer([1, 2], **meta))
    async with scripted() as [server]:
        server.info["weight_version"] = label
        server.default = gate
        async with fleet_of(server) as fleet:
            fleet.set_version(3)
            pending = asyncio.create_task(fleet.agenerate(request()))
            await gate.seen.wait()
            fleet.set_version(4)
            gate.opened.set()
            response = await pending
    assert response.output_versions == [3, 3]
    assert fleet.get_version() == 4


async def test_older_server_label_stands() -> None:
    """A server behind the run's version labels its tokens with what served them."""
    async with scripted() as [server]:
        server.info["weight_version"] = "2"
        server.default = answer([1], weight_version="2")
        async with fleet_of(server) as fleet:
            fleet.set_version(5)
            assert (await fleet.agenerate(request())).output_versions == [2]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"known": 3, "pinned": 3, "pinned_after": 3}, 3),  # the label moved during the call: the older one
        ({"known": 3, "pinned": 4, "pinned_after": 4}, 4),  # the last health check was before the update
        ({"known": 4, "pinned": 3, "pinned_after": 3}, 4),  # the server is ahead of the run's version
        ({"known": None, "pinned": 3, "pinned_after": 4}, 3),
        ({"known": None, "pinned": 3, "pinned_after": 3}, 4),
    ],
)
async def test_label_while_weights_may_have_changed(facts: dict[str, Any], expected: int) -> None:
    """Case 22: a label holds for all tokens only if weights cannot have changed; else the older version is taken."""
    segment = Segment([1], [-0.1], [4], StopReason.STOP)
    assert token_versions(segment, updates_abort=False, **facts) == [expected]
    assert token_versions(segment, updates_abort=True, **facts) == [4]
    exact = Segment([1], [-0.1], [4], StopReason.STOP, exact=True)
    assert token_versions(exact, updates_abort=False, **facts) == [4]


async def test_two_aborts_three_segments() -> None:
    """Case 24: two aborts give three segments with the right ids, logprobs and versions, resumed from ids."""
    async with scripted() as [server], fleet_of(server) as fleet:
        server.script.extend(
            [
                answer([1, 2], "abort", weight_versions=spans(("3", 2))),
                answer([3], "abort", weight_versions=spans(("4", 1))),
                answer([4, 5], weight_versions=spans(("4", 1), ("5", 1))),
            ]
        )
        response = await fleet.agenerate(request(max_new_tokens=8, min_new_tokens=5, seed=1))
        sent = server.requests
    assert response.output_tokens == [1, 2, 3, 4, 5]
    assert response.output_logprobs == [-0.501, -0.502, -0.503, -0.504, -0.505]
    assert response.output_versions == [3, 3, 4, 4, 5]
    assert response.stop_reason is StopReason.STOP
    assert [one["input_ids"] for one in sent] == [[5, 6], [5, 6, 1, 2], [5, 6, 1, 2, 3]]
    params = [one["sampling_params"] for one in sent]
    assert [one["max_new_tokens"] for one in params] == [8, 6, 5]
    assert [one["min_new_tokens"] for one in params] == [5, 3, 2]
    assert len({one["rid"] for one in sent}) == 3
    seeds = [one["sampling_seed"] for one in params]
    assert seeds[0] == 1
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**31 for seed in seeds)


async def test_derived_seeds_are_deterministic() -> None:
    """The same interruption of the same seeded request resumes with the same seed; an unseeded one has none."""
    async with scripted() as [server], fleet_of(server) as fleet:
        for seed in (1, 1, None):
            server.script.append(answer([1, 2], "abort"))
            await fleet.agenerate(request(seed=seed))
        seeds = [one["sampling_params"].get("sampling_seed") for one in server.requests]
    assert seeds[1] == seeds[3] != 1
    assert seeds[4:] == [None, None]


async def test_abort_at_the_end_of_the_budget() -> None:
    """An abort with the budget used up is a length stop."""
    async with scripted() as [server], fleet_of(server) as fleet:
        server.script.append(answer([1, 2], "abort"))
        response = await fleet.agenerate(request(max_new_tokens=2))
    assert response.stop_reason is StopReason.LENGTH
    assert len(server.requests) == 1


async def test_waits_while_paused() -> None:
    """After an abort nothing is sent to a server that says it is paused, until it goes on."""
    async with scripted() as [server], fleet_of(server) as fleet:
        server.info["paused"] = True
        server.script.append(answer([1], "abort"))
        pending = asyncio.create_task(fleet.agenerate(request()))
        await until(lambda: fleet.stats()[server.url].paused and fleet.stats()[server.url].requests == 1)
        await asyncio.wait([pending], timeout=0.1)
        assert len(server.requests) == 1
        server.info["paused"] = False
        assert (await pending).output_tokens == [1, 1, 2, 3]


async def test_aborts_without_headway_back_off() -> None:
    """A server that keeps aborting with nothing is asked less and less often."""
    async with scripted() as [server], fleet_of(server, pause_poll_s=0.02) as fleet:
        server.default = answer([], "abort")
        pending = asyncio.create_task(fleet.agenerate(request()))
        await asyncio.wait([pending], timeout=0.5)
        assert 2 <= len(server.requests) <= 6  # a busy loop would make hundreds
        server.default = answer([9])
        assert (await pending).output_tokens == [9]


async def test_endless_aborts_end() -> None:
    """Aborts without a token for update_timeout_s are an error that says so."""
    async with scripted() as [server], fleet_of(server, update_timeout_s=0.1) as fleet:
        server.default = answer([], "abort")
        with pytest.raises(ServerUnavailableError, match="without a token"):
            await fleet.agenerate(request())


async def test_dead_server_is_avoided() -> None:
    """Case 35: with one of two servers killed mid-request, all requests finish on the other; it may come back."""
    async with scripted(2) as servers, fleet_of(*servers) as fleet:
        dead, alive = servers
        gate = Gate(answer([1]))
        dead.default = gate
        pending = [asyncio.create_task(fleet.agenerate(request(f"r{i}"))) for i in range(8)]
        await gate.seen.wait()
        await dead.stop()
        responses = await asyncio.gather(*pending)
        assert all(one.output_tokens for one in responses)
        assert not fleet.stats()[dead.url].healthy
        assert fleet.stats()[dead.url].errors >= 1
        before = len(dead.requests)
        await asyncio.gather(*(fleet.agenerate(request(f"r{i}")) for i in range(8)))
        assert len(dead.requests) == before
        dead.default = answer([2])
        await dead.start()
        await until(lambda: fleet.stats()[dead.url].healthy)
        await asyncio.gather(*(fleet.agenerate(request(f"n{i}")) for i in range(8)))
        assert len(dead.requests) > before
    assert alive.requests


async def test_tokens_survive_a_dead_server() -> None:
    """Case 35: tokens of earlier segments are kept when their server dies, and the rest is generated elsewhere."""
    async with scripted(2) as [one, other], fleet_of(one) as fleet:
        gate = Gate(None)
        one.script.extend([answer([1, 2], "abort", weight_versions=spans(("3", 2))), gate])
        pending = asyncio.create_task(fleet.agenerate(request()))
        await gate.seen.wait()
        fleet.set_servers([one.url, other.url])
        other.default = answer([3], weight_versions=spans(("4", 1)))
        await one.stop()
        response = await pending
    assert other.requests[0]["input_ids"] == [5, 6, 1, 2]
    assert (response.output_tokens, response.output_versions) == ([1, 2, 3], [3, 3, 4])


@pytest.mark.parametrize("step", [DIE, 429, 500, 503])
async def test_failed_call_goes_on(step: int) -> None:
    """A broken connection, 429 and 5xx are tried again; the request does not see them."""
    async with scripted() as [server], fleet_of(server) as fleet:
        server.script.extend([step, step])
        response = await fleet.agenerate(request())
        assert response.output_tokens == [1, 2, 3]
        assert len({sent["rid"] for sent in server.requests}) == 3
        assert fleet.stats()[server.url].errors == 2


async def test_permanent_refusal_is_not_retried() -> None:
    """A 400 goes to the caller at once, and the server stays in the rotation."""
    async with scripted() as [server], fleet_of(server) as fleet:
        server.script.append(400)
        with pytest.raises(GenerationError, match="scripted 400"):
            await fleet.agenerate(request())
        assert len(server.requests) == 1
        assert fleet.stats()[server.url].healthy
        assert fleet.stats()[server.url].in_flight == 0


async def test_missing_logprob_fails_the_slot() -> None:
    """Case 25: n-1 logprobs are a SlotDataError."""
    async with scripted() as [server], fleet_of(server) as fleet:
        server.default = answer([1, 2], output_token_logprobs=[[-0.1, 1, None]])
        with pytest.raises(SlotDataError, match="1 output logprobs for 2"):
            await fleet.agenerate(request())


async def test_endless_failures_end() -> None:
    """A server whose health passes while its requests fail is left to itself, and the request ends in bounded time."""
    async with scripted() as [server], fleet_of(server, no_server_timeout_s=0.3) as fleet:
        server.default = 500
        with pytest.raises(ServerUnavailableError, match="scripted 500"):
            await fleet.agenerate(request())
        assert len(server.requests) < 20


async def test_no_server_in_time() -> None:
    """Without any healthy server a request fails after no_server_timeout_s, and the error says what to do."""
    async with Fleet(fast_settings(no_server_timeout_s=0.1)) as fleet:
        started = time.monotonic()
        with pytest.raises(ServerUnavailableError, match=r"known: none.*start a server"):
            await fleet.agenerate(request())
        assert 0.1 <= time.monotonic() - started < 2
        with pytest.raises(ServerUnavailableError):
            await fleet.wait_ready(0.01)


async def test_requests_before_the_servers() -> None:
    """Case 36: requests that come before the servers wait for them and then succeed, with no failed attempt."""
    server = ScriptedServer()
    await server.start()
    await server.stop()  # its address is known, nothing listens
    async with Fleet(fast_settings()) as fleet:
        pending = [asyncio.create_task(fleet.agenerate(request(f"r{i}"))) for i in range(4)]
        fleet.set_servers([server.url])
        await asyncio.wait(pending, timeout=0.1)
        assert not any(one.done() for one in pending)
        await server.start()
        try:
            await fleet.wait_ready(5)
            responses = await asyncio.gather(*pending)
        finally:
            await server.stop()
        assert all(one.output_tokens == [1, 2, 3] for one in responses)
        assert fleet.stats()[server.url].errors == 0


async def test_affinity_and_balance() -> None:
    """Requests of one rid stay on one server, new rids are spread."""
    async with scripted(2) as servers, fleet_of(*servers) as fleet:
        for _ in range(4):
            await fleet.agenerate(request("same"))
        assert sorted(len(server.requests) for server in servers) == [0, 4]
        for number in range(4):
            await fleet.agenerate(request(f"r{number}"))
        assert sorted(len(server.requests) for server in servers) == [2, 6]


async def test_removed_server_gets_nothing_new() -> None:
    """A server that left the registry ends its open calls, gets no new ones, and is forgotten."""
    async with scripted(2) as [one, other], fleet_of(one) as fleet:
        gate = Gate(answer([4]))
        one.default = gate
        pending = asyncio.create_task(fleet.agenerate(request("r")))
        await gate.seen.wait()
        fleet.set_servers([other.url])
        await until(lambda: fleet.stats()[other.url].healthy)
        await fleet.agenerate(request("r"))
        gate.opened.set()
        assert (await pending).output_tokens == [4]
        await until(lambda: one.url not in fleet.stats())
        assert (len(one.requests), len(other.requests)) == (1, 1)


async def test_open_calls_leave_a_silent_server() -> None:
    """A server that stops answering its health checks loses its open calls: they go on elsewhere."""
    async with scripted(2) as [silent, other], fleet_of(silent) as fleet:
        gate = Gate(None)
        silent.default = gate
        pending = asyncio.create_task(fleet.agenerate(request()))
        await gate.seen.wait()
        fleet.set_servers([silent.url, other.url])
        silent.healthy = False
        assert (await pending).output_tokens == [1, 2, 3]
        assert len(other.requests) == 1


async def test_removed_server_loses_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls at a removed server that hangs go on elsewhere after a while."""
    monkeypatch.setattr("forebay_workers.engines.fleet._REMOVED_GRACE_S", 0.1)
    async with scripted(2) as [one, other], fleet_of(one) as fleet:
        gate = Gate(None)
        one.default = gate
        pending = asyncio.create_task(fleet.agenerate(request()))
        await gate.seen.wait()
        fleet.set_servers([other.url])
        assert (await pending).output_tokens == [1, 2, 3]
        assert list(fleet.stats()) == [other.url]


async def test_cancellation_closes_the_call() -> None:
    """A cancelled request gives its place back and its connection up."""
    async with scripted() as [server], fleet_of(server) as fleet:
        gate = Gate(None)
        server.default = gate
        pending = asyncio.create_task(fleet.agenerate(request()))
        await gate.seen.wait()
        assert fleet.stats()[server.url].in_flight == 1
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending
        assert fleet.stats()[server.url].in_flight == 0
        await until(lambda: gate.cancelled)


async def test_close_ends_requests() -> None:
    """Closing the fleet ends open and waiting requests with an error, at once."""
    async with scripted() as [server], fleet_of(server) as fleet:
        gate = Gate(None)
        server.default = gate
        pending: asyncio.Task[ModelResponse] = asyncio.create_task(fleet.agenerate(request()))
        await gate.seen.wait()
        await fleet.close()
        with pytest.raises(ServerUnavailableError, match="closed"):
            await pending
        with pytest.raises(ServerUnavailableError, match="closed"):
            await fleet.agenerate(request())
