"""The development inference server, over real HTTP, held against plain transformers."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import random
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")

import aiohttp  # noqa: E402 - after the skips
import numpy as np  # noqa: E402
from aiohttp import web  # noqa: E402

from forebay_ops.tiny_model import VOCABULARY, create_tiny_model  # noqa: E402
from forebay_ops.tiny_server.app import create_runner  # noqa: E402
from forebay_ops.tiny_server.engine import Engine, EngineSettings  # noqa: E402
from forebay_ops.tiny_server.model import ServedModel  # noqa: E402
from forebay_ops.tiny_server.sampling import uniforms  # noqa: E402

pytestmark = pytest.mark.asyncio

EOS = VOCABULARY.index("<eos>")
PROMPT = [VOCABULARY.index(symbol) for symbol in "c:1234="]
DEADLINE_S = 30.0
Json = dict[str, Any]
T = TypeVar("T")

LONG: Json = {"max_new_tokens": 900, "ignore_eos": True}  # some seconds of work: long enough to be interrupted


class Server:
    """A running server and a client of it."""

    def __init__(self, engine: Engine, url: str, session: aiohttp.ClientSession) -> None:
        self.engine = engine
        self.url = url
        self.session = session

    async def post(self, path: str, body: Json | None = None) -> tuple[int, Json]:
        """Status and JSON of a POST."""
        async with self.session.post(self.url + path, json=body or {}) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Json]:
        """Status and JSON of a GET."""
        async with self.session.get(self.url + path) as response:
            return response.status, await response.json()

    async def generate(self, ids: Sequence[int] = PROMPT, **params: Any) -> Json:
        """The answer to a request that must succeed; ``rid`` is taken out of the sampling parameters."""
        body = {"input_ids": list(ids), "return_logprob": True, "sampling_params": params}
        if "rid" in params:
            body["rid"] = params.pop("rid")
        status, answer = await self.post("/generate", body)
        assert status == 200, answer
        return answer

    async def refused(self, body: Json, status: int = 400) -> str:
        """The error message of a request that must fail."""
        found, answer = await self.post("/generate", body)
        assert found == status, answer
        return str(answer["error"]["message"])

    async def until(self, condition: Callable[[Json], bool]) -> Json:
        """Wait for a condition on /server_info."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                _, info = await self.get("/server_info")
                if condition(info):
                    return info


@asynccontextmanager
async def serving(folder: Path, **settings: int) -> AsyncIterator[Server]:
    """A server of a model folder on a free port."""
    engine = Engine(ServedModel.load(folder), EngineSettings(**settings))
    runner = create_runner(engine)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        async with aiohttp.ClientSession() as session:
            yield Server(engine, f"http://{host}:{port}", session)
    finally:
        await runner.cleanup()


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder that is served."""
    return create_tiny_model(tmp_path_factory.mktemp("old") / "model", seed=0)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights for the same model."""
    return create_tiny_model(tmp_path_factory.mktemp("new") / "model", seed=1)


@functools.cache
def plain(folder: Path) -> Any:
    """The model of a folder as transformers runs it."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def reference(folder: Path, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Logprobs of output tokens by one plain, unbatched transformers forward."""
    with torch.no_grad():
        logits = plain(folder)(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    table = torch.log_softmax(logits / temperature, dim=-1)
    return [float(table[i, token_id]) for i, token_id in enumerate(output)]


def logprobs(answer: Json) -> list[float]:
    """Logprobs of an answer, after a check that they are those of its output ids."""
    triples = answer["meta_info"]["output_token_logprobs"]
    assert [token_id for _, token_id, _ in triples] == answer["output_ids"]
    return [logprob for logprob, _, _ in triples]


def spans(answer: Json) -> list[tuple[str, int, int]]:
    """Weight-version spans of an answer."""
    return [(span["version"], span["start"], span["end"]) for span in answer["meta_info"]["weight_versions"]]


def random_prompts(count: int, longest: int = 60) -> list[list[int]]:
    """Prompts of uneven lengths."""
    rng = random.Random(count)
    return [[rng.randrange(len(VOCABULARY)) for _ in range(rng.randint(1, longest))] for _ in range(count)]


async def in_background(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a request and let it be sent."""
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    return task


# --- what is generated


async def test_logprobs_of_an_uneven_batch_equal_transformers(old: Path) -> None:
    """Rows of uneven length that join and leave a batch get the logprobs of an unbatched forward, scaled or not."""
    prompts = random_prompts(40)
    async with serving(old, max_running=12) as server:
        answers = await asyncio.gather(
            *(
                server.generate(prompt, max_new_tokens=3 + i % 17, temperature=(1.0, 0.7)[i % 2], ignore_eos=True)
                for i, prompt in enumerate(prompts)
            )
        )
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert len(answer["output_ids"]) == 3 + i % 17
        expected = reference(old, prompt, answer["output_ids"], (1.0, 0.7)[i % 2])
        assert logprobs(answer) == pytest.approx(expected, abs=1e-4)


async def test_greedy_equals_transformers_greedy(old: Path) -> None:
    """Temperature 0 gives the tokens of transformers' greedy search and unscaled logprobs."""
    prompts = random_prompts(6)
    async with serving(old) as server:
        answers = await asyncio.gather(
            *(server.generate(prompt, max_new_tokens=12, temperature=0, ignore_eos=True) for prompt in prompts)
        )
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        expected = plain(old).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, min_new_tokens=12)
        # min_new_tokens keeps transformers from stopping, and from choosing eos: compare up to an eos of ours.
        ours = answer["output_ids"]
        agreed = ours.index(EOS) if EOS in ours else len(ours)
        assert ours[:agreed] == expected[0, len(prompt) :].tolist()[:agreed]
        assert logprobs(answer) == pytest.approx(reference(old, prompt, ours), abs=1e-4)


async def test_seeded_request_is_the_same_in_any_company(old: Path) -> None:
    """A sampling_seed fixes the tokens, alone or in a batch; another seed gives others."""
    params: Json = {"max_new_tokens": 20, "ignore_eos": True, "top_p": 0.9}
    async with serving(old) as server:
        alone = await server.generate(sampling_seed=7, **params)
        crowd = await asyncio.gather(
            *(server.generate(prompt, max_new_tokens=9, ignore_eos=True) for prompt in random_prompts(20)),
            server.generate(sampling_seed=7, **params),
            server.generate(sampling_seed=8, **params),
        )
    assert crowd[-2]["output_ids"] == alone["output_ids"]
    assert crowd[-1]["output_ids"] != alone["output_ids"]


async def test_top_k_and_top_p_restrict_the_choice_but_not_the_logprobs(old: Path) -> None:
    """top_k=1 is greedy in effect, a small top_p too, and the logprobs stay those of the full vocabulary."""
    async with serving(old) as server:
        greedy = await server.generate(max_new_tokens=8, temperature=0, ignore_eos=True)
        choices: list[Json] = [{"top_k": 1}, {"top_p": 0.01}]
        for limits in choices:
            answer = await server.generate(max_new_tokens=8, ignore_eos=True, **limits)
            assert answer["output_ids"] == greedy["output_ids"]
            assert logprobs(answer) == pytest.approx(logprobs(greedy), abs=1e-5)


async def test_frequency_penalty_changes_logits_before_the_logprobs(old: Path) -> None:
    """Each earlier occurrence of a token lowers its logit by the penalty, and the logprobs show it."""
    async with serving(old) as server:
        answer = await server.generate(max_new_tokens=12, temperature=0, frequency_penalty=2.0, ignore_eos=True)
    output = answer["output_ids"]
    with torch.no_grad():
        logits = plain(old)(torch.tensor([PROMPT + output])).logits[0, len(PROMPT) - 1 : -1]
    for i, token_id in enumerate(output):
        logits[i] -= 2.0 * torch.bincount(torch.tensor(output[:i], dtype=torch.long), minlength=len(VOCABULARY))
        assert token_id == int(logits[i].argmax())
    expected = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    assert logprobs(answer) == pytest.approx(expected.tolist(), abs=1e-4)


async def test_uniforms_are_uniform_and_depend_on_seed_and_step() -> None:
    """The counter-based random numbers fill (0, 1) evenly, over steps and over neighbouring seeds."""
    count = np.arange(20_000, dtype=np.uint64)
    for values in (uniforms(np.zeros_like(count), count), uniforms(count, np.zeros_like(count))):
        assert 0.0 < values.min() < values.max() < 1.0
        histogram, _ = np.histogram(values, bins=10, range=(0.0, 1.0))
        assert histogram.min() > 1800
        assert histogram.max() < 2200


# --- how it ends


async def test_stop_token_ends_the_output_and_is_part_of_it(old: Path) -> None:
    """A stop token id or eos is the last output id, with a logprob, and not part of the text."""
    async with serving(old) as server:
        free = await server.generate(max_new_tokens=40, sampling_seed=3, ignore_eos=True)
        wanted = free["output_ids"][5]
        first = free["output_ids"].index(wanted)
        answer = await server.generate(max_new_tokens=40, sampling_seed=3, stop_token_ids=[wanted])
        eos = await server.generate(max_new_tokens=900, sampling_seed=3)
    reason = answer["meta_info"]["finish_reason"]
    assert reason["type"] == "stop"
    if reason["matched"] == wanted:  # not stopped by an earlier eos
        assert answer["output_ids"] == free["output_ids"][: first + 1]
    assert len(logprobs(answer)) == answer["meta_info"]["completion_tokens"] == len(answer["output_ids"])
    assert eos["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert eos["output_ids"].index(EOS) == len(eos["output_ids"]) - 1
    assert "<eos>" not in eos["text"]


async def test_stop_string_ends_after_the_token_that_completes_it(old: Path) -> None:
    """A stop string may span tokens; the output ends with the token that completes it, the text before it."""
    async with serving(old) as server:
        params: Json = {"max_new_tokens": 30, "sampling_seed": 11, "ignore_eos": True, "skip_special_tokens": False}
        free = await server.generate(**params)
        wanted = "".join(VOCABULARY[token_id] for token_id in free["output_ids"][4:6])
        answer = await server.generate(stop=["never seen", wanted], **params)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": wanted}
    assert answer["output_ids"] == free["output_ids"][: len(answer["output_ids"])]
    assert answer["text"] == free["text"][: free["text"].index(wanted)]
    assert "".join(VOCABULARY[token_id] for token_id in answer["output_ids"]).endswith(wanted)


async def test_length_min_new_tokens_and_ignore_eos(old: Path) -> None:
    """max_new_tokens gives reason length; min_new_tokens holds stop tokens back; ignore_eos lets eos pass."""
    everything = list(range(len(VOCABULARY)))
    async with serving(old) as server:
        length = await server.generate(max_new_tokens=4, ignore_eos=True)
        held = await server.generate(max_new_tokens=9, min_new_tokens=6, stop_token_ids=everything[:-1], temperature=1)
        ignored = await server.generate(max_new_tokens=300, ignore_eos=True, sampling_seed=1)
    assert length["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    assert held["output_ids"][:6] == [len(VOCABULARY) - 1] * 6  # the only token that does not stop
    assert logprobs(held) == pytest.approx(reference(old, PROMPT, held["output_ids"]), abs=1e-4)
    assert EOS in ignored["output_ids"]
    assert ignored["meta_info"]["completion_tokens"] == 300


async def test_stream_sends_cumulative_events_and_done(old: Path) -> None:
    """A stream's events grow to the same answer as without, and the last line is [DONE]."""
    params: Json = {"max_new_tokens": 30, "sampling_seed": 5, "ignore_eos": True}
    async with serving(old) as server:
        whole = await server.generate(**params)
        body = {"input_ids": PROMPT, "return_logprob": True, "stream": True, "sampling_params": params}
        async with server.session.post(server.url + "/generate", json=body) as response:
            assert response.content_type == "text/event-stream"
            lines = [line for line in (await response.text()).splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    assert counts == sorted(set(counts[:-1])) + counts[-1:]
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 30}
    assert all(event["meta_info"]["finish_reason"] is None for event in events[:-1])


# --- what is refused


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "input_ids is missing"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": "12"}, "list of integers"),
        ({"input_ids": [[3, 4], [5]]}, "no batches"),
        ({"input_ids": [3, 20]}, "token id 20"),
        ({"input_ids": [-1]}, "token id -1"),
        ({"input_ids": [3], "rid": 5}, "rid"),
        ({"input_ids": [3], "stream": "yes"}, "stream"),
        ({"input_ids": [3], "sampling_params": {"best_of": 2}}, "best_of"),
        ({"input_ids": [3], "sampling_params": {"n": 2}}, "n must be 1"),
        ({"input_ids": [3], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [3], "sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"input_ids": [3], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": [3], "sampling_params": {"top_k": 0}}, "top_k"),
        ({"input_ids": [3], "sampling_params": {"stop": [""]}}, "stop"),
        ({"input_ids": [3], "sampling_params": {"stop_token_ids": [99]}}, "stop_token_ids"),
        ({"input_ids": [3], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"input_ids": [3], "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}}, "min_new_tokens"),
        ({"input_ids": [3], "sampling_params": {"max_new_tokens": 1024}}, "context of 1024"),
        ({"input_ids": [3] * 1024}, "context of 1024"),
    ],
)
async def test_bad_requests_are_400_and_name_what_is_wrong(old: Path, body: Json, named: str) -> None:
    """A request that cannot be served is told why, and the server goes on."""
    async with serving(old) as server:
        assert named in await server.refused(body)
        assert (await server.get("/health"))[0] == 200


async def test_malformed_json_and_unknown_paths_answer_json(old: Path) -> None:
    """Errors of the transport are JSON too."""
    async with serving(old) as server:
        async with server.session.post(server.url + "/generate", data=b"{nope") as response:
            assert response.status == 400
            assert "not JSON" in (await response.json())["error"]["message"]
        assert (await server.get("/nowhere"))[0] == 404
        assert (await server.get("/generate"))[0] == 405


async def test_duplicate_live_rid_is_refused_and_free_afterwards(old: Path) -> None:
    """A rid can be used by one live request at a time."""
    async with serving(old) as server:
        first = await in_background(server.generate(rid="twin", **LONG))
        await server.until(lambda info: info["running"] == 1)
        assert "twin" in await server.refused({"input_ids": PROMPT, "rid": "twin"})
        await server.post("/abort_request", {"rid": "twin"})
        assert (await first)["meta_info"]["id"] == "twin"
        assert (await server.generate(rid="twin", max_new_tokens=1))["meta_info"]["id"] == "twin"


async def test_full_queue_is_503(old: Path) -> None:
    """Requests above max_queued are turned away, and served again once there is room."""
    async with serving(old, max_queued=2, max_running=4) as server:
        await server.post("/pause_generation", {"mode": "retract"})
        waiting = [await in_background(server.generate(max_new_tokens=2)) for _ in range(2)]
        await server.until(lambda info: info["queued"] == 2)
        assert "--max-queued" in await server.refused({"input_ids": PROMPT}, status=503)
        await server.post("/continue_generation")
        await asyncio.gather(*waiting)
        await server.generate(max_new_tokens=2)


# --- aborts


async def test_abort_running_request_keeps_its_tokens(old: Path) -> None:
    """An aborted request answers 200 with the tokens it had; an unknown rid is 200 too."""
    async with serving(old) as server:
        task = await in_background(server.generate(rid="victim", **LONG))
        other = await in_background(server.generate(max_new_tokens=60, ignore_eos=True, sampling_seed=4))
        await server.until(lambda info: info["total_tokens"] >= 10)
        assert (await server.post("/abort_request", {"rid": "nobody"}))[0] == 200
        assert (await server.post("/abort_request", {"rid": "victim"}))[0] == 200
        answer = await task
        bystander = await other
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < LONG["max_new_tokens"]
    assert logprobs(answer) == pytest.approx(reference(old, PROMPT, answer["output_ids"]), abs=1e-4)
    assert logprobs(bystander) == pytest.approx(reference(old, PROMPT, bystander["output_ids"]), abs=1e-4)


async def test_abort_all_and_queued_requests(old: Path) -> None:
    """abort_all ends running and queued requests; a queued one has no tokens."""
    async with serving(old, max_running=1) as server:
        running = await in_background(server.generate(**LONG))
        await server.until(lambda info: info["running"] == 1)
        queued = await in_background(server.generate(**LONG))
        await server.until(lambda info: info["queued"] == 1)
        await server.post("/abort_request", {"abort_all": True})
        answers = await asyncio.gather(running, queued)
        assert (await server.post("/abort_request", {}))[0] == 400
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["abort", "abort"]
    assert answers[1]["output_ids"] == []
    assert answers[1]["meta_info"]["output_token_logprobs"] == []
    assert answers[1]["meta_info"]["weight_versions"] == []


async def test_abort_queued_request_while_paused(old: Path) -> None:
    """A pause does not keep a queued request from being aborted."""
    async with serving(old) as server:
        await server.post("/pause_generation", {"mode": "in_place"})
        task = await in_background(server.generate(rid="q", max_new_tokens=3))
        await server.until(lambda info: info["queued"] == 1)
        await server.post("/abort_request", {"rid": "q"})
        assert (await task)["output_ids"] == []


async def test_disconnect_aborts_the_request(old: Path) -> None:
    """When a client goes away, plain or streaming, its row is freed."""

    async def read_all(server: Server, stream: bool) -> None:
        body = {"input_ids": PROMPT, "stream": stream, "sampling_params": LONG}
        async with server.session.post(server.url + "/generate", json=body) as response:
            await response.read()

    async with serving(old) as server:
        for stream in (False, True):
            task = asyncio.ensure_future(read_all(server, stream))
            before = await server.until(lambda info: info["running"] == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            after = await server.until(lambda info: info["running"] == 0)
            assert after["total_tokens"] - before["total_tokens"] < LONG["max_new_tokens"]


# --- pauses


async def test_abort_pause_ends_what_is_there_and_queues_what_comes(old: Path) -> None:
    """The default pause aborts running requests; new ones wait for the end of the pause."""
    async with serving(old) as server:
        running = await in_background(server.generate(**LONG))
        await server.until(lambda info: info["total_tokens"] >= 5)
        assert (await server.post("/pause_generation"))[0] == 200
        assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
        later = await in_background(server.generate(max_new_tokens=2, ignore_eos=True))
        info = await server.until(lambda info: info["queued"] == 1)
        assert info["paused"]
        await server.post("/continue_generation")
        assert len((await later)["output_ids"]) == 2


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_retract_pause_recomputes_exactly(old: Path, mode: str) -> None:
    """A request goes on after a retract or in-place pause as if there had been none; in between nothing steps."""
    params: Json = {"max_new_tokens": 200, "ignore_eos": True, "sampling_seed": 9}
    async with serving(old) as server:
        unpaused = await server.generate(**params)
        start = server.engine.total_tokens
        task = await in_background(server.generate(**params))
        await server.until(lambda info: info["total_tokens"] >= start + 20)
        await server.post("/pause_generation", {"mode": mode})
        _, held = await server.get("/server_info")
        assert (held["running"], held["queued"]) == ((0, 1) if mode == "retract" else (1, 0))
        for _ in range(20):
            assert (await server.get("/server_info"))[1]["total_tokens"] == held["total_tokens"]
        assert not task.done()
        await server.post("/continue_generation")
        answer = await task
    assert answer["output_ids"] == unpaused["output_ids"]
    assert logprobs(answer) == pytest.approx(reference(old, PROMPT, answer["output_ids"]), abs=1e-4)


async def test_health_during_a_pause_and_after(old: Path) -> None:
    """Both health checks are 503 at once during a pause; /model_info keeps answering."""
    async with serving(old) as server:
        assert (await server.get("/health_generate"))[0] == 200
        await server.post("/pause_generation", {"mode": "in_place"})
        async with asyncio.timeout(5):
            assert (await server.get("/health"))[0] == 503
            assert (await server.get("/health_generate"))[0] == 503
        _, info = await server.get("/model_info")
        assert info["paused"]
        await server.post("/continue_generation")
        assert (await server.get("/health"))[0] == 200
        assert (await server.post("/pause_generation", {"mode": "nap"}))[0] == 400


# --- weights


async def test_update_in_flight_gives_two_spans_with_exact_logprobs(old: Path, new: Path) -> None:
    """Tokens before an update have the old weights' logprobs, those after it the new ones' over a recomputed cache."""
    async with serving(old) as server:
        tasks = [await in_background(server.generate(max_new_tokens=300, ignore_eos=True)) for _ in range(3)]
        await server.until(lambda info: info["running"] == 3 and info["total_tokens"] >= 60)
        status, update = await server.post("/update_weights_from_disk", {"model_path": str(new), "weight_version": "1"})
        assert (status, update["success"], update["num_paused_requests"]) == (200, True, 3)
        _, info = await server.get("/model_info")
        assert (info["weight_version"], info["model_path"]) == ("1", str(new))
        answers = await asyncio.gather(*tasks)
        fresh = await server.generate(max_new_tokens=3, ignore_eos=True)
    for answer in answers:
        (first, start, cut), (second, cut_again, end) = spans(answer)
        assert (first, second, start, cut_again, end) == ("0", "1", 0, cut, 300)
        assert 0 < cut < 300
        found = logprobs(answer)
        assert found[:cut] == pytest.approx(reference(old, PROMPT, answer["output_ids"])[:cut], abs=1e-4)
        assert found[cut:] == pytest.approx(reference(new, PROMPT, answer["output_ids"])[cut:], abs=1e-4)
        assert answer["meta_info"]["weight_version"] == "1"
    assert spans(fresh) == [("1", 0, 3)]


async def test_update_without_flush_keeps_the_stale_cache(old: Path, new: Path) -> None:
    """With flush_cache false, later tokens attend to the old weights' keys and values, as on a real server."""
    async with serving(old) as server:
        task = await in_background(server.generate(max_new_tokens=120, ignore_eos=True))
        await server.until(lambda info: info["total_tokens"] >= 10)
        await server.post("/pause_generation", {"mode": "in_place"})
        body = {"model_path": str(new), "weight_version": "1", "flush_cache": False, "load_format": "auto"}
        assert (await server.post("/update_weights_from_disk", body))[0] == 200
        assert (await server.get("/model_info"))[1]["paused"]
        await server.post("/continue_generation")
        answer = await task
    (_, _, cut), _ = spans(answer)
    tokens = PROMPT + answer["output_ids"]
    kept = len(PROMPT) + cut - 1  # the last token before the cut was not in the cache yet
    models = [plain(old), plain(new)]
    cache = transformers.DynamicCache()
    name = "cache" if "cache" in inspect.signature(models[0].forward).parameters else "past_key_values"
    with torch.no_grad():
        models[0](torch.tensor([tokens[:kept]]), use_cache=True, **{name: cache})
        logits = models[1](torch.tensor([tokens[kept:-1]]), use_cache=True, **{name: cache}).logits[0]
    after = torch.tensor(tokens[kept + 1 :]).unsqueeze(1)
    expected = torch.log_softmax(logits, dim=-1).gather(1, after).squeeze(1).tolist()
    assert logprobs(answer)[cut:] == pytest.approx(expected, abs=1e-4)


async def test_failed_update_leaves_the_old_weights(old: Path, new: Path, tmp_path: Path) -> None:
    """A bad path, wrong shapes, missing names or a damaged file: 400, and weights, version and requests stay."""
    from safetensors.torch import load_file, save_file

    weights = load_file(new / "model.safetensors")
    bad = {name: tmp_path / name for name in ("missing", "shape", "names", "damaged", "empty")}
    for name in ("shape", "names", "damaged"):
        shutil.copytree(new, bad[name])
    bad["empty"].mkdir()
    save_file({**weights, "lm_head.weight": torch.zeros(21, 64)}, bad["shape"] / "model.safetensors")
    save_file({k: v for k, v in weights.items() if k != "lm_head.weight"}, bad["names"] / "model.safetensors")
    (bad["damaged"] / "model.safetensors").write_bytes((new / "model.safetensors").read_bytes()[:-1000])
    expected = {
        "missing": "does not exist",
        "shape": "lm_head.weight [21, 64] instead of [20, 64]",
        "names": "missing: lm_head.weight",
        "damaged": "cannot read",
        "empty": "no safetensors",
    }
    async with serving(old) as server:
        running = await in_background(server.generate(max_new_tokens=400, ignore_eos=True))
        await server.until(lambda info: info["running"] == 1)
        for name, reason in expected.items():
            body = {"model_path": str(bad[name]), "weight_version": "9", "abort_all_requests": True}
            status, update = await server.post("/update_weights_from_disk", body)
            assert (status, update["success"]) == (400, False)
            assert reason in update["message"]
        assert (await server.get("/model_info"))[1]["weight_version"] == "0"
        assert (await server.post("/update_weights_from_disk", {"model_path": str(new), "load_format": "x"}))[0] == 400
        answer = await running
    assert spans(answer) == [("0", 0, 400)]
    assert logprobs(answer) == pytest.approx(reference(old, PROMPT, answer["output_ids"]), abs=1e-4)


async def test_update_that_aborts_all_requests(old: Path, new: Path) -> None:
    """abort_all_requests ends what runs with the old label; later requests have the new weights."""
    async with serving(old) as server:
        running = await in_background(server.generate(**LONG))
        await server.until(lambda info: info["total_tokens"] >= 5)
        body = {"model_path": str(new), "weight_version": "1", "abort_all_requests": True}
        assert (await server.post("/update_weights_from_disk", body))[1]["num_paused_requests"] == 0
        answer = await running
        later = await server.generate(max_new_tokens=5, ignore_eos=True)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["meta_info"]["weight_version"] == "0"
    assert logprobs(later) == pytest.approx(reference(new, PROMPT, later["output_ids"]), abs=1e-4)


async def test_weights_of_nan_abort_requests_and_leave_no_trace(old: Path, tmp_path: Path) -> None:
    """Damaged weights end requests with a reason instead of NaN logprobs; good weights repair the server."""
    from safetensors.torch import load_file, save_file

    broken = Path(shutil.copytree(old, tmp_path / "nan"))
    weights = {name: tensor * float("nan") for name, tensor in load_file(old / "model.safetensors").items()}
    save_file(weights, broken / "model.safetensors")
    async with serving(old) as server:
        await server.post("/update_weights_from_disk", {"model_path": str(broken)})
        answer = await server.generate(max_new_tokens=3)
        assert "damaged" in answer["meta_info"]["finish_reason"]["message"]
        await server.post("/update_weights_from_disk", {"model_path": str(old)})
        healed = await server.generate(max_new_tokens=3, ignore_eos=True)
    assert logprobs(healed) == pytest.approx(reference(old, PROMPT, healed["output_ids"]), abs=1e-4)


async def test_flush_cache_does_not_disturb_running_requests(old: Path) -> None:
    """A flush while a request runs recomputes its cache."""
    async with serving(old) as server:
        task = await in_background(server.generate(max_new_tokens=150, ignore_eos=True))
        await server.until(lambda info: info["total_tokens"] >= 5)
        assert (await server.post("/flush_cache"))[0] == 200
        answer = await task
    assert logprobs(answer) == pytest.approx(reference(old, PROMPT, answer["output_ids"]), abs=1e-4)


# --- the process


async def test_information_endpoints(old: Path) -> None:
    """/model_info, /server_info and /v1/models tell what clients size themselves by."""
    async with serving(old, max_running=8) as server:
        _, model = await server.get("/model_info")
        _, load = await server.get("/server_info")
        _, models = await server.get("/v1/models")
    assert model == {
        "model_path": str(old),
        "weight_version": "0",
        "is_generation": True,
        "vocab_size": 20,
        "context_length": 1024,
        "paused": False,
    }
    assert (load["running"], load["queued"], load["max_running"], load["tokens_per_s"]) == (0, 0, 8, 0.0)
    assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == (str(old), 1024)


async def test_engine_crash_fails_every_request_and_health(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the engine thread dies, live requests get 500, later ones too, and health is 503: nothing hangs."""

    def crash(*_: object) -> None:
        raise RuntimeError("out of luck")

    async with serving(old) as server:
        running = await in_background(server.refused({"input_ids": PROMPT, "sampling_params": LONG}, status=500))
        await server.until(lambda info: info["total_tokens"] >= 5)
        monkeypatch.setattr(server.engine.model, "forward", crash)
        assert "out of luck" in await running
        assert (await server.get("/health"))[0] == 503
        assert "restart" in await server.refused({"input_ids": PROMPT}, status=500)
        assert (await server.post("/pause_generation"))[0] == 500


async def run_cli(*arguments: object) -> asyncio.subprocess.Process:
    """The server as a process of its own."""
    command = [sys.executable, "-m", "forebay_ops.tiny_server", *map(str, arguments)]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)


async def test_bad_starts_are_one_line_and_exit_code_2(old: Path, tmp_path: Path) -> None:
    """A missing folder, one without config.json and a port in use each give one line with the remedy."""
    (tmp_path / "empty").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments, reason in (
            (("--model", tmp_path / "nowhere"), "does not exist: pass --model"),
            (("--model", tmp_path / "empty"), "no config.json"),
            (("--model", old, "--port", port), f"port {port} on 127.0.0.1 is in use: stop the other process or pass"),
        ):
            process = await run_cli(*arguments)
            out, err = await asyncio.wait_for(process.communicate(), DEADLINE_S)
            assert process.returncode == 2
            assert out == b""
            assert len(err.decode().splitlines()) == 1
            assert reason in err.decode()


async def test_process_says_ready_serves_and_stops_on_sigterm(old: Path) -> None:
    """One line when ready; SIGTERM aborts what runs and ends the process with code 0, without further output."""
    process = await run_cli("--model", old, "--port", 0, "--weight-version", 5, "--context-length", 1000)
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)).decode()
        assert line.startswith("forebay tiny server: ready on http://127.0.0.1:")
        assert line.endswith(f"model={old} version=5\n")
        url = line.split()[5]
        async with aiohttp.ClientSession() as session:
            body = {"input_ids": PROMPT, "sampling_params": LONG}
            request = asyncio.ensure_future(session.post(url + "/generate", json=body))
            running = 0
            async with asyncio.timeout(DEADLINE_S):
                while not running:
                    async with session.get(url + "/server_info") as response:
                        running = (await response.json())["running"]
            process.send_signal(signal.SIGTERM)
            answer = await (await request).json()
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        out, err = await asyncio.wait_for(process.communicate(), 10)
        assert (process.returncode, out, err) == (0, b"", b"")
    finally:
        if process.returncode is None:
            process.kill()
