"""Agents to name: anything with ``async def run(data, **extra)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forebay import AgentWorkflow


class Agent:
    """An agent with arguments, which an instance does not say."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        """The reward."""
        return self.scale


class Bare:
    """An agent without a constructor."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any) -> float:
        """The reward."""
        return 1.0


@dataclass
class Data:
    """An agent that is a dataclass."""

    scale: float = 1.0

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        """The reward."""
        return self.scale


class Static:
    """An agent that needs no instance."""

    @staticmethod
    async def run(data: dict[str, Any], **extra: Any) -> float:
        """The reward."""
        return 1.0


class Old(AgentWorkflow):
    """An agent on the deprecated base."""

    def __init__(self, scale: float, *, other: int = 0) -> None:
        self.scale, self.other = scale, other

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        """The reward."""
        return self.scale


class Blocking:
    """Its run is no coroutine function."""

    def run(self, data: dict[str, Any], **extra: Any) -> float:
        """Block."""
        return 1.0


class Yielding:
    """Its run is a generator."""

    async def run(self, data: dict[str, Any], **extra: Any) -> Any:
        """Yield."""
        yield 1.0


class Narrow:
    """Its run does not take what it is called with."""

    async def run(self, data: dict[str, Any]) -> float:
        """The reward."""
        return 1.0


class Wide:
    """Its run needs more than it is called with."""

    async def run(self, data: dict[str, Any], tools: Any, **extra: Any) -> float:
        """The reward."""
        return 1.0


KEPT = Agent(scale=3.0)
"""An instance at the top level of its module."""
