"""Several tries at one prompt, until the reward is positive (contract, section 10)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from forebay.generation import GenerationHyperparameters, InferenceEngine, ModelRequest, ModelResponse
from forebay_workers.workflows.arguments import Checks, check, check_common, check_discount, check_integer, check_text
from forebay_workers.workflows.base import BuiltInWorkflow, new_rid, tensors
from forebay_workers.workflows.chat import NextTurn

__all__ = ["MultiTurnWorkflow"]

_RETRY = (
    "This answer is not right, or it could not be read. Go through the question once more, find the mistake, and "
    "answer again."
)


class MultiTurnWorkflow(BuiltInWorkflow):
    """As :class:`RLVRWorkflow`, but an answer whose reward is not positive gets a user's message and another try.

    The result is one row with all turns: the ids that the model produced, and between them the chat template's tokens
    for `retry_message`, which are context and not trained on. All turns go to one server, which has the beginning in
    its cache. A turn begins only while ``gconfig.max_tokens``, the bound on the whole row, leaves room for an answer;
    ``gconfig.max_new_tokens`` bounds each answer.

    Args:
        reward_fn: as :class:`RLVRWorkflow`; `prompt` and `prompt_ids` are the whole conversation before the answer.
        gconfig: as :class:`RLVRWorkflow`.
        tokenizer: as :class:`RLVRWorkflow`.
        max_turns: answers at most.
        turn_discount: the last answer's reward is multiplied by this once for each retry; above 0, at most 1.
        retry_message: what the user says after an answer whose reward is not positive.
        enable_thinking: passed to the chat template.
        reward_timeout_s: as :class:`RLVRWorkflow`.

    Raises:
        WorkflowError: an argument cannot be used, or the chat template has no place for earlier answers.
    """

    _checks: ClassVar[Checks] = {
        **check_common(),
        "max_turns": lambda name, value: check_integer(name, value, 1),
        "turn_discount": check_discount,
        "retry_message": check_text,
    }

    def __init__(
        self,
        reward_fn: Callable[..., Any],
        gconfig: GenerationHyperparameters | dict[str, Any],
        tokenizer: Any,
        max_turns: int,
        turn_discount: float = 1.0,
        retry_message: str = _RETRY,
        enable_thinking: bool = False,
        reward_timeout_s: float = 15.0,
    ) -> None:
        given = {"max_turns": max_turns, "turn_discount": turn_discount, "retry_message": retry_message}
        check(type(self), given, self._checks)
        super().__init__(reward_fn, gconfig, tokenizer, enable_thinking, reward_timeout_s)
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self._next = NextTurn.of(retry_message, self.tokenizer, self.chat_text, self.gconfig.stop_token_ids)

    @classmethod
    def check_arguments(cls, **arguments: Any) -> None:
        """See :meth:`BuiltInWorkflow.check_arguments`; it stands here since it belongs to this constructor."""
        super().check_arguments(**arguments)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """One row: prompt, answers, and the retry messages between them."""
        row, rid, turn = _Conversation(self.prompt_ids(data)), new_rid(), 0
        while True:
            request = ModelRequest(rid=rid, input_ids=list(row.ids), gconfig=self.gconfig, tokenizer=self.tokenizer)
            response = await self.generate(engine, request)
            row.add_answer(response, turn)
            reward = await self.reward_of(response, data)
            # A reward that is no number fails the slot: no need to ask again.
            if reward > 0 or not math.isfinite(reward) or turn + 1 == self.max_turns:
                break
            context = self._next.after(response.output_tokens)
            if len(row.ids) + len(context) >= self.gconfig.max_tokens:
                break
            row.add_context(context)
            turn += 1
        return row.tensors(reward * self.turn_discount**turn, response)


@dataclass(slots=True)
class _Conversation:
    """A row that grows: `ids` begin as the prompt, and every other list has an entry for each of them."""

    ids: list[int]
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        prompt, self.ids = self.ids, []
        self.add_context(prompt)

    def add_context(self, ids: list[int]) -> None:
        """Tokens that are not trained on."""
        self.ids += ids
        self.loss_mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)
        self.turns += [-1] * len(ids)

    def add_answer(self, response: ModelResponse, turn: int) -> None:
        """Tokens that the model produced."""
        self.ids += response.output_tokens
        self.loss_mask += [1] * response.output_len
        self.logprobs += response.output_logprobs
        self.versions += response.output_versions
        self.turns += [turn] * response.output_len

    def tensors(self, reward: float, last: ModelResponse) -> dict[str, Any]:
        """The row [1, S]; `last` is the final response."""
        import torch

        result = tensors(self.ids, self.loss_mask, self.logprobs, self.versions, reward, last.stop_reason)
        return result | {"turn_ids": torch.tensor([self.turns], dtype=torch.int32)}
