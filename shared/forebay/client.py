"""The trainer's and the producer's side of a run (contract, section 13)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self, Unpack

from forebay.batches import AsyncBatchStream
from forebay.errors import SubmitError, VersionError, WeightUpdateError, WorkflowError
from forebay.options import GroupOptions, resolve_rules
from forebay.settings import EngineSettings, RunSettings, Settings, load
from forebay.store.store import RunStatus, Store
from forebay.weights import UpdatePhase, WeightUpdateResult, update_weights_from_disk
from forebay.wire.envelopes import GroupSpec
from forebay.wire.values import encode_plain
from forebay.workflow import WorkflowKind, WorkflowLike, name_workflow

__all__ = ["AsyncClient"]

_MAX_SPEC_BYTES = 64 * 2**20


class AsyncClient:
    """Submits prompt groups, reads batches, moves the version. :class:`forebay.Client` is the same for plain code."""

    def __init__(self, store: Store, settings: Settings, run_settings: RunSettings, engine: EngineSettings) -> None:
        self._store = store
        self.settings = settings
        self.run_settings = run_settings
        """The rules that the run's collector has published."""
        self._engine = engine

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
        idempotency_key: str | None = None,
        **options: Unpack[GroupOptions],
    ) -> int:
        """Enqueue one prompt group and return its task id, without waiting for it to start.

        `options` are those of :class:`GroupOptions`; what is left out is as the run's settings say. With an
        `idempotency_key` that was used before (within 7 days), the group of then is returned and nothing is enqueued.

        Raises:
            SubmitError: a ValueError; the group could not run, and nothing was enqueued.
            QueueFullError: ``max_queued_groups`` groups wait to start.
        """
        size, rules = resolve_rules(options, self.run_settings)
        packed = self._spec(data, workflow, workflow_kwargs).pack()
        if len(packed) > _MAX_SPEC_BYTES:
            raise SubmitError(
                f"the group is {len(packed)} bytes, above the bound of {_MAX_SPEC_BYTES}; pass paths instead"
            )
        task_id, _ = await self._store.submit(packed, rules.pack(), size, idempotency_key)
        return task_id

    def _spec(self, data: dict[str, Any], workflow: WorkflowLike, workflow_kwargs: dict[str, Any] | None) -> GroupSpec:
        if not isinstance(data, dict):
            raise SubmitError(f"data is a {type(data).__name__}; a prompt is a dict")
        named = name_workflow(workflow, workflow_kwargs, self.run_settings.import_allowlist)
        if named.kind is WorkflowKind.AGENT:
            raise WorkflowError(
                f"{named.name} is an agent: this release has no proxy for the model calls of agents; write a "
                "RolloutWorkflow, whose arun_episode calls engine.agenerate"
            )
        return GroupSpec(workflow=named.name, kwargs=named.kwargs, data=encode_plain(data))

    async def end_of_data(self) -> None:
        """Say that nothing more will be submitted: the last batch may be partial, and readers come to an end.

        A later ``submit`` opens the data again.
        """
        await self._store.end_of_data()

    def batches(self, consumer: str = "trainer", *, timeout_s: float | None = None) -> AsyncBatchStream:
        """The run's batches from where `consumer` stands; `timeout_s` bounds the wait for each (None: no bound)."""
        return AsyncBatchStream(self._store, self.run_settings, consumer, timeout_s)

    async def set_version(self, version: int) -> None:
        """Tell the run that the policy is at `version`. Raises VersionError if that would go backwards."""
        check_version(version)
        await self._store.set_version(version)

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

    async def status(self) -> RunStatus:
        """Where the groups of the run are, at one instant."""
        return await self._store.status()


def check_version(version: int) -> None:
    """Raise VersionError unless `version` is an integer from 0 that every part of the system can hold."""
    if type(version) is not int or not 0 <= version < 2**31:
        raise VersionError(f"version {version!r}: must be an integer from 0 to {2**31 - 1}")


def _absolute(path: str | Path) -> str:
    return str(Path(path).absolute())
