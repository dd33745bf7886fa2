"""Bringing a run in line with its trainer's checkpoint, after Redis went back in time (``docs/operations.md``).

The checkpoint is the truth on what was trained on, the producer on what was submitted. Of each prompt that neither the
one nor Redis knows, a new group is made. All of it may be repeated: a call that was cut off is made again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import structlog

from forebay.errors import SubmitError
from forebay.store.store import Store

__all__ = ["Known", "Reconciliation", "known_of", "reconcile"]

log = structlog.get_logger(__name__)

_UNKNOWN_TASK = 0
"""What an idempotency key names whose group was trained on and whose task id nobody knows; no group has this id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """What a reconciliation found and did."""

    rolled_back: bool
    """Redis had gone back in time; the sequences have been moved above all that was ever given out."""
    version: int
    next_task: int
    """Task ids are above this one from now on."""
    next_batch: int
    """Likewise."""
    taken_back: tuple[int, ...] = ()
    """Groups that were trained on and that Redis held for pending: they are delivered."""
    returned: tuple[int, ...] = ()
    """Groups of handed-over batches that were not trained on and wait for another batch."""
    pending: int = 0
    """Prompts, of those given as submitted, that are on their way and come by themselves."""
    ended: int = 0
    """Of those that were trained on, rejected or evicted."""
    missing: tuple[str, ...] = ()
    """The keys of those that neither Redis nor the checkpoint knows: submit them again."""
    reissued: Mapping[str, int] = field(default_factory=dict)
    """Those that ``resubmit`` has submitted again, which are not missing any more: key -> new task id."""

    def with_reissued(self, reissued: Mapping[str, int]) -> Reconciliation:
        """The same, once these have been submitted again."""
        missing = tuple(key for key in self.missing if key not in reissued)
        return replace(self, missing=missing, reissued=dict(reissued))


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the trainer's checkpoint and the producer know."""

    version: int
    last_batch: int
    task_ids: frozenset[int]
    keys: frozenset[str]
    """Of prompts that were trained on."""
    whole: bool
    """Nothing was said of single groups: batches up to the last one count as trained on."""
    submitted: Mapping[str, int]
    """Idempotency key -> the task id that submit gave, 0 where that is not known."""


def known_of(
    version: int,
    last_batch: int,
    trained: Iterable[int | str] | None,
    submitted: Iterable[str] | Mapping[str, int],
) -> Known:
    """The arguments of ``reconcile``, checked; the caller checks `version`. Raises SubmitError."""
    if type(last_batch) is not int or last_batch < 0:
        raise SubmitError(f"last_batch={last_batch!r}: must be the id of a batch, or 0 for none")
    if isinstance(trained, (str, bytes)) or isinstance(submitted, (str, bytes)):
        raise SubmitError("trained and submitted must be collections of task ids or keys, not one string")
    known = [] if trained is None else list(trained)
    for item in known:
        if type(item) not in {int, str} or item in {"", 0}:
            raise SubmitError(f"trained has {item!r}: it must have task ids and idempotency keys alone")
    keys = submitted if isinstance(submitted, Mapping) else dict.fromkeys(submitted, _UNKNOWN_TASK)
    for key, task in keys.items():
        if not isinstance(key, str) or not key or type(task) is not int:
            raise SubmitError(f"submitted has {key!r}: {task!r}; it must have idempotency keys, or keys and task ids")
    return Known(
        version=version,
        last_batch=last_batch,
        task_ids=frozenset(item for item in known if isinstance(item, int)),
        keys=frozenset(item for item in known if isinstance(item, str)),
        whole=trained is None,
        submitted=keys,
    )


async def reconcile(store: Store, known: Known, consumer: str) -> Reconciliation:
    """Reconcile, but for what is to be submitted again: those are ``missing``."""
    await store.note_seen(known.last_batch, max(known.task_ids, default=0))
    async with store.unmarked() as plain:  # which takes Redis as it is
        own = await _own_tasks(plain, known)
        taken = await plain.take_back(sorted(known.task_ids | own))
        back, returned = await plain.settle_checkpoint(
            known.version, known.last_batch, consumer, whole=known.whole
        )  # fmt: skip
        store.turn()
        found = await _look(plain, known, own)
        task, batch = await plain.sequences()
    found = replace(
        found, rolled_back=back, next_task=task, next_batch=batch, taken_back=tuple(taken), returned=tuple(returned)
    )
    log.warning(
        "run.reconciled",
        run=store.keys.run,
        rolled_back=back,
        version=known.version,
        taken_back=len(taken),
        returned=len(returned),
        pending=found.pending,
        missing=len(found.missing),
    )
    return found


async def _own_tasks(store: Store, known: Known) -> set[int]:
    """The groups of the keys that were trained on; a key that Redis does not know is made known to it."""
    keys = sorted(known.keys)
    found = dict(zip(keys, await store.tasks_of(keys), strict=True))
    lost = [(key, known.submitted.get(key, _UNKNOWN_TASK)) for key, task in found.items() if task is None]
    await store.remember_keys(lost)
    return {task for task in found.values() if task}


async def _look(store: Store, known: Known, own: set[int]) -> Reconciliation:
    """Where each submitted prompt is; the keys of missing ones are free again."""
    trained = known.task_ids | own
    keys = [key for key in known.submitted if key not in known.keys]
    tasks = dict(zip(keys, await store.tasks_of(keys), strict=True))
    missing = [key for key, task in tasks.items() if task is None and known.submitted[key] not in trained]
    await store.remember_keys(
        (key, known.submitted[key]) for key, task in tasks.items() if task is None and known.submitted[key] in trained
    )
    open_ = {key: task for key, task in tasks.items() if task is not None and task not in trained}
    fates = dict(zip(open_, await store.fates(list(open_.values())), strict=True))
    dropped = await store.dropped() if "unknown" in fates.values() and not known.whole else set()
    lost = [key for key, fate in fates.items() if _is_lost(fate, open_[key], known, dropped)]
    for key in lost:
        await store.forget_key(key, open_[key])
    pending = sum(fate in {"open", "kept"} for fate in fates.values())
    gone = {*missing, *lost}
    return Reconciliation(
        rolled_back=False,
        version=known.version,
        next_task=0,
        next_batch=0,
        pending=pending,
        ended=len(known.submitted) - pending - len(gone),
        missing=tuple(key for key in keys if key in gone),
    )


def _is_lost(fate: str, task: int, known: Known, dropped: set[int]) -> bool:
    """Whether a group that the checkpoint was not trained on cannot come any more, and has not ended otherwise."""
    if fate in {"open", "kept", "ended"}:
        return False
    if not known.whole:
        return fate != "unknown" or task not in dropped  # a tombstone that has expired may be of a rejected group
    _, _, batch = fate.partition(":")
    return batch.isdigit() and int(batch) > known.last_batch
