"""A Hugging Face causal LM on CPU: its forward pass over a batch of rows, its tokenizer, its weights."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from forebay_ops.tiny_server.folder import ModelError, WeightsError, check_folder
from forebay_ops.tiny_server.kv import ATTENTION_NAME, CACHE_ARGUMENT, SlotCache, attention


class ServedModel:
    """The model of a folder, with what the engine needs of it. Its methods are for one thread at a time."""

    def __init__(self, model: Any, tokenizer: Any, folder: Path, context_length: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self.path = str(folder)
        self.context_length = context_length
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.eos_ids = _eos_ids(model, tokenizer)
        self.cache = SlotCache()
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"  # renamed in transformers 5.24

    @classmethod
    def load(cls, folder: Path, context_length: int | None = None) -> ServedModel:
        """Load a folder in float32; ``context_length`` (tokens) defaults to the model's own.

        Raises:
            ModelError: it is no model folder, or an architecture this server cannot batch.
        """
        import transformers

        hf: Any = transformers  # its classes are typed in parts only
        check_folder(folder)
        hf.utils.logging.disable_progress_bar()
        hf.utils.logging.set_verbosity_error()
        hf.AttentionInterface.register(ATTENTION_NAME, attention)
        try:
            model, info = hf.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ModelError(f"cannot load the model in {folder}: {_one_line(error)}") from error
        if info["missing_keys"]:  # transformers would have made them up
            raise ModelError(f"the weights in {folder} lack {', '.join(sorted(info['missing_keys'])[:3])}")
        tokenizer = None
        if (folder / "tokenizer.json").exists() or (folder / "tokenizer_config.json").exists():
            try:
                tokenizer = hf.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            except (OSError, ValueError, KeyError, RuntimeError) as error:
                raise ModelError(f"cannot load the tokenizer in {folder}: {_one_line(error)}") from error
        own_length = int(getattr(model.config, "max_position_embeddings", 2048))
        length = own_length if context_length is None else context_length
        if not 0 < length <= own_length:
            raise ModelError(f"--context-length must be between 1 and {own_length} for the model in {folder}")
        if _attends_to_a_window(model.config, length):
            raise ModelError(f"the model in {folder} uses sliding-window attention, which this server does not support")
        return cls(model.eval().requires_grad_(False), tokenizer, folder, length)

    @property
    def has_tokenizer(self) -> bool:
        """Whether text and stop strings are possible."""
        return self._tokenizer is not None

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of keys and values per token and slot (an upper bound for models that share heads unevenly)."""
        config = self._model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * config.num_hidden_layers * heads * head_dim * 4)

    def decode_text(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of tokens; empty without a tokenizer. Safe to call from any thread."""
        if self._tokenizer is None or not token_ids:
            return ""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def forward(
        self, decoding: Sequence[int], positions: Sequence[int], joining: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """One pass: the next token of each of the first rows, at its position, and all tokens of rows that join.

        Returns the logits after the last token of each row (rows x vocabulary, float32), decoding rows first.
        """
        lengths = [len(tokens) for tokens in joining]
        self.cache.prepare(positions, lengths)
        packed, places, last = list(decoding), list(positions), list(range(len(decoding)))
        for tokens in joining:
            packed.extend(tokens)
            places.extend(range(len(tokens)))
            last.append(len(packed) - 1)
        output = self._model(
            input_ids=torch.tensor([packed]),
            position_ids=torch.tensor([places]),
            use_cache=True,
            logits_to_keep=torch.tensor(last),
            **{self._cache_argument: self.cache, CACHE_ARGUMENT: self.cache},
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def read_weights(self, folder: Path) -> dict[str, torch.Tensor]:
        """The safetensors of a folder, checked against the live model by name, shape and kind.

        Raises:
            WeightsError: unreadable or not the weights of this model; the message says which names differ.
        """
        found = _read_safetensors(folder)
        live = self._model.state_dict()
        shared: dict[int, list[str]] = {}
        for name, tensor in live.items():
            shared.setdefault(tensor.data_ptr(), []).append(name)
        # Of names that share their memory (a tied head) one is enough.
        missing = [names[0] for names in shared.values() if not any(name in found for name in names)]
        unknown = [name for name in found if name not in live]
        odd = [
            f"{name} {list(tensor.shape)} instead of {list(live[name].shape)}"
            for name, tensor in found.items()
            if name in live and (tensor.shape != live[name].shape or not tensor.is_floating_point())
        ]
        for problem, names in (("missing", missing), ("unknown", unknown), ("of another shape or type", odd)):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise WeightsError(f"the weights in {folder} do not fit: {problem}: {', '.join(names[:3])}{more}")
        return found

    def install_weights(self, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Copy checked weights into the live model, in place."""
        live = self._model.state_dict()
        with torch.inference_mode():
            for name, tensor in weights.items():
                live[name].copy_(tensor)
        self.path = str(folder)


def _read_safetensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not folder.is_dir():
        raise WeightsError(f"model folder {folder} does not exist")
    try:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            files = [folder / str(name) for name in names]
        else:
            files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"model folder {folder} has no safetensors")
        tensors: dict[str, torch.Tensor] = {}
        for file in files:
            tensors.update(load_file(file))
    except (OSError, SafetensorError, json.JSONDecodeError, KeyError, AttributeError) as error:
        raise WeightsError(f"cannot read the weights in {folder}: {_one_line(error)}") from error
    return tensors


def _attends_to_a_window(config: Any, context_length: int) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    window = getattr(config, "sliding_window", None)
    return window is not None and window < context_length


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    for holder in (model.generation_config, model.config, tokenizer):
        value = getattr(holder, "eos_token_id", None)
        if value is not None:
            found.update(value if isinstance(value, list | tuple) else [value])
    return frozenset(int(token_id) for token_id in found)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
