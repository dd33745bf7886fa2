"""How far one generation has come, over the calls that it takes."""

from __future__ import annotations

import hashlib
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from forebay.errors import SlotDataError
from forebay.generation import ModelResponse

if TYPE_CHECKING:
    from forebay.backends.base import Segment, ServerError
    from forebay.generation import GenerationHyperparameters, ModelRequest, StopReason

__all__ = ["GENERATING", "WAITING_FOR_SERVER", "WAITING_FOR_UPDATE", "Progress", "token_versions"]

GENERATING = "generating"
WAITING_FOR_SERVER = "waiting for a server"
WAITING_FOR_UPDATE = "waiting for a weight update"

_LONGEST_WAIT_S = 1.0
_MAX_DOUBLINGS = 16
_REMEDY = "apply_chat_template(tokenize=True) needs return_dict=False with transformers 5, and no return_tensors"


def token_versions(
    segment: Segment, *, pinned: int, pinned_after: int, known: int | None, updates_abort: bool
) -> list[int]:
    """The version of each token of `segment` (contract, section 7).

    A server's spans are exact. Its single label is what it holds when it answers, and the pinned version what the run
    had when the request left; both are exact unless weights changed during the call. If they may have, the older
    version is taken, so that staleness is never under-estimated.

    Args:
        segment: what the server sent.
        pinned: the run's version when the request left.
        pinned_after: the run's version now.
        known: the server's label as last seen before the request left, None if it has none.
        updates_abort: updates abort running requests first, so a label holds for the whole segment.
    """
    if segment.versions is None:
        return [pinned] * len(segment.tokens)
    if segment.exact or updates_abort:
        return segment.versions
    if known is not None:
        newest = max(known, pinned)
    elif pinned_after != pinned:
        newest = pinned
    else:
        return segment.versions
    return [min(version, newest) for version in segment.versions]


@dataclass(slots=True)
class Progress:
    """One generation: its request, what has been generated, and since when it has made no headway."""

    rid: str
    prompt: list[int]
    gconfig: GenerationHyperparameters
    budget: int
    image_data: list[str] | None
    largest_id: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    error: ServerError | None = None
    failing_since: float | None = None
    """Monotonic time of the first failure since tokens last came."""
    slot: tuple[int, int, int] = (-1, 0, 0)
    """``(task_id, sample_idx, attempt)`` of the episode that asks, for who wants to know what it does."""
    server: str = ""
    """Where it is under way, or was last."""
    doing: str = WAITING_FOR_SERVER
    """What it does now: one of the words here."""
    _started: float = field(default_factory=time.monotonic)
    _first_tokens_s: float | None = None
    _last_headway: float = field(default_factory=time.monotonic)
    _waits: int = 0

    @classmethod
    def of(cls, req: ModelRequest) -> Self:
        """The start of `req`.

        Raises:
            ValueError: ``n_samples != 1``.
            SlotDataError: the prompt is no list of token ids, is empty, or leaves no budget.
        """
        gconfig, prompt = req.gconfig, req.input_ids
        if gconfig.n_samples != 1:
            raise ValueError(
                f"n_samples={gconfig.n_samples}: one request generates once; submit a group to sample more"
            )
        if not isinstance(prompt, (list, tuple)):
            raise SlotDataError(f"request {req.rid}: input_ids={prompt!r:.100} is no list of token ids; {_REMEDY}")
        if not prompt:
            raise SlotDataError(f"request {req.rid}: the prompt is empty")
        bad = [token for token in prompt if not isinstance(token, int) or isinstance(token, bool) or token < 0]
        if bad:
            raise SlotDataError(f"request {req.rid}: {bad[0]!r:.100} in input_ids is no token id; {_REMEDY}")
        budget = min(gconfig.max_tokens - len(prompt), gconfig.max_new_tokens)
        if budget <= 0:
            raise SlotDataError(
                f"request {req.rid}: no token may be generated: the prompt has {len(prompt)} tokens, "
                f"max_tokens={gconfig.max_tokens}, max_new_tokens={gconfig.max_new_tokens}"
            )
        return cls(req.rid, list(prompt), gconfig, budget, req.image_data, max(prompt))

    @property
    def started_s(self) -> float:
        """Seconds since the request came."""
        return time.monotonic() - self._started

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.budget - len(self.tokens)

    def new_server_rid(self) -> str:
        """The request's id on a server, new for each call: a second one that is live there would be refused."""
        return f"{self.rid}.{uuid.uuid4().hex[:12]}"

    def server_prompt(self) -> list[int]:
        """What the next call starts from: prompt and all tokens so far, as ids."""
        return self.prompt + self.tokens

    def server_gconfig(self) -> GenerationHyperparameters:
        """The settings of the next call: what is left of ``min_new_tokens``, and a seed that repeats no draws."""
        if not self.tokens:
            return self.gconfig
        minimum = max(0, self.gconfig.min_new_tokens - len(self.tokens))
        return self.gconfig.new(min_new_tokens=minimum, seed=self._seed())

    def _seed(self) -> int | None:
        if self.gconfig.seed is None:
            return None
        digest = hashlib.sha256(f"{self.gconfig.seed}:{len(self.tokens)}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1  # 31 bits: any server's seed type holds it

    def append(self, segment: Segment, versions: list[int]) -> None:
        """Add what one call brought."""
        self.failing_since, self.error = None, None  # the server answered, be it with nothing
        if not segment.tokens:
            return
        now = time.monotonic()
        if self._first_tokens_s is None:
            self._first_tokens_s = now - self._started
        self._last_headway, self._waits = now, 0
        self.tokens += segment.tokens
        self.logprobs += segment.logprobs
        self.versions += versions
        self.largest_id = max(self.largest_id, *segment.tokens)

    def failed(self, error: ServerError) -> None:
        """Note that a call brought nothing."""
        self.error = error
        if self.failing_since is None:
            self.failing_since = time.monotonic()

    def stalled_s(self) -> float:
        """Seconds since tokens last came, or since the start."""
        return time.monotonic() - self._last_headway

    def next_wait(self, first_s: float) -> float:
        """Seconds to wait before the next try; doubles up to one second until tokens come again."""
        wait_s = min(first_s * 2.0**self._waits, max(first_s, _LONGEST_WAIT_S))
        self._waits = min(self._waits + 1, _MAX_DOUBLINGS)
        return wait_s

    def response(self, stop: StopReason) -> ModelResponse:
        """The answer to the request."""
        latency = time.monotonic() - self._started
        return ModelResponse(
            input_tokens=self.prompt,
            output_tokens=self.tokens,
            output_logprobs=self.logprobs,
            output_versions=self.versions,
            stop_reason=stop,
            latency=latency,
            ttft=latency if self._first_tokens_s is None else self._first_tokens_s,
        )
