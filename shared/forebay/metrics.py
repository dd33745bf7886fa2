"""What is told of groups and batches: pure functions of their summaries (contract, section 12).

``docs/metrics.md`` has the meaning and the unit of each name; ``tests/conformance/test_12_metrics.py`` holds the two
against each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from forebay.outcomes import RejectReason
from forebay.wire.envelopes import GroupSummary

__all__ = ["GroupTally", "batch_metrics", "loss_weight", "mean_reward", "scope_metrics", "scope_of", "staleness_of"]

_AFTER_ALL_FILTERS = frozenset({None, RejectReason.FILTERED, RejectReason.ACCEPT_ERROR})
"""A group that ends so came as far as ``should_accept_fn``, or has none."""


def scope_of(*, is_eval: bool) -> str:
    """The prefix of metrics, and the folder of dumps: ``rollout`` or ``eval-rollout``."""
    return "eval-rollout" if is_eval else "rollout"


def staleness_of(group: GroupSummary, version: int) -> int:
    """By how many versions its oldest trained token is older than `version`; 0 where it has no versions."""
    return max(0, version - group.head) if group.head >= 0 else 0


@dataclass(slots=True)
class GroupTally:
    """Sums over groups that were decided, in one scope."""

    groups: int = 0
    target_slots: int = 0
    usable_slots: int = 0
    trainable_slots: int = 0
    fully_masked: int = 0
    singletons: int = 0
    usable_yield: float = 0.0
    trainable_yield: float = 0.0
    rejected: Counter[str] = field(default_factory=Counter)

    def add(self, group: GroupSummary, reason: RejectReason | None) -> None:
        """Count a group that was decided: accepted where `reason` is None."""
        self.count(group.group_size, len(group.rollouts), reason)

    def count(self, group_size: int, usable: int, reason: str | None, *, times: int = 1) -> None:
        """Count a group of which this is known: slots asked for, usable ones, and the reason if it was rejected.

        `times`: so many groups of which the same is known.
        """
        trainable = usable if reason in _AFTER_ALL_FILTERS else 0
        self.groups += times
        self.target_slots += times * group_size
        self.usable_slots += times * usable
        self.trainable_slots += times * trainable
        self.fully_masked += times * (usable == 0)
        self.singletons += times * (usable == 1)
        self.usable_yield += times * usable / max(1, group_size)  # 0: a collector of an older release did not say
        self.trainable_yield += times * trainable / max(1, group_size)
        if reason is not None:
            self.rejected[str(reason)] += times

    def merge(self, other: GroupTally) -> None:
        """Count what `other` has counted."""
        self.groups += other.groups
        self.target_slots += other.target_slots
        self.usable_slots += other.usable_slots
        self.trainable_slots += other.trainable_slots
        self.fully_masked += other.fully_masked
        self.singletons += other.singletons
        self.usable_yield += other.usable_yield
        self.trainable_yield += other.trainable_yield
        self.rejected.update(other.rejected)

    def metrics(self, scope: str) -> dict[str, float]:
        """Counts, and means over the groups; no means where there are none."""
        refused = sum(self.rejected.values())
        out: dict[str, float] = {"accepted": self.groups - refused, "rejected": refused}
        out.update({f"rejected/{reason}": count for reason, count in self.rejected.items()})
        if self.groups:
            sums = {
                "target_slot_count": self.target_slots,
                "usable_slot_count": self.usable_slots,
                "trainable_slot_count": self.trainable_slots,
                "fully_masked_group": self.fully_masked,
                "singleton_slot_group": self.singletons,
                "pre_filter_usable_slot_yield": self.usable_yield,
                "pre_filter_trainable_slot_yield": self.trainable_yield,
            }
            out.update({name: total / self.groups for name, total in sums.items()})
        return _scoped(out, scope)


def batch_metrics(groups: Sequence[GroupSummary], scope: str, version: int | None = None) -> dict[str, float]:
    """What accepted groups hold. With the `version` at which they will be trained on, their staleness too."""
    rows = [row for group in groups for rollout in group.rollouts for row in rollout.rows]
    if not rows:
        return {}
    out: dict[str, float] = {
        "usable_group_size": _mean([len(group.rollouts) for group in groups]),
        "tokens": sum(row.seqlen for row in rows),
        "trained_tokens": sum(row.trained for row in rows),
        "num_turns": _mean([row.turns for row in rows]),
        "group_seconds/avg": _mean([group.seconds for group in groups]),
        "group_seconds/max": max(group.seconds for group in groups),
    }
    if (reward := mean_reward(groups)) is not None:
        out["reward"] = reward
    if ends := [row.truncated for row in rows if row.truncated is not None]:
        out["truncated"] = _mean(ends)
    out |= _loss_weights(groups)
    out |= _phases(groups)
    if version is not None:
        out |= _staleness(groups, version)
    return _scoped(out, scope)


def scope_metrics(
    groups: Sequence[GroupSummary],
    scope: str,
    *,
    rejected: Iterable[tuple[int, int, str]] = (),
    evicted: Iterable[tuple[int, int]] = (),
) -> dict[str, float]:
    """All metrics of groups that stand for themselves, such as those of an evaluation: no batch, so no staleness.

    Args:
        groups: those that were accepted and are here.
        scope: ``rollout`` or ``eval-rollout``.
        rejected: of each rejected one the slots asked for, the usable ones, and the reason.
        evicted: of each that was accepted, and evicted since, the slots asked for and the usable ones. As in the
            metrics of a batch they count as accepted too.
    """
    tally = GroupTally()
    for group in groups:
        tally.add(group, None)
    for size, usable, reason in rejected:
        tally.count(size, usable, reason)
    gone = 0
    for size, usable in evicted:
        tally.count(size, usable, None)
        gone += 1
    return {**tally.metrics(scope), f"{scope}/evicted": float(gone), **batch_metrics(groups, scope)}


def loss_weight(group: GroupSummary) -> int:
    """The trained tokens of a group: what it weighs in a loss that is a mean over tokens."""
    return sum(row.trained for rollout in group.rollouts for row in rollout.rows)


def mean_reward(groups: Sequence[GroupSummary]) -> float | None:
    """The mean of the rows' rewards as the workflow gave them; None where no row has one."""
    rows = [row for group in groups for rollout in group.rollouts for row in rollout.rows]
    raw = [row.reward if row.original_reward is None else row.original_reward for row in rows]
    known = [value for value in raw if value is not None]
    return _mean(known) if known else None


def _loss_weights(groups: Sequence[GroupSummary]) -> dict[str, float]:
    by_size: dict[int, list[int]] = {}
    for group in groups:
        by_size.setdefault(len(group.rollouts), []).append(loss_weight(group))
    every = [weight for weights in by_size.values() for weight in weights]
    return {
        "group_loss_weight/avg": _mean(every),
        "group_loss_weight/min": min(every),
        "group_loss_weight/max": max(every),
        **{f"group_loss_weight_size_{size}": _mean(weights) for size, weights in sorted(by_size.items())},
    }


def _phases(groups: Sequence[GroupSummary]) -> dict[str, float]:
    by_name: dict[str, list[float]] = {}
    for group in groups:
        for name, seconds in group.phases.items():
            by_name.setdefault(name, []).append(seconds)
    return {f"seconds/{name}": _mean(values) for name, values in by_name.items()}


def _staleness(groups: Sequence[GroupSummary], version: int) -> dict[str, float]:
    ages = [staleness_of(group, version) for group in groups]
    counts = Counter(ages)
    return {
        "staleness/avg": _mean(ages),
        "staleness/max": max(ages),
        **{f"staleness_{age}": count for age, count in sorted(counts.items())},
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _scoped(values: Mapping[str, float], scope: str) -> dict[str, float]:
    return {f"{scope}/{name}": float(value) for name, value in values.items()}
