"""Requests to inference engines and their answers (contract, section 7)."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["GenerationHyperparameters", "InferenceEngine", "ModelRequest", "ModelResponse", "StopReason"]


class StopReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """A stop token or a stop string."""
    LENGTH = "length"
    """The token budget is used up."""
    TOOL_CALLS = "tool_calls"
    """The model asked for a tool."""
    ABORT = "abort"
    """The server gave the request up; the tokens so far are kept. Callers of ``agenerate`` never see it: an
    aborted generation is resumed, or ends as ``length`` when its budget is used up."""


@dataclass(frozen=True, slots=True)
class GenerationHyperparameters:
    """Sampling settings. Every field reaches the server where the server knows it.

    Frozen, so that one object can be shared by all episodes of a worker; :meth:`new` makes a changed copy.
    """

    n_samples: int = 1
    max_new_tokens: int = 16384
    min_new_tokens: int = 0
    max_tokens: int = 32768
    """Bound on prompt plus completion, tokens."""
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = 100_000_000
    temperature: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stop: list[str] | None = None
    frequency_penalty: float = 0.0
    seed: int | None = None

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """A copy with `changes`; an unknown field is a TypeError."""
        return dataclasses.replace(self, **changes)

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> GenerationHyperparameters:
        """A copy that also stops at the tokenizer's end-of-text and padding tokens, where it has them."""
        ids = list(self.stop_token_ids)
        for token_id in (tokenizer.eos_token_id, tokenizer.pad_token_id):
            if token_id is not None and token_id not in ids:
                ids.append(token_id)
        return dataclasses.replace(self, stop_token_ids=ids)


@dataclass(slots=True)
class ModelRequest:
    """One generation. `rid` also decides routing: requests of one rid stay on one server (KV reuse)."""

    rid: str
    input_ids: list[int]
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    metadata: dict[str, Any] = field(default_factory=dict)
    tokenizer: Any = None
    image_data: list[str] | None = None
    """Base64 images, in the order of their placeholders in the prompt."""
    multi_modal_input: list[dict[str, Any]] | None = None
    processor: Any = None


@dataclass(slots=True)
class ModelResponse:
    """What was generated: the three output lists have one entry per output token.

    `output_versions` holds, per output token, the policy version that produced it. Times are in seconds.
    """

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: StopReason
    latency: float = 0.0
    ttft: float = 0.0
    """Time to the first token; equal to `latency` where the answer is not streamed."""

    @property
    def input_len(self) -> int:
        """Prompt tokens."""
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        """Generated tokens."""
        return len(self.output_tokens)


class InferenceEngine(ABC):
    """What an episode generates with."""

    @abstractmethod
    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Generate, across aborts and weight updates, until a stop or the budget's end.

        Raises:
            ValueError: ``n_samples != 1``; sample several times by submitting a group.
            SlotDataError: no token may be generated (the prompt fills the budget), or the server's answer is unusable.
            GenerationError: the server refuses the request for good.
            ServerUnavailableError: no server answered in time.
        """

    @abstractmethod
    def get_version(self) -> int:
        """The newest policy version that the engine knows of."""
