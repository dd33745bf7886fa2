"""Our slot host and plain arq side by side, as the benchmarks of both need them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, cast

import msgpack
import redis.asyncio as redis_asyncio
from arq.connections import ArqRedis, RedisSettings, create_pool
from arq.worker import Worker, func

from forebay import RunSettings, Settings, load
from forebay.aio import stop_tasks
from forebay.store import Store
from forebay.store.pipelining import Pipeliner
from forebay_workers.settings import WorkerSettings

__all__ = ["ALIKE", "DEFAULTS", "POLL_S", "SLOTS", "ArqSide", "UnpipelinedStore", "arq_side", "idle_of", "opened_store"]

_OURS = load(WorkerSettings)
POLL_S = _OURS.poll_delay_s
SLOTS = _OURS.max_slots

_IDLE_POLL_S = _OURS.idle_poll_s
_LAST_LOOK_S = 2.0

DEFAULTS: dict[str, Any] = {}
"""arq as it comes: a look at the queue every 0.5 s, 10 jobs at once, pickle, results kept for an hour."""

ALIKE: dict[str, Any] = {
    "poll_delay": POLL_S,
    "max_jobs": SLOTS,
    "keep_result": 0,
    "job_serializer": msgpack.packb,
    "job_deserializer": msgpack.unpackb,
}
"""arq set as near to our host as its options go."""


def idle_of(store: Store) -> Callable[[], Coroutine[Any, Any, None]]:
    """What our host waits for when it has nothing to do, as in a worker."""

    async def idle() -> None:
        await store.wait_for_wake("jobs", _IDLE_POLL_S)

    return idle


class _OneByOne(Pipeliner):
    """Every request in a round trip, on a connection, of its own."""

    def __init__(self, client: redis_asyncio.Redis) -> None:
        super().__init__(client)
        self._client = client

    async def send(self, *commands: tuple[Any, ...]) -> list[Any]:
        """See :meth:`Pipeliner.send`."""
        pipe = self._client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        return await pipe.execute(raise_on_error=False)


class UnpipelinedStore(Store):
    """A store that does not gather what is asked for at the same time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pipeliner = _OneByOne(self._redis)


@asynccontextmanager
async def opened_store(
    url: str, run_name: str, rules: RunSettings, kind: type[Store] = Store
) -> AsyncIterator[tuple[Store, Settings]]:
    """A store whose run is configured, without a collector."""
    settings = load(Settings, redis_url=url, experiment_name=run_name)
    store = kind.open(settings, max_connections=SLOTS + 32)
    try:
        epoch = await store.lead("benchmark", 3600)
        await store.configure(epoch, rules)
        yield store, settings
    finally:
        await store.close()


class ArqSide:
    """A plain arq worker and a client that enqueues for it."""

    def __init__(self, pool: ArqRedis, worker: Worker) -> None:
        self.pool = pool
        self.worker = worker

    async def enqueue(self, *args: Any) -> None:
        """Enqueue one job."""
        await self.pool.enqueue_job("job", *args)

    async def wait_idle(self) -> None:
        """Wait until all that runs has ended and is recorded."""
        if running := [task for task in self.worker.tasks.values() if not task.done()]:
            await asyncio.wait(running)


@asynccontextmanager
async def arq_side(
    url: str, job: Callable[..., Coroutine[Any, Any, None]], options: dict[str, Any]
) -> AsyncIterator[ArqSide]:
    """A running arq worker whose one function is `job`; `options` are those of ``arq.worker.Worker``."""
    serializers = {name: value for name, value in options.items() if name.startswith("job_")}
    pool = await create_pool(RedisSettings.from_dsn(url), **serializers)
    # log_results is off as in our host: a line a job is no work of a queue.
    worker = Worker(
        [func(cast("Any", job), name="job")], redis_pool=pool, handle_signals=False, log_results=False, **options
    )
    running = asyncio.create_task(worker.async_run())
    try:
        yield ArqSide(pool, worker)
    finally:
        worker.burst = True  # it ends by itself once the queue is empty; cancelled, it leaves pipelines open
        await asyncio.wait([running], timeout=_LAST_LOOK_S)
        await stop_tasks([running])
        connections: Any = pool.connection_pool
        await connections.disconnect()
