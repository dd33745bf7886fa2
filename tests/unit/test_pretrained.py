"""Tokenizers as forebay loads them for workflows (contract 2)."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import WorkflowError
from forebay.pretrained import PretrainedCache, load_tokenizer
from forebay_ops.tiny_model import create_tiny_model

MESSAGES = [{"role": "user", "content": "1+1="}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer that has a chat template."""
    return str(create_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize(
    "travelled", [lambda it: it, lambda it: pickle.loads(pickle.dumps(it)), copy.deepcopy], ids=["", "pickle", "copy"]
)
def test_a_chat_becomes_a_list_of_ids(model: str, travelled: Callable[[Any], Any]) -> None:
    """apply_chat_template(tokenize=True) returns ids unless a dict is asked for; a copied tokenizer's does too."""
    tokenizer = travelled(load_tokenizer(model))
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(MESSAGES, tokenize=True, add_generation_prompt=True)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    asked = tokenizer.apply_chat_template(MESSAGES, tokenize=True, add_generation_prompt=True, return_dict=True)
    assert asked["input_ids"] == ids


def test_a_copy_answers_by_its_own_template(model: str) -> None:
    """A template that is set on a deep copy is that copy's."""
    tokenizer = load_tokenizer(model)
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{{ messages | length }}"
    assert other.apply_chat_template(MESSAGES, tokenize=False) == "1"
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) != "1"


def test_it_can_be_saved(model: str, tmp_path: Path) -> None:
    """What was loaded can be saved, and loaded from there."""
    load_tokenizer(model).save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).apply_chat_template(MESSAGES, tokenize=True) == load_tokenizer(
        model
    ).apply_chat_template(MESSAGES, tokenize=True)


def test_loaded_once_for_a_worker(model: str) -> None:
    """Within a cache's use the same object is given; outside it is loaded anew."""
    cache = PretrainedCache()
    with cache.in_use():
        assert load_tokenizer(model) is load_tokenizer(model)
    assert load_tokenizer(model) is not load_tokenizer(model)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    """A folder without a tokenizer is a WorkflowError with its path."""
    with pytest.raises(WorkflowError, match=r"tokenizer .*nowhere cannot be loaded"):
        load_tokenizer(str(tmp_path / "nowhere"))
