"""A tokenizer whose ids do not round-trip through text, with the chat template that a test asks for."""

from __future__ import annotations

import string
from typing import Any

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Ends an answer with its own token and a line break that no model emits."""

_SPECIAL = ["<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>"]
_MERGES = [("a", "b"), ("ab", "c")]
_VOCABULARY = [*_SPECIAL, *string.ascii_letters, *string.digits, *" \n.,:?<>|/_#'", "ab", "abc"]


def make_tokenizer(template: str | None = CHATML, eos: str = "<|im_end|>") -> Any:
    """Letters are tokens, and so is ``ab``: served as ``a`` and ``b``, text would come back as another id."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    ids = {symbol: at for at, symbol in enumerate(_VOCABULARY)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=_MERGES, unk_token="<unk>"))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    backend.decoder = decoders.Fuse()
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token=eos,
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def token_ids(tokenizer: Any, *tokens: str) -> list[int]:
    """The ids of single tokens."""
    ids: list[int] = tokenizer.convert_tokens_to_ids(list(tokens))
    assert tokenizer.unk_token_id not in ids, tokens
    return ids
