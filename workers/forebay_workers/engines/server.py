"""What a fleet knows of one server, and the calls that are open there."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from forebay.backends.base import ServerError

if TYPE_CHECKING:
    from forebay.backends.base import Backend, Segment
    from forebay_workers.engines.progress import Progress
    from forebay_workers.engines.router import Router

__all__ = ["Server"]

_LONGEST_HOLD_S = 10.0


class Server:
    """One server of a fleet. Health itself is the router's; see there."""

    def __init__(self, backend: Backend) -> None:
        self.url = backend.url
        self.label: int | None = None
        self.vocab_size: int | None = None
        self.paused = False
        self.paused_at: float | None = None
        """Monotonic time since when it has been; likewise the next."""
        self.down_at: float | None = time.monotonic()
        self.error = ""
        """What it last failed with."""
        self.requests = 0
        self.tokens = 0
        self.errors = 0
        self.failed_checks = 0
        self.held_until = 0.0
        """Monotonic time before which a passed check does not bring it back."""
        self.removed_at: float | None = None
        self.check_now = asyncio.Event()
        self.watcher: asyncio.Task[None] | None = None
        self.calls: set[asyncio.Task[Segment]] = set()
        self._backend = backend
        self._failures = 0

    async def refresh(self) -> None:
        """Ask the server what it serves. Raises ServerError."""
        info = await self._backend.model_info()
        self.label = info.version
        self.vocab_size = info.vocab_size
        self.paused = bool(info.paused)
        self.paused_at = (self.paused_at or time.monotonic()) if self.paused else None

    def note_health(self, *, healthy: bool, error: str = "") -> None:
        """Remember since when it has been down, and why, for who asks; the router decides by its own."""
        self.down_at = None if healthy else self.down_at or time.monotonic()
        self.error = "" if healthy else error or self.error

    async def generate(self, progress: Progress) -> Segment:
        """One call. Raises as :meth:`Backend.generate`, and ServerError when :meth:`give_up_calls` ends it."""
        call = asyncio.create_task(
            self._backend.generate(
                progress.new_server_rid(),
                progress.server_prompt(),
                progress.server_gconfig(),
                progress.remaining,
                progress.image_data,
            )
        )
        self.calls.add(call)
        try:
            await asyncio.wait({call})
        finally:  # this task was cancelled: the call must not outlive it
            self.calls.discard(call)
            call.cancel()
            call.add_done_callback(_retrieve)
        if call.cancelled():
            raise ServerError(f"{self.url}: the call was given up, as the server is gone or does not answer")
        segment = call.result()
        self._failures = 0
        self.requests += 1
        self.tokens += len(segment.tokens)
        return segment

    def hold_off(self, interval_s: float) -> None:
        """After a failed request: come back with the next passed check, but after repeated failures later and later.

        A server whose health passes while its requests fail would otherwise draw all of them, being least loaded.
        """
        self._failures += 1
        hold_s = 0.0 if self._failures == 1 else interval_s * 2.0 ** min(self._failures - 2, 10)
        self.held_until = time.monotonic() + min(hold_s, _LONGEST_HOLD_S)

    def give_up_calls(self) -> None:
        """End open calls; their generations go on elsewhere."""
        for call in self.calls:
            call.cancel()

    def stop(self, router: Router) -> None:
        """Leave the rotation for good."""
        router.remove(self.url)
        self.give_up_calls()
        if self.watcher is not None and self.watcher is not asyncio.current_task():
            self.watcher.cancel()

    async def stopped(self) -> None:
        """Wait until nothing of it runs any more."""
        tasks: list[asyncio.Task[Any]] = [*self.calls]
        if self.watcher is not None:
            tasks.append(self.watcher)
        await asyncio.gather(*tasks, return_exceptions=True)


def _retrieve(call: asyncio.Task[Segment]) -> None:
    """Take the error of a call that nobody waits for any more, or the event loop would log it."""
    if not call.cancelled():
        call.exception()
