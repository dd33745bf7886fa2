"""RLVR on prompts with images (contract, section 10)."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any, ClassVar

from forebay import workflow_context
from forebay.errors import SlotDataError, SubmitError
from forebay.generation import GenerationHyperparameters, InferenceEngine, ModelRequest, ModelResponse
from forebay.pretrained import load_processor
from forebay.wire.values import encode_plain, pack
from forebay_workers.workflows.arguments import Checks, check, check_common, check_processor
from forebay_workers.workflows.base import BuiltInWorkflow, messages_of, new_rid, row
from forebay_workers.workflows.images import decode_image, require_pillow

__all__ = ["VisionRLVRWorkflow"]

_PER_TOKEN = ("mm_token_type_ids", "token_type_ids")
"""What a processor says of each token, [1, S]."""
_TEXT = frozenset({"input_ids", "attention_mask", *_PER_TOKEN})


class VisionRLVRWorkflow(BuiltInWorkflow):
    """``data["messages"]`` and ``data["images"]`` through a processor, one generation, one reward.

    `messages` have an image's place where their content has ``{"type": "image"}``; `images` are the images in that
    order, each as bytes or as base64 text of an image file (``encode_image`` makes it of a PIL image).

    A server is sent the chat template's own token ids, in which an image is one place holder, and the images: servers
    expand the place holders themselves, and refuse or re-tokenize prompts in which they are expanded already. The row
    holds the expanded ids, which is what the model reads and what a trainer feeds it together with
    ``multi_modal_input``; ``gconfig.max_tokens`` bounds these.

    Args:
        reward_fn: as :class:`RLVRWorkflow`; `prompt_ids` are the expanded ones.
        gconfig: as :class:`RLVRWorkflow`.
        tokenizer: as :class:`RLVRWorkflow`.
        processor: the model's processor, or the folder or name to load it from.
        enable_thinking: passed to the chat template if true.
        reward_timeout_s: as :class:`RLVRWorkflow`.

    Raises:
        WorkflowError: an argument cannot be used, or pillow is not installed.
    """

    _checks: ClassVar[Checks] = {**check_common(), "processor": check_processor}
    _loaded: ClassVar[tuple[str, ...]] = ("tokenizer", "processor")

    def __init__(
        self,
        reward_fn: Callable[..., Any],
        gconfig: GenerationHyperparameters | dict[str, Any],
        tokenizer: Any,
        processor: Any,
        enable_thinking: bool = False,
        reward_timeout_s: float = 15.0,
    ) -> None:
        check(type(self), {"processor": processor}, self._checks)
        require_pillow()
        super().__init__(reward_fn, gconfig, tokenizer, enable_thinking, reward_timeout_s)
        if isinstance(processor, str):
            processor = load_processor(processor)
        self.processor = processor

    @classmethod
    def check_arguments(cls, **arguments: Any) -> None:
        """See :meth:`BuiltInWorkflow.check_arguments`; it stands here since it belongs to this constructor."""
        super().check_arguments(**arguments)

    def chat_text(self, messages: list[dict[str, Any]] | str) -> str:
        """`messages` through the processor's chat template; a string is taken as what a template made already."""
        if isinstance(messages, str):
            return messages
        # Few templates of processors know the option, and an unknown one is taken for one of the processor.
        options = {"enable_thinking": True} if self.enable_thinking else {}
        return str(self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options))

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """One row: prompt with expanded place holders, and completion."""
        prompt = await self._prompt(data)
        grown = len(prompt.ids) - len(prompt.server_ids)
        if len(prompt.ids) >= self.gconfig.max_tokens:
            raise SlotDataError(
                f"no token may be generated: the prompt has {len(prompt.ids)} tokens, {grown} of them for its images, "
                f"and max_tokens={self.gconfig.max_tokens}"
            )
        request = ModelRequest(
            rid=new_rid(),
            input_ids=list(prompt.server_ids),
            gconfig=self.gconfig.new(max_tokens=self.gconfig.max_tokens - grown),
            tokenizer=self.tokenizer,
            image_data=list(prompt.image_data),
            multi_modal_input=[dict(prompt.multi_modal)],
            processor=self.processor,
        )
        answer = await self.generate(engine, request)
        self._check_answer(answer)
        response = dataclasses.replace(answer, input_tokens=list(prompt.ids))
        result = row(response, await self.reward_of(response, data))
        return result | prompt.tensors(response.output_len)

    async def _prompt(self, data: dict[str, Any]) -> _Prompt:
        """What `data` is made into: once for the slots of a group that this process runs."""
        key = _digest(data)
        # In a thread: decoding and resizing take long enough to hold up the other episodes.
        if key is None:
            return await asyncio.to_thread(self._prepare, data)
        cache = workflow_context.get().processor_cache
        return await cache.aget_or_compute(key, lambda: self._prepare(data))

    def _prepare(self, data: dict[str, Any]) -> _Prompt:
        messages, images = messages_of(data), data.get("images")
        if not isinstance(images, (list, tuple)) or not images:
            raise SlotDataError(
                f"the prompt has no 'images', a list of images; it has {sorted(data)}. Prompts of text alone are "
                "RLVRWorkflow's"
            )
        decoded = [decode_image(image, f"images[{at}]") for at, image in enumerate(images)]
        text = self.chat_text(messages)
        try:
            made = self.processor(
                images=[image for image, _ in decoded], text=[text], return_tensors="pt", add_special_tokens=False
            )
        except (ValueError, IndexError, StopIteration) as error:  # as processors refuse images that do not fit the text
            raise SlotDataError(
                f"the processor refuses the prompt with {len(images)} images ({error}); messages need one "
                "{'type': 'image'} in their content for each"
            ) from error
        return _Prompt(
            ids=made["input_ids"][0].tolist(),
            server_ids=self.encode(text),
            image_data=[sent for _, sent in decoded],
            multi_modal={name: value for name, value in made.items() if name not in _TEXT},
            per_token={name: made[name] for name in _PER_TOKEN if name in made},
        )

    def _check_answer(self, response: ModelResponse) -> None:
        """A place holder among the answer's tokens would be one for which there is no image."""
        for name in ("image_token_id", "video_token_id"):
            token_id = getattr(self.processor, name, None)
            if token_id is not None and token_id in response.output_tokens:
                raise SlotDataError(
                    f"the model generated token {token_id}, the place holder of an image: no trainer could tell it "
                    "from those of the prompt"
                )


def _digest(data: dict[str, Any]) -> bytes | None:
    """What the prompt is known by; None for images that are no plain values."""
    try:
        return hashlib.sha256(pack(encode_plain([data.get("messages"), data.get("images")]))).digest()
    except SubmitError:
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt as the model reads it, and as a server is sent it."""

    ids: list[int]
    server_ids: list[int]
    image_data: list[str]
    multi_modal: dict[str, Any]
    per_token: dict[str, Any]

    def tensors(self, output_len: int) -> dict[str, Any]:
        """What the row has besides text; generated tokens are text, of type 0."""
        import torch

        result: dict[str, Any] = {"multi_modal_input": [dict(self.multi_modal)]}
        for name, values in self.per_token.items():
            padding = torch.zeros((1, output_len), dtype=torch.int32)
            result[name] = torch.cat([values.to(torch.int32), padding], dim=1)
        return result
