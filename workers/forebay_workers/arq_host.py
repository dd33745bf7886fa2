"""arq, and nothing else of the project knows it.

arq keeps the loop, the bound on running jobs, the health key and the job records, which its tools can read. What is not
its default, and why: jobs are claimed in bulk, with their leases, by a script of ours (``store/lua/claim.lua``). A
claimed id leaves the queue, so no worker steps over what the others run, and reading as many ids as it has room for
(``queue_read_limit``) suffices a fleet of any size; arq's in-progress keys, which outlive a killed worker by the job's
time-out, play no part. Jobs are msgpack, nothing that runs code when it is read. Results are not kept, they travel on
their own stream. Time-outs, attempts and retries are ours, so arq's never strike. A lost connection ends neither the
loop nor the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from arq.connections import ArqRedis
from arq.utils import poll
from arq.worker import Worker, func
from redis.exceptions import RedisError

from forebay.errors import ConnectionLostError, RedisRefusedError
from forebay.store.connection import ANSWER_TIMEOUT_S, connection_pool
from forebay.store.refusals import refusal
from forebay.wire.values import pack, unpack

__all__ = ["SlotHost"]

log = structlog.get_logger(__name__)

_FUNCTION = "run_slot"
_NEVER_S = 10 * 86400
_NEVER_TRIES = 10**9
_AWAY_S = 0.5


class _BulkWorker(Worker):
    """An arq worker that claims many jobs in one round trip."""

    def __init__(
        self,
        *args: Any,
        claim: Callable[[int], Awaitable[list[str]]],
        idle: Callable[[], Awaitable[None]],
        url: str,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._url = url
        self._claim = claim
        self._idle = idle
        self._away = False
        self.claiming = asyncio.Lock()
        """Held from the question for jobs until each that was leased has its task."""

    async def main(self) -> None:
        # arq's begins with INFO and DBSIZE, for a log line: a worker's user of Redis needs to be allowed neither.
        self.ctx["redis"] = self.pool
        async for _ in poll(self.poll_delay_s):
            await self._poll_iteration()

    async def _poll_iteration(self) -> None:
        # arq calls this every poll_delay and ends when it raises; a Redis that is away must not end the worker.
        try:
            free = self.max_jobs - self.job_counter
            if self.allow_pick_jobs and free > 0:
                async with self.claiming:
                    job_ids = await self._claim(free)
                    for job_id in job_ids:
                        await self._start(job_id)
                if not job_ids:
                    await self._idle()
            self._collect()
            await self.heart_beat()
            self._away = False
        except RedisRefusedError:  # an OSError that does not pass
            raise
        except (ConnectionLostError, RedisError, OSError) as error:
            if (refused := refusal(error, self._url)) is not None:
                raise refused from None
            if not self._away:  # once: the store says how long it lasts
                log.warning("claiming.waits", reason=str(error))
            self._away = True
            # What the pool has may lead to a server that is no longer the primary.
            pool: Any = self.pool.connection_pool  # whose type redis-py does not tell
            await pool.disconnect(inuse_connections=False)
            await asyncio.sleep(_AWAY_S)

    async def _start(self, job_id: str) -> None:
        await self.sem.acquire()
        self.job_counter += 1
        self.job_tasks[job_id] = task = self.loop.create_task(self._run(job_id))
        task.add_done_callback(lambda _: self._release_sem_dec_counter_on_complete())
        self.tasks[job_id] = task

    async def _run(self, job_id: str) -> None:
        # In place of arq's run_job, which reads the job's record and writes its end in transactions of its own: half
        # of a worker's CPU. The claim has read all that matters, and publish, release and reap remove the record.
        try:
            await self.functions[_FUNCTION].coroutine({**self.ctx, "job_id": job_id})
            self.jobs_complete += 1
        except asyncio.CancelledError:
            self.jobs_retried += 1
            raise
        finally:
            del self.job_tasks[job_id]

    def _collect(self) -> None:
        for job_id, task in list(self.tasks.items()):
            if task.done():
                del self.tasks[job_id]
                if not task.cancelled() and (error := task.exception()) is not None:
                    self.jobs_failed += 1
                    # A fault of ours: no slot's failure comes this way. Its lease will end and the slot run again.
                    log.error("job.failed", job=job_id, exc_info=error)


class SlotHost:
    """Hosts slot jobs in this process."""

    def __init__(
        self,
        url: str,
        queue: str,
        claim: Callable[[int], Awaitable[list[str]]],
        run_slot: Callable[[str], Awaitable[None]],
        *,
        idle: Callable[[], Awaitable[None]],
        max_slots: int,
        poll_delay_s: float,
    ) -> None:
        """Make the host.

        Args:
            url: Redis.
            queue: arq's queue.
            claim: gives up to so many job ids that this process may run.
            run_slot: runs one.
            idle: awaited after a claim that gave nothing; it ends when there may be something, or after a while.
            max_slots: jobs at once.
            poll_delay_s: between looks, besides `idle`.
        """
        logging.getLogger("arq").setLevel(logging.WARNING)  # two lines for each job otherwise

        async def job(ctx: dict[str, Any]) -> None:
            await run_slot(ctx["job_id"])

        # arq's own client of the same server, made with our time-outs; its repr and its settings are never logged.
        self._redis = ArqRedis(
            connection_pool(url, socket_timeout_s=ANSWER_TIMEOUT_S),
            job_serializer=pack,
            job_deserializer=unpack,
            default_queue_name=queue,
        )
        self._worker = _BulkWorker(
            functions=[func(job, name=_FUNCTION, timeout=_NEVER_S, keep_result=0, max_tries=_NEVER_TRIES)],
            redis_pool=self._redis,
            queue_name=queue,
            handle_signals=False,
            max_jobs=max_slots,
            queue_read_limit=max_slots,
            job_timeout=_NEVER_S,
            keep_result=0,
            max_tries=_NEVER_TRIES,
            poll_delay=poll_delay_s,
            job_serializer=pack,
            job_deserializer=unpack,
            log_results=False,
            claim=claim,
            idle=idle,
            url=url,
        )

    @property
    def busy(self) -> int:
        """Jobs that run here now."""
        return int(self._worker.job_counter)

    async def run(self) -> None:
        """Claim and run jobs until cancelled."""
        await self._worker.async_run()

    async def stop_claiming(self, timeout_s: float) -> None:
        """Start nothing more.

        What a claim that is on its way has leased is started first, so that it can be handed back; an answer that has
        not come within `timeout_s` is not waited for, and its leases run out.
        """
        self._worker.allow_pick_jobs = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._worker.claiming:
                pass

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no job runs here: whether that came about within `timeout_s`."""
        running = [task for task in self._worker.tasks.values() if not task.done()]
        if not running:
            return True
        _, pending = await asyncio.wait(running, timeout=timeout_s)
        return not pending

    async def close(self) -> None:
        """Close arq's connections."""
        await self._redis.aclose(close_connection_pool=True)
