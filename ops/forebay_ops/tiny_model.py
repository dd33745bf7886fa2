"""A tiny random policy of the copy task, small enough to learn it on one CPU core in seconds.

The task: copy four digits (``c:1234=`` -> ``1234`` and a stop). The model is a Qwen3 of about 134k parameters with
untied embeddings (some servers leave a tied head stale when weights are reloaded), the tokenizer has one token per
character. Torch and transformers are imported inside the functions, so that importing this module costs nothing.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

VOCABULARY: tuple[str, ...] = ("<pad>", "<eos>", "<unk>", *"0123456789", *" c:=+-,")
"""The 20 symbols; a symbol's index is its token id."""

CONTEXT_LENGTH = 1024
"""Longest prompt plus completion of the tiny model, in tokens."""

_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_MARKER = "forebay_tiny_model.json"
_FORMAT = 1


def create_tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """Write config, random weights and tokenizer of the copy task into ``folder`` and return it.

    The same seed gives the same weights. A folder that already holds the model of this seed is left as it is, so the
    call may be repeated, also by several processes at once: the files are written beside it and renamed into place.

    Raises:
        FileExistsError: ``folder`` holds something else (also: the tiny model of another seed).
    """
    marker = {"format": _FORMAT, "seed": seed}
    if _holds(folder, marker):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        scratch.chmod(0o755)  # mkdtemp makes it private; a server of another user must be able to read the model
        _write_weights(scratch, seed)
        _write_tokenizer(scratch)
        (scratch / _MARKER).write_text(json.dumps(marker), encoding="utf-8")
        try:
            scratch.rename(folder)  # succeeds over a missing or an empty folder, and nothing else
        except OSError as error:
            if _holds(folder, marker):  # another process was faster
                return folder
            raise FileExistsError(
                f"{folder} exists and is not the tiny model of seed {seed}: remove it or choose another folder"
            ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _holds(folder: Path, marker: dict[str, int]) -> bool:
    try:
        found = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(found == marker)


def _write_weights(folder: Path, seed: int) -> None:
    import torch
    import transformers
    from safetensors.torch import save_file

    hf: Any = transformers  # its classes are typed in parts only

    pad, eos = VOCABULARY.index("<pad>"), VOCABULARY.index("<eos>")
    config = hf.Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=False,
        pad_token_id=pad,
        eos_token_id=eos,
        bos_token_id=None,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random state is not ours to change
        torch.manual_seed(seed)
        model = hf.Qwen3ForCausalLM(config)
    # Not model.save_pretrained: that draws a progress bar.
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    hf.GenerationConfig(eos_token_id=eos, pad_token_id=pad).save_pretrained(folder)


def _write_tokenizer(folder: Path) -> None:
    import transformers
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    hf: Any = transformers

    symbols = {symbol: token_id for token_id, symbol in enumerate(VOCABULARY)}
    pad, eos, unk = VOCABULARY[:3]
    backend = Tokenizer(models.WordLevel(symbols, unk_token=unk))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()  # joins without the spaces that WordLevel would put between tokens
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        eos_token=eos,
        unk_token=unk,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_LENGTH,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
