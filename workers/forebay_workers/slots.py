"""One slot job, from its id to its published header.

Invariants (tests in ``tests/integration/``):

- An attempt that is not wanted any more never touches a GPU (``test_late_first_attempt_still_wins_while_open``).
- Every attempt that began ends as published, handed back, or lost to its lease (``test_killed_worker_loses_nothing``).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import structlog

from forebay import workflow_context
from forebay.errors import ConnectionLostError, FrameError
from forebay.generation import InferenceEngine
from forebay.outcomes import FailureKind, SlotOutcome
from forebay.processor_cache import ProcessorCache
from forebay.settings import RunSettings
from forebay.store.records import Lease
from forebay.store.store import Store
from forebay.trace_files import TraceWriter, session_record
from forebay.tracing import Session
from forebay.wire.envelopes import GroupSpec, SlotHeader
from forebay_workers.attempts import Ended, WorkflowCache, run_attempt
from forebay_workers.format_check import FormatCheck
from forebay_workers.group_caches import GroupCaches
from forebay_workers.leases import Attempt, Leases
from forebay_workers.publication import Publisher
from forebay_workers.settings import WorkerSettings

__all__ = ["SlotRunner"]

log = structlog.get_logger(__name__)


class SlotRunner:
    """Runs slot jobs against one engine."""

    def __init__(
        self,
        store: Store,
        engine: InferenceEngine,
        leases: Leases,
        worker: str,
        run_settings: RunSettings,
        settings: WorkerSettings,
        traces: TraceWriter | None = None,
    ) -> None:
        self._store = store
        self._engine = engine
        self._leases = leases
        self._worker = worker
        self._rules = run_settings
        self._settings = settings
        self._workflows = WorkflowCache(run_settings.import_allowlist)
        self._check = FormatCheck(store) if run_settings.check_trajectory_format else None
        self._traces = traces
        self._caches = GroupCaches()
        self._claimed: dict[str, Lease] = {}
        self.publisher = Publisher(
            store,
            leases,
            rows_ttl_s=run_settings.rows_ttl_s,
            memory_wait_s=settings.memory_wait_s,
            away_s=run_settings.group_deadline_s,
        )
        self.draining = False
        """The worker is shutting down: a cancelled attempt is handed back."""
        self.sessions: dict[Attempt, Session] = {}
        """The episodes that run here, by attempt."""
        self.ended: dict[str, int] = {}
        """Attempts that ended here, by outcome."""
        self.ended_by_kind: Counter[tuple[str, str]] = Counter()
        """The same, by outcome and, of failures, kind."""

    async def claim(self, most: int) -> list[str]:
        """Lease up to `most` attempts for this worker: their job ids."""
        leases = await self._store.claim(self._worker, most, self._rules.lease_s)
        self._claimed.update({lease.job_id: lease for lease in leases})
        return [lease.job_id for lease in leases]

    async def run(self, job_id: str) -> None:
        """Run the job `job_id`, which :meth:`claim` has leased."""
        lease = self._claimed.pop(job_id, None)
        if lease is None:
            log.warning("slot.not_claimed", job=job_id)
            return
        task_id, sample_idx, attempt = lease.attempt
        with structlog.contextvars.bound_contextvars(
            run=self._store.keys.run, task_id=task_id, sample_idx=sample_idx, attempt=attempt
        ):
            self._leases.hold(lease.attempt)
            try:
                await self._hold_and_run(lease.attempt, lease)
            except ConnectionLostError as error:
                # The lease will end and the slot run again; what was computed here is lost, not the slot.
                log.warning("slot.not_published", reason=str(error))
            finally:
                self._leases.drop(lease.attempt)
                self.sessions.pop(lease.attempt, None)

    async def _hold_and_run(self, attempt: Attempt, lease: Lease) -> None:
        began = time.monotonic()
        session = self.sessions[attempt] = Session(self._store.keys.run, *attempt)
        try:
            with session.active(), self._caches.of(attempt[0]) as cache:
                ended = await self._attempt(attempt, lease, cache, session)
        except asyncio.CancelledError:
            # A shut-down hands the attempt back; one that lost its lease has nothing to hand back.
            if self._leases.holds(attempt) and not self.draining:
                # Nobody here cancelled it: the workflow did that to itself, and would do it again on any worker.
                task = asyncio.current_task()
                while task is not None and task.cancelling():
                    task.uncancel()
                reason = "the workflow cancelled its own task"
                ended = Ended(SlotOutcome.FAILED, kind=FailureKind.DATA, reason=reason)
                await self._publish(attempt, ended, began, session)
                return
            self._trace(session, "handed_back" if self._leases.holds(attempt) else "lost")
            if self._leases.holds(attempt):
                self._leases.drop(attempt)  # whoever cancels what is held lets the release be
                await asyncio.shield(self._store.release(*attempt))
                log.info("slot.handed_back")
            raise
        await self._publish(attempt, ended, began, session)

    def _trace(self, session: Session, status: str, reason: str = "") -> None:
        if self._traces is not None:
            self._traces.write(session_record(session, worker=self._worker, status=status, reason=reason))

    async def _publish(self, attempt: Attempt, ended: Ended, began: float, session: Session) -> None:
        self._trace(session, ended.outcome.value, ended.reason)
        seconds = time.monotonic() - began

        def header(ended: Ended) -> SlotHeader:
            return SlotHeader(
                task=attempt[0],
                idx=attempt[1],
                attempt=attempt[2],
                outcome=ended.outcome.value,
                kind=ended.kind.value if ended.kind else None,
                reason=ended.reason,
                traceback=ended.traceback,
                result_kind=ended.result_kind.value,
                keys=list(ended.keys),
                rows=list(ended.rows),
                reference=ended.reference,
                rows_bytes=len(ended.frame or b""),
                worker=self._worker,
                seconds=seconds,
                phases=session.phases,
            )

        verdict, ended = await self.publisher.publish(attempt, ended, header)
        self.ended_by_kind[ended.outcome.value, ended.kind.value if ended.kind else ""] += 1
        self.ended[ended.outcome.value] = self.ended.get(ended.outcome.value, 0) + 1
        if ended.outcome is SlotOutcome.FAILED:
            log.warning("slot.failed", kind=ended.kind, reason=ended.reason, verdict=verdict)
        else:
            log.debug("slot.ended", outcome=ended.outcome, verdict=verdict)

    async def _attempt(self, attempt: Attempt, lease: Lease, cache: ProcessorCache, session: Session) -> Ended:
        try:
            spec = GroupSpec.unpack(lease.spec)
        except FrameError as error:
            await self._store.note_unreadable_spec(attempt[0], str(error), lease.spec)
            return Ended(SlotOutcome.FAILED, kind=FailureKind.DATA, reason=f"unreadable group: {error}")
        session.is_eval = spec.is_eval
        context = workflow_context.WorkflowContext(
            is_eval=spec.is_eval,
            task_id=attempt[0],
            sample_idx=attempt[1],
            group_size=lease.group_size,
            attempt=attempt[2],
            run=self._store.keys.run,
            processor_cache=cache,
        )
        return await run_attempt(
            spec,
            context,
            self._engine,
            self._workflows,
            timeout_s=max(0.001, min(self._rules.episode_timeout_s, lease.deadline_s)),
            max_rows_bytes=self._rules.max_rows_bytes,
            max_inline_tokens=self._settings.max_inline_tokens,
            check=self._check,
        )
