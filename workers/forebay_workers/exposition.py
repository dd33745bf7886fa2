"""A worker's metrics for Prometheus (contract, section 12); ``docs/metrics.md`` has the meaning of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from forebay.loop_lag import LAG_BUCKETS_S
from forebay_workers.metrics import WorkerState

__all__ = ["Exposition"]


class Exposition:
    """What one worker process exposes."""

    def __init__(self, look: Callable[[], WorkerState]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_State(look))
        ProcessCollector(registry=self._registry)
        self._lag = Histogram(
            "forebay_event_loop_lag_seconds",
            "How late this worker's event loop is.",
            registry=self._registry,
            buckets=LAG_BUCKETS_S,
        )

    def lag(self, seconds: float) -> None:
        """The event loop was late."""
        self._lag.observe(seconds)

    async def render(self) -> bytes:
        """The text of a scrape."""
        return generate_latest(self._registry)


class _State(Collector):
    def __init__(self, look: Callable[[], WorkerState]) -> None:
        self._look = look

    def collect(self) -> Iterator[Metric]:
        state = self._look()
        yield GaugeMetricFamily("forebay_worker_slots", "Episodes that may run here at once.", value=state.slots)
        yield GaugeMetricFamily("forebay_worker_slots_busy", "Episodes that run here.", value=state.busy)
        ended = CounterMetricFamily("forebay_worker_attempts", "Attempts that ended here.", labels=["outcome", "kind"])
        for labels, count in sorted(state.ended.items()):
            ended.add_metric(labels, count)
        yield ended
        yield GaugeMetricFamily("forebay_worker_servers", "Inference servers known here.", value=state.servers)
        yield GaugeMetricFamily(
            "forebay_worker_servers_healthy", "Those of them that take requests.", value=state.servers_healthy
        )
        yield GaugeMetricFamily(
            "forebay_worker_results_held", "Finished episodes that wait for memory in Redis.", value=state.held.results
        )
        yield GaugeMetricFamily(
            "forebay_worker_results_held_bytes", "Bytes of rows of those.", value=state.held.rows_bytes
        )
        used = GaugeMetricFamily("forebay_worker_pool_used", "What is in use of a bounded pool.", labels=["pool"])
        waiting = GaugeMetricFamily("forebay_worker_pool_waiting", "Callers that wait for it.", labels=["pool"])
        limit = GaugeMetricFamily("forebay_worker_pool_limit", "Its bound.", labels=["pool"])
        for name, use in sorted(state.pools.items()):
            used.add_metric([name], use.in_use)
            waiting.add_metric([name], use.waiting)
            limit.add_metric([name], use.limit)
        yield from (used, waiting, limit)
