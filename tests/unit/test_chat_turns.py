"""What follows an answer under many chat templates (contract, section 10: text is never re-tokenized)."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.chat import CHATML, make_tokenizer, token_ids

from forebay.errors import WorkflowError
from forebay_workers.workflows import MultiTurnWorkflow
from forebay_workers.workflows.chat import NextTurn

LLAMA = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }} <eos>{% endif %}{% endfor %}"
)
"""A space before the end of an answer, and no generation prompt."""
GLM = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""The next turn's beginning is what ends an answer."""
PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Nothing special ends an answer, but something special begins it."""
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}{{ m['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
"""Shows the last answer otherwise than earlier ones, and trims."""


def next_turn(template: str, message: str = "abc", **options: Any) -> tuple[NextTurn, Any]:
    """The next turn, and its tokenizer."""
    tokenizer = make_tokenizer(template, eos="<eos>")

    def text(chat: list[dict[str, Any]]) -> str:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **options))

    return NextTurn.of(message, tokenizer, text, []), tokenizer


@pytest.mark.parametrize(
    ("template", "last", "expected"),
    [
        (CHATML, "<|im_end|>", "\n<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML, "a", "<|im_end|>\n<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML, "<eos>", "<|im_end|>\n<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n"),
        (LLAMA, "<eos>", "[INST] abc [/INST]"),
        (LLAMA, "a", " <eos>[INST] abc [/INST]"),
        (GLM, "<|user|>", "\nabc<|assistant|>\n"),
        (GLM, "a", "<|user|>\nabc<|assistant|>\n"),
        (PLAIN, "a", "\nuser: abc\n<|assistant|>"),
        (PLAIN, "<|assistant|>", "\nuser: abc\n<|assistant|>"),
        (THINKING, "<|im_end|>", "\n<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_what_follows_an_answer(template: str, last: str, expected: str) -> None:
    """10: the template's own tokens after an answer; its end only where the model did not emit that one itself."""
    turn, tokenizer = next_turn(template)
    ids = turn.after([*token_ids(tokenizer, "a", "b"), *token_ids(tokenizer, last)])
    assert ids == tokenizer.encode(expected, add_special_tokens=False)


def test_an_empty_answer() -> None:
    """An answer without a token is ended by the template."""
    turn, tokenizer = next_turn(CHATML)
    assert turn.after([]) == list(turn.ids)
    assert turn.ids[0] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_the_templates_options_reach_the_next_answer() -> None:
    """What a template puts at the beginning of an answer, such as an empty thought, is there in every turn."""
    turn, tokenizer = next_turn(THINKING, enable_thinking=False)
    assert tokenizer.decode(list(turn.ids)).endswith("<|im_start|>assistant\n<think></think>")


def test_a_trimmed_message() -> None:
    """A message that the template trims is found all the same."""
    turn, tokenizer = next_turn(THINKING, message="  abc\n")
    assert "user\nabc<|im_end|>" in tokenizer.decode(list(turn.ids))


def test_a_message_that_reads_like_the_place_of_the_answer() -> None:
    """The answer is looked for before the message, so the message may say anything."""
    turn, tokenizer = next_turn(CHATML, message="earlier answer")
    expected = "<|im_end|>\n<|im_start|>user\nearlier answer<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(list(turn.ids)) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0]['content'] }}", "leaves out the user's later message"),
        ("{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}", "leaves out earlier answers"),
    ],
)
def test_templates_for_one_turn_only(template: str, message: str) -> None:
    """A template that has no place for an answer or a further message is refused when the workflow is built."""

    async def reward(*_: Any, **__: Any) -> float:
        return 0.0

    with pytest.raises(WorkflowError, match=message):
        MultiTurnWorkflow(reward, {}, make_tokenizer(template), max_turns=2)


def test_a_tokenizer_that_begins_every_text_with_a_space() -> None:
    """The ids are a difference of two texts', so what a tokenizer puts before every text is not in them."""

    class Spaced:
        """Begins every text with id 1000."""

        def __init__(self) -> None:
            self.inner = make_tokenizer(PLAIN)
            self.all_special_ids: list[int] = self.inner.all_special_ids

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            """Ids."""
            return [1000, *self.inner.encode(text, add_special_tokens=add_special_tokens)]

    tokenizer = Spaced()

    def text(chat: list[dict[str, Any]]) -> str:
        return str(tokenizer.inner.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))

    turn = NextTurn.of("abc", tokenizer, text, [])
    assert list(turn.ids) == tokenizer.inner.encode("\nuser: abc\n<|assistant|>", add_special_tokens=False)
