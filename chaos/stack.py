"""The processes of a run, all real, under the supervisor of ``make up``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from chaos.schedule import Target
from forebay_ops import ports
from forebay_ops.process import ManagedProcess, ProcessSpec, ProcessState, RestartPolicy
from forebay_ops.readiness import LogLine
from forebay_ops.spawning import kill_group
from forebay_ops.specs import LocalStackConfig, collector_spec
from forebay_ops.supervisor import LocalStack
from forebay_ops.terminal import Terminal

__all__ = ["ChaosConfig", "Fleet", "stack_config"]

_MEANT = RestartPolicy(max_quick_failures=10**9, quick_s=1.0, backoff_s=0.1, max_backoff_s=0.4)
"""Here a process that dies young is nothing to give up on."""


@dataclass(frozen=True, slots=True)
class ChaosConfig:
    """What runs."""

    folder: Path
    seed: int
    workers: int = 3
    servers: int = 2
    collectors: int = 2
    partitions: int = 4
    """Of the results, which the collectors share."""
    lease_s: float = 2.0
    """Of workers and of collectors."""
    batch_size: int = 8
    group_size: int = 4
    max_staleness: int = 2

    def environment(self, urls: Sequence[str]) -> dict[str, str]:
        """The settings of all processes."""
        run = {
            "experiment_name": "chaos",
            "trial_name": f"seed{self.seed}",
            "servers": ",".join(urls),
            "import_allowlist": "chaos",
            "batch_size": self.batch_size,
            "group_size": self.group_size,
            "max_staleness": self.max_staleness,
            "max_queued_groups": 3 * self.batch_size,
            "requeue_evicted": True,
            "max_requeues": 2,
            "reward_normalization": '{"mean_level": "batch", "std_level": "batch"}',
            "lease_s": self.lease_s,
            "collector_lease_s": self.lease_s,
            "partitions": self.partitions,
            "retry_backoff_s": 0.2,
            "episode_timeout_s": 20,
            "group_deadline_s": 60,
            "stall_timeout_s": 60,
            "engine_connect_timeout_s": 1,
            "engine_request_timeout_s": 4,
            "engine_update_timeout_s": 3,
            "engine_no_server_timeout_s": 10,
            "engine_health_interval_s": 0.2,
            "worker_max_slots": 10,
            "worker_drain_timeout_s": 0.5,
            "redis_timeout_s": 10,
        }
        return {f"FOREBAY_{name.upper()}": str(value) for name, value in run.items()}


def stack_config(config: ChaosConfig) -> LocalStackConfig:
    """The local stack of a run."""
    free = [ports.find_free_port() for _ in range(config.servers)]
    urls = [f"http://127.0.0.1:{port}" for port in free]
    base = LocalStackConfig(
        home=config.folder / "home",
        workers=config.workers,
        server_count=0,
        collector=False,
        env=config.environment(urls),
        terminal=Terminal(hidden=True),
        policy=_MEANT,
        start_timeout_s=120.0,
        stop_grace_s=5.0,
    )
    books = str(config.folder / "books")
    extra = [_own(f"server-{index}", "server", str(port)) for index, port in enumerate(free)]
    extra += [replace(collector_spec(base), name=f"collector-{index}") for index in range(config.collectors)]
    extra += [_own("producer", "producer", books, str(config.seed)), _own("trainer", "trainer", books)]
    return replace(base, extra=tuple(extra))


def _own(name: str, module: str, *arguments: str) -> ProcessSpec:
    argv = (sys.executable, "-m", f"chaos.{module}", *arguments)
    return ProcessSpec(name, argv, ready=LogLine(f"{module}.ready"), start_timeout_s=120.0, stop_grace_s=2.0)


class Fleet:
    """The processes by kind, and which of them are up."""

    def __init__(self, stack: LocalStack) -> None:
        self._stack = stack
        self._stopped: set[int] = set()
        """Process groups that SIGSTOP holds."""

    def up(self, target: Target) -> list[ManagedProcess]:
        """Those that are ready and not stopped, by name."""
        return [process for process in self._of(target) if self._is_up(process)]

    def _of(self, target: Target) -> list[ManagedProcess]:
        named = sorted(self._stack.processes.items())
        return [process for name, process in named if name.partition("-")[0] == target]

    def _is_up(self, process: ManagedProcess) -> bool:
        return process.state is ProcessState.READY and process.pid is not None and process.pid not in self._stopped

    @property
    def all_up(self) -> bool:
        """Whether everything is."""
        return all(self._is_up(process) for process in self._stack.processes.values())

    def hit(self, process: ManagedProcess, number: signal.Signals) -> int:
        """Send a signal to a process that is up; its pid."""
        pid = process.pid or 0
        kill_group(pid, number)
        if number is signal.SIGSTOP:
            self._stopped.add(pid)
        else:
            # The supervisor sees the end a moment later; until then it would pass for one that is up.
            process.state = ProcessState.WAITING
        return pid

    def go_on(self, pid: int) -> None:
        """SIGCONT to one that was stopped."""
        if pid in self._stopped:
            self._stopped.discard(pid)
            kill_group(pid, signal.SIGCONT)

    def all_go_on(self) -> None:
        """SIGCONT to all that are stopped: nothing else ends them."""
        for pid in list(self._stopped):
            self.go_on(pid)


def own_redis() -> None:
    """Make sure that the embedded server is used, which may be killed, whatever the environment names."""
    os.environ.pop("REDIS_URL", None)
