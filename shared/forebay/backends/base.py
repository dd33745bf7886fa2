"""What forebay asks of one inference server, whatever its protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp

from forebay.errors import ForebayError

if TYPE_CHECKING:
    from forebay.generation import GenerationHyperparameters, StopReason
    from forebay.settings import EngineSettings

__all__ = [
    "MAX_ERROR_CHARS",
    "Backend",
    "ModelInfo",
    "Segment",
    "ServerError",
    "make_session",
    "read_answer",
    "shorten",
]

MAX_ERROR_CHARS = 500
"""Bound on how much of a server's own text an error quotes."""


class ServerError(ForebayError, RuntimeError):
    """A server did not answer, or answered 408, 429 or 5xx: try elsewhere, or later.

    Attributes:
        status: the HTTP status, or None where there was no answer (refused, reset, timed out).
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Segment:
    """What one call of a server generated: a whole generation, or the part of it up to an abort."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int] | None
    """Per token: from the server's spans, else its label for all; None where it reports no integer version."""
    stop: StopReason
    message: str = ""
    """The server's words on an abort."""
    exact: bool = False
    """`versions` come from spans, so they hold across a weight update that happened during the call."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a server says of itself. None: it does not say."""

    version: int | None
    """Its weight label, where that is an integer."""
    model_path: str | None
    vocab_size: int | None = None
    paused: bool | None = None


class Backend(ABC):
    """A client of one server. Holds no connection of its own; `session` is shared and closed by its owner."""

    def __init__(self, base_url: str, session: aiohttp.ClientSession, settings: EngineSettings) -> None:
        self.url = base_url.rstrip("/")
        self._session = session
        self._settings = settings

    @abstractmethod
    async def generate(
        self,
        rid: str,
        input_ids: list[int],
        gconfig: GenerationHyperparameters,
        budget: int,
        image_data: list[str] | None = None,
    ) -> Segment:
        """Generate at most `budget` tokens. `rid` must not be in use on the server.

        Raises:
            GenerationError: the server refuses the request for good (a permanent 4xx).
            SlotDataError: the answer is unusable; the text says what is wrong with it.
            ServerError: no answer, or one that asks to try again.
        """

    @abstractmethod
    async def pause(self, mode: str) -> None:
        """Stop generating; `mode` as ``EngineSettings.pause_mode``. Raises ServerError."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on generating; harmless where nothing is paused. Raises ServerError."""

    @abstractmethod
    async def update_weights_from_disk(self, path: str, version: int) -> None:
        """Load the weights in folder `path` (on the server's disk) and label them `version`.

        Returns only when the server itself reports the new version, where it reports any.

        Raises:
            ServerError: the server does not hold the new weights, with its own text.
        """

    @abstractmethod
    async def model_info(self) -> ModelInfo:
        """Ask the server, within a few seconds, also during a pause. Raises ServerError."""

    async def is_alive(self) -> bool:
        """Whether :meth:`model_info` answers. Health end-points hang during a pause, so they say nothing."""
        try:
            await self.model_info()
        except ServerError:
            return False
        return True


def make_session(settings: EngineSettings) -> aiohttp.ClientSession:
    """A session for any number of servers, bounded per server. Call it inside a running event loop; close it."""
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=settings.max_connections_per_server)
    # Environment proxies are ignored (trust_env=False): inference servers are on the cluster's own network.
    key = settings.api_key
    headers = None if key is None else {"Authorization": f"Bearer {key.get_secret_value()}"}
    return aiohttp.ClientSession(connector=connector, trust_env=False, headers=headers)


async def read_answer(response: aiohttp.ClientResponse, most: int) -> bytes | None:
    """The body of `response`, unpacked; None once it is more than `most` bytes, of which the rest is not read."""
    if (response.content_length or 0) > most:
        return None
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > most:
            return None
        parts.append(part)
    return b"".join(parts)


def shorten(text: str) -> str:
    """`text` in one line, cut to ``MAX_ERROR_CHARS``."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_ERROR_CHARS else line[: MAX_ERROR_CHARS - 3] + "..."
