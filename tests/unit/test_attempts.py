"""One attempt of a slot: how it ends, and what it may see (contract 2, 4.1, 4.2)."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from helpers import workflows
from helpers.building import result
from helpers.workflows import Counting

from forebay import FailureKind, InferenceEngine, ModelRequest, ModelResponse, SlotOutcome
from forebay.backends.base import ServerError
from forebay.outcomes import ResultKind
from forebay.wire.codec import decode_rows
from forebay.wire.envelopes import GroupSpec
from forebay.wire.values import encode_plain
from forebay.workflow_context import WorkflowContext, get, scope, stat_scope
from forebay_workers.attempts import Ended, WorkflowCache, classify, run_attempt

ALLOWED = ["forebay", "helpers"]


class NoEngine(InferenceEngine):
    """Not asked for anything here."""

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Never called."""
        raise NotImplementedError

    def get_version(self) -> int:
        """Never asked."""
        return 0


def spec(name: str, data: dict[str, Any] | None = None, **kwargs: Any) -> GroupSpec:
    """A group of a workflow of the helpers, as a worker reads it."""
    made = GroupSpec(f"helpers.workflows:{name}", kwargs, encode_plain(data or {}))
    return GroupSpec.unpack(made.pack())


async def run(
    group: GroupSpec, cache: WorkflowCache | None = None, context: WorkflowContext | None = None, **limits: Any
) -> Ended:
    """Run an attempt of `group`."""
    bounds = {"timeout_s": 30.0, "max_rows_bytes": 2**20, "max_inline_tokens": 1000} | limits
    return await run_attempt(group, context or WorkflowContext(), NoEngine(), cache or WorkflowCache(ALLOWED), **bounds)


class TestOutcomes:
    """contract 4.2: exactly one outcome; the kinds of failures."""

    async def test_usable(self) -> None:
        """Rows, their summaries, the key set and the reference are delivered."""
        values = result(rows=2, rewards=np.array([1.0, 2.0]), rollout_reward=np.float32(1.5))
        ended = await run(spec("Returning", {"return": values}))
        assert (ended.outcome, ended.kind, ended.reference) == (SlotOutcome.USABLE, None, 1.5)
        assert ended.keys == tuple(sorted(values))
        assert [(one.reward, one.seqlen, one.head) for one in ended.rows] == [(1.0, 4, 3), (2.0, 4, 3)]
        assert ended.frame is not None
        assert [one.reward for one in decode_rows(ended.frame)] == [1.0, 2.0]

    async def test_interactions(self) -> None:
        """Contract 4.5: a dict of Interactions is a usable slot whose header has its kind and its completion ids."""
        fields = {"input_tokens": [1], "output_tokens": [2, 3], "output_logprobs": [-1, -2], "output_versions": [4, 5]}
        ended = await run(spec("Interacting", {"interactions": {"a": fields, "b": fields | {"rollout_reward": 2.0}}}))
        assert (ended.outcome, ended.result_kind, ended.keys) == (SlotOutcome.USABLE, ResultKind.INTERACTIONS, ())
        assert [(one.completion, one.head, one.tail) for one in ended.rows] == [("a-0", 4, 5), ("b-0", 4, 5)]
        assert ended.reference == 2.0
        assert ended.frame is not None
        assert [one.completion for one in decode_rows(ended.frame)] == ["a-0", "b-0"]

    async def test_a_mixed_dict_is_a_contract_failure(self) -> None:
        """Contract 4.5: tensors and Interactions in one dict fail the slot as contract, in every setting."""
        fields = {"input_tokens": [1], "output_tokens": [2], "output_logprobs": [-1], "output_versions": [4]}
        ended = await run(spec("Interacting", {"interactions": {"a": fields}, "others": {"rewards": np.ones(1)}}))
        assert (ended.outcome, ended.kind) == (SlotOutcome.FAILED, FailureKind.CONTRACT)
        assert "mixes Interactions with other values (rewards)" in ended.reason

    async def test_none_is_rejected(self) -> None:
        """None: rejected, not a failure."""
        ended = await run(spec("Returning", {"return": None}))
        assert (ended.outcome, ended.kind, ended.frame) == (SlotOutcome.REJECTED, None, None)

    @pytest.mark.parametrize(
        ("returned", "said"),
        [
            ({}, "returned an empty dict; return None to reject"),
            ([1], "returned a list; expected a dict or None"),
            ("text", "returned a str"),
            ({"rewards": np.ones(1)}, "no input_ids"),
        ],
    )
    async def test_wrong_formats_are_contract_failures(self, returned: Any, said: str) -> None:
        """Contract 2: an empty dict is a failed slot in every setting, as is any other format."""
        ended = await run(spec("Returning", {"return": returned}))
        assert (ended.outcome, ended.kind) == (SlotOutcome.FAILED, FailureKind.CONTRACT)
        assert said in ended.reason

    @pytest.mark.parametrize("change", [{"logprobs": np.full((1, 4), np.nan)}, {"rewards": np.array([np.inf])}])
    async def test_bad_values_are_data_failures(self, change: dict[str, Any]) -> None:
        """Contract 3: NaN and infinite values fail the slot with kind data."""
        ended = await run(spec("Returning", {"return": result(**change)}))
        assert (ended.outcome, ended.kind) == (SlotOutcome.FAILED, FailureKind.DATA)

    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            ("server", FailureKind.INFRA),
            ("connection", FailureKind.INFRA),
            ("connection_lost", FailureKind.INFRA),
            ("generation", FailureKind.DATA),
            ("slot_data", FailureKind.DATA),
            ("key", FailureKind.DATA),
            ("silent", FailureKind.DATA),
            ("exit", FailureKind.DATA),
            ("timeout", FailureKind.TIMEOUT),
            ("reward_timeout", FailureKind.TIMEOUT),
            ("contract", FailureKind.CONTRACT),
        ],
    )
    async def test_what_a_workflow_raises(self, error: str, kind: FailureKind) -> None:
        """Whatever a workflow raises, an exit too, is its slot's failure with a kind, the text and the traceback."""
        ended = await run(spec("Returning", {"raise": error}))
        raised = workflows.ERRORS[error]
        assert (ended.outcome, ended.kind, ended.frame) == (SlotOutcome.FAILED, kind, None)
        assert ended.reason == (f"{type(raised).__name__}: {raised}" if str(raised) else type(raised).__name__)
        assert "arun_episode" in ended.traceback

    def test_a_server_without_an_answer_is_infra(self) -> None:
        """A back-end's own error is infra."""
        assert classify(ServerError("HTTP 503", 503)).kind is FailureKind.INFRA

    async def test_episode_timeout(self) -> None:
        """An episode that runs out of time is failed(timeout) with the time, and the loop goes on."""
        async with asyncio.timeout(30):
            ended = await run(spec("Returning", {"sleep": True}), timeout_s=0.05)
        assert (ended.outcome, ended.kind) == (SlotOutcome.FAILED, FailureKind.TIMEOUT)
        assert "EpisodeTimeoutError: the episode ran longer than 0.1 s" in ended.reason

    async def test_cancelling_the_attempt_passes_through(self) -> None:
        """Cancellation from outside is not an outcome."""
        attempt = asyncio.create_task(run(spec("Returning", {"sleep": True})))
        await asyncio.sleep(0)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt

    async def test_a_cancellation_of_the_workflows_own_is_a_failure(self) -> None:
        """A CancelledError that nobody sent to the attempt is the workflow's failure, so that the slot ends."""
        ended = await run(spec("Returning", {"cancelled": True}))
        assert (ended.outcome, ended.kind) == (SlotOutcome.FAILED, FailureKind.DATA)
        assert "CancelledError" in ended.reason

    async def test_rows_above_the_bound(self) -> None:
        """Rows above max_rows_bytes are failed(data) with both numbers."""
        ended = await run(spec("Returning"), max_rows_bytes=50)
        assert ended.kind is FailureKind.DATA
        assert "above max_rows_bytes=50" in ended.reason

    async def test_large_rows_are_the_same(self) -> None:
        """Rows that are encoded in a thread are the same bytes."""
        inline, threaded = [await run(spec("Returning"), max_inline_tokens=bound) for bound in (1000, 1)]
        assert inline == threaded

    @pytest.mark.parametrize(
        ("name", "kwargs", "said"),
        [
            ("Absent", {}, "has no Absent"),
            ("Broken", {"why": "on purpose"}, "could not be built: RuntimeError: on purpose"),
            ("not_a_workflow", {}, "is no RolloutWorkflow"),
        ],
    )
    async def test_a_workflow_that_cannot_be_built(self, name: str, kwargs: dict[str, Any], said: str) -> None:
        """Contract 2: what cannot be imported or built is a failed slot with a clear reason."""
        ended = await run(spec(name, **kwargs))
        assert (ended.outcome, ended.kind) == (SlotOutcome.FAILED, FailureKind.DATA)
        assert said in ended.reason

    async def test_a_module_outside_the_allowlist(self) -> None:
        """Contract 2: a module that is not allowed is a failed slot, never an import."""
        ended = await run(spec("Returning"), WorkflowCache(["forebay"]))
        assert (ended.outcome, ended.kind) == (SlotOutcome.FAILED, FailureKind.DATA)
        assert "not in the run's import allowlist" in ended.reason


class TestReasons:
    """Case 8: the collector receives a failure record with the root traceback."""

    async def test_case_8_the_root_cause(self) -> None:
        """Case 8: the reason has the surface and the root, the traceback both."""
        ended = await run(spec("Awkward", {"how": "chained"}))
        assert ended.reason == "LookupError: the surface (from ZeroDivisionError: the root)"
        assert "ZeroDivisionError: the root" in ended.traceback
        assert "LookupError: the surface" in ended.traceback

    @pytest.mark.parametrize("how", ["long", "deep"])
    async def test_texts_are_bounded(self, how: str) -> None:
        """A huge message and a deep stack are shortened; the traceback keeps its beginning and its end."""
        ended = await run(spec("Awkward", {"how": how}))
        assert len(ended.reason) <= 500
        assert len(ended.traceback) < 4100
        assert ended.traceback.startswith("Traceback")

    async def test_an_error_without_a_text(self) -> None:
        """An exception whose own text fails is still an outcome."""
        ended = await run(spec("Awkward", {"how": "unprintable"}))
        assert ended.outcome is SlotOutcome.FAILED
        assert ended.reason.startswith("UnprintableError")


class TestIsolation:
    """contract 2 and 4.1: a copy of the data and a context for each slot."""

    async def test_attempts_never_see_each_others_data(self) -> None:
        """Attempts of one group, at once and one after the other, each find the data as submitted."""
        cache = WorkflowCache(ALLOWED)
        group = spec("Counting", {"inner": {"visits": []}, "array": np.zeros(2)})
        at_once = await asyncio.gather(*(run(group, cache) for _ in range(5)))
        later = [await run(group, cache) for _ in range(3)]
        assert [ended.rows[0].reward for ended in [*at_once, *later]] == [0.0] * 8
        assert group.data["inner"] == {"visits": []}
        assert "new" not in group.data

    async def test_contexts_are_isolated(self) -> None:
        """Slots that share the loop each see their own context, and none is left behind."""
        cache = WorkflowCache(ALLOWED)
        group = spec("Counting", {"inner": {"visits": []}, "array": np.zeros(1)})
        contexts = [
            WorkflowContext(is_eval=idx % 2 == 1, task_id=9, sample_idx=idx, group_size=4, attempt=idx + 1, run="e/t")
            for idx in range(4)
        ]
        await asyncio.gather(*(run(group, cache, context) for context in contexts))
        workflow = await cache.get(group)
        assert isinstance(workflow, Counting)
        assert sorted(workflow.seen, key=lambda seen: seen[0].sample_idx) == [
            (context, "eval-rollout" if context.is_eval else "rollout") for context in contexts
        ]
        assert get() == WorkflowContext()

    async def test_a_failed_attempt_leaves_no_context(self) -> None:
        """Also when the episode raises."""
        await run(spec("Returning", {"raise": "key"}), context=WorkflowContext(task_id=5))
        assert get().task_id == -1

    def test_scope_for_tests_of_workflows(self) -> None:
        """Contract 8: scopes nest, and stat_scope follows is_eval."""
        assert stat_scope() == "rollout"
        with scope(WorkflowContext(task_id=1)) as outer, scope(WorkflowContext(task_id=2, is_eval=True)):
            assert (get().task_id, stat_scope(), outer.task_id) == (2, "eval-rollout", 1)
        assert get() == WorkflowContext()


class TestCache:
    """One workflow instance serves all episodes of a process."""

    async def test_one_instance_for_name_and_arguments(self) -> None:
        """The same name and arguments are one instance, also when asked for at once; others are others."""
        cache = WorkflowCache(ALLOWED)
        first, again = await asyncio.gather(*(cache.get(spec("Frozen", scale=1.0)) for _ in range(2)))
        other = await cache.get(spec("Frozen", scale=2.0))
        assert first is again
        assert other == workflows.Frozen(2.0)

    async def test_bounded(self) -> None:
        """The least recently used instance goes."""
        cache = WorkflowCache(ALLOWED, entries=2)
        first, second = [await cache.get(spec("Frozen", scale=float(scale))) for scale in (1, 2)]
        assert await cache.get(spec("Frozen", scale=1.0)) is first
        await cache.get(spec("Frozen", scale=3.0))
        assert await cache.get(spec("Frozen", scale=1.0)) is first
        assert await cache.get(spec("Frozen", scale=2.0)) is not second
