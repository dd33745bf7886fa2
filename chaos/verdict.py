"""The judgement, from the books alone: pure, so that ``tests/chaos/test_verdict.py`` can show it every kind of fault.

- **lost**: a prompt that was to be submitted and neither reached the trainer nor ended rejected or evicted; a group
  that the pipeline counts as delivered and the trainer never got, or of which no end is known; a batch that was handed
  over and never trained on.
- **duplicated**: a group or a prompt in two batches; a batch handed over twice with different content, trained on
  twice, or handed over after its ack was answered; a key with two task ids.
- **stale**: a group trained on at a version that is more than ``max_staleness`` above the oldest weights that it was
  sampled with, by the label or by the tokens themselves, whichever is older.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Verdict", "judge"]


@dataclass(slots=True)
class Verdict:
    """What came out. Each fault is a line of text."""

    groups: int = 0
    """Prompts that were submitted."""
    delivered: int = 0
    """Groups that the trainer got."""
    batches: int = 0
    redelivered: int = 0
    """Hand-overs of a batch that had been handed over before."""
    rejected: int = 0
    evicted: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    """Staleness -> delivered groups."""
    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Content that is not what the servers sent."""


def judge(
    producer: Iterable[Mapping[str, Any]],
    trainer: Iterable[Mapping[str, Any]],
    outcomes: Mapping[int, str],
    max_staleness: int,
) -> Verdict:
    """Judge a run that has been drained.

    Args:
        producer: records of its book, in order.
        trainer: the same of the trainer.
        outcomes: how each task id that the run ever gave out has ended, as the pipeline says.
        max_staleness: the bound, in versions.
    """
    verdict = Verdict()
    tasks_of = _submissions(producer, verdict)
    delivered = _hand_overs(trainer, max_staleness, verdict)
    numbers = {number for groups in delivered.values() for _, number, *_ in groups}
    tasks = {task for groups in delivered.values() for task, *_ in groups}
    ended = {"rejected", "evicted"}
    for number, ids in tasks_of.items():
        if number not in numbers and not any(outcomes.get(task) in ended for task in ids):
            known = ", ".join(f"{task} {outcomes.get(task, 'unknown')}" for task in sorted(ids)) or "never submitted"
            verdict.lost.append(f"prompt {number} has no end (groups: {known})")
    for task, outcome in outcomes.items():
        if outcome == "delivered" and task not in tasks:
            verdict.lost.append(f"group {task} counts as delivered, and the trainer never got it")
        elif outcome not in {"delivered", *ended}:
            verdict.lost.append(f"group {task} has not ended: {outcome}")
    for task in tasks:
        if outcomes.get(task) != "delivered":
            verdict.duplicated.append(f"group {task} was delivered, and counts as {outcomes.get(task, 'unknown')}")
    verdict.groups, verdict.delivered, verdict.batches = len(tasks_of), len(tasks), len(delivered)
    counts = list(outcomes.values())
    verdict.rejected, verdict.evicted = counts.count("rejected"), counts.count("evicted")
    return verdict


def _submissions(records: Iterable[Mapping[str, Any]], verdict: Verdict) -> dict[int, set[int]]:
    """Prompt -> its task ids, more than one of which is a fault."""
    tasks_of: dict[int, set[int]] = {}
    for record in records:
        if record["kind"] == "submit":
            tasks_of.setdefault(record["number"], set())
        elif record["kind"] == "submitted":
            tasks_of.setdefault(record["number"], set()).add(record["task"])
    verdict.duplicated += [
        f"the key of prompt {number} has groups {sorted(ids)}" for number, ids in tasks_of.items() if len(ids) > 1
    ]
    return tasks_of


def _hand_overs(
    records: Iterable[Mapping[str, Any]], max_staleness: int, verdict: Verdict
) -> dict[int, list[tuple[int, int, int, int]]]:
    """Batch -> its groups, as the trainer got them first."""
    first: dict[int, list[tuple[int, int, int, int]]] = {}
    digests: dict[int, str] = {}
    batches_of_task: dict[int, set[int]] = defaultdict(set)
    batches_of_number: dict[int, set[int]] = defaultdict(set)
    trained: set[int] = set()
    acked: set[int] = set()
    for record in records:
        batch = record.get("batch", 0)
        if record["kind"] == "acked":
            acked.add(batch)
        elif record["kind"] == "handed":
            if batch in acked:
                verdict.duplicated.append(f"batch {batch} came again after its ack")
            verdict.wrong += [f"batch {batch}: {fault}" for fault in record["faults"]]
            for task, number, *_ in record["groups"]:
                batches_of_task[task].add(batch)
                batches_of_number[number].add(batch)
            if batch not in first:
                first[batch] = [tuple(group) for group in record["groups"]]
                digests[batch] = record["digest"]
                continue
            verdict.redelivered += 1
            if digests[batch] != record["digest"]:
                verdict.duplicated.append(f"batch {batch} came again with other content")
        elif record["kind"] == "step":
            if batch in trained:
                verdict.duplicated.append(f"batch {batch} was trained on twice")
            trained.add(batch)
            for task, _, head, oldest in first.get(batch, []):
                staleness = record["version"] - min(head, oldest)
                verdict.staleness[staleness] = verdict.staleness.get(staleness, 0) + 1
                if staleness > max_staleness:
                    verdict.stale.append(
                        f"group {task} of batch {batch} was trained on at version {record['version']}; its oldest "
                        f"token is of version {oldest}, labelled {head}"
                    )
    for what, batches_of in (("group", batches_of_task), ("prompt", batches_of_number)):
        verdict.duplicated += [
            f"{what} {name} is in batches {sorted(batches)}" for name, batches in batches_of.items() if len(batches) > 1
        ]
    verdict.lost += [f"batch {batch} was handed over and never trained on" for batch in set(first) - trained]
    return first
