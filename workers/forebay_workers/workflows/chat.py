"""The tokens between an answer that the model gave and the next one that it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from forebay.errors import WorkflowError

__all__ = ["NextTurn"]

_ANSWER = "earlier answer"
"""Stands for the model's answer while the template is asked what follows one. Its own tokens are never used."""


@dataclass(frozen=True, slots=True)
class NextTurn:
    """What a chat template puts after an answer, up to where the next answer begins.

    The template is asked once, with a text in the place of the answer: the answers themselves stay the ids that the
    model produced, since text that is tokenized again need not give the same ids.
    """

    ids: tuple[int, ...]
    """The end of the answer, the user's turn, the beginning of the next answer."""
    closing: int
    """How many of `ids`, from the start, end the answer: the last of them is what a model emits to end it."""

    @classmethod
    def of(
        cls, message: str, tokenizer: Any, chat_text: Callable[[list[dict[str, Any]]], str], stop_ids: Sequence[int]
    ) -> Self:
        """The next turn with the user's `message`.

        Raises:
            WorkflowError: the chat template does not show earlier answers, or the message.
        """
        chat = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": _ANSWER},
            {"role": "user", "content": message},
        ]
        text, shown = chat_text(chat), message.strip()  # many templates strip
        at = text.rfind(shown)
        found = text.rfind(_ANSWER, 0, max(at, 0))
        if at < 0 or found < 0:
            missing = "the user's later message" if at < 0 else "earlier answers"
            raise WorkflowError(
                f"the chat template of {getattr(tokenizer, 'name_or_path', tokenizer)!r} leaves out {missing}: it "
                "cannot be used for several turns; give the tokenizer another chat_template"
            )
        end = found + len(_ANSWER)

        def encode(part: str) -> list[int]:
            return list(tokenizer.encode(part, add_special_tokens=False))

        # The difference, since some tokenizers begin every text with a space of their own.
        head, whole = encode(text[:end]), encode(text)
        ids = whole[len(head) :] if whole[: len(head)] == head else encode(text[end:])
        special = _special_ids(tokenizer) | set(stop_ids)
        ends = any(token in special for token in encode(text[end:at]))
        closing = 1 + next(i for i, token in enumerate(ids) if token in special) if ends else 0
        return cls(tuple(ids), closing)

    def after(self, answer: Sequence[int]) -> list[int]:
        """What to append to the ids of `answer`, which has its end or, stopped by a limit or a string, has not."""
        ended = self.closing > 0 and len(answer) > 0 and answer[-1] == self.ids[self.closing - 1]
        return list(self.ids[self.closing if ended else 0 :])


def _special_ids(tokenizer: Any) -> set[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})  # has those too that no attribute of the tokenizer names
    return {*tokenizer.all_special_ids, *(token_id for token_id, token in added.items() if token.special)}
