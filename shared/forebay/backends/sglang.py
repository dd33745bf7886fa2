"""The protocol of SGLang servers, and of the development server that imitates it."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import structlog

from forebay.backends.base import Backend, ModelInfo, Segment, ServerError, read_answer, shorten
from forebay.backends.sglang_answer import AnswerParser, integer_label
from forebay.errors import GenerationError, SlotDataError
from forebay.redaction import HIDDEN

if TYPE_CHECKING:
    from forebay.generation import GenerationHyperparameters
    from forebay.settings import EngineSettings

__all__ = ["BACKEND", "SglangBackend"]

log = structlog.get_logger(__name__)

_PARSE_HERE_CHARS = 64 * 1024
_ALL_TOKENS = 100_000_000
"""``top_k`` from here on means the whole vocabulary, which SGLang writes as -1."""
_TRY_AGAIN = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})


class _TooLongError(ServerError):
    """An answer was longer than what is read."""


class SglangBackend(Backend):
    """A client of one SGLang server."""

    def __init__(self, base_url: str, session: aiohttp.ClientSession, settings: EngineSettings) -> None:
        super().__init__(base_url, session, settings)
        self._parser = AnswerParser(self.url)
        self._vocab_size: int | None = None
        self._vocab_on_disk: tuple[str, int | None] | None = None

    async def generate(
        self,
        rid: str,
        input_ids: list[int],
        gconfig: GenerationHyperparameters,
        budget: int,
        image_data: list[str] | None = None,
    ) -> Segment:
        """See :meth:`Backend.generate`. Not streamed: a call that dies brings nothing."""
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": input_ids,
            "sampling_params": sampling_params(gconfig, budget),
            "return_logprob": True,
            "stream": False,
        }
        if image_data:
            body["image_data"] = image_data
        try:
            status, text = await self._call("POST", "/generate", body, self._settings.request_timeout_s)
        except _TooLongError as error:  # the next try would bring as much
            raise SlotDataError(str(error)) from None
        if status != HTTPStatus.OK:
            raise _refusal(f"{self.url}/generate", status, text)
        where = f"{self.url} (rid {rid})"
        if len(text) > _PARSE_HERE_CHARS:  # milliseconds of work, for which no other episode should wait
            return await asyncio.to_thread(self._parser.parse, text, budget, self._vocab_size, where)
        return self._parser.parse(text, budget, self._vocab_size, where)

    async def pause(self, mode: str) -> None:
        """See :meth:`Backend.pause`."""
        await self._control("/pause_generation", {"mode": mode}, self._settings.update_timeout_s)

    async def resume(self) -> None:
        """See :meth:`Backend.resume`."""
        await self._control("/continue_generation", {}, self._settings.connect_timeout_s * 2)

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        """See :meth:`Backend.update_weights_from_disk`.

        A server can answer 400 although the weights changed (it could not flush its cache while requests wait), and
        can time out after changing them. So it is asked for its label after every try, and the label decides.
        """
        # A stale prefix cache would mix versions without a trace; only in_place asks for exactly that.
        flush = self._settings.pause_mode != "in_place"
        problem = await self._update(path, version, flush_cache=flush)
        if problem and flush and "flush" in problem.lower():
            problem = await self._update(path, version, flush_cache=False)
            if not problem:
                log.warning("server.cache_not_flushed", server=self.url, version=version)
        if problem:
            raise ServerError(f"{self.url}: update to version {version} from {path} failed: {problem}")

    async def _update(self, path: str, version: int, *, flush_cache: bool) -> str:
        """Try once; what went wrong, or an empty string."""
        body = {
            "model_path": path,
            "weight_version": str(version),
            "flush_cache": flush_cache,
            "abort_all_requests": False,
        }
        try:
            status, text = await self._call("POST", "/update_weights_from_disk", body, self._settings.update_timeout_s)
            problem = "" if status == HTTPStatus.OK and _field(text, "success") is True else _said(status, text)
        except ServerError as error:
            problem = str(error)
        try:
            info = await self.model_info()
        except ServerError as error:
            return problem or str(error)
        if problem:  # the path too: a repeated update of one version has the right label before it starts
            changed = info.version == version and info.model_path and Path(info.model_path) == Path(path)
            return "" if changed else problem
        if info.version not in (None, version):
            return f"the server reports success, but version {info.version}"
        return ""

    async def model_info(self) -> ModelInfo:
        """See :meth:`Backend.model_info`."""
        status, text = await self._call("GET", "/model_info", None, self._settings.connect_timeout_s)
        if status != HTTPStatus.OK:
            raise ServerError(f"{self.url}/model_info: {_said(status, text)}", status)
        info = _json_object(text)
        if info is None:
            raise ServerError(f"{self.url}/model_info: not a JSON object: {shorten(text)}", status)
        path, vocab, paused = info.get("model_path"), info.get("vocab_size"), info.get("paused", info.get("is_paused"))
        model_path = path if isinstance(path, str) else None
        vocab_size = vocab if isinstance(vocab, int) and vocab > 0 else await self._vocab_from_disk(model_path)
        self._vocab_size = vocab_size
        return ModelInfo(
            version=integer_label(info.get("weight_version")),
            model_path=model_path,
            vocab_size=vocab_size,
            paused=paused if isinstance(paused, bool) else None,
        )

    async def _vocab_from_disk(self, model_path: str | None) -> int | None:
        """SGLang does not tell its vocabulary, and an id outside kills it; the model's folder may be shared."""
        if not model_path:
            return None
        if self._vocab_on_disk is None or self._vocab_on_disk[0] != model_path:
            self._vocab_on_disk = (model_path, await asyncio.to_thread(_read_vocab_size, model_path))
        return self._vocab_on_disk[1]

    async def _control(self, path: str, body: dict[str, Any], timeout_s: float) -> None:
        status, text = await self._call("POST", path, body, timeout_s)
        if status != HTTPStatus.OK:
            raise ServerError(f"{self.url}{path}: {_said(status, text)}", status)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> tuple[int, str]:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._settings.connect_timeout_s)
        url = self.url + path
        try:
            async with self._session.request(method, url, json=body, timeout=timeout) as response:
                raw = await read_answer(response, self._settings.max_answer_bytes)
        except TimeoutError as error:
            raise ServerError(f"{url}: no answer within {timeout_s:g} s: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(f"{url}: {type(error).__name__}: {shorten(str(error))}") from error
        if raw is None:
            most = self._settings.max_answer_bytes
            raise _TooLongError(f"{url}: the answer is longer than FOREBAY_ENGINE_MAX_ANSWER_BYTES={most}")
        text = raw.decode("utf-8", errors="replace")
        key = self._settings.api_key
        if (
            key is not None and response.status != HTTPStatus.OK
        ):  # errors quote it, and some servers what they were sent
            text = text.replace(key.get_secret_value(), HIDDEN)
        return response.status, text


BACKEND = SglangBackend


def sampling_params(gconfig: GenerationHyperparameters, budget: int) -> dict[str, Any]:
    """`gconfig` in SGLang's words, for a call that may generate `budget` tokens."""
    params: dict[str, Any] = {
        "max_new_tokens": budget,
        "min_new_tokens": max(0, min(gconfig.min_new_tokens, budget)),
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "top_p": gconfig.top_p,
        "top_k": -1 if gconfig.top_k >= _ALL_TOKENS else gconfig.top_k,
        "frequency_penalty": gconfig.frequency_penalty,
        "ignore_eos": gconfig.ignore_eos,
        "skip_special_tokens": gconfig.skip_special_tokens,
    }
    if gconfig.stop_token_ids:
        params["stop_token_ids"] = list(gconfig.stop_token_ids)
    if gconfig.stop:
        params["stop"] = list(gconfig.stop)
    if gconfig.seed is not None:
        params["sampling_seed"] = gconfig.seed
    return params


def _refusal(what: str, status: int, text: str) -> GenerationError | ServerError:
    """The error for an answer that is not 200, by whether the same request could ever succeed."""
    message = f"{what}: {_said(status, text)}"
    permanent = HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR and status not in _TRY_AGAIN
    return GenerationError(message) if permanent else ServerError(message, status)


def _said(status: int, text: str) -> str:
    """Status and the server's own words, wherever it put them."""
    words = _field(text, "message")
    if words is None:
        error = _field(text, "error")
        words = error.get("message") if isinstance(error, dict) else error
    return shorten(f"HTTP {status}: {words if isinstance(words, str) else text}")


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _field(text: str, name: str) -> Any:
    return (_json_object(text) or {}).get(name)


def _read_vocab_size(model_path: str) -> int | None:
    try:
        config = _json_object((Path(model_path) / "config.json").read_text(encoding="utf-8")) or {}
    except (OSError, ValueError):
        return None  # a hub name, or a folder of the server's machine alone
    inner = config.get("text_config")
    size = config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    return size if isinstance(size, int) and size > 0 else None
