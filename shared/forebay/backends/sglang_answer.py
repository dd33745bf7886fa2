"""Check an answer of SGLang's ``/generate`` and take it apart.

Nothing is repaired: a value that is missing or impossible fails the slot (contract, section 3), since a made-up
logprob would train the model without anybody noticing.
"""

from __future__ import annotations

import json
import math
import re
from http import HTTPStatus
from typing import Any, NamedTuple, TypeGuard

import structlog

from forebay.backends.base import Segment, ServerError, shorten
from forebay.errors import GenerationError, SlotDataError
from forebay.generation import StopReason

__all__ = ["AnswerParser", "integer_label"]

log = structlog.get_logger(__name__)

_MASKED_LOGPROB = -9999.0
"""Servers write this for a token that sampling had excluded: not a probability."""
_POSITIVE_SLACK = 1e-2
"""Rounding may lift a logprob a little above 0."""
_SHOWN = 3
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_STOPS = {
    "stop": StopReason.STOP,
    "length": StopReason.LENGTH,
    "tool_calls": StopReason.TOOL_CALLS,
    "abort": StopReason.ABORT,
}


class _Finish(NamedTuple):
    stop: StopReason
    message: str
    status: int | None


def integer_label(label: object) -> int | None:
    """A weight label as a version; None where it is no integer (SGLang starts with ``default``)."""
    if isinstance(label, str) and _INTEGER.fullmatch(label):
        return int(label)
    return label if _is_int(label) else None


class AnswerParser:
    """Parses the answers of one server; remembers only what it has warned of."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._warned = False

    def parse(self, text: str, budget: int, vocab_size: int | None, source: str) -> Segment:
        """The segment in the body `text` of an answer with status 200; `source` says in errors whose it was.

        Raises:
            SlotDataError: the answer is malformed or holds unusable values.
            GenerationError, ServerError: it is an error in the form of an abort.
        """
        answer = _object(text, source)
        meta = answer.get("meta_info")
        if not isinstance(meta, dict):
            raise SlotDataError(f"{source}: the answer has no meta_info: {shorten(text)}")
        finish = _finish(meta.get("finish_reason"), source)
        if finish.status is not None:
            _raise_for_abort(finish, source)
        tokens = _tokens(answer.get("output_ids"), budget, vocab_size, source)
        logprobs = _logprobs(meta.get("output_token_logprobs"), tokens, source)
        versions, exact = self._versions(meta, len(tokens), source)
        return Segment(tokens, logprobs, versions, finish.stop, finish.message, exact)

    def _versions(self, meta: dict[str, Any], count: int, source: str) -> tuple[list[int] | None, bool]:
        spans = meta.get("weight_versions")
        if isinstance(spans, list) and spans:
            versions = _spans(spans, count, source)
            if None not in versions:
                return [version for version in versions if version is not None], True
            # One label could not stand for all either, since the spans may show a change.
            self._warn([span.get("version") for span in spans])
            return None, False
        label = meta.get("weight_version")
        version = integer_label(label)
        if version is None:
            if label is not None:
                self._warn(label)
            return None, False
        return [version] * count, False

    def _warn(self, label: object) -> None:
        if not self._warned:
            self._warned = True
            log.warning("server.label_not_integer", server=self._server, label=label, used="the pinned version")


def _object(text: str, source: str) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SlotDataError(f"{source}: the answer is not JSON ({error}): {shorten(text)}") from None
    if not isinstance(answer, dict):
        raise SlotDataError(f"{source}: the answer is not one JSON object: {shorten(text)}")
    return answer


def _finish(reason: object, source: str) -> _Finish:
    fields: dict[str, Any] = reason if isinstance(reason, dict) else {"type": reason}
    kind = fields.get("type")
    stop = _STOPS.get(kind) if isinstance(kind, str) else None
    if stop is None:
        raise SlotDataError(f"{source}: unknown finish_reason {shorten(repr(reason))}")
    status = fields.get("status_code") if stop is StopReason.ABORT else None
    message = fields.get("message") if stop is StopReason.ABORT else None
    return _Finish(stop, shorten(str(message or "")), status if _is_int(status) else None)


def _raise_for_abort(finish: _Finish, source: str) -> None:
    """An abort with a status is an error that the server found after it had accepted the request."""
    status = finish.status or 0
    message = f"{source}: aborted with status {status}: {finish.message}"
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in (408, 429):
        raise ServerError(message, status)
    if status >= HTTPStatus.BAD_REQUEST:
        raise GenerationError(message)


def _tokens(ids: object, budget: int, vocab_size: int | None, source: str) -> list[int]:
    if ids is None:
        ids = []  # aborted while queued
    if not isinstance(ids, list):
        raise SlotDataError(f"{source}: output_ids is no list")
    end = math.inf if vocab_size is None else vocab_size
    bad = [token for token in ids if not _is_int(token) or not 0 <= token < end]
    if bad:
        raise SlotDataError(f"{source}: {len(bad)} output ids are no token ids, for example {bad[:_SHOWN]!r}")
    if len(ids) > budget:
        raise SlotDataError(f"{source}: {len(ids)} output ids, but only {budget} were asked for")
    return ids


def _logprobs(triples: object, tokens: list[int], source: str) -> list[float]:
    if triples is None:
        triples = []
    if not isinstance(triples, list) or len(triples) != len(tokens):
        count = len(triples) if isinstance(triples, list) else "no list of"
        raise SlotDataError(f"{source}: {count} output logprobs for {len(tokens)} output ids")
    logprobs: list[float] = []
    for index, (triple, token) in enumerate(zip(triples, tokens, strict=True)):
        if not isinstance(triple, list) or len(triple) < 2:
            raise SlotDataError(f"{source}: output logprob {index} is no (logprob, id, text): {shorten(repr(triple))}")
        value, token_id = triple[0], triple[1]
        if token_id != token:
            raise SlotDataError(f"{source}: output logprob {index} is of id {token_id!r}, the token is {token}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SlotDataError(f"{source}: output logprob {index} is no number: {value!r}")
        if not math.isfinite(value) or not _MASKED_LOGPROB < value <= _POSITIVE_SLACK:
            raise SlotDataError(f"{source}: output logprob {index} of id {token} is {value!r}")
        logprobs.append(float(value))
    return logprobs


def _spans(spans: list[Any], count: int, source: str) -> list[int | None]:
    """One version per token; None where its label is no integer. Spans are half-open and must cover all tokens."""
    versions: list[int | None] = []
    for span in spans:
        start, end = (span.get("start"), span.get("end")) if isinstance(span, dict) else (None, None)
        if not _is_int(start) or not _is_int(end) or start != len(versions) or not start <= end <= count:
            raise SlotDataError(f"{source}: weight_versions do not cover {count} tokens: {shorten(repr(spans))}")
        versions.extend([integer_label(span.get("version"))] * (end - start))
    if len(versions) != count:
        raise SlotDataError(f"{source}: weight_versions do not cover {count} tokens: {shorten(repr(spans))}")
    return versions


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
