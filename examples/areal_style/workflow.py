"""One turn of chat and a score for it, written as for AReaL.

``areal_workflow.txt`` beside this file is the same workflow with AReaL's imports: nothing but the import lines differs.
"""

import uuid
from collections.abc import Callable
from typing import Any

import torch

from forebay import (
    AsyncRewardWrapper,
    GenerationHyperparameters,
    InferenceEngine,
    ModelRequest,
    ModelResponse,
    RolloutWorkflow,
    session_context,
    trace_session,
)
from forebay.log import getLogger

logger = getLogger("ChatScoreWorkflow")


def digits_share(_prompt: str, completion: str, **_: Any) -> float:
    """The share of digits in the completion."""
    return sum(character.isdigit() for character in completion) / max(1, len(completion))


class ChatScoreWorkflow(RolloutWorkflow):
    """Asks once, scores the answer, and returns one row."""

    def __init__(
        self,
        reward_fn: Callable[..., float],
        tokenizer: Any,
        gconfig: GenerationHyperparameters,
    ) -> None:
        self.tokenizer = tokenizer
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
        self.score_fn = AsyncRewardWrapper(reward_fn, timeout_seconds=30, max_workers=2)

    @trace_session("reward")
    async def _score(self, response: ModelResponse, prompt: str, data: dict[str, Any]) -> float:
        completion = self.tokenizer.decode(response.output_tokens)
        return await self.score_fn(prompt, completion, **data)

    @session_context()
    async def _ask(self, engine: InferenceEngine, request: ModelRequest) -> ModelResponse:
        with trace_session("generate"):
            return await engine.agenerate(request)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Run the episode of ``data["messages"]``."""
        input_ids = self.tokenizer.apply_chat_template(data["messages"], tokenize=True, add_generation_prompt=True)
        request = ModelRequest(
            rid=uuid.uuid4().hex,
            input_ids=list(input_ids),
            gconfig=self.gconfig.new(n_samples=1),
            tokenizer=self.tokenizer,
        )
        response = await self._ask(engine, request)
        reward = await self._score(response, self.tokenizer.decode(input_ids), data)
        logger.debug("%d tokens, reward %.3f", response.output_len, reward)

        prompt_len, output_len = response.input_len, response.output_len
        row = {
            "input_ids": torch.tensor(response.input_tokens + response.output_tokens, dtype=torch.int32),
            "loss_mask": torch.tensor([0] * prompt_len + [1] * output_len, dtype=torch.int32),
            "logprobs": torch.tensor([0.0] * prompt_len + response.output_logprobs, dtype=torch.float32),
            "versions": torch.tensor([-1] * prompt_len + response.output_versions, dtype=torch.int32),
            "attention_mask": torch.ones(prompt_len + output_len, dtype=torch.bool),
            "rewards": torch.tensor(reward, dtype=torch.float32),
        }
        return {name: value.unsqueeze(0) for name, value in row.items()}
