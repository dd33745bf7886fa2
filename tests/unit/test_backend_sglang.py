"""The SGLang client: what it sends, what it accepts, how it fails."""

from __future__ import annotations

import asyncio
import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from aiohttp import web
from scripted_server import DIE, answer, fast_settings, scripted, spans

from forebay.backends import Backend, ServerError, make_backend, make_session
from forebay.errors import GenerationError, SettingsError, SlotDataError
from forebay.generation import GenerationHyperparameters, StopReason

if TYPE_CHECKING:
    from pathlib import Path

    from forebay.backends import Segment

pytestmark = pytest.mark.asyncio
G = GenerationHyperparameters


async def ask(step: Any, gconfig: G | None = None, budget: int = 8, **settings: Any) -> tuple[Segment, dict[str, Any]]:
    """One call of a server that answers with `step`: the segment and the request that the server saw."""
    options = fast_settings(**settings)
    async with scripted() as [server], make_session(options) as session:
        server.default = step
        backend = make_backend("sglang", server.url + "/", session, options)
        segment = await backend.generate("r1", [5, 6], gconfig or G(), budget)
        return segment, server.requests[0]


async def test_every_hyperparameter_reaches_the_server() -> None:
    """All fields are sent in the server's words, the budget as max_new_tokens."""
    gconfig = G(
        min_new_tokens=2,
        top_p=0.9,
        top_k=40,
        temperature=0.7,
        stop_token_ids=[3],
        ignore_eos=True,
        skip_special_tokens=False,
        stop=["END"],
        frequency_penalty=0.25,
        seed=11,
    )
    _, sent = await ask(answer([1]), gconfig, budget=6)
    assert sent["input_ids"] == [5, 6]
    assert sent["rid"] == "r1"
    assert sent["return_logprob"] is True
    assert sent["sampling_params"] == {
        "max_new_tokens": 6,
        "min_new_tokens": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "stop": ["END"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "frequency_penalty": 0.25,
        "sampling_seed": 11,
    }


async def test_defaults_in_server_words() -> None:
    """Greedy is temperature 0, the whole vocabulary is top_k -1, a minimum never exceeds the budget."""
    _, sent = await ask(answer([1]), G(greedy=True, min_new_tokens=100), budget=4)
    params = sent["sampling_params"]
    assert params["temperature"] == 0.0
    assert params["top_k"] == -1
    assert params["min_new_tokens"] == 4
    assert not {"sampling_seed", "stop", "stop_token_ids"} & params.keys()


@pytest.mark.parametrize(
    ("meta", "versions", "exact"),
    [
        ({"weight_versions": spans(("3", 1), ("4", 2)), "weight_version": "4"}, [3, 4, 4], True),
        ({"weight_version": "7"}, [7, 7, 7], False),
        ({"weight_version": "default"}, None, False),
        ({"weight_versions": spans(("default", 1), ("4", 2)), "weight_version": "4"}, None, False),
        ({}, None, False),
    ],
)
async def test_versions(meta: dict[str, Any], versions: list[int] | None, *, exact: bool) -> None:
    """Versions come from the spans, else from the integer label, else there are none."""
    segment, _ = await ask(answer([1, 2, 3], **meta))
    assert segment.versions == versions
    assert segment.exact is exact
    assert segment.logprobs == [-0.501, -0.502, -0.503]
    assert segment.stop is StopReason.STOP


async def test_label_that_is_no_integer_is_warned_of_once() -> None:
    """One warning per server for labels that are no integers."""
    options = fast_settings()
    async with scripted() as [server], make_session(options) as session:
        server.default = answer([1], weight_version="default")
        backend = make_backend("sglang", server.url, session, options)
        with structlog.testing.capture_logs() as logs:
            for number in range(3):
                await backend.generate(f"r{number}", [5], G(), 4)
    assert [entry["event"] for entry in logs] == ["server.label_not_integer"]


async def test_aborted_while_queued() -> None:
    """An abort without any output is an empty segment, not an error."""
    body = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "paused"}}}
    segment, _ = await ask(body)
    assert (segment.tokens, segment.stop, segment.message) == ([], StopReason.ABORT, "paused")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (answer([1, 2], output_token_logprobs=[[-0.1, 1, None]]), "1 output logprobs for 2 output ids"),
        (answer([1, 2], output_token_logprobs=None), "0 output logprobs for 2 output ids"),
        (answer([1], output_token_logprobs=[[float("nan"), 1, None]]), "is nan"),
        (answer([1], output_token_logprobs=[[float("-inf"), 1, None]]), "is -inf"),
        (answer([1], output_token_logprobs=[[-9999.0, 1, None]]), "is -9999.0"),
        (answer([1], output_token_logprobs=[[2.0, 1, None]]), "is 2.0"),
        (answer([1], output_token_logprobs=[[None, 1, None]]), "is no number"),
        (answer([1], output_token_logprobs=[[-0.1, 2, None]]), "is of id 2, the token is 1"),
        (answer([1], output_token_logprobs=[-0.1]), "no (logprob, id, text)"),
        (answer([-1]), "no token ids"),
        ({**answer([1]), "output_ids": ["a"]}, "no token ids"),
        ({**answer([1]), "output_ids": [1.5]}, "no token ids"),
        (answer(list(range(9))), "only 8 were asked for"),
        (answer([1], finish_reason=None), "unknown finish_reason"),
        (answer([1], finish_reason={"type": "mood"}), "unknown finish_reason"),
        (answer([1, 2], weight_versions=spans(("3", 1))), "do not cover 2 tokens"),
        (answer([1, 2], weight_versions=[{"version": "3", "start": 1, "end": 2}]), "do not cover 2 tokens"),
        ({"output_ids": [1]}, "no meta_info"),
        ([1], "not one JSON object"),
    ],
)
async def test_unusable_answers(body: Any, words: str) -> None:
    """Case 25: an answer with missing or impossible values fails the slot and says why; nothing is filled in."""

    async def step(_: dict[str, Any]) -> web.Response:
        return web.Response(text=json.dumps(body), content_type="application/json")

    with pytest.raises(SlotDataError) as caught:
        await ask(step)
    assert words in str(caught.value)


async def test_malformed_json() -> None:
    """A body that is no JSON fails the slot."""

    async def step(_: dict[str, Any]) -> web.Response:
        return web.Response(text="<html>oops", content_type="text/html")

    with pytest.raises(SlotDataError, match="not JSON"):
        await ask(step)


async def test_output_outside_the_vocabulary() -> None:
    """Once the vocabulary is known, an output id outside of it fails the slot."""
    options = fast_settings()
    async with scripted() as [server], make_session(options) as session:
        server.info["vocab_size"] = 3
        backend = make_backend("sglang", server.url, session, options)
        await backend.model_info()
        server.default = answer([1, 3])
        with pytest.raises(SlotDataError, match=r"no token ids, for example \[3\]"):
            await backend.generate("r", [1], G(), 8)


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
async def test_permanent_refusals(status: int) -> None:
    """A permanent 4xx is a GenerationError with the server's own words."""
    with pytest.raises(GenerationError, match=f"HTTP {status}: scripted {status}"):
        await ask(status)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
async def test_refusals_to_try_again(status: int) -> None:
    """408, 429 and 5xx are ServerErrors that carry the status."""
    with pytest.raises(ServerError, match=f"scripted {status}") as caught:
        await ask(status)
    assert caught.value.status == status
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.status) == (str(caught.value), status)


async def test_long_error_texts_are_cut() -> None:
    """An error quotes a bounded part of the server's text."""

    async def step(_: dict[str, Any]) -> web.Response:
        return web.Response(status=400, text="x" * 100_000)

    with pytest.raises(GenerationError) as caught:
        await ask(step)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(("status", "kind"), [(400, GenerationError), (500, ServerError)])
async def test_abort_with_a_status_is_an_error(status: int, kind: type[Exception]) -> None:
    """An abort that carries a status is that error, not a segment."""
    reason = {"type": "abort", "message": "too long", "status_code": status}
    with pytest.raises(kind, match="too long"):
        await ask(answer([], finish_reason=reason))


async def test_dies_mid_request() -> None:
    """A connection that breaks before the answer is a ServerError without a status, and so is a refused one."""
    options = fast_settings()
    async with scripted() as [server], make_session(options) as session:
        backend = make_backend("sglang", server.url, session, options)
        server.default = DIE
        with pytest.raises(ServerError, match="Disconnected") as caught:
            await backend.generate("r", [1], G(), 8)
        assert caught.value.status is None
        assert await backend.is_alive()
        await server.stop()
        with pytest.raises(ServerError, match="/generate: Client") as caught:
            await backend.generate("r", [1], G(), 8)
        assert caught.value.status is None
        assert not await backend.is_alive()


async def test_no_answer_in_time() -> None:
    """A call is bounded by request_timeout_s."""

    async def step(_: dict[str, Any]) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(ServerError, match="no answer within"):
        await ask(step, request_timeout_s=0.05)


async def with_backend(check: Any) -> None:
    """Run `check` on a server and its client."""
    options = fast_settings()
    async with scripted() as [server], make_session(options) as session:
        await check(server, make_backend("sglang", server.url, session, options))


async def test_model_info(tmp_path: Path) -> None:
    """The label is an integer or nothing; an untold vocabulary is read from a shared model folder."""
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 20}}')
    options = fast_settings()
    async with scripted() as [server], make_session(options) as session:
        backend = make_backend("sglang", server.url, session, options)
        info = await backend.model_info()
        assert (info.version, info.model_path, info.vocab_size, info.paused) == (None, "/nowhere", None, None)
        server.info.update(weight_version="12", model_path=str(tmp_path), paused=True)
        info = await backend.model_info()
        assert (info.version, info.vocab_size, info.paused) == (12, 20, True)
        assert await backend.is_alive()
        server.healthy = False
        assert not await backend.is_alive()


async def test_update_that_failed_but_happened() -> None:
    """A 400 although the weights changed counts as done: the label that the server reports decides."""

    async def check(server: Any, backend: Backend) -> None:
        server.update_replies.append((400, "Cache flush failed"))
        await backend.update_weights_from_disk("/m/3", 3)
        assert len(server.updates) == 1
        assert server.updates[0]["weight_version"] == "3"

    await with_backend(check)


async def test_update_retries_without_a_flush() -> None:
    """An update that failed for its cache flush, with the old label kept, is repeated without the flush."""

    async def check(server: Any, backend: Backend) -> None:
        server.changes_weights = False
        server.update_replies.extend([(400, "Cache flush failed after updating weights"), (200, "ok")])
        server.info["weight_version"] = "default"  # tells nothing, so success is believed
        await backend.update_weights_from_disk("/m/3", 3)
        assert [update["flush_cache"] for update in server.updates] == [True, False]

    await with_backend(check)


async def test_update_that_failed() -> None:
    """A failed update raises with the server's text, even when an earlier update had the same label."""

    async def check(server: Any, backend: Backend) -> None:
        server.changes_weights = False
        server.info["weight_version"] = "3"
        server.update_replies.append((400, "no such folder"))
        with pytest.raises(ServerError, match="no such folder"):
            await backend.update_weights_from_disk("/m/other", 3)

    await with_backend(check)


async def test_update_that_only_says_it_happened() -> None:
    """A success with another label than asked for is a failure."""

    async def check(server: Any, backend: Backend) -> None:
        server.changes_weights = False
        server.info["weight_version"] = "2"
        with pytest.raises(ServerError, match="reports success, but version 2"):
            await backend.update_weights_from_disk("/m/3", 3)

    await with_backend(check)


@pytest.mark.parametrize("name", ["nothing", "base", "..errors", ""])
async def test_unknown_backend(name: str) -> None:
    """A back-end that does not exist is a settings error."""
    options = fast_settings()
    async with make_session(options) as session:
        with pytest.raises(SettingsError, match="no such back-end"):
            make_backend(name, "http://x", session, options)
