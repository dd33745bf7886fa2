"""The HTTP face: SGLang's endpoints over an ``Engine``."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

from aiohttp import web
from aiohttp.typedefs import Middleware

from forebay_ops.tiny_server.engine import Engine, PauseMode
from forebay_ops.tiny_server.request import BusyError, Finish, Request, ServerFailedError
from forebay_ops.tiny_server.sampling import DEFAULT_MAX_NEW_TOKENS, SamplingParams

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_MAX_BODY_BYTES = 64 * 1024 * 1024
_HEALTH_TIMEOUT_S = 20.0
_SHUTDOWN_TIMEOUT_S = 1.0
_LOAD_FORMATS = (None, "auto", "safetensors")


class BadRequestError(ValueError):
    """The request cannot be served; answered with 400."""


def create_runner(engine: Engine, api_key: str | None = None) -> web.AppRunner:
    """The server of an engine, ready for a site; it starts the engine with itself and stops it with itself.

    With `api_key` every request but ``GET /health`` must have it, as with SGLang's option of that name.
    """
    # Handlers are cancelled when their client goes away: that is how a disconnect aborts its request.
    return web.AppRunner(
        create_app(engine, api_key), handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_TIMEOUT_S
    )


def create_app(engine: Engine, api_key: str | None = None) -> web.Application:
    """The routes of the server."""
    handlers = _Handlers(engine)
    checks = [] if api_key is None else [_check_key(api_key)]
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors_as_json, *checks])
    app.add_routes(
        [
            web.post("/generate", handlers.generate),
            web.post("/abort_request", handlers.abort_request),
            web.post("/pause_generation", handlers.pause_generation),
            web.post("/continue_generation", handlers.continue_generation),
            web.post("/update_weights_from_disk", handlers.update_weights_from_disk),
            web.post("/flush_cache", handlers.flush_cache),
            web.get("/health", handlers.health),
            web.get("/health_generate", handlers.health_generate),
            web.get("/model_info", handlers.model_info),
            web.get("/get_model_info", handlers.model_info),  # the older names
            web.get("/server_info", handlers.server_info),
            web.get("/get_server_info", handlers.server_info),
            web.get("/v1/models", handlers.models),
        ]
    )

    async def start(_: web.Application) -> None:
        engine.start()

    async def abort_all(_: web.Application) -> None:
        engine.abort_all("the server is stopping")

    async def stop(_: web.Application) -> None:
        await engine.stop()

    app.on_startup.append(start)
    app.on_shutdown.append(abort_all)
    app.on_cleanup.append(stop)
    return app


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequestError as error:
        return _error(400, str(error))
    except BusyError as error:
        return _error(503, str(error))
    except ServerFailedError as error:
        return _error(500, str(error))
    except web.HTTPException as error:  # 404, 405, 413
        return _error(error.status, error.reason)


def _check_key(api_key: str) -> Middleware:
    expected = f"Bearer {api_key}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path != "/health" and not hmac.compare_digest(given, expected):
            return _error(401, "send Authorization: Bearer KEY, the server's --api-key")
        return await handler(request)

    return check


class _Handlers:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, http: web.Request) -> web.StreamResponse:
        body = await _body(http)
        with_logprobs = _flag(body, "return_logprob", False)
        request = self._parse(body)
        if self._engine.is_live(request.rid):
            raise BadRequestError(f"rid {request.rid!r} is already in use by a live request")
        self._engine.submit(request)
        try:
            if request.progress is not None:
                return await self._stream(http, request, request.progress, with_logprobs)
            await request.done
        finally:
            if not request.done.done() or request.done.cancelled():  # the client has gone, or the stream broke
                self._engine.abort(request.rid, "the client disconnected")
        return web.json_response(self._answer(request, len(request.output), with_logprobs))

    async def abort_request(self, http: web.Request) -> web.Response:
        body = await _body(http)
        rid = body.get("rid")
        if _flag(body, "abort_all", False):
            self._engine.abort_all("aborted by /abort_request")
        elif isinstance(rid, str):
            self._engine.abort(rid, "aborted by /abort_request")
        else:
            raise BadRequestError("give a rid (string) or abort_all: true")
        return web.json_response({"success": True})

    async def pause_generation(self, http: web.Request) -> web.Response:
        body = await _body(http)
        asked = body.get("mode") or "abort"
        mode = next((known for known in get_args(PauseMode) if known == asked), None)
        if mode is None:
            raise BadRequestError(f"mode must be abort, retract or in_place, got {asked!r}")
        await self._engine.pause(mode)
        return web.json_response({"status": "ok", "message": f"generation is paused ({mode})"})

    async def continue_generation(self, _: web.Request) -> web.Response:
        await self._engine.resume()
        return web.json_response({"status": "ok", "message": "generation goes on"})

    async def update_weights_from_disk(self, http: web.Request) -> web.Response:
        body = await _body(http)
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not path:
            raise BadRequestError("model_path must be the path of a model folder")
        if version is not None and not isinstance(version, str):
            raise BadRequestError(f"weight_version must be a string, got {version!r}")
        if body.get("load_format") not in _LOAD_FORMATS:
            raise BadRequestError("load_format must be auto or safetensors: this server reads nothing else")
        # keep_pause needs no code: a pause always outlives an update here.
        result = await self._engine.update_weights(
            Path(path),
            version,
            flush_cache=_flag(body, "flush_cache", True),
            abort_all=_flag(body, "abort_all_requests", False),
        )
        answer = {"success": result.success, "message": result.message, "num_paused_requests": result.held_requests}
        return web.json_response(answer, status=200 if result.success else 400)

    async def flush_cache(self, _: web.Request) -> web.Response:
        await self._engine.flush_cache()
        return web.json_response({"success": True, "message": "cache flushed"})

    async def health(self, _: web.Request) -> web.Response:
        return self._unhealthy() or web.json_response({"status": "ok"})

    async def health_generate(self, _: web.Request) -> web.Response:
        unhealthy = self._unhealthy()
        if unhealthy is not None:
            return unhealthy
        probe = self._parse(
            {
                "rid": f"HEALTH_CHECK_{uuid.uuid4().hex}",
                "input_ids": [0],
                "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            }
        )
        self._engine.submit(probe)
        try:
            await asyncio.wait_for(probe.done, _HEALTH_TIMEOUT_S)
        except TimeoutError:
            return _error(503, f"no token in {_HEALTH_TIMEOUT_S:.0f} s")
        finally:
            self._engine.abort(probe.rid, "the health check is over")
        if not probe.output:
            return _error(503, "the health check was aborted")
        return web.json_response({"status": "ok"})

    async def model_info(self, _: web.Request) -> web.Response:
        engine = self._engine
        return web.json_response(
            {
                "model_path": engine.model.path,
                "weight_version": engine.weight_version,
                "is_generation": True,
                "vocab_size": engine.model.vocab_size,
                "context_length": engine.model.context_length,
                "paused": engine.paused,
            }
        )

    async def server_info(self, _: web.Request) -> web.Response:
        engine = self._engine
        return web.json_response(
            {
                "model_path": engine.model.path,
                "weight_version": engine.weight_version,
                "running": engine.running,
                "queued": engine.queued,
                "tokens_per_s": round(engine.tokens_per_second(), 1),
                "total_tokens": engine.total_tokens,
                "total_requests": engine.total_requests,
                "max_running": engine.settings.max_running,
                "max_queued": engine.settings.max_queued,
                "paused": engine.paused,
            }
        )

    async def models(self, _: web.Request) -> web.Response:
        model = self._engine.model
        card = {
            "id": model.path,
            "object": "model",
            "owned_by": "forebay",
            "root": model.path,
            "max_model_len": model.context_length,
        }
        return web.json_response({"object": "list", "data": [card]})

    def _unhealthy(self) -> web.Response | None:
        if self._engine.failure is not None:
            return _error(503, self._engine.failure)
        if self._engine.paused:
            return _error(503, "generation is paused")
        return None

    def _parse(self, body: Mapping[str, object]) -> Request:
        """A request that the engine can serve.

        Raises:
            BadRequestError: something in it is wrong; the message names it.
        """
        model = self._engine.model
        prompt = _prompt(body, model.vocab_size)
        rid = body.get("rid")
        if rid is not None and (not isinstance(rid, str) or not rid):
            raise BadRequestError(f"rid must be a non-empty string, got {rid!r}")
        try:
            params = SamplingParams.parse(body.get("sampling_params"))
        except ValueError as error:
            raise BadRequestError(str(error)) from error
        room = model.context_length - len(prompt)
        wanted = params.max_new_tokens if params.max_new_tokens > 0 else max(1, params.min_new_tokens)
        if wanted > room:
            raise BadRequestError(
                f"prompt ({len(prompt)} tokens) + max_new_tokens ({wanted}) exceed the context of "
                f"{model.context_length} tokens"
            )
        if params.max_new_tokens < 0:  # not given
            limit = max(DEFAULT_MAX_NEW_TOKENS, params.min_new_tokens)
            params = replace(params, max_new_tokens=min(limit, room))
        if params.stop and not model.has_tokenizer:
            raise BadRequestError("sampling_params.stop needs a tokenizer, and the model folder has none")
        stop_ids = frozenset() if params.ignore_eos else model.eos_ids | params.stop_token_ids
        if any(not 0 <= token_id < model.vocab_size for token_id in params.stop_token_ids):
            raise BadRequestError(f"sampling_params.stop_token_ids must be in [0, {model.vocab_size})")
        return Request(
            rid=rid or uuid.uuid4().hex,
            prompt=prompt,
            params=params,
            stop_ids=stop_ids,
            seed=secrets.randbits(64) if params.sampling_seed is None else params.sampling_seed,
            done=asyncio.get_running_loop().create_future(),
            progress=asyncio.Queue() if _flag(body, "stream", False) else None,
        )

    async def _stream(
        self, http: web.Request, request: Request, progress: asyncio.Queue[int], with_logprobs: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        sent = 0
        while not request.done.done():
            count = await progress.get()
            while not progress.empty():  # events are cumulative: a slow client needs only the last one
                count = progress.get_nowait()
            if count > sent and not request.done.done():
                await _send(response, self._answer(request, count, with_logprobs))
                sent = count
        failure = request.done.exception()
        if failure is None:
            await _send(response, self._answer(request, len(request.output), with_logprobs))
        else:
            await _send(response, _error_body(str(failure)))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _answer(self, request: Request, count: int, with_logprobs: bool) -> dict[str, object]:
        """The answer after ``count`` tokens; it is the final one when the request has ended."""
        finish = request.finish if request.done.done() else None
        output = request.output[:count]
        meta: dict[str, object] = {
            "id": request.rid,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": count,
            "finish_reason": None if finish is None else finish.to_wire(),
            "weight_version": self._engine.weight_version if finish is None else request.final_version,
            "weight_versions": [
                {"version": span.version, "start": span.start, "end": min(span.end, count)}
                for span in list(request.spans)
                if span.start < count
            ],
            "e2e_latency": time.monotonic() - request.started_at,
        }
        if with_logprobs:
            pairs = zip(request.logprobs[:count], output, strict=True)
            meta["output_token_logprobs"] = [[logprob, token_id, None] for logprob, token_id in pairs]
        return {"text": self._text(request, output, finish), "output_ids": output, "meta_info": meta}

    def _text(self, request: Request, output: list[int], finish: Finish | None) -> str:
        """Without what ended it: neither a stop token nor a stop string is part of the text."""
        matched = None if finish is None else finish.matched
        shown = output[:-1] if isinstance(matched, int) else output
        text = self._engine.model.decode_text(shown, skip_special_tokens=request.params.skip_special_tokens)
        return text[: text.index(matched)] if isinstance(matched, str) else text


def _prompt(body: Mapping[str, object], vocab_size: int) -> list[int]:
    prompt = body.get("input_ids")
    if prompt is None:
        raise BadRequestError("input_ids is missing: this server takes token ids, not text or messages")
    if isinstance(prompt, list) and prompt and all(isinstance(item, list) for item in prompt):
        raise BadRequestError("input_ids must be one list of integers: this server takes no batches")
    if not isinstance(prompt, list) or not all(type(item) is int for item in prompt):
        raise BadRequestError("input_ids must be a list of integers")
    if not prompt:
        raise BadRequestError("input_ids is empty")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(item for item in prompt if not 0 <= item < vocab_size)
        raise BadRequestError(f"input_ids has token id {wrong}, outside the vocabulary of {vocab_size}")
    if body.get("image_data") is not None:
        raise BadRequestError("image_data is not supported: this server takes text models only")
    return prompt


async def _body(http: web.Request) -> Mapping[str, object]:
    raw = await http.read()
    if not raw:
        return {}
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:  # also bytes that are no text
        raise BadRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    return body


def _flag(body: Mapping[str, object], key: str, default: bool) -> bool:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadRequestError(f"{key} must be true or false, got {value!r}")
    return value


async def _send(response: web.StreamResponse, event: object) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def _error_body(message: str) -> dict[str, object]:
    return {"error": {"message": message}}


def _error(status: int, message: str) -> web.Response:
    return web.json_response(_error_body(message), status=status)
