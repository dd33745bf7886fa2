"""The workflow of the run, and what its tokens say.

A prompt is a number. The stub server (``server.py``) answers with tokens that carry the version of the weights that it
holds and the prompt's number, so the trainer reads from the tokens themselves, not from what the pipeline says of them,
how old they are and whose.
"""

from __future__ import annotations

import random
import uuid
from typing import Any

from forebay import (
    GenerationHyperparameters,
    InferenceEngine,
    Interaction,
    ModelRequest,
    RolloutWorkflow,
    workflow_context,
)

__all__ = ["TOKENS", "VOCABULARY", "ChaosWorkflow", "fate_of", "is_doomed", "read_token", "write_token"]

VOCABULARY = 2**31 - 1
TOKENS = 8
"""Generated in each episode."""

_PROMPTS = 1000
"""A token tells prompts apart modulo this."""
_FATES = {"good": 84, "flaky": 8, "half": 4, "reject": 4}


def write_token(version: int, number: int) -> int:
    """The token that weights of `version` generate for prompt `number`."""
    return version * _PROMPTS + number % _PROMPTS


def read_token(token: int, number: int) -> int | None:
    """The version of the weights that generated `token`; None if it is of another prompt than `number`."""
    version, remainder = divmod(token, _PROMPTS)
    return version if remainder == number % _PROMPTS else None


def fate_of(seed: int, number: int) -> str:
    """What becomes of prompt `number`.

    ``flaky``: a slot's first attempt fails; ``half``: every other slot is rejected; ``reject``: all are; else ``good``.
    """
    return random.Random(f"{seed}:{number}").choices(list(_FATES), list(_FATES.values()))[0]


def is_doomed(seed: int, key: str) -> bool:
    """Whether all slots of the prompt with this idempotency key are rejected."""
    number = key.rpartition("-")[2]
    return number.isdecimal() and fate_of(seed, int(number)) == "reject"


class ChaosWorkflow(RolloutWorkflow):
    """One generation, which ends as the prompt's fate says."""

    def __init__(self, gconfig: GenerationHyperparameters) -> None:
        self.gconfig = gconfig

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Interaction] | None:
        """Generate; returns one interaction, whose prompt is the number and the slot's index."""
        context, number, fate = workflow_context.get(), data["number"], data["fate"]
        if fate == "flaky" and context.sample_idx == 0 and context.attempt == 1:
            raise ConnectionError("a tool of this prompt is away at the first attempt")
        request = ModelRequest(rid=uuid.uuid4().hex, input_ids=[number, context.sample_idx or 0], gconfig=self.gconfig)
        response = await engine.agenerate(request)
        if fate == "reject" or (fate == "half" and (context.sample_idx or 0) % 2):
            return None
        return {
            request.rid: Interaction(
                input_tokens=response.input_tokens,
                output_tokens=response.output_tokens,
                output_logprobs=response.output_logprobs,
                output_versions=response.output_versions,
                reward=float((number * 7 + (context.sample_idx or 0) * 3) % 5),
            )
        }
