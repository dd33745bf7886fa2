"""The public API as a user writes it. Type checkers read this file; nothing runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import numpy as np

from forebay import (
    AgentWorkflow,
    AsyncBatch,
    AsyncBatchStream,
    AsyncClient,
    AsyncRewardWrapper,
    Batch,
    BatchStream,
    Client,
    EngineSettings,
    FailureKind,
    ForebayError,
    ForebayWarning,
    GenerationHyperparameters,
    InferenceEngine,
    ModelRequest,
    ModelResponse,
    NormConfig,
    RolloutGroup,
    RolloutWorkflow,
    RunSettings,
    Settings,
    ShareOf,
    StopReason,
    TrajBatchMeta,
    WorkflowLike,
    concat_padded_tensors,
    load,
    workflow_context,
)


def reward(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """A reward function."""
    return float(completion == data["answer"])


class OneTurn(RolloutWorkflow):
    """A workflow of one's own."""

    def __init__(self, gconfig: GenerationHyperparameters, scale: float = 1.0) -> None:
        self.gconfig = gconfig.new(temperature=0.5)
        self.scale = scale
        self.reward = AsyncRewardWrapper(reward, timeout_s=5, on_timeout=None)

    @classmethod
    def check_arguments(cls, gconfig: Any = None, **_: Any) -> None:
        """Only settings are settings."""
        if not isinstance(gconfig, GenerationHyperparameters):
            raise TypeError("gconfig must be GenerationHyperparameters")

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """One generation."""
        context = workflow_context.get()
        assert_type(context.sample_idx, int)
        assert_type(workflow_context.stat_scope(), str)
        response = await engine.agenerate(ModelRequest(rid=f"{context.task_id}", input_ids=[1], gconfig=self.gconfig))
        assert_type(response, ModelResponse)
        assert_type(response.output_versions, list[int])
        assert_type(engine.get_version(), int)
        if response.stop_reason is StopReason.ABORT:
            return None
        value = await self.reward("", "", response.input_tokens, response.output_tokens, **data)
        assert_type(value, float)
        ids = np.array([response.input_tokens + response.output_tokens], dtype=np.int32)
        return {"input_ids": ids, "attention_mask": np.ones_like(ids, dtype=np.bool_), "rewards": np.array([value])}


def accept(group: dict[str, Any]) -> bool:
    """A filter."""
    found: RolloutGroup = group["rollout_group"]
    assert_type(found.row_counts, tuple[int, ...])
    assert_type(found.rewards, tuple[float | None, ...])
    return found.usable_size > 1


def settings() -> None:
    """Settings keep their types through ``load``."""
    run = load(RunSettings, batch_size=4)
    assert_type(run, RunSettings)
    assert_type(run.capacity, int)
    assert_type(run.attempts(FailureKind.INFRA), int)
    load(RunSettings, reward_normalization=NormConfig("group", mean_leave1out=True, std_level=None))
    assert_type(run.norm, NormConfig | None)
    assert_type(load(Settings).run, str)
    assert_type(load(EngineSettings).request_timeout_s, float)


class Agent:
    """An agent of one's own."""

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        """One episode."""
        return float(len(data) + len(extra))


class OldAgent(AgentWorkflow):
    """An agent on the deprecated base."""

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        """One episode."""
        return 1.0


WAYS: list[WorkflowLike] = [
    OneTurn(GenerationHyperparameters()),
    OneTurn,
    "package.module:OneTurn",
    Agent(),
    Agent,
    OldAgent(),
    OldAgent,
]
WARNING: type[UserWarning] = ForebayWarning


def trajectories(batch: Batch) -> None:
    """A batch taken apart, split over ranks and put together."""
    made = batch.trajectories(pad_token_id=0)
    assert_type(made, list[dict[str, Any]])
    tensors, meta = TrajBatchMeta.batch(made)
    assert_type(meta, TrajBatchMeta)
    assert_type(batch.meta.traj_seqlens, tuple[int, ...])
    shuffled, order = meta.reorder(tensors, range(meta.n_trajs))
    for part, own in order.split(shuffled, 2):
        assert_type(own.rollout_groups, tuple[RolloutGroup | None, ...])
        assert_type(concat_padded_tensors(own.trajectories(part)), dict[str, Any])


async def asynchronous() -> None:
    """A producer and a trainer on an event loop."""
    async with await AsyncClient.connect(load(Settings), wait_s=5, engine=load(EngineSettings)) as client:
        assert_type(client, AsyncClient)
        for way in WAYS:
            task_id = await client.submit(
                {"messages": []},
                way,
                {"gconfig": GenerationHyperparameters()},
                group_size=4,
                reward_normalization=True,
                drop_incomplete_group=False,
                min_usable_group_size=2,
                should_accept_fn=accept,
                idempotency_key="one",
            )
            assert_type(task_id, int)
        await client.end_of_data()
        async with client.batches("trainer", timeout_s=60) as stream:
            assert_type(stream, AsyncBatchStream)
            async for batch in stream:
                assert_type(batch, AsyncBatch)
                assert_type(batch.rollout_groups, list[RolloutGroup])
                assert_type(batch.tensors(pad_token_id=0), dict[str, Any])
                assert_type(batch.tokens, int)
                assert_type(batch.rewards_normalized, bool)
                assert_type(batch.normalized_groups, list[bool])
                assert_type(batch.share_of, ShareOf)
                assert_type(await batch.ack(), bool)
        client.batches(rank=1, world_size=2, follows=True, resume_after=7)
        await client.set_version(await client.version() + 1)
        result = await client.update_weights_from_disk(Path("weights"), 2, on_progress=print)
        assert_type(result.out, list[str])
        assert_type((await client.explain()).verdict, str)


def plain() -> None:
    """The same without an event loop."""
    try:
        with Client.connect(load(Settings)) as client:
            assert_type(client.submit({"messages": []}, OneTurn, {"gconfig": GenerationHyperparameters()}), int)
            with client.batches() as stream:
                assert_type(stream, BatchStream)
                for batch in stream:
                    assert_type(batch, Batch)
                    assert_type(batch.ack(), bool)
            assert_type(client.batches("eval", rank=0, world_size=4, follows=True, resume_after=3), BatchStream)
            client.set_version(client.version() + 1)
    except ForebayError as error:
        print(error)
