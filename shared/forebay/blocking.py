"""The same client for plain, blocking code: most trainers are.

One thread runs an event loop; every call is handed to it. An interrupt (Ctrl-C) cancels the call that waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import fields
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from forebay.batches import AsyncBatchStream, BatchData, CollectedRollouts, Rollouts
from forebay.client import AsyncClient
from forebay.errors import QueueFullError
from forebay.options import GroupOptions
from forebay.reconciling import Reconciliation
from forebay.settings import EngineSettings, RunSettings, Settings
from forebay.stalls import Diagnosis
from forebay.store.ledger_records import DeadGroup, Drop, Redriven, SetAside
from forebay.store.records import RunStatus
from forebay.weights import UpdatePhase, WeightUpdateResult
from forebay.workflow import WorkflowLike

__all__ = ["Batch", "BatchStream", "Client"]

T = TypeVar("T")


class _LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="forebay-client", daemon=True)
        self._thread.start()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except (KeyboardInterrupt, CancelledError):
            future.cancel()
            raise

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)
            self._loop.close()


class Batch(BatchData):
    """A batch of a :class:`BatchStream`."""

    _stream: BatchStream

    def ack(self) -> bool:
        """This rank has trained on the batch, which goes when all have. False if that was so already."""
        return self._stream.ack(self)


class BatchStream:
    """Reads the batches of a run; see :class:`forebay.AsyncBatchStream` for what it raises."""

    def __init__(self, loop: _LoopThread, stream: AsyncBatchStream) -> None:
        self._loop = loop
        self._stream = stream

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to release: what was not acknowledged stays pending and comes again."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self.next()
        if batch is None:
            raise StopIteration
        return batch

    def next(self) -> Batch | None:
        """The next batch; None when the data has ended and everything was handed over."""
        found = self._loop.run(self._stream.next())
        if found is None:
            return None
        return self.own(found)

    def own(self, found: BatchData) -> Batch:
        """`found` as a batch of this stream."""
        batch = Batch(**{name.name: getattr(found, name.name) for name in fields(BatchData)})
        batch._stream = self
        return batch

    def ack(self, batch: BatchData) -> bool:
        """This rank has trained on `batch`, which goes when all have. False if that was so already."""
        return self._loop.run(self._stream.ack(batch))


class Client:
    """Submits prompt groups, reads batches, moves the version; see :class:`forebay.AsyncClient` for each call."""

    def __init__(self, loop: _LoopThread, client: AsyncClient) -> None:
        self._loop = loop
        self._client = client

    @classmethod
    def connect(
        cls, settings: Settings | None = None, *, wait_s: float = 30.0, engine: EngineSettings | None = None
    ) -> Self:
        """Join the run that `settings` (default: the environment) name, waiting up to `wait_s` for its collector."""
        loop = _LoopThread()
        try:
            return cls(loop, loop.run(AsyncClient.connect(settings, wait_s=wait_s, engine=engine)))
        except BaseException:
            loop.stop()
            raise

    @property
    def settings(self) -> Settings:
        """Which run this is, and where its Redis is."""
        return self._client.settings

    @property
    def run_settings(self) -> RunSettings:
        """The rules that the run's collector has published."""
        return self._client.run_settings

    def close(self) -> None:
        """Close the connections. Nothing that was submitted is touched."""
        self._loop.run(self._client.close())
        self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(
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
        """Enqueue one prompt group and return its task id, without waiting for it to start."""
        return self._loop.run(
            self._client.submit(
                data, workflow, workflow_kwargs, is_eval=is_eval, batched=batched, idempotency_key=idempotency_key,
                **options,
            )
        )  # fmt: skip

    def wait_for_task(self, task_id: int, *, timeout_s: float | None = None) -> CollectedRollouts:
        """The group `task_id`, once it has ended, whichever way."""
        return self._loop.run(self._client.wait_for_task(task_id, timeout_s=timeout_s))

    def rollout_batch(
        self,
        data: Sequence[dict[str, Any]],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        *,
        is_eval: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[GroupOptions],
    ) -> CollectedRollouts:
        """Submit a group for each prompt in `data`, and wait for all: those accepted, in the order of `data`."""
        return self._loop.run(
            self._client.rollout_batch(
                data, workflow, workflow_kwargs, is_eval=is_eval, timeout_s=timeout_s, **options
            )
        )  # fmt: skip

    def evaluate(
        self,
        data: Sequence[dict[str, Any]],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GroupOptions],
    ) -> CollectedRollouts:
        """As :meth:`rollout_batch`, for evaluation."""
        return self._loop.run(
            self._client.evaluate(data, workflow, workflow_kwargs, timeout_s=timeout_s, **options)
        )  # fmt: skip

    def wait(self, count: int, *, consumer: str = "trainer", timeout_s: float | None = None) -> Rollouts | None:
        """The next `count` accepted groups, however they are batched; fewer at the end of the data, None after it.

        ``metrics`` say what is in these groups, and nothing of others.
        """
        return self._loop.run(self._client.wait(count, consumer=consumer, timeout_s=timeout_s))

    def prepare_batch(
        self,
        dataloader: Iterable[Any],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        *,
        dynamic_bs: bool = False,
        consumer: str = "trainer",
        timeout_s: float | None = None,
        **options: Unpack[GroupOptions],
    ) -> Batch:
        """The next batch, with the queue kept full from `dataloader`; the one given before is acknowledged."""
        found = self._loop.run(
            self._client.prepare_batch(
                dataloader, workflow, workflow_kwargs, dynamic_bs=dynamic_bs, consumer=consumer, timeout_s=timeout_s,
                **options,
            )
        )  # fmt: skip
        return BatchStream(self._loop, found.stream).own(found)

    def end_of_data(self) -> None:
        """Say that nothing more will be submitted: the last batch may be partial, and readers come to an end."""
        self._loop.run(self._client.end_of_data())

    def batches(
        self,
        consumer: str = "trainer",
        *,
        rank: int = 0,
        world_size: int = 1,
        follows: bool = False,
        resume_after: int | None = None,
        timeout_s: float | None = None,
    ) -> BatchStream:
        """The run's batches, or one rank's shares of them, from where `consumer` stands."""
        return BatchStream(
            self._loop,
            self._client.batches(
                consumer, rank=rank, world_size=world_size, follows=follows, resume_after=resume_after,
                timeout_s=timeout_s,
            ),
        )  # fmt: skip

    def set_version(self, version: int) -> None:
        """Tell the run that the policy is at `version`. Raises VersionError if that would go backwards."""
        self._loop.run(self._client.set_version(version))

    def recover(self, version: int) -> None:
        """A trainer begins again from a checkpoint of `version`, which may be older than the run's."""
        self._loop.run(self._client.recover(version))

    def reconcile(
        self,
        *,
        version: int,
        last_batch: int = 0,
        trained: Iterable[int | str] | None = None,
        submitted: Iterable[str] | Mapping[str, int] = (),
        resubmit: Callable[[str], int] | None = None,
        consumer: str = "trainer",
    ) -> Reconciliation:
        """Bring Redis in line with the trainer's checkpoint; `resubmit` is called in this thread."""
        found = self._loop.run(
            self._client.reconcile(
                version=version, last_batch=last_batch, trained=trained, submitted=submitted, consumer=consumer
            )
        )
        reissued: dict[str, int] = {}
        if resubmit is not None:
            with contextlib.suppress(QueueFullError):
                for key in found.missing:
                    reissued[key] = resubmit(key)
        return found.with_reissued(reissued)

    def version(self) -> int:
        """The policy version in force."""
        return self._loop.run(self._client.version())

    def update_weights_from_disk(
        self, path: str | Path, version: int, *, on_progress: Callable[[str, UpdatePhase], None] | None = None
    ) -> WeightUpdateResult:
        """Load the weights in folder `path`, which every server must see, on all servers; then set the version."""
        return self._loop.run(self._client.update_weights_from_disk(path, version, on_progress=on_progress))

    def add_servers(self, urls: Iterable[str]) -> None:
        """Add inference servers to the run's registry."""
        self._loop.run(self._client.add_servers(list(urls)))

    def resume(self) -> bool:
        """Let a run that has stopped itself go on, with its failure budgets anew: whether it had stopped."""
        return self._loop.run(self._client.resume())

    def status(self) -> RunStatus:
        """Where the groups of the run are, at one instant."""
        return self._loop.run(self._client.status())

    def explain(self) -> Diagnosis:
        """Why the next batch does not come."""
        return self._loop.run(self._client.explain())

    def drops(self, *, since: float = 0.0, limit: int | None = 1000) -> list[Drop]:
        """The last `limit` groups that did not reach a trainer since Unix time `since`, the newest first, and why."""
        return self._loop.run(self._client.drops(since=since, limit=limit))

    def dead_letters(self, *, kind: str | None = None) -> list[DeadGroup]:
        """The groups some slots of which failed for good, the oldest first; with `kind`, those with such a slot."""
        return self._loop.run(self._client.dead_letters(kind=kind))

    def dead_letter(self, task_id: int) -> DeadGroup | None:
        """Those of one group; None where there are none, or they are no longer kept."""
        return self._loop.run(self._client.dead_letter(task_id))

    def redrive(self, task_id: int, *, again: bool = False) -> Redriven:
        """Submit the prompt of a group with dead letters once more, as a new group; once, unless `again`."""
        return self._loop.run(self._client.redrive(task_id, again=again))

    def poison(self) -> list[SetAside]:
        """What was set aside because it could not be read, the newest first."""
        return self._loop.run(self._client.poison())
