"""Workflows to name, build and run. Each returns one row whose reward tells what happened."""

from __future__ import annotations

import asyncio
import sys
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from forebay import GenerationHyperparameters, InferenceEngine, Interaction, RolloutWorkflow, workflow_context
from forebay.errors import (
    ConnectionLostError,
    GenerationError,
    RewardTimeoutError,
    ServerUnavailableError,
    SlotDataError,
    WorkflowContractError,
)
from helpers.building import result

ERRORS: dict[str, BaseException] = {
    "connection_lost": ConnectionLostError("no redis"),
    "connection": ConnectionResetError("reset"),
    "contract": WorkflowContractError("bad format"),
    "exit": SystemExit(3),
    "generation": GenerationError("HTTP 422: the server's words"),
    "key": KeyError("missing"),
    "reward_timeout": RewardTimeoutError("too slow"),
    "server": ServerUnavailableError("no server"),
    "slot_data": SlotDataError("NaN"),
    "silent": ValueError(),
    "timeout": TimeoutError("of its own"),
}


class Plain(RolloutWorkflow):
    """No constructor of its own."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """One row."""
        return result()


class Configured(RolloutWorkflow):
    """Arguments of every kind that travels."""

    def __init__(
        self,
        reward_fn: Any,
        gconfig: GenerationHyperparameters | None = None,
        *,
        scale: float = 1.0,
        **extra: Any,
    ) -> None:
        self.reward_fn, self.gconfig, self.scale, self.extra = reward_fn, gconfig, scale, extra

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """One row."""
        return result()


@dataclass(frozen=True)
class Frozen(RolloutWorkflow):
    """A frozen dataclass."""

    scale: float = 1.0

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """One row."""
        return result()


class Abstract(RolloutWorkflow):
    """Not finished."""

    @abstractmethod
    def more(self) -> None:
        """Missing."""


class Positional(Plain):
    """Takes arguments that have no name."""

    def __init__(self, *values: int) -> None:
        self.values = values


class Broken(Plain):
    """Cannot be built."""

    def __init__(self, why: str) -> None:
        raise RuntimeError(why)


class Returning(RolloutWorkflow):
    """Returns what its data say, or raises it."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        """As the data say."""
        if "raise" in data:
            raise ERRORS[data["raise"]]
        if data.get("sleep"):
            await asyncio.Event().wait()
        if data.get("cancelled"):
            inner = asyncio.get_running_loop().create_future()
            inner.cancel()
            await inner
        return data.get("return", result())


class BySlot(RolloutWorkflow):
    """Returns what its data say for the slot."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        """As the data say."""
        return data["slots"][workflow_context.get().sample_idx]


class Interacting(RolloutWorkflow):
    """Returns an Interaction for each completion id of its data, and what else they say."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """As the data say; an entry is the fields of an Interaction."""
        slot = workflow_context.get().sample_idx
        made = {f"{name}-{slot}": Interaction(**fields) for name, fields in data["interactions"].items()}
        return {**made, **data.get("others", {})}


class Checked(RolloutWorkflow):
    """Refuses arguments that cannot be right."""

    def __init__(self, size: int = 1, other: int = 0) -> None:
        self.size, self.other = size, other

    @classmethod
    def check_arguments(cls, size: int = 1, **_: Any) -> None:
        """The size is at least 1."""
        if size < 1:
            raise ValueError(f"size={size}: must be at least 1")

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """One row."""
        return result()


class CheckedFurther(Checked):
    """Has another constructor, of which the check it inherits knows nothing."""

    def __init__(self, size: str) -> None:
        super().__init__(size=len(size))


class Counting(RolloutWorkflow):
    """Changes its data, and gives what it found in them as its reward; says in what context it ran."""

    def __init__(self) -> None:
        self.seen: list[tuple[workflow_context.WorkflowContext, str]] = []

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any]:
        """The reward is the number of earlier visits that this episode sees in its data."""
        import numpy as np

        visits = len(data["inner"]["visits"])
        data["inner"]["visits"].append(1)
        data["new"] = True
        await asyncio.sleep(0)  # the others run meanwhile
        self.seen.append((workflow_context.get(), workflow_context.stat_scope()))
        return result(rewards=np.array([visits + data["array"].sum()], dtype=np.float32))


class UnprintableError(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Awkward(RolloutWorkflow):
    """Raises errors that are awkward to describe."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """As the data say."""
        if data["how"] == "unprintable":
            raise UnprintableError
        if data["how"] == "long":
            raise ValueError("x" * 100_000)
        if data["how"] == "deep":
            self.recurse()
        try:
            raise ZeroDivisionError("the root")
        except ZeroDivisionError as error:
            raise LookupError("the surface") from error

    def recurse(self) -> None:
        """Never end."""
        self.recurse()


def not_a_workflow() -> int:
    """Callable, and no workflow."""
    return len(sys.argv)


NUMBER = 3
