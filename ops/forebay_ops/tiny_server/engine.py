"""The scheduler thread: requests join and leave a running batch between decode steps.

The event loop talks to the thread through one ordered inbox (requests and commands) and gets one wake-up per step back.

Invariants (each with its test in ``tests/unit/test_tiny_server.py``):

- Every submitted request ends exactly once: with a ``finish``, or with the error that killed the engine
  (``test_engine_crash_fails_every_request_and_health``).
- Row i of the batch owns slot i of the cache, which holds its prompt and all of its output but the last token. Hence a
  request can leave at any step and come back by a prefill of all its tokens, with the same result
  (``test_retract_pause_recomputes_exactly``).
- Weights change between two steps only, in full or not at all (``test_failed_update_leaves_the_old_weights``).
- A request that is paused, queued or running can be aborted at any time (``test_abort_queued_request_while_paused``).
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from forebay_ops.tiny_server.folder import WeightsError
from forebay_ops.tiny_server.model import ServedModel
from forebay_ops.tiny_server.request import BusyError, Finish, Request, ServerFailedError
from forebay_ops.tiny_server.sampling import sample

PauseMode = Literal["abort", "retract", "in_place"]
T = TypeVar("T")

_ADMIT_TOKENS = 8192  # prefilled per step at most (one request may exceed it): bounds how long the others wait
_RATE_WINDOW_S = 10

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits of the engine."""

    max_running: int = 256  # rows of the batch
    max_queued: int = 10_000  # requests beyond the running ones
    max_cache_bytes: int = 2 << 30  # about: admission stops when batch x longest possible request exceeds it
    torch_threads: int = 1


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Outcome of a weight update; ``held_requests`` were neither finished nor aborted by it."""

    success: bool
    message: str
    held_requests: int


class Engine:
    """Continuous batching over one model. All public methods belong to the event loop that called ``start``."""

    def __init__(self, model: ServedModel, settings: EngineSettings, weight_version: str = "0") -> None:
        self.model = model
        self.settings = settings
        self.weight_version = weight_version
        self.paused = False
        self.failure: str | None = None
        self.total_tokens = 0
        self.total_requests = 0
        self._live: dict[str, Request] = {}  # this and the next: event loop only
        self._unanswered: set[asyncio.Future[Any]] = set()
        self._wake = threading.Condition()
        self._inbox: list[Request | Callable[[], None]] = []
        self._stopping = False
        self._abort_wanted = False
        self._waiting: deque[Request] = deque()  # this and what follows: engine thread only
        self._rows: list[Request] = []
        self._finished: list[Request] = []
        self._seconds: deque[tuple[int, int]] = deque(maxlen=_RATE_WINDOW_S + 1)  # (second, tokens)
        self._thread = threading.Thread(target=self._run, name="tiny-server-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread; call it from a coroutine of the event loop that is to be served."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its current step; requests that still live are aborted."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        self._fail_all("the server has stopped")

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._rows)

    @property
    def queued(self) -> int:
        """Requests that wait for a row."""
        return max(0, len(self._live) - len(self._rows))

    def tokens_per_second(self) -> float:
        """Output tokens per second over the last ten full seconds."""
        now = int(time.monotonic())
        recent = [tokens for second, tokens in list(self._seconds) if now - _RATE_WINDOW_S <= second < now]
        return sum(recent) / _RATE_WINDOW_S

    def is_live(self, rid: str) -> bool:
        """Whether a request of this id is queued or running."""
        return rid in self._live

    def submit(self, request: Request) -> None:
        """Queue a request; its ``done`` future resolves when ``finish`` is set.

        Raises:
            ValueError: a request of the same id lives.
            BusyError: the queue is full.
            ServerFailedError: the engine is dead.
        """
        if self.failure is not None:
            raise ServerFailedError(self.failure)
        if request.rid in self._live:
            raise ValueError(f"rid {request.rid!r} is already in use by a live request")
        free_rows = 0 if self.paused else self.settings.max_running - self.running
        if self.queued >= self.settings.max_queued + free_rows:
            raise BusyError(f"{self.queued} requests are queued already (--max-queued): retry later")
        self._live[request.rid] = request
        self.total_requests += 1
        self._post(request)

    def abort(self, rid: str, message: str) -> bool:
        """End a request with finish reason ``abort`` and the tokens it has; false when no such request lives."""
        request = self._live.get(rid)
        if request is None:
            return False
        self._abort([request], message)
        return True

    def abort_all(self, message: str) -> int:
        """Abort every live request; returns how many."""
        requests = list(self._live.values())
        self._abort(requests, message)
        return len(requests)

    async def pause(self, mode: PauseMode) -> None:
        """Stop stepping. Requests that run are aborted (so are queued ones), retracted, or kept with their cache."""

        def apply() -> None:
            self.paused = True
            if mode == "abort":
                self._drop_all("generation was paused")
            elif mode == "retract":
                self._retract_all()

        await self._call(apply)

    async def resume(self) -> None:
        """Go on after a pause."""

        def apply() -> None:
            self.paused = False

        await self._call(apply)

    async def flush_cache(self) -> None:
        """Forget all keys and values; those of running requests are recomputed."""
        await self._call(self._flush)

    async def update_weights(
        self, folder: Path, weight_version: str | None, *, flush_cache: bool, abort_all: bool
    ) -> UpdateResult:
        """Replace the weights by those of a folder, between two steps.

        Weights that do not fit change nothing and abort nothing. Without ``flush_cache`` running requests go on with
        keys and values of the old weights.
        """

        def apply() -> UpdateResult:
            try:
                weights = self.model.read_weights(folder)
            except WeightsError as error:
                return UpdateResult(False, str(error), len(self._rows) + len(self._waiting))
            if abort_all:
                self._drop_all("aborted by a weight update")
            self.model.install_weights(weights, folder)
            if weight_version is not None:
                self.weight_version = weight_version
            if flush_cache or not self._rows:
                self._flush()
            message = f"weights of {folder} loaded as version {self.weight_version}"
            return UpdateResult(True, message, len(self._rows) + len(self._waiting))

        return await self._call(apply)

    # --- between the event loop and the thread

    def _post(self, item: Request | Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(item)
            self._wake.notify()

    async def _call(self, function: Callable[[], T]) -> T:
        """Run a function in the thread, between two steps."""
        if self.failure is not None:
            raise ServerFailedError(self.failure)
        outcome: asyncio.Future[T] = self._event_loop.create_future()
        self._unanswered.add(outcome)
        outcome.add_done_callback(self._unanswered.discard)
        self._post(lambda: self._notify(_resolve, outcome, function()))
        return await outcome

    def _abort(self, requests: Sequence[Request], message: str) -> None:
        for request in requests:
            request.abort_message = message
        with self._wake:
            self._abort_wanted = True
            self._wake.notify()

    @property
    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise RuntimeError("the engine was not started")
        return self._loop

    def _notify(self, function: Callable[..., object], *arguments: object) -> None:
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(function, *arguments)

    def _deliver(self, finished: list[Request], progress: list[tuple[Request, int]]) -> None:
        """In the event loop: one call per step."""
        for request in finished:
            self._live.pop(request.rid, None)
            _resolve(request.done, None)
        for request, count in progress:
            if request.progress is not None:
                request.progress.put_nowait(count)

    def _fail_all(self, message: str) -> None:
        """In the event loop, after the thread ended: nobody is left to answer."""
        self.failure = self.failure or message
        for outcome in list(self._unanswered):
            _fail(outcome, ServerFailedError(message))
        requests, self._live = list(self._live.values()), {}
        for request in requests:
            _fail(request.done, ServerFailedError(message))
            if request.progress is not None:
                request.progress.put_nowait(len(request.output))

    # --- the thread

    def _run(self) -> None:
        torch.set_num_threads(self.settings.torch_threads)
        try:
            with torch.inference_mode():
                while self._wait_for_work():
                    self._take_inbox()
                    if not self.paused and (self._rows or self._waiting):
                        self._step()
                    self._announce()
                self._take_inbox()
                self._drop_all("the server is stopping")
                self._announce()
        except Exception as error:  # the thread's boundary: nobody above it could answer the requests
            log.exception("tiny server: the engine thread died")
            self.failure = f"the engine died of {error!r}: restart the server"
            self._notify(self._fail_all, self.failure)

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (
                self._inbox
                or self._stopping
                or self._abort_wanted
                or (not self.paused and (self._rows or self._waiting))
            ):
                self._wake.wait()
            return not self._stopping

    def _take_inbox(self) -> None:
        with self._wake:  # both at once: an abort must not be looked for before its request has left the inbox
            inbox, self._inbox = self._inbox, []
            abort_wanted, self._abort_wanted = self._abort_wanted, False
        for item in inbox:
            if isinstance(item, Request):
                self._waiting.append(item)
            else:
                item()
        if abort_wanted:
            self._sweep_aborted()

    def _sweep_aborted(self) -> None:
        for request in (*self._rows, *self._waiting):
            if request.abort_message is not None:
                self._end(request, Finish("abort", message=request.abort_message))
        self._close_gaps()
        self._waiting = deque(request for request in self._waiting if request.finish is None)

    def _step(self) -> None:
        """One token for every row: those that run, and those that join with all their tokens."""
        running, joining = self._rows, self._admit()
        logits = self.model.forward(
            [request.output[-1] for request in running],
            [request.cached_tokens for request in running],
            [request.prompt + request.output for request in joining],
        )
        self._rows = [*running, *joining]
        token_ids, logprobs = sample(logits, self._rows)
        for request, token_id, logprob in zip(self._rows, token_ids, logprobs, strict=True):
            self._advance(request, token_id, logprob)
        self._count(len(token_ids))
        self._close_gaps()

    def _admit(self) -> list[Request]:
        """Take from the queue what fits the batch, the cache and one step, shortest first (for little padding)."""
        admitted: list[Request] = []
        widest = max((request.reserved_tokens for request in self._rows), default=0)
        tokens = 0
        while self._waiting and len(self._rows) + len(admitted) < self.settings.max_running:
            request = self._waiting[0]
            count = len(self._rows) + len(admitted)
            widest = max(widest, request.reserved_tokens)
            tokens += len(request.prompt) + len(request.output)
            cache_bytes = (count + 1) * widest * self.model.cache_bytes_per_token
            if (admitted and tokens > _ADMIT_TOKENS) or (count and cache_bytes > self.settings.max_cache_bytes):
                break
            admitted.append(self._waiting.popleft())
        admitted.sort(key=lambda request: len(request.prompt) + len(request.output))
        return admitted

    def _advance(self, request: Request, token_id: int, logprob: float) -> None:
        if not math.isfinite(logprob):
            message = f"the model gave a logprob of {logprob}: its weights are damaged"
            return self._end(request, Finish("abort", message=message))
        request.add(token_id, logprob, self.weight_version)
        count, params = len(request.output), request.params
        if count >= params.min_new_tokens:
            if token_id in request.stop_ids:
                return self._end(request, Finish("stop", matched=token_id))
            if params.stop:
                text = self.model.decode_text(request.output, skip_special_tokens=params.skip_special_tokens)
                found = [stop for stop in params.stop if stop in text]
                if found:
                    return self._end(request, Finish("stop", matched=min(found, key=text.index)))
        if count >= params.max_new_tokens:
            self._end(request, Finish("length", length=count))
        return None

    def _end(self, request: Request, finish: Finish) -> None:
        request.finish = finish
        request.final_version = self.weight_version
        self._finished.append(request)

    def _close_gaps(self) -> None:
        """Drop finished rows; the last rows move into their slots."""
        rows = self._rows
        left = [row for row, request in enumerate(rows) if request.finish is None]
        if len(left) == len(rows):
            return
        targets = [row for row in range(len(left)) if rows[row].finish is not None]
        sources = [row for row in left if row >= len(left)]
        kept = rows[: len(left)]
        if sources:
            self.model.cache.move(sources, targets, max(rows[row].cached_tokens for row in sources))
            for source, target in zip(sources, targets, strict=True):
                kept[target] = rows[source]
        self._rows = kept

    def _retract_all(self) -> None:
        """Running requests go back to the head of the queue; their tokens stay."""
        self._waiting.extendleft(reversed(self._rows))
        self._rows = []

    def _drop_all(self, message: str) -> None:
        for request in (*self._rows, *self._waiting):
            self._end(request, Finish("abort", message=message))
        self._rows = []
        self._waiting.clear()

    def _flush(self) -> None:
        self._retract_all()
        self.model.cache.clear()

    def _announce(self) -> None:
        """Tell the event loop what happened since the last time, in one call."""
        finished, self._finished = self._finished, []
        progress = [(r, len(r.output)) for r in (*self._rows, *finished) if r.progress is not None]
        if finished or progress:
            self._notify(self._deliver, finished, progress)

    def _count(self, tokens: int) -> None:
        self.total_tokens += tokens
        now = int(time.monotonic())
        if self._seconds and self._seconds[-1][0] == now:
            self._seconds[-1] = (now, self._seconds[-1][1] + tokens)
        else:
            self._seconds.append((now, tokens))


def _resolve(future: asyncio.Future[T], value: T) -> None:
    if not future.done():  # it is when the client has gone
        future.set_result(value)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
