"""The trainer's and the producer's side of a run (contract, section 13)."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

from forebay.batches import AsyncBatch, AsyncBatchStream, CollectedRollouts, Rollouts
from forebay.collecting import collect_groups
from forebay.errors import ConsumerError, QueueFullError, SubmitError, VersionError, WeightUpdateError, WorkflowError
from forebay.feeding import Feeds, GroupBuffer
from forebay.options import GroupOptions, resolve_rules
from forebay.reconciling import Reconciliation, known_of, reconcile
from forebay.settings import EngineSettings, RunSettings, Settings, load
from forebay.stalls import Diagnosis, diagnose
from forebay.store.ledger_records import DeadGroup, Drop, Redriven, SetAside
from forebay.store.records import Channel, Cursor, RunStatus
from forebay.store.store import Store
from forebay.weights import UpdatePhase, WeightUpdateResult, update_weights_from_disk
from forebay.wire.envelopes import GroupSpec
from forebay.wire.values import encode_plain, pack
from forebay.workflow import WorkflowKind, WorkflowLike, name_workflow

__all__ = ["AsyncClient"]

_MAX_SPEC_BYTES = 64 * 2**20
_FULL_S = 0.1


class AsyncClient:
    """Submits prompt groups, reads batches, moves the version. :class:`forebay.Client` is the same for plain code."""

    def __init__(self, store: Store, settings: Settings, run_settings: RunSettings, engine: EngineSettings) -> None:
        self._store = store
        self.settings = settings
        self.run_settings = run_settings
        """The rules that the run's collector has published."""
        self._engine = engine
        self._streams: dict[str, AsyncBatchStream] = {}
        self._buffers: dict[str, GroupBuffer] = {}
        self._prepared: dict[str, AsyncBatch] = {}
        self._preparing: dict[str, asyncio.Lock] = {}
        self._feeds = Feeds()

    @classmethod
    async def connect(
        cls, settings: Settings | None = None, *, wait_s: float = 30.0, engine: EngineSettings | None = None
    ) -> Self:
        """Join the run that `settings` (default: the environment) name, waiting up to `wait_s` for its collector.

        Raises:
            ConnectionLostError: Redis cannot be reached.
            RunNotReadyError: no collector has published the run's settings.
        """
        chosen = settings or load(Settings)
        store = Store.open(chosen)
        try:
            await store.ping()
            run_settings = await store.wait_for_settings(wait_s, asyncio.sleep)
        except BaseException:
            await store.close()
            raise
        return cls(store, chosen, run_settings, engine or load(EngineSettings))

    async def close(self) -> None:
        """Close the connections. Nothing that was submitted is touched."""
        await self._store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def submit(
        self,
        data: dict[str, Any],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        *,
        is_eval: bool = False,
        batched: bool = True,
        idempotency_key: str | None = None,
        **options: Unpack[GroupOptions],
    ) -> int:
        """Enqueue one prompt group and return its task id, without waiting for it to start.

        The group comes in a batch, or with ``batched=False`` to whoever asks :meth:`wait_for_task` for it. Groups with
        `is_eval` are such, and neither the capacity rule nor eviction touches them.

        `options` are those of :class:`GroupOptions`; what is left out is as the run's settings say. With an
        `idempotency_key` that was used before (within 7 days), the group of then is returned and nothing is enqueued.

        Raises:
            SubmitError: a ValueError; the group could not run, and nothing was enqueued.
            QueueFullError: ``max_queued_groups`` groups, or ``max_queued_bytes`` of prompts, wait to start.
            StoreFullError: one too; Redis has no memory left.
            RunStoppedError: the run has stopped itself.
        """
        for name, value in (("is_eval", is_eval), ("batched", batched)):
            if type(value) is not bool:
                raise SubmitError(f"{name}={value!r}: must be True or False")
        if idempotency_key is not None and (not isinstance(idempotency_key, str) or not idempotency_key):
            raise SubmitError(f"idempotency_key={idempotency_key!r}: must be a string that is not empty, or None")
        channel = Channel.EVAL if is_eval else Channel.BATCHES if batched else Channel.DIRECT
        size, rules = resolve_rules(options, self.run_settings, is_eval=is_eval)
        spec = self._spec(data, workflow, workflow_kwargs, is_eval=is_eval)
        packed = spec.pack()
        if len(packed) > _MAX_SPEC_BYTES:
            raise SubmitError(
                f"the group is {len(packed)} bytes, above the bound of {_MAX_SPEC_BYTES}; pass paths instead"
            )
        label = idempotency_key or f"#{hashlib.blake2b(pack(spec.data), digest_size=8).hexdigest()}"
        task_id, _ = await self._store.submit(packed, rules.pack(), size, idempotency_key, channel, label)
        return task_id

    def _spec(
        self, data: dict[str, Any], workflow: WorkflowLike, workflow_kwargs: dict[str, Any] | None, *, is_eval: bool
    ) -> GroupSpec:
        if not isinstance(data, dict):
            raise SubmitError(f"data is a {type(data).__name__}; a prompt is a dict")
        named = name_workflow(workflow, workflow_kwargs, self.run_settings.import_allowlist)
        if named.kind is WorkflowKind.AGENT:
            raise WorkflowError(
                f"{named.name} is an agent: this release has no proxy for the model calls of agents; write a "
                "RolloutWorkflow, whose arun_episode calls engine.agenerate"
            )
        return GroupSpec(workflow=named.name, kwargs=named.kwargs, data=encode_plain(data), is_eval=is_eval)

    async def wait_for_task(self, task_id: int, *, timeout_s: float | None = None) -> CollectedRollouts:
        """The group `task_id`, once it has ended, whichever way; `timeout_s` bounds the wait (None: no bound).

        A group that waits for a batch is taken out of the stream; one that was put into a batch is an error.

        Raises:
            GroupNotDeliveredError: it is not known, was collected before, or is in a batch.
            StallError: it has not ended in time; the text says what it waits for.
            CollectorUnavailableError: no collector lives.
            RunStoppedError: the run has stopped itself before it ended.
        """
        if type(task_id) is not int:
            raise SubmitError(f"task_id={task_id!r}: must be what submit returned")
        return await collect_groups(self._store, self.run_settings, [task_id], timeout_s)

    async def rollout_batch(
        self,
        data: Sequence[dict[str, Any]],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        *,
        is_eval: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[GroupOptions],
    ) -> CollectedRollouts:
        """Submit a group for each prompt in `data`, and wait for all: those accepted, in the order of `data`.

        Those that were rejected, or stale when they were to be handed over, are in ``ended``. Where rewards are
        normalized by statistics of the batch, the batch is what this call returns. Raises as :meth:`wait_for_task`
        does; what was submitted by then runs on, and its results are kept for ``rows_ttl_s``.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        task_ids: list[int] = []
        for item in data:
            while True:
                try:
                    task_ids.append(
                        await self.submit(item, workflow, workflow_kwargs, is_eval=is_eval, batched=False, **options)
                    )
                    break
                except QueueFullError:
                    if deadline is not None and time.monotonic() > deadline:
                        raise
                    await asyncio.sleep(_FULL_S)
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        return await collect_groups(self._store, self.run_settings, task_ids, left, is_eval=is_eval)

    async def evaluate(
        self,
        data: Sequence[dict[str, Any]],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GroupOptions],
    ) -> CollectedRollouts:
        """As :meth:`rollout_batch`, for evaluation: the episodes know it, and dumps go to ``eval-rollout``."""
        if "is_eval" in options:
            raise SubmitError("evaluate is for evaluation alone; with is_eval of your own call rollout_batch")
        return await self.rollout_batch(data, workflow, workflow_kwargs, is_eval=True, timeout_s=timeout_s, **options)

    async def wait(self, count: int, *, consumer: str = "trainer", timeout_s: float | None = None) -> Rollouts | None:
        """The next `count` accepted groups, however they are batched; fewer at the end of the data, None after it.

        A batch is acknowledged when its last group was returned and this is called again. `timeout_s` bounds the wait
        for each batch. ``metrics`` say what is in these groups (the second part in docs/metrics.md, without staleness);
        what became of others is told with whole batches alone. Raises as :meth:`AsyncBatchStream.next` does.
        """
        if type(count) is not int or count < 1:
            raise SubmitError(f"count={count!r}: must be an integer of at least 1")
        if count > self.run_settings.capacity:
            raise SubmitError(
                f"count={count} is above the capacity of {self.run_settings.capacity} groups that may be handed over "
                "before the version moves; ask for fewer, or raise max_staleness, batches_per_version or batch_size"
            )
        if consumer not in self._buffers:
            self._buffers[consumer] = GroupBuffer(self.batches(consumer))
        return await self._buffers[consumer].take(count, timeout_s)

    async def prepare_batch(
        self,
        dataloader: Iterable[Any],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        *,
        dynamic_bs: bool = False,
        consumer: str = "trainer",
        timeout_s: float | None = None,
        **options: Unpack[GroupOptions],
    ) -> AsyncBatch:
        """The next batch, with the queue kept full from `dataloader`, which is gone through again and again.

        The batch that this gave before is acknowledged, unless it was already. All arguments count for what is
        submitted from now on. A dataloader that was passed before goes on where it was.

        Args:
            dataloader: gives prompts, or lists of prompts.
            workflow: runs them.
            workflow_kwargs: its arguments.
            dynamic_bs: cut a batch once ``batch_size`` groups were accepted or rejected, with those accepted, instead
                of waiting for so many accepted ones. It is the run's: the last call, of whichever client, decides.
            consumer: the cursor on the batches.
            timeout_s: bounds the wait.
            **options: of the groups.

        Raises:
            SubmitError: a prompt, or the workflow, cannot be submitted; or the dataloader gives nothing.
            StallError, CollectorUnavailableError, RowsMissingError, RunStoppedError: as for the batch stream.
        """
        if type(dynamic_bs) is not bool:
            raise SubmitError(f"dynamic_bs={dynamic_bs!r}: must be True or False")
        feed = self._feeds.of(dataloader)

        async def submit(item: dict[str, Any]) -> int:
            return await self.submit(item, workflow, workflow_kwargs, **options)

        async def keep_full() -> None:
            await feed.keep_full(self._store, self.run_settings.batch_size, submit)

        async with self._preparing.setdefault(consumer, asyncio.Lock()):
            if (before := self._prepared.get(consumer)) is not None:
                await before.ack()
                del self._prepared[consumer]
            await self._store.set_dynamic(dynamic_bs)
            stream = self._streams.setdefault(consumer, self.batches(consumer))
            stream.timeout_s = timeout_s
            while (batch := await stream.next(meanwhile=keep_full)) is None:
                await keep_full()  # somebody else has ended the data; what is submitted here opens it again
            self._prepared[consumer] = batch
        return batch

    async def end_of_data(self) -> None:
        """Say that nothing more will be submitted: the last batch may be partial, and readers come to an end.

        A later ``submit`` opens the data again.
        """
        await self._store.end_of_data()

    def batches(
        self,
        consumer: str = "trainer",
        *,
        rank: int = 0,
        world_size: int = 1,
        follows: bool = False,
        resume_after: int | None = None,
        timeout_s: float | None = None,
    ) -> AsyncBatchStream:
        """The run's batches, or one rank's shares of them, from where `consumer` stands (docs/trainers.md).

        Args:
            consumer: names the trainer. One drives the run's version; a second name must follow.
            rank: from 0; which share of each batch this reader gets. Groups differ by at most one between ranks, and
                tokens are balanced. A batch is done with once every rank has acknowledged it.
            world_size: how many ranks there are. It may differ from before: what the ranks of then had not all
                acknowledged comes again, dealt anew.
            follows: read what the driving consumer was handed, on a cursor of one's own.
            resume_after: the id of the last batch that the checkpoint was trained on. Later ones come again, also those
                acknowledged, which ``retain_batches`` keeps. Every rank passes the same.
            timeout_s: bounds the wait for each batch; None: no bound.

        Raises:
            ConsumerError: a ValueError; the name, the rank or the world size is none.
        """
        if resume_after is not None and (type(resume_after) is not int or resume_after < 0):
            raise ConsumerError(f"resume_after={resume_after!r}: must be the id of a batch, or 0 for all")
        cursor = Cursor(consumer, rank, world_size, follows)
        return AsyncBatchStream(
            self._store, self.run_settings, cursor, resume_after=resume_after, timeout_s=timeout_s
        )  # fmt: skip

    async def set_version(self, version: int) -> None:
        """Tell the run that the policy is at `version`. Raises VersionError if that would go backwards."""
        check_version(version)
        await self._store.set_version(version)

    async def recover(self, version: int) -> None:
        """A trainer begins again from a checkpoint of `version`, which may be older than the run's.

        What it was handed and had not trained on no longer counts as ahead of the version; batches that it had not
        acknowledged, or that come again by ``batches(resume_after=...)``, count again. Call it once, before any rank
        reads.
        """
        check_version(version)
        await self._store.recover(version)

    async def reconcile(
        self,
        *,
        version: int,
        last_batch: int = 0,
        trained: Iterable[int | str] | None = None,
        submitted: Iterable[str] | Mapping[str, int] = (),
        resubmit: Callable[[str], Awaitable[int]] | None = None,
        consumer: str = "trainer",
    ) -> Reconciliation:
        """Bring Redis in line with the trainer's checkpoint, after a RolledBackError or when a trainer begins again.

        What was trained on comes never again, what neither Redis nor the checkpoint knows is submitted again, all else
        comes as it would have. On a Redis that has lost nothing it does what :meth:`recover` and ``resume_after`` do.
        May be called again, and is, if it was cut off. Nobody may read batches meanwhile; batches in hand that were not
        trained on come again.

        Args:
            version: of the checkpoint.
            last_batch: id of the last batch that it was trained on; 0: none.
            trained: task ids (``batch.task_ids``) or idempotency keys of all groups that it was trained on. None: those
                of the batches up to `last_batch`, which is all that can be said if Redis still knows those batches.
            submitted: idempotency keys of all prompts that were submitted, if possible with the task ids.
            resubmit: submits the prompt of a key again, under that key. Without it, or once the queue is full, the keys
                are in ``missing``.
            consumer: who drives the version.

        Raises:
            SubmitError: an argument is none of these.
            VersionError: `version` is none.
        """
        check_version(version)
        found = await reconcile(self._store, known_of(version, last_batch, trained, submitted), consumer)
        self._buffers.clear()
        self._streams.clear()
        self._prepared.clear()
        reissued: dict[str, int] = {}
        if resubmit is not None:
            with contextlib.suppress(QueueFullError):
                for key in found.missing:
                    reissued[key] = await resubmit(key)
        return found.with_reissued(reissued)

    async def version(self) -> int:
        """The policy version in force."""
        return await self._store.version()

    async def update_weights_from_disk(
        self, path: str | Path, version: int, *, on_progress: Callable[[str, UpdatePhase], None] | None = None
    ) -> WeightUpdateResult:
        """Load the weights in folder `path`, which every server must see, on all servers; then set the version.

        A server that fails leaves the rotation and is named in the result.

        Raises:
            WeightUpdateError: no server is registered, or none took the weights; the version has not moved.
        """
        check_version(version)
        current = await self._store.version()
        if version < current:  # before a server is touched, which would then carry the wrong label
            raise VersionError(f"version {version} is below the run's version {current}; versions only grow")
        urls = await self._store.servers()
        if not urls:
            raise WeightUpdateError(
                "no inference server is registered in this run; set FOREBAY_SERVERS for the workers or call add_servers"
            )
        result = await update_weights_from_disk(urls, _absolute(path), version, self._engine, on_progress=on_progress)
        await self._store.remove_servers(result.out)
        await self._store.set_version(version)
        return result

    async def add_servers(self, urls: Iterable[str]) -> None:
        """Add inference servers to the run's registry."""
        await self._store.add_servers(urls)

    async def resume(self) -> bool:
        """Let a run that has stopped itself go on, with its failure budgets anew: whether it had stopped."""
        return await self._store.resume()

    async def status(self) -> RunStatus:
        """Where the groups of the run are, at one instant."""
        return await self._store.status()

    async def explain(self) -> Diagnosis:
        """Why the next batch does not come: the cause, one sentence, and the group, slot, worker and server concerned.

        ``forebay why`` shows it all. Two round trips to Redis; nothing is changed.
        """
        return diagnose(await self._store.look(), self.run_settings)

    async def drops(self, *, since: float = 0.0, limit: int | None = 1000) -> list[Drop]:
        """The last `limit` groups that did not reach a trainer, the newest first, and why.

        Of those since Unix time `since`, s, by the clock of Redis. ``drop_ledger_entries`` of them are kept.
        """
        return await self._store.drops(since_ms=int(since * 1000), limit=limit)

    async def dead_letters(self, *, kind: str | None = None) -> list[DeadGroup]:
        """The groups some slots of which failed for good, the oldest first; with `kind`, those with such a slot."""
        return await self._store.dead_groups(kind)

    async def dead_letter(self, task_id: int) -> DeadGroup | None:
        """Those of one group; None where there are none, or they are no longer kept."""
        return await self._store.dead_group(task_id)

    async def redrive(self, task_id: int, *, again: bool = False) -> Redriven:
        """Submit the prompt of a group with dead letters once more, as a new group that names the old one as parent.

        It is done once for each group, and not for one that was delivered with the slots that it had; `again` does it
        all the same. Raises QueueFullError and RunStoppedError as :meth:`submit` does.
        """
        return await self._store.redrive(task_id, again=again)

    async def poison(self) -> list[SetAside]:
        """What was set aside because it could not be read, the newest first."""
        return await self._store.poison()


def check_version(version: int) -> None:
    """Raise VersionError unless `version` is an integer from 0 that every part of the system can hold."""
    if type(version) is not int or not 0 <= version < 2**31:
        raise VersionError(f"version {version!r}: must be an integer from 0 to {2**31 - 1}")


def _absolute(path: str | Path) -> str:
    return str(Path(path).absolute())
