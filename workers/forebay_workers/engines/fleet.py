"""Generate on a changing set of inference servers, across aborts, weight updates and dead servers.

Invariants (each with its test in ``tests/unit/test_fleet.py``):

- Token ids are those that servers sent, in order; nothing is re-tokenized, nothing that was received is lost when a
  server dies (``test_tokens_survive_a_dead_server``).
- Every token has the version of what produced it; where that cannot be known exactly, the older of the possible
  versions (``test_bump_during_a_request``, ``test_two_aborts_three_segments``).
- A server takes requests only after a health check has passed; one failed request ends that until the next passed
  check (``test_dead_server_is_avoided``).
- Every wait is bounded: for a server by ``no_server_timeout_s``, for one call by ``request_timeout_s``, for a pause by
  ``update_timeout_s`` (``test_no_server_in_time``, ``test_endless_aborts_end``).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import structlog

from forebay import workflow_context
from forebay.backends import make_backend, make_session
from forebay.backends.base import ServerError
from forebay.errors import ServerUnavailableError, SlotDataError
from forebay.generation import InferenceEngine, StopReason
from forebay_workers.engines.progress import (
    GENERATING,
    WAITING_FOR_SERVER,
    WAITING_FOR_UPDATE,
    Progress,
    token_versions,
)
from forebay_workers.engines.router import Router
from forebay_workers.engines.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterable

    import aiohttp

    from forebay.backends.base import Segment
    from forebay.generation import ModelRequest, ModelResponse
    from forebay.settings import EngineSettings

__all__ = ["Fleet", "Generating", "ServerStats"]

log = structlog.get_logger(__name__)

_LOST_AFTER_CHECKS = 3
"""Failed health checks in a row after which calls that are still open on the server are given up."""
_REMOVED_GRACE_S = 10.0
"""How long calls may go on at a server that left the registry, which may be back a moment later."""
_JITTER = 0.2


@dataclass(frozen=True, slots=True)
class ServerStats:
    """Counters of one server since this worker first saw it."""

    healthy: bool
    paused: bool
    version: int | None
    """Its own weight label at the last health check, where that is an integer."""
    in_flight: int
    requests: int
    """Calls that it answered; a resumed generation takes several."""
    tokens: int
    errors: int
    paused_s: float | None = None
    """For how long it has been paused."""
    down_s: float | None = None
    """For how long it has not been healthy."""
    error: str = ""
    """What it last failed with, while it is down."""


@dataclass(frozen=True, slots=True)
class Generating:
    """What an episode's oldest open generation does."""

    doing: str
    seconds: float
    """Since it was asked for."""
    server: str


class Fleet(InferenceEngine):
    """Many servers behind one :meth:`agenerate`. Use it in one event loop, as a context manager or start/close."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._router = Router(settings.affinity_entries)
        self._servers: dict[str, Server] = {}
        self._version = 0
        self._session: aiohttp.ClientSession | None = None
        self._wanted: set[str] = set()
        self._available = asyncio.Event()
        self._open: dict[int, Progress] = {}

    async def start(self) -> None:
        """Open connections and begin to watch the servers that were set. Safe to call again."""
        if self._session is None:
            self._session = make_session(self._settings)
            self._sync(self._session)

    async def close(self) -> None:
        """Give open calls up and close all connections. Safe to call again."""
        session, self._session = self._session, None
        servers = list(self._servers.values())
        for server in servers:
            server.stop(self._router)
        self._servers.clear()
        self._available.set()  # wake those who wait for a server: they see that the fleet is closed
        await asyncio.gather(*(server.stopped() for server in servers))
        if session is not None:
            await session.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def set_servers(self, urls: Iterable[str]) -> None:
        """Use exactly these servers, by base URL. Call it as often as the registry changes, or more often.

        A new server takes requests once its first health check has passed. A removed one takes none from now on; its
        open calls may end within 10 s, then they go on elsewhere from the tokens that they have.
        """
        self._wanted = {url.rstrip("/") for url in urls}
        if self._session is not None:
            self._sync(self._session)

    def set_version(self, v: int) -> None:
        """Record the run's policy version: what tokens are labelled with where servers do not label them."""
        self._version = v

    def get_version(self) -> int:
        """The version last set."""
        return self._version

    def stats(self) -> dict[str, ServerStats]:
        """Health and counters by base URL."""
        return {
            url: ServerStats(
                healthy=self._router.is_healthy(url),
                paused=server.paused,
                version=server.label,
                in_flight=self._router.in_flight(url),
                requests=server.requests,
                tokens=server.tokens,
                errors=server.errors,
                paused_s=None if server.paused_at is None else max(0.0, time.monotonic() - server.paused_at),
                down_s=None if server.down_at is None else max(0.0, time.monotonic() - server.down_at),
                error=server.error,
            )
            for url, server in list(self._servers.items())
        }

    def generating(self) -> dict[tuple[int, int, int], Generating]:
        """What runs here, by ``(task_id, sample_idx, attempt)`` of the episode that asked. For other threads too."""
        oldest: dict[tuple[int, int, int], Generating] = {}
        for progress in list(self._open.values()):  # oldest first
            oldest.setdefault(progress.slot, Generating(progress.doing, progress.started_s, progress.server))
        return oldest

    @property
    def ready(self) -> bool:
        """Whether a server is healthy."""
        return self._available.is_set()

    async def wait_ready(self, timeout_s: float) -> None:
        """Return as soon as one server is healthy; to be called after :meth:`start`.

        Raises:
            ServerUnavailableError: none was within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._available.wait()
        except TimeoutError:
            raise self._unavailable(timeout_s, None) from None
        self._require_open()

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """See :meth:`InferenceEngine.agenerate`. ``ttft`` is the time to the first segment that brought tokens.

        A generation that is resumed tells the server its earlier tokens as prompt; so a frequency penalty counts
        anew, and a stop string that spans the seam is not seen.
        """
        progress = Progress.of(req)
        context = workflow_context.get()
        progress.slot = context.task_id, context.sample_idx, context.attempt
        self._open[id(progress)] = progress
        try:
            return await self._generate(progress)
        finally:
            del self._open[id(progress)]

    async def _generate(self, progress: Progress) -> ModelResponse:
        while True:
            segment, url = await self._next_segment(progress)
            if segment.stop is not StopReason.ABORT:
                return progress.response(segment.stop)
            if progress.remaining == 0:
                return progress.response(StopReason.LENGTH)
            progress.doing = WAITING_FOR_UPDATE
            await self._wait_to_resume(url, progress)

    async def _next_segment(self, progress: Progress) -> tuple[Segment, str]:
        """One successful call, on whatever server; its tokens are in `progress`."""
        while True:
            progress.doing = WAITING_FOR_SERVER
            server = await self._acquire(progress)
            progress.doing, progress.server = GENERATING, server.url
            try:
                return await self._call(server, progress), server.url
            except ServerError as error:
                self._suspect(server, error)
                progress.failed(error)
            finally:
                self._router.release(server.url)
            await asyncio.sleep(progress.next_wait(self._settings.pause_poll_s))

    async def _call(self, server: Server, progress: Progress) -> Segment:
        if server.vocab_size is not None and progress.largest_id >= server.vocab_size:
            raise SlotDataError(
                f"request {progress.rid}: token id {progress.largest_id} is outside the vocabulary of {server.url} "
                f"({server.vocab_size} ids): is the tokenizer of another model?"
            )
        pinned, known = self._version, server.label
        segment = await server.generate(progress)
        versions = token_versions(
            segment,
            pinned=pinned,
            pinned_after=self._version,
            known=known,
            updates_abort=self._settings.pause_mode == "abort",
        )
        progress.append(segment, versions)
        return segment

    async def _acquire(self, progress: Progress) -> Server:
        """The server for the next call, counted as in flight there."""
        now = time.monotonic()
        since = now if progress.failing_since is None else progress.failing_since
        deadline = since + self._settings.no_server_timeout_s
        while True:
            self._require_open()
            if now >= deadline:
                raise self._unavailable(now - since, progress.error)
            url = self._router.acquire(progress.rid)
            if url is not None:
                return self._servers[url]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline - now):
                    await self._available.wait()
            now = time.monotonic()

    async def _wait_to_resume(self, url: str, progress: Progress) -> None:
        """After an abort: until the server is not paused any more, or unhealthy, or gone."""
        limit_s = self._settings.update_timeout_s
        while True:
            await asyncio.sleep(progress.next_wait(self._settings.pause_poll_s))
            if progress.stalled_s() > limit_s:
                raise ServerUnavailableError(
                    f"request {progress.rid}: {url} has aborted it or been paused for {limit_s:g} s without a token; "
                    "is a weight update stuck?"
                )
            server = self._servers.get(url)
            if server is None or not self._router.is_healthy(url):
                return
            try:
                await server.refresh()  # its label too, which decides the versions of the next segment
            except ServerError as error:
                self._suspect(server, error)
                return
            if not server.paused:
                return

    def _suspect(self, server: Server, error: ServerError) -> None:
        """Take a server that failed a request out of the rotation and have it checked at once."""
        server.errors += 1
        server.note_health(healthy=False, error=str(error))
        if self._router.is_healthy(server.url):
            log.warning("server.down", server=server.url, reason=str(error))
            server.hold_off(self._settings.health_interval_s)
            self._router.set_health(server.url, healthy=False)
            self._note_availability()
        server.check_now.set()

    def _sync(self, session: aiohttp.ClientSession) -> None:
        for url in self._wanted:
            server = self._servers.get(url)
            if server is None:
                server = Server(make_backend(self._settings.backend, url, session, self._settings))
                self._servers[url] = server
                self._router.add(url)
                server.watcher = asyncio.create_task(self._watch(server), name=f"health {url}")
                log.info("server.added", server=url)
            elif server.removed_at is not None:
                server.removed_at = None
                server.check_now.set()
        for url, server in self._servers.items():
            if url not in self._wanted and server.removed_at is None:
                server.removed_at = time.monotonic()
                self._router.set_health(url, healthy=False)
                server.check_now.set()
                log.info("server.removed", server=url)
        self._note_availability()

    async def _watch(self, server: Server) -> None:
        """Check one server's health for as long as it is wanted."""
        while server.removed_at is None or time.monotonic() - server.removed_at < _REMOVED_GRACE_S:
            server.check_now.clear()
            if server.removed_at is None:
                await self._check(server)
            elif not server.calls:
                break
            wait_s = self._settings.health_interval_s * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 -- spread
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await server.check_now.wait()
        self._servers.pop(server.url, None)
        server.stop(self._router)

    async def _check(self, server: Server) -> None:
        was_healthy = self._router.is_healthy(server.url)
        try:
            await server.refresh()
        except ServerError as error:
            server.failed_checks += 1
            server.note_health(healthy=False, error=str(error))
            if was_healthy:
                log.warning("server.down", server=server.url, reason=str(error))
            self._router.set_health(server.url, healthy=False)
            if server.failed_checks == _LOST_AFTER_CHECKS:
                server.give_up_calls()
        else:
            server.failed_checks = 0
            held = time.monotonic() < server.held_until
            healthy = server.removed_at is None and not held
            self._router.set_health(server.url, healthy=healthy, paused=server.paused)
            server.note_health(healthy=healthy)
            if healthy and not was_healthy:
                log.info("server.up", server=server.url, version=server.label)
        self._note_availability()

    def _note_availability(self) -> None:
        if self._router.any_healthy:
            self._available.set()
        else:
            self._available.clear()

    def _require_open(self) -> None:
        if self._session is None:
            raise ServerUnavailableError("the fleet of inference servers is not started, or closed: call start() first")

    def _unavailable(self, waited_s: float, error: Exception | None) -> ServerUnavailableError:
        known = ", ".join(sorted(self._servers)) or "none"
        cause = f"; last error: {error}" if error is not None else ""
        return ServerUnavailableError(
            f"no healthy inference server within {waited_s:.1f} s (known: {known}){cause}; start a server, or add a "
            "running one to the run's registry"
        )
