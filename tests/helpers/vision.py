"""A tiny vision-language model with random weights, and what an inference server does with it.

The model is of a real family (PaddleOCR-VL, whose image processor works with pillow alone), as a folder that
transformers loads. Serving follows SGLang: a prompt of ids has one place holder for each image, which the server
expands; ids are kept as they are; logprobs are those of the sampled tokens.
"""

from __future__ import annotations

import asyncio
import base64
import io
import string
from pathlib import Path
from typing import Any

from aiohttp import web

_SPECIAL = ["<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>", "<|vs|>", "<|ve|>", "<|image|>", "<|video|>"]
_VOCABULARY = [*_SPECIAL, *string.ascii_lowercase, *string.digits, *" \n?."]
IMAGE_TOKEN = _SPECIAL.index("<|image|>")
PATCH, MERGE = 4, 2
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vs|><|image|><|ve|>{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def create_tiny_vision_model(folder: Path) -> Path:
    """Write weights, tokenizer and processor of 60,000 parameters into `folder`."""
    import torch
    import transformers
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil

    hf: Any = transformers
    ids = {symbol: at for at, symbol in enumerate(_VOCABULARY)}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        extra_special_tokens={"image_token": "<|image|>"},
        clean_up_tokenization_spaces=False,
    )
    size = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": 64 * 64}
    image_processor = PaddleOCRVLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, temporal_patch_size=1, size=size)
    processor = hf.PaddleOCRVLProcessor(image_processor=image_processor, tokenizer=tokenizer, chat_template=_TEMPLATE)
    processor.save_pretrained(folder)
    config = hf.PaddleOCRVLConfig(
        text_config={
            "vocab_size": len(_VOCABULARY),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
            "pad_token_id": ids["<pad>"],
            "eos_token_id": ids["<|im_end|>"],
            "bos_token_id": None,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": PATCH,
            "image_size": 64,
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=ids["<|video|>"],
        vision_start_token_id=ids["<|vs|>"],
        vision_end_token_id=ids["<|ve|>"],
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = hf.PaddleOCRVLForConditionalGeneration(config)
    with torch.no_grad():  # random weights are nearly uniform: sharpen them, so that images matter to the logprobs
        model.lm_head.weight.mul_(8)
    model.save_pretrained(folder)
    return folder


class TinyVision:
    """The model of a folder behind ``/generate``."""

    def __init__(self, folder: Path, version: str = "3") -> None:
        import torch
        import transformers

        hf: Any = transformers
        self.processor = hf.AutoProcessor.from_pretrained(folder)
        self.model = hf.PaddleOCRVLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.version = version
        self.requests: list[dict[str, Any]] = []
        self._generator = torch.Generator().manual_seed(0)
        self._turn = asyncio.Lock()

    async def step(self, body: dict[str, Any]) -> web.StreamResponse:
        """Answer a request; refuse one whose images do not fit its ids."""
        self.requests.append(body)
        images, ids = body.get("image_data") or [], body["input_ids"]
        if ids.count(IMAGE_TOKEN) != len(images):
            message = f"{ids.count(IMAGE_TOKEN)} place holders for {len(images)} images"
            return web.json_response({"error": {"message": message}}, status=400)
        async with self._turn:  # in a thread: the services of a test share its event loop
            tokens, logprobs, stop = await asyncio.to_thread(self._sample, ids, images, body["sampling_params"])
        meta = {
            "finish_reason": {"type": stop},
            "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)],
            "weight_version": self.version,
        }
        return web.json_response({"output_ids": tokens, "meta_info": meta})

    def _sample(self, ids: list[int], images: list[str], params: dict[str, Any]) -> tuple[list[int], list[float], str]:
        import torch
        from PIL import Image

        pictures = [Image.open(io.BytesIO(base64.b64decode(image))) for image in images]
        inputs = dict(self.processor.image_processor(pictures, return_tensors="pt"))
        counts = [int(grid.prod()) // MERGE**2 for grid in inputs["image_grid_thw"]]
        prompt: list[int] = []
        for token in ids:
            prompt += [token] * (counts.pop(0) if token == IMAGE_TOKEN else 1)
        stops, tokens, logprobs = set(params.get("stop_token_ids", [])), [], []
        while len(tokens) < params["max_new_tokens"]:
            last = self.logprobs(prompt + tokens, inputs)[-1]
            token = int(torch.multinomial(last.exp(), 1, generator=self._generator))
            tokens.append(token)
            logprobs.append(float(last[token]))
            if token in stops:
                return tokens, logprobs, "stop"
        return tokens, logprobs, "length"

    def logprobs(self, ids: list[int], inputs: dict[str, Any]) -> Any:
        """[S, V] of what follows each of `ids`, whose place holders are expanded."""
        import torch

        one = torch.tensor([ids])
        with torch.no_grad():
            logits = self.model(input_ids=one, mm_token_type_ids=(one == IMAGE_TOKEN).int(), **inputs).logits
        assert torch.isfinite(logits).all()
        return logits[0].float().log_softmax(-1)
