"""One generation request and what the engine learns about it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from forebay_ops.tiny_server.sampling import SamplingParams


class ServerFailedError(RuntimeError):
    """The engine thread died: every request fails with this, and the server has to be restarted."""


class BusyError(RuntimeError):
    """The queue is full: send less at once, or later."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a request ended; ``matched`` only for ``stop``, ``message`` only for ``abort``."""

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str = ""
    length: int = 0

    def to_wire(self) -> Mapping[str, object]:
        """The ``finish_reason`` object of SGLang."""
        if self.kind == "stop":
            return {"type": "stop", "matched": self.matched}
        if self.kind == "length":
            return {"type": "length", "length": self.length}
        return {"type": "abort", "message": self.message}


@dataclass(slots=True)
class VersionSpan:
    """Output tokens ``[start, end)`` were sampled under the weights labelled ``version``."""

    version: str
    start: int
    end: int


@dataclass(slots=True, eq=False)
class Request:
    """A request in the engine.

    The engine thread alone writes ``output``, ``logprobs``, ``spans``, ``final_version`` and ``finish``; the event
    loop writes ``abort_message`` and owns ``done`` and ``progress``. ``output`` and ``logprobs`` only grow, so that
    the event loop may read the first n entries once the engine has announced n tokens.
    """

    rid: str
    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]  # token ids that end it; empty under ignore_eos
    seed: int  # of its own random stream, below 2**64
    done: asyncio.Future[None]
    progress: asyncio.Queue[int] | None = None  # token counts as they grow; only of a streamed request
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish: Finish | None = None
    final_version: str = ""
    abort_message: str | None = None
    started_at: float = field(default_factory=time.monotonic)

    @property
    def cached_tokens(self) -> int:
        """Tokens whose KV is cached while it runs: all but the last one sampled."""
        return len(self.prompt) + len(self.output) - 1

    @property
    def reserved_tokens(self) -> int:
        """Tokens it can come to hold, prompt included."""
        return len(self.prompt) + self.params.max_new_tokens

    def add(self, token_id: int, logprob: float, version: str) -> None:
        """Append one sampled token and extend, or open, the span of its weight version."""
        self.output.append(token_id)
        self.logprobs.append(logprob)
        count = len(self.output)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1].end = count
        else:
            self.spans.append(VersionSpan(version, count - 1, count))
