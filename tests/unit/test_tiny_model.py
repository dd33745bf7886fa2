"""The tiny copy-task model: its size, its tokenizer, and how it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")

from forebay_ops.tiny_model import VOCABULARY, create_tiny_model  # noqa: E402 - after the skips


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of seed 0."""
    return create_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_model_has_about_134k_parameters_and_untied_embeddings(folder: Path) -> None:
    """The folder loads as a Qwen3 of 134k float32 parameters over 20 symbols, with a head of its own."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_080
    assert model.config.vocab_size == len(VOCABULARY) == 20
    assert model.get_output_embeddings().weight.data_ptr() != model.get_input_embeddings().weight.data_ptr()
    assert model.generation_config.eos_token_id == VOCABULARY.index("<eos>")


def test_chat_template_adds_nothing_to_the_message(folder: Path) -> None:
    """A one-message chat is exactly its seven characters, one token each."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "c:1234="}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)
    ids = rendered["input_ids"] if not isinstance(rendered, list) else rendered
    assert [VOCABULARY[token_id] for token_id in ids] == list("c:1234=")


def test_decode_gives_the_text_back(folder: Path) -> None:
    """Decoding inserts no spaces, drops special tokens on request, and maps foreign characters to <unk>."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("c: 12+3,4-5=").input_ids) == "c: 12+3,4-5="
    ids = [*tokenizer("1234").input_ids, tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "1234"
    assert tokenizer.decode(ids) == "1234<eos>"
    assert tokenizer("x").input_ids == [tokenizer.unk_token_id]


def test_same_seed_gives_the_same_weights_and_another_seed_others(folder: Path, tmp_path: Path) -> None:
    """Weights depend on the seed alone."""
    again = create_tiny_model(tmp_path / "again", seed=0)
    other = create_tiny_model(tmp_path / "other", seed=1)
    weights = [(path / "model.safetensors").read_bytes() for path in (folder, again, other)]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]


def test_second_call_changes_nothing_and_leaves_no_scratch(tmp_path: Path) -> None:
    """A call for a model that exists returns it untouched, and no temporary folder stays behind."""
    model = create_tiny_model(tmp_path / "tiny")
    before = {path.name: path.stat().st_mtime_ns for path in model.iterdir()}
    assert create_tiny_model(model) == model
    assert {path.name: path.stat().st_mtime_ns for path in model.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    """A folder that holds another model, or anything else, is left alone with an error that says so."""
    create_tiny_model(tmp_path / "tiny", seed=1)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("keep me")
    for name in ("tiny", "notes"):
        with pytest.raises(FileExistsError, match="remove it or choose another folder"):
            create_tiny_model(tmp_path / name, seed=0)
    assert (tmp_path / "notes" / "todo.txt").read_text() == "keep me"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "tiny"]
