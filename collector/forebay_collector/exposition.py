"""The collector's metrics for Prometheus (contract, section 12); ``docs/metrics.md`` has the meaning of each.

State and totals are read from Redis at each scrape, so they survive collectors; histograms are of this process. Labels
have closed sets of values: the phases, which users name, are bounded here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence

import structlog
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from forebay.errors import ConnectionLostError
from forebay.loop_lag import LAG_BUCKETS_S
from forebay.metrics import loss_weight, mean_reward, scope_of, staleness_of
from forebay.outcomes import RejectReason
from forebay.store.look_records import RunLook
from forebay.store.records import RunStatus
from forebay.store.store import Store
from forebay.wire.envelopes import GroupSummary
from forebay_collector.dump import Dumper

__all__ = ["Exposition"]

log = structlog.get_logger(__name__)

_STATUS_TIMEOUT_S = 2.0
"""A scrape does not wait for a Redis that is away; it says so."""
_MAX_PHASES = 32
_OTHER = "other"
_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_AGES = (0, 1, 2, 3, 4, 6, 8, 12, 16)
_REWARDS = (-10, -5, -2, -1, -0.5, 0, 0.25, 0.5, 0.75, 1, 2, 5, 10)
_TOKENS = tuple(4**power for power in range(3, 13))
_GROUP_EVENTS = frozenset({"submitted", "requeued", "started", "accepted", "rejected", "evicted", "delivered"})
_FAMILIES = {  # counters named `first:value`: the family and its label
    "rejected": ("forebay_groups_rejected", "reason", "Groups rejected, by reason."),
    "slots": ("forebay_slots", "outcome", "Slots ended, by outcome."),
    "failures": ("forebay_attempt_failures", "kind", "Attempts that failed, by kind."),
    "poison": ("forebay_set_aside", "where", "What was set aside as unreadable, by where it stood."),
    "retries": ("forebay_attempt_retries", "kind", "Attempts queued again after a failure, by its kind."),
}


class Exposition:
    """What one collector process exposes; an :class:`~forebay_collector.metrics.Observer`."""

    def __init__(self, store: Store, dumper: Dumper) -> None:
        self._store = store
        self._registry = CollectorRegistry()
        self._run = _RunState(dumper)
        self._registry.register(self._run)
        ProcessCollector(registry=self._registry)
        self._phases_known: set[str] = set()
        self._group_seconds = self._histogram(
            "forebay_group_seconds", "Longest counted attempt of a decided group.", ["scope"], _SECONDS
        )
        self._usable_size = self._histogram(
            "forebay_usable_group_size", "Usable rollouts of a decided group.", ["scope"], (0, *_SIZES)
        )
        self._loss_weight = self._histogram(
            "forebay_group_loss_weight_tokens", "Trained tokens of an accepted group.", ["scope"], _TOKENS
        )
        self._reward = self._histogram(
            "forebay_group_reward", "Mean raw reward of an accepted group that has one.", ["scope"], _REWARDS
        )
        self._phases = self._histogram(
            "forebay_phase_seconds", "Time in a traced phase, mean of a group's slots.", ["scope", "phase"], _SECONDS
        )
        self._staleness = self._histogram(
            "forebay_staleness_versions", "Staleness of a group when its batch was cut.", [], _AGES
        )
        self._lag = self._histogram(
            "forebay_event_loop_lag_seconds", "How late this collector's event loop is.", [], LAG_BUCKETS_S
        )
        self._leading = Gauge("forebay_collector_leading", "1: this collector leads.", registry=self._registry)
        self._partitions = Gauge(
            "forebay_collector_partitions", "Partitions of the results that this collector owns.",
            registry=self._registry,
        )  # fmt: skip

    def _histogram(self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, labels, registry=self._registry, buckets=buckets)

    # -- what happens -------------------------------------------------------------------------------------------------

    def decided(self, group: GroupSummary, reason: RejectReason | None) -> None:
        """See :class:`~forebay_collector.metrics.Observer`."""
        scope = scope_of(is_eval=group.is_eval)
        self._run.decided[scope, "accepted" if reason is None else reason.value] += 1
        self._usable_size.labels(scope).observe(len(group.rollouts))
        if group.rollouts:
            self._group_seconds.labels(scope).observe(group.seconds)
        for name, seconds in group.phases.items():
            self._phases.labels(scope, self._phase(name)).observe(seconds)
        if reason is None:
            self._loss_weight.labels(scope).observe(loss_weight(group))
            if (reward := mean_reward([group])) is not None:
                self._reward.labels(scope).observe(reward)

    def cut(self, groups: Sequence[GroupSummary], version: int) -> None:
        """See :class:`~forebay_collector.metrics.Observer`."""
        for group in groups:
            self._staleness.observe(staleness_of(group, version))

    def lag(self, seconds: float) -> None:
        """The event loop was late."""
        self._lag.observe(seconds)

    def holds(self, *, leading: bool, partitions: Sequence[int]) -> None:
        """What this collector holds."""
        self._leading.set(leading)
        self._partitions.set(len(partitions))

    def _phase(self, name: str) -> str:
        if name not in self._phases_known:
            if len(self._phases_known) >= _MAX_PHASES:
                return _OTHER
            self._phases_known.add(name)
        return name

    # -- the scrape ---------------------------------------------------------------------------------------------------

    async def render(self) -> bytes:
        """The text of a scrape. While Redis is away ``forebay_redis_up`` is 0, and what is read from it is left out."""
        try:
            async with asyncio.timeout(_STATUS_TIMEOUT_S):
                self._run.look = await self._store.look(groups=1)
                self._run.status = self._run.look.status
        except (ConnectionLostError, TimeoutError) as error:
            log.warning("metrics.redis_away", reason=str(error))
            self._run.status = self._run.look = None
        return generate_latest(self._registry)


class _RunState(Collector):
    """What is read from Redis at the scrape, and counts that others keep."""

    def __init__(self, dumper: Dumper) -> None:
        self.status: RunStatus | None = None
        self.look: RunLook | None = None
        self.decided: Counter[tuple[str, str]] = Counter()
        self._dumper = dumper

    def collect(self) -> Iterator[Metric]:
        yield _gauge("forebay_redis_up", "1: Redis answered this scrape.", float(self.status is not None))
        if self.status is not None:
            yield from _state(self.status)
            yield from _totals(self.status.counters)
        if self.look is not None:
            yield from _waits(self.look)
        decided = CounterMetricFamily(
            "forebay_groups_decided", "Groups that this collector decided on.", labels=["scope", "outcome"]
        )
        for labels, count in sorted(self.decided.items()):
            decided.add_metric(labels, count)
        yield decided
        yield _counter("forebay_dump_files", "outcome", "Dump files written.", dict(self._dumper.written))
        yield _counter("forebay_dump_skipped", "reason", "What was not dumped whole.", dict(self._dumper.skipped))


def _state(status: RunStatus) -> Iterator[Metric]:
    groups = GaugeMetricFamily("forebay_groups_in_flight", "Groups by where they are.", labels=["state"])
    for state in ("queued", "running", "ready", "cut", "direct_queued", "direct_running", "held"):
        groups.add_metric([state], getattr(status, state))
    yield groups
    attempts = GaugeMetricFamily("forebay_attempts", "Attempts that wait, or run on a worker.", labels=["state"])
    attempts.add_metric(["queued"], status.queued_jobs)
    attempts.add_metric(["leased"], status.leased)
    yield attempts
    yield _gauge("forebay_delivered_ahead_groups", "Groups handed over ahead of the version.", status.delivered_ahead)
    yield _gauge("forebay_capacity_groups", "(s + 1) * k * B.", status.capacity)
    yield _gauge("forebay_run_stopped", "1: the run has stopped itself.", float(status.stopped is not None))
    yield _gauge("forebay_version", "The policy version in force.", status.version)
    owners = status.owners
    yield _gauge("forebay_collectors_alive", "Collectors whose heart-beat is recent.", len(owners.collectors))
    owned = GaugeMetricFamily("forebay_partition_owned", "1: a collector owns this partition.", labels=["partition"])
    unread = GaugeMetricFamily("forebay_results_unread", "Results of groups that have not ended.", labels=["partition"])
    for partition in owners.partitions:
        owned.add_metric([str(partition.number)], float(bool(partition.owner)))
        unread.add_metric([str(partition.number)], partition.unread)
    yield owned
    yield unread
    yield _gauge("forebay_workers_alive", "Workers whose heart-beat is recent.", len(status.workers))
    busy = sum(int(about.get("busy", 0)) for about in status.workers.values())
    yield _gauge("forebay_fleet_slots_busy", "Slots that run, as the live workers last said.", busy)
    slots = sum(int(about.get("slots", 0)) for about in status.workers.values())
    yield _gauge("forebay_fleet_slots", "Slots that the live workers have.", slots)
    held = sum(int(about.get("held", 0)) for about in status.workers.values())
    yield _gauge("forebay_fleet_results_held", "Finished episodes that wait on workers for memory in Redis.", held)
    used = GaugeMetricFamily("forebay_bound_used", "What there is of something bounded.", labels=["bound"])
    limit = GaugeMetricFamily("forebay_bound_limit", "Its bound; absent where there is none.", labels=["bound"])
    for bound in status.bounds:
        used.add_metric([bound.name], bound.used)
        if bound.limit:
            limit.add_metric([bound.name], bound.limit)
    yield used
    yield limit
    yield _gauge("forebay_servers_registered", "Inference servers in the run's registry.", len(status.servers))


def _waits(look: RunLook) -> Iterator[Metric]:
    yield _known("forebay_last_cut_age_seconds", "Since the last batch was cut.", look.since_cut_s)
    yield _known("forebay_trainer_idle_seconds", "Since the trainer last asked for a batch.", look.reader_idle_s)
    group = next(iter(look.groups), None)
    slot = None if group is None else group.oldest
    age_s = 0.0 if group is None else group.age_s
    yield _gauge("forebay_oldest_group_age_seconds", "Since the oldest running group was started.", age_s)
    slot_s = slot.age_s if slot is not None and slot.state == "running" else 0.0
    yield _gauge("forebay_oldest_slot_age_seconds", "Since its oldest running slot was claimed.", slot_s)


def _totals(counters: dict[str, int]) -> Iterator[Metric]:
    """The run's counters since it began; names that are not known here become events."""
    groups: dict[str, int] = {}
    batches: dict[str, int] = {}
    events: dict[str, int] = {}
    labelled: dict[str, dict[str, int]] = {name: {} for name in _FAMILIES}
    for name, count in sorted(counters.items()):
        first, _, value = name.partition(":")
        if value and first in labelled:
            labelled[first][value] = count
        elif name in _GROUP_EVENTS:
            groups[name] = count
        elif name.startswith("batches_"):
            batches[name.removeprefix("batches_")] = count
        else:
            events[name] = count
    yield _counter("forebay_groups", "event", "Groups of the run, by what happened to them.", groups)
    yield _counter("forebay_batches", "event", "Batches of the run, by what happened to them.", batches)
    yield _counter("forebay_events", "event", "Whatever else the run counts.", events)
    for first, (family, label, text) in _FAMILIES.items():
        yield _counter(family, label, text, labelled[first])


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _known(name: str, text: str, value: float | None) -> Metric:
    """A gauge without a sample where there is no value yet."""
    family = GaugeMetricFamily(name, text, labels=[])
    if value is not None:
        family.add_metric([], value)
    return family


def _counter(name: str, label: str, text: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in sorted(values.items()):
        family.add_metric([value], count)
    return family
