"""Contract, section 10: the built-in workflows, through a real fleet and real HTTP.

Proved elsewhere: RLVR's result and its reward's arguments in ``tests/unit/test_rlvr.py``; what follows an answer under
many chat templates in ``tests/unit/test_chat_turns.py``; which arguments are refused in
``tests/unit/test_workflow_arguments.py``; which images are in ``tests/unit/test_images.py``.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from helpers.chat import make_tokenizer, token_ids
from helpers.episodes import Rewards, fleet_of, run, tiny_fleet
from helpers.vision import IMAGE_TOKEN, MERGE, PATCH, TinyVision, create_tiny_vision_model
from PIL import Image
from scripted_server import ScriptedServer, answer, scripted

from forebay.errors import GenerationError, SlotDataError
from forebay.wire.rows import rows_from_tensors
from forebay.workflow_context import WorkflowContext, scope
from forebay_ops.tiny_model import create_tiny_model
from forebay_workers.engines import Fleet
from forebay_workers.workflows import MultiTurnWorkflow, RLVRWorkflow, VisionRLVRWorkflow, encode_image

hf: Any = transformers
DATA: dict[str, Any] = {"messages": [{"role": "user", "content": "c:12="}], "answer": "12"}
MESSAGES = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}]


def model_logprobs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[S-1]: what the model gives each token after the first."""
    return logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:].long().unsqueeze(1)).squeeze(1)


def assert_logprobs(result: dict[str, Any], logits: torch.Tensor) -> None:
    """Where the row is trained on, its logprobs are the model's; elsewhere they are 0."""
    trained = result["loss_mask"][0].bool()
    expected = torch.where(trained[1:], model_logprobs(logits, result["input_ids"]), 0.0)
    assert trained.any()
    assert torch.allclose(result["logprobs"][0, 1:], expected, atol=1e-4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The development server's tiny model."""
    return create_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny vision-language model."""
    return create_tiny_vision_model(tmp_path_factory.mktemp("vlm"))


class TestRLVR:
    """10: RLVR."""

    async def test_one_generation_of_a_real_model(self, tiny: Path) -> None:
        """10: messages -> chat template -> one generation -> reward (prompt, completion, ids of both, **data)."""
        reward = Rewards(0.5)
        async with tiny_fleet(tiny) as fleet:
            result = await run(RLVRWorkflow(reward, {"max_new_tokens": 12}, str(tiny)), fleet, DATA)
        tokenizer = hf.AutoTokenizer.from_pretrained(tiny)
        prompt = tokenizer.encode("c:12=")
        ids = result["input_ids"][0].tolist()
        assert ids[: len(prompt)] == prompt
        text = tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)
        assert reward.calls == [(("c:12=", text, prompt, ids[len(prompt) :]), DATA)]
        assert result["versions"].tolist() == [[-1] * len(prompt) + [2] * (len(ids) - len(prompt))]
        with torch.no_grad():
            assert_logprobs(result, hf.AutoModelForCausalLM.from_pretrained(tiny)(result["input_ids"].long()).logits)


@asynccontextmanager
async def several_turns(
    *served: tuple[list[int], str], servers: int = 1, **changes: Any
) -> AsyncIterator[tuple[MultiTurnWorkflow, Rewards, Fleet, list[ScriptedServer]]]:
    """A multi-turn workflow on servers that give the answers ``(ids, why they ended)``; further arguments as given."""
    rewards = changes.pop("rewards", [0.0])
    reward = Rewards(*rewards)
    arguments = {"max_turns": 3, "turn_discount": 0.5, "retry_message": "abc?", "gconfig": {}} | changes
    workflow = MultiTurnWorkflow(reward, tokenizer=make_tokenizer(), **arguments)
    async with scripted(servers) as running:
        for server in running:
            server.default = 500
            server.script.extend(
                answer(ids, stop, weight_version=str(at)) for at, (ids, stop) in enumerate(served, start=4)
            )
        async with fleet_of(*(server.url for server in running)) as fleet:
            yield workflow, reward, fleet, running


class TestMultiTurn:
    """10: MultiTurn."""

    tokenizer = make_tokenizer()
    chat: ClassVar[dict[str, Any]] = {"messages": [{"role": "user", "content": "abc"}]}
    prompt = tokenizer.encode("<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n")
    retry = tokenizer.encode("\n<|im_start|>user\nabc?<|im_end|>\n<|im_start|>assistant\n")
    a, b, end = token_ids(tokenizer, "a", "b", "<|im_end|>")

    async def test_the_row_in_full(self) -> None:
        """10: one row, context masked; every served token with its logprob, version and turn; reward x discount."""
        first, second = [self.a, self.end], [self.b, self.b, self.end]
        async with several_turns((first, "stop"), (second, "stop"), rewards=[0.0, 0.8]) as (workflow, _, fleet, _):
            result = await run(workflow, fleet, self.chat)
        p, r = len(self.prompt), len(self.retry)
        assert result["input_ids"].tolist() == [self.prompt + first + self.retry + second]
        assert result["loss_mask"].tolist() == [[0] * p + [1] * 2 + [0] * r + [1] * 3]
        assert result["turn_ids"].tolist() == [[-1] * p + [0] * 2 + [-1] * r + [1] * 3]
        assert result["versions"].tolist() == [[-1] * p + [4] * 2 + [-1] * r + [5] * 3]
        logprobs = [0.0] * p + [-0.5 - t / 1000 for t in first] + [0.0] * r + [-0.5 - t / 1000 for t in second]
        assert torch.allclose(result["logprobs"], torch.tensor([logprobs]))
        assert result["attention_mask"].all()
        assert result["rewards"].tolist() == pytest.approx([0.4])
        assert result["is_truncated"].tolist() == [False]
        assert {name: value.dtype for name, value in result.items()} == {
            "input_ids": torch.int32,
            "attention_mask": torch.bool,
            "loss_mask": torch.int32,
            "logprobs": torch.float32,
            "versions": torch.int32,
            "turn_ids": torch.int32,
            "rewards": torch.float32,
            "is_truncated": torch.bool,
        }
        (one,), _ = rows_from_tensors(result)
        assert (one.turns, one.head_tail) == (2, (4, 5))

    @pytest.mark.parametrize(
        ("rewards", "turns", "expected"),
        [
            ([1.0], 1, 1.0),
            ([0.0, 1.0], 2, 0.5),
            ([-1.0, 1.0], 2, 0.5),
            ([0.0, -0.5, 1.0], 3, 0.25),
            ([0.0, 0.0, 0.0, 1.0], 3, 0.0),
            ([-1.0], 3, -0.25),
        ],
    )
    async def test_until_the_reward_is_positive(self, rewards: list[float], turns: int, expected: float) -> None:
        """10: up to max_turns, until the reward is positive (AReaL's code stops at any non-zero one)."""
        served = [([self.a, self.end], "stop")] * 4
        async with several_turns(*served, rewards=rewards) as (workflow, reward, fleet, servers):
            result = await run(workflow, fleet, self.chat)
        assert len(servers[0].requests) == len(reward.calls) == turns
        assert result["rewards"].tolist() == [expected]
        assert int(result["turn_ids"].max()) == turns - 1

    async def test_case_26_ids_that_do_not_round_trip(self) -> None:
        """10, case 26: ids that text would turn into others are sent and stored again as they were served."""
        served = [self.a, self.b, self.end]
        assert self.tokenizer.encode(self.tokenizer.decode(served)) != served
        async with several_turns(*[(served, "stop")] * 2, rewards=[0.0, 1.0]) as (workflow, _, fleet, servers):
            result = await run(workflow, fleet, self.chat)
        sent = [request["input_ids"] for request in servers[0].requests]
        assert sent == [self.prompt, self.prompt + served + self.retry]
        assert result["input_ids"].tolist() == [sent[1] + served]

    async def test_an_answer_without_an_end(self) -> None:
        """10: an answer that a limit ended gets the template's end, which is context, and another turn."""
        cut, whole = [self.a, self.a], [self.b, self.end]
        async with several_turns((cut, "length"), (whole, "stop"), rewards=[0.0, 1.0]) as (workflow, _, fleet, _):
            result = await run(workflow, fleet, self.chat)
        assert result["input_ids"].tolist() == [[*self.prompt, *cut, self.end, *self.retry, *whole]]
        assert result["loss_mask"][0, len(self.prompt) :].tolist() == [1, 1] + [0] * (1 + len(self.retry)) + [1, 1]
        assert result["is_truncated"].tolist() == [False]

    async def test_is_truncated_is_the_last_answers(self) -> None:
        """3, 10: is_truncated says whether the final response was stopped by the length limit."""
        served = [([self.a, self.end], "stop"), ([self.a, self.a], "length")]
        async with several_turns(*served, max_turns=2) as (workflow, _, fleet, _):
            assert (await run(workflow, fleet, self.chat))["is_truncated"].tolist() == [True]

    @pytest.mark.parametrize(("room", "turns"), [(0, 1), (1, 2)])
    async def test_max_tokens_bounds_the_row(self, room: int, turns: int) -> None:
        """7, 10: max_tokens is the budget of all turns: without room for a token, what there is is the result."""
        limit = len(self.prompt) + 2 + len(self.retry) + room
        served = [([self.a, self.end], "stop"), ([self.b], "length")]
        async with several_turns(*served, gconfig={"max_tokens": limit, "max_new_tokens": 7}) as made:
            workflow, reward, fleet, servers = made
            result = await run(workflow, fleet, self.chat)
        budgets = [request["sampling_params"]["max_new_tokens"] for request in servers[0].requests]
        assert budgets == [7, 1][:turns]
        assert len(reward.calls) == turns
        assert result["input_ids"].shape[1] <= limit
        assert int(result["loss_mask"][0, -1]) == 1, "no context without an answer"

    async def test_all_turns_on_one_server(self) -> None:
        """7, 10: one rid for an episode's turns, so they stay where the beginning is cached; then another."""
        served = [([self.a, self.end], "stop")] * 9
        async with several_turns(*served, servers=3) as (workflow, _, fleet, servers):
            for _ in range(3):
                with scope(WorkflowContext(task_id=7, sample_idx=1)):
                    await run(workflow, fleet, self.chat)
        by_rid = [{r["rid"].rsplit(".", 1)[0] for r in server.requests} for server in servers]
        assert sum(len(rids) for rids in by_rid) == len(set().union(*by_rid)) == 3
        assert sum(len(server.requests) for server in servers) == 9
        assert all(rid.startswith("7-1-") for rids in by_rid for rid in rids)

    async def test_the_rewards_arguments(self) -> None:
        """10: each answer's reward gets the conversation before it as prompt, and the answer alone as completion."""
        served = [([self.a, self.end], "stop"), ([self.b, self.end], "stop")]
        async with several_turns(*served, max_turns=2) as (workflow, reward, fleet, _):
            await run(workflow, fleet, self.chat)
        (_, first, ids1, out1), data1 = reward.calls[0]
        (conversation, second, ids2, out2), data2 = reward.calls[1]
        assert (first, out1, second, out2) == ("a", [self.a, self.end], "b", [self.b, self.end])
        assert ids1 == self.prompt
        assert ids2 == [*self.prompt, self.a, self.end, *self.retry]
        assert conversation == self.tokenizer.decode(ids2, skip_special_tokens=True)
        assert data1 == data2 == self.chat

    async def test_a_reward_that_is_no_number_fails_the_slot(self) -> None:
        """3: a NaN reward fails the slot, at once: it is not taken for a wrong answer."""
        served = [([self.a, self.end], "stop")] * 3
        async with several_turns(*served, rewards=[float("nan")]) as (workflow, reward, fleet, _):
            result = await run(workflow, fleet, self.chat)
        assert len(reward.calls) == 1
        with pytest.raises(SlotDataError, match="rewards is nan"):
            rows_from_tensors(result)

    async def test_a_real_model(self, tiny: Path) -> None:
        """10: of a real model, the logprobs of all turns are those that it gives the whole row."""
        workflow = MultiTurnWorkflow(
            Rewards(0.0), {"max_new_tokens": 6}, str(tiny), max_turns=3, turn_discount=0.9, retry_message=" c:12="
        )
        async with tiny_fleet(tiny) as fleet:
            result = await run(workflow, fleet, DATA)
        assert sorted(set(result["turn_ids"][0].tolist())) == [-1, 0, 1, 2]
        with torch.no_grad():
            assert_logprobs(result, hf.AutoModelForCausalLM.from_pretrained(tiny)(result["input_ids"].long()).logits)


def picture(color: str = "red", size: tuple[int, int] = (20, 12)) -> Image.Image:
    """An image."""
    image = Image.new("RGB", size, "white")
    image.paste(color, (0, 0, size[0] // 2, size[1]))
    return image


def jpeg(image: Image.Image) -> bytes:
    """An image file's bytes."""
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG")
    return buffer.getvalue()


@asynccontextmanager
async def seeing(
    folder: Path, reward: Any = None, **gconfig: Any
) -> AsyncIterator[tuple[VisionRLVRWorkflow, TinyVision, Fleet]]:
    """A vision workflow on a server of the tiny vision-language model."""
    model = TinyVision(folder)
    settings = {"max_new_tokens": 8, **gconfig}
    workflow = VisionRLVRWorkflow(reward or Rewards(1.0), settings, str(folder), str(folder))
    async with scripted() as (server,):
        server.default = model.step
        async with fleet_of(server.url) as fleet:
            yield workflow, model, fleet


class TestVision:
    """10: VisionRLVR."""

    async def test_the_row_is_what_the_model_saw(self, vlm: Path) -> None:
        """10: the row and its multi_modal_input, fed to the model, give the served logprobs; another image does not."""
        async with seeing(vlm) as (workflow, model, fleet):
            result = await run(workflow, fleet, {"messages": MESSAGES, "images": [jpeg(picture())]})
        ids = result["input_ids"][0].tolist()
        (inputs,) = result["multi_modal_input"]
        grid = inputs["image_grid_thw"]
        assert set(inputs) == {"pixel_values", "image_grid_thw"}
        assert ids.count(IMAGE_TOKEN) == int(grid.prod()) // MERGE**2 > 1
        assert inputs["pixel_values"].shape == (int(grid.prod()), 3, PATCH, PATCH)
        assert result["mm_token_type_ids"].tolist() == [[int(token == IMAGE_TOKEN) for token in ids]]
        assert result["mm_token_type_ids"].dtype == torch.int32
        start = len(ids) - int(result["loss_mask"].sum())
        assert result["loss_mask"].tolist() == [[0] * start + [1] * (len(ids) - start)]
        assert result["versions"].tolist() == [[-1] * start + [3] * (len(ids) - start)]
        served = result["logprobs"][0, start:]

        def replayed(images: dict[str, Any]) -> torch.Tensor:
            after: torch.Tensor = model.logprobs(ids, images)
            return after[start - 1 : -1].gather(1, result["input_ids"][0, start:].long().unsqueeze(1)).squeeze(1)

        assert torch.allclose(served, replayed(inputs), atol=1e-4)
        assert not torch.allclose(served, replayed(inputs | {"pixel_values": -inputs["pixel_values"]}), atol=1e-2)

    async def test_what_the_server_is_sent(self, vlm: Path) -> None:
        """10: base64 images in the order of their place holders, which the server expands: one token each."""
        files = [jpeg(picture()), jpeg(picture("blue", (40, 16)))]
        content = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
        images = [files[0], base64.b64encode(files[1]).decode()]
        async with seeing(vlm) as (workflow, model, fleet):
            data = {"messages": [{"role": "user", "content": content}], "images": images}
            result = await run(workflow, fleet, data)
        (request,) = model.requests
        assert [base64.b64decode(image) for image in request["image_data"]] == files
        assert request["input_ids"].count(IMAGE_TOKEN) == 2
        expanded = result["input_ids"][0, : int((result["loss_mask"] == 0).sum())].tolist()
        assert [t for t in expanded if t != IMAGE_TOKEN] == [t for t in request["input_ids"] if t != IMAGE_TOKEN]
        assert result["multi_modal_input"][0]["image_grid_thw"].shape == (2, 3)

    async def test_a_groups_slots_share_the_processors_work(self, vlm: Path) -> None:
        """8, 10: images are decoded and processed once for a group's slots, and again for another prompt."""
        async with seeing(vlm) as (workflow, _, fleet):
            inner, sizes = workflow.processor, []

            class Counting:
                def __getattr__(self, name: str) -> Any:
                    return getattr(inner, name)

                def __call__(self, **given: Any) -> Any:
                    sizes.append(given["images"][0].size)
                    return inner(**given)

            workflow.processor = Counting()
            prompts = [{"messages": MESSAGES, "images": [jpeg(picture(size=size))]} for size in ((20, 12), (40, 16))]
            context = WorkflowContext(task_id=7, group_size=4)

            async def slot(idx: int) -> dict[str, Any]:
                with scope(dataclasses.replace(context, sample_idx=idx)):
                    return await run(workflow, fleet, prompts[idx // 3])

            results = await asyncio.gather(*(slot(idx) for idx in range(4)))
        assert sorted(sizes) == [(20, 12), (40, 16)]
        grids = [result["multi_modal_input"][0]["image_grid_thw"].tolist() for result in results]
        assert grids[0] == grids[1] == grids[2] != grids[3]

    async def test_any_form_of_an_image_gives_the_same(self, vlm: Path) -> None:
        """10: bytes, base64 text, a data URL and a PIL image are one and the same image to processor and server."""
        image = picture()
        text = encode_image(image)
        forms = [image, text, base64.b64decode(text), f"data:image/png;base64,{text}"]
        async with seeing(vlm) as (workflow, model, fleet):
            results = [await run(workflow, fleet, {"messages": MESSAGES, "images": [form]}) for form in forms]
        pixels = [result["multi_modal_input"][0]["pixel_values"] for result in results]
        assert all(torch.equal(one, pixels[0]) for one in pixels)
        assert len({request["image_data"][0] for request in model.requests}) == 1

    async def test_the_rewards_arguments(self, vlm: Path) -> None:
        """10: reward (prompt, completion, prompt_ids, completion_ids, **data): the ids are the row's."""
        reward = Rewards(0.25)
        data = {"messages": MESSAGES, "images": [jpeg(picture())], "answer": "red"}
        async with seeing(vlm, reward) as (workflow, _, fleet):
            result = await run(workflow, fleet, data)
        ((prompt, completion, prompt_ids, completion_ids), rest) = reward.calls[0]
        assert result["input_ids"].tolist() == [prompt_ids + completion_ids]
        assert result["rewards"].tolist() == [0.25]
        assert "what is it?" in prompt
        assert completion == workflow.tokenizer.decode(completion_ids, skip_special_tokens=True)
        assert rest == data

    async def test_max_tokens_counts_expanded_images(self, vlm: Path) -> None:
        """7, 10: the budget is of what the model reads: image tokens count, although the server is sent one each."""
        data = {"messages": MESSAGES, "images": [jpeg(picture())]}
        async with seeing(vlm) as (workflow, _, fleet):
            result = await run(workflow, fleet, data)
            prompt = int((result["loss_mask"] == 0).sum())
        async with seeing(vlm, max_tokens=prompt + 3) as (workflow, model, fleet):
            result = await run(workflow, fleet, data)
        assert model.requests[0]["sampling_params"]["max_new_tokens"] == 3
        assert result["input_ids"].shape[1] <= prompt + 3
        async with seeing(vlm, max_tokens=prompt) as (workflow, model, fleet):
            with pytest.raises(SlotDataError, match=rf"{prompt} tokens, \d+ of them for its images"):
                await run(workflow, fleet, data)
        assert model.requests == []

    @pytest.mark.parametrize("truncated", [True, False])
    async def test_is_truncated(self, vlm: Path, truncated: bool) -> None:
        """3, 10: built-in workflows always set is_truncated."""
        async with seeing(vlm, stop_token_ids=[] if truncated else list(range(200))) as (workflow, _, fleet):
            if truncated:
                workflow.gconfig = workflow.gconfig.new(stop_token_ids=[])
            result = await run(workflow, fleet, {"messages": MESSAGES, "images": [jpeg(picture())]})
        assert result["is_truncated"].tolist() == [truncated]

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ({"messages": MESSAGES}, r"no 'images'.*\['messages'\].*RLVRWorkflow"),
            ({"messages": MESSAGES, "images": []}, "no 'images'"),
            ({"images": [b"x"]}, "no 'messages'"),
            ({"messages": MESSAGES, "images": [jpeg(picture())] * 2}, "with 2 images .*one {'type': 'image'}"),
            ({"messages": [{"role": "user", "content": "?"}], "images": [jpeg(picture())]}, "with 1 images"),
            ({"messages": MESSAGES, "images": ["/etc/cat.png"]}, r"images\[0\].*no base64.*neither paths nor URLs"),
        ],
    )
    async def test_prompts_that_cannot_be_used(self, vlm: Path, data: dict[str, Any], message: str) -> None:
        """10: a prompt whose images do not fit its places is bad data, said before anything is generated."""
        async with seeing(vlm) as (workflow, model, fleet):
            with pytest.raises(SlotDataError, match=message):
                await run(workflow, fleet, data)
        assert model.requests == []

    async def test_a_generated_place_holder_fails_the_slot(self, vlm: Path) -> None:
        """10: a place holder among the answer's tokens has no image: no trainer could use the row."""
        tokenizer = hf.AutoTokenizer.from_pretrained(vlm)
        async with seeing(vlm) as (workflow, _, _), scripted() as (server,):
            server.default = answer([tokenizer.convert_tokens_to_ids("a"), IMAGE_TOKEN])
            async with fleet_of(server.url) as fleet:
                with pytest.raises(SlotDataError, match=f"generated token {IMAGE_TOKEN}, the place holder"):
                    await run(workflow, fleet, {"messages": MESSAGES, "images": [jpeg(picture())]})

    async def test_a_text_model_refuses_images(self, tiny: Path, vlm: Path) -> None:
        """7, 10: a server of a text model refuses images with 400, which is final; it does not overlook them."""
        workflow = VisionRLVRWorkflow(Rewards(1.0), {"max_new_tokens": 8}, str(vlm), str(vlm))
        workflow.encode = lambda _: [3, 4]  # type: ignore[method-assign] -- ids that the text model knows
        async with tiny_fleet(tiny) as fleet:
            with pytest.raises(GenerationError, match="image_data is not supported"):
                await run(workflow, fleet, {"messages": MESSAGES, "images": [jpeg(picture())]})
