"""Images from submit to the trainer (contract, sections 3 and 10): ``multi_modal_input`` travels with its rows."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import reward_functions
from helpers.vision import IMAGE_TOKEN, TinyVision, create_tiny_vision_model
from PIL import Image
from services import read, services

from forebay_workers.workflows import VisionRLVRWorkflow

MESSAGES = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}]


def image_file(color: str, size: tuple[int, int]) -> bytes:
    """A PNG's bytes."""
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, format="PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny vision-language model."""
    return create_tiny_vision_model(tmp_path_factory.mktemp("vlm"))


async def test_images_reach_the_trainer(redis_url: str, run_name: str, vlm: Path) -> None:
    """3, 10: a batch's rows and their multi_modal_input, fed to the model, give the logprobs that were served."""
    model = TinyVision(vlm, version="0")
    arguments: dict[str, Any] = {
        "reward_fn": reward_functions.gentle_half,
        "gconfig": {"max_new_tokens": 6},
        "tokenizer": str(vlm),
        "processor": str(vlm),
    }
    async with services(redis_url, run_name, import_allowlist=["helpers"], lease_s=10.0) as (running, client):
        running.server.default = model.step
        for color, size in (("red", (20, 12)), ("blue", (40, 16))):
            data = {"messages": MESSAGES, "images": [image_file(color, size)]}
            await client.submit(data, VisionRLVRWorkflow, arguments)
        (batch,) = await read(client, 1, timeout_s=60)
    tensors = batch.tensors()
    inputs = tensors["multi_modal_input"]
    assert len(inputs) == len(tensors["input_ids"]) == 4
    assert len({tuple(one["image_grid_thw"].flatten().tolist()) for one in inputs}) == 2
    for at, one in enumerate(inputs):
        ids = tensors["input_ids"][at][tensors["attention_mask"][at]].tolist()
        types = tensors["mm_token_type_ids"][at][: len(ids)].tolist()
        assert types == [int(token == IMAGE_TOKEN) for token in ids]
        images = {name: torch.as_tensor(value) for name, value in one.items()}
        after = model.logprobs(ids, images)[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
        trained = tensors["loss_mask"][at][1 : len(ids)].bool()
        assert torch.allclose(tensors["logprobs"][at][1 : len(ids)][trained], after[trained], atol=1e-4)
