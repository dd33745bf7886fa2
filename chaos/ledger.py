"""Whether the run's own books agree with how its groups ended: the drop ledger and the dead letters. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from forebay.store.ledger_records import Drop

__all__ = ["ledger_faults"]

_REASONS = {"no_usable_slot", "stale"}
"""Why a group of this run may not arrive. Any other reason says that something was lost or damaged on the way."""
_SHOWN = 5


def ledger_faults(
    outcomes: Mapping[int, str], drops: Sequence[Drop], counters: Mapping[str, int], is_doomed: Callable[[str], bool]
) -> list[str]:
    """What is wrong, in words.

    Args:
        outcomes: how each task id has ended.
        drops: the whole drop ledger; the run has fewer groups than it keeps.
        counters: of the run.
        is_doomed: whether the prompt of this name is one that the workflow rejects.
    """
    entries = Counter((drop.task_id, drop.outcome) for drop in drops)
    ended = Counter((task, outcome) for task, outcome in outcomes.items() if outcome in ("rejected", "evicted"))
    faults = [
        f"drop ledger: group {task} {outcome} has {entries[task, outcome]} entries, not {ended[task, outcome]}"
        for task, outcome in sorted(entries.keys() | ended.keys())
        if entries[task, outcome] != ended[task, outcome]
    ][:_SHOWN]
    for outcome in ("rejected", "evicted"):
        listed = sum(count for (_, how), count in entries.items() if how == outcome)
        if listed != counters.get(outcome, 0):
            faults.append(f"drop ledger: {listed} entries {outcome}, counted {counters.get(outcome, 0)}")
    faults += [
        f"group {drop.task_id} was {drop.outcome} at {drop.place} for {drop.reason}: {drop.detail}"
        for drop in drops
        if drop.reason not in _REASONS
    ][:_SHOWN]
    faults += [
        f"group {drop.task_id} was rejected, and its prompt {drop.prompt} is not one to be: {drop.detail}"
        for drop in drops
        if drop.outcome == "rejected" and drop.reason in _REASONS and not is_doomed(drop.prompt)
    ][:_SHOWN]
    letters, failed = counters.get("dead_letters", 0), counters.get("slots:failed", 0)
    if letters != failed:
        faults.append(f"{letters} dead letters, {failed} slots that failed for good")
    return faults
