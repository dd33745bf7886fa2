"""What a local stack consists of, and how each of its processes is started."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from forebay.errors import PortInUseError, SettingsError
from forebay_ops import ports
from forebay_ops.embedded_redis import RedisPlan
from forebay_ops.process import ProcessSpec, RestartPolicy
from forebay_ops.readiness import HttpAnswers, LogLine, RedisAnswers
from forebay_ops.terminal import Terminal

__all__ = ["LocalStackConfig", "Role"]

_HOST = "127.0.0.1"
_METRICS_PORT = "FOREBAY_COLLECTOR_HTTP_PORT"
_LOADING_TIMEOUT_S = 600.0
"""How long Redis may take to load its append-only file."""


class Role(IntEnum):
    """Processes of a higher role are stopped first."""

    REDIS = 0
    SERVER = 1
    EXTRA = 2
    COLLECTOR = 3
    WORKER = 4


@dataclass(frozen=True)
class LocalStackConfig:
    """What to run, and how."""

    home: Path = Path(".forebay")
    workers: int = 2
    model_path: Path | None = None
    """Model folder of the inference servers; needed unless `server_count` is 0."""
    model_version: int = 0
    """Version that the weights in `model_path` are."""
    server_port: int = 30000
    """Port of the first inference server; the next ones follow. 0: any free ports."""
    server_count: int = 1
    """0: use those that ``FOREBAY_SERVERS`` names."""
    collector: bool = True
    redis: bool = True
    """Whether anything needs Redis."""
    redis_url: str | None = field(default=None, repr=False)
    """None: ``REDIS_URL`` if it is set, else the embedded server."""
    redis_port: int | None = None
    """Port of the embedded server; None: 6390 if it is free, else any."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Added to the environment of all processes."""
    torch_threads: int = 1
    """Threads of each inference server."""
    quiet: bool = False
    """Show progress, but not the log lines of the processes."""
    terminal: Terminal | None = None
    """Where progress is shown; None: standard output."""
    forebay: tuple[str, ...] = (sys.executable, "-m", "forebay")
    """The command whose sub-commands are run: ``serve-tiny``, ``collector``, ``worker``."""
    server_args: tuple[str, ...] = ()
    collector_args: tuple[str, ...] = ()
    worker_args: tuple[str, ...] = ()
    extra: tuple[ProcessSpec, ...] = ()
    """Further processes; started with the collector, stopped after it."""
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    start_timeout_s: float = 180.0
    stop_grace_s: float = 10.0
    handle_signals: bool = True
    """False: the caller handles them. Ignored outside the main thread, where they cannot be handled."""


def environment(config: LocalStackConfig, home: Path) -> dict[str, str]:
    """What all processes get, but for the addresses that only the start decides."""
    folder = str(Path.cwd())  # so that workers can import what the trainer imports, `examples.*` for one
    path = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "FOREBAY_HOME": str(home),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "PYTHONUNBUFFERED": "1",
        **config.env,
    }


def server_ports(config: LocalStackConfig) -> list[int]:
    """The ports of the inference servers.

    Raises:
        PortInUseError: one of them is taken.
    """
    if config.server_count and config.model_path is None:
        raise SettingsError("model_path is needed to start an inference server (or server_count=0)")
    if config.server_port == 0:
        return [ports.find_free_port() for _ in range(config.server_count)]
    wanted = [config.server_port + index for index in range(config.server_count)]
    for port in wanted:
        if not ports.is_free(port):
            raise PortInUseError(
                f"port {port} for the inference server is in use{ports.owner(port)}: stop that process, "
                "or choose another port: forebay up --server-port N, make up SERVER_PORT=N"
            )
    return wanted


def server_url(port: int) -> str:
    """URL of the inference server on this port."""
    return f"http://{_HOST}:{port}"


def redis_spec(config: LocalStackConfig, plan: RedisPlan, lock: int) -> ProcessSpec:
    """The embedded Redis. It holds `lock`."""
    return ProcessSpec(
        "redis",
        plan.argv,
        ready=RedisAnswers(plan),
        address=plan.url,
        log=plan.log,
        show_log=False,
        start_timeout_s=_LOADING_TIMEOUT_S,
        stop_grace_s=config.stop_grace_s,
        pass_fds=(lock,),
        on_start=plan.record,
        on_end=plan.forget,
    )


def server_spec(config: LocalStackConfig, index: int, port: int) -> ProcessSpec:
    """An inference server on CPU."""
    url = server_url(port)
    options = {
        "--model": str(config.model_path),
        "--host": _HOST,
        "--port": str(port),
        "--weight-version": str(config.model_version),
        "--torch-threads": str(config.torch_threads),
    }
    argv = (*config.forebay, "serve-tiny", *(word for pair in options.items() for word in pair), *config.server_args)
    env = {"OMP_NUM_THREADS": str(config.torch_threads)}
    return _spec(config, f"server-{index}", argv, ready=HttpAnswers(f"{url}/model_info"), address=url, env=env)


def collector_spec(config: LocalStackConfig) -> ProcessSpec:
    """The collector. Its metrics are served on a free port, unless the environment says where."""
    argv = (*config.forebay, "collector", *config.collector_args)
    given = {**os.environ, **config.env}
    env: dict[str, str] = {}
    port = given.get(_METRICS_PORT, "")
    if not port and importlib.util.find_spec("prometheus_client") is not None:
        # Not one that it picks itself: it is shown, and stays the same when the collector is started again.
        port = env[_METRICS_PORT] = str(ports.find_free_port())
    host = given.get("FOREBAY_COLLECTOR_HTTP_HOST") or _HOST
    address = f"http://{host}:{port}/metrics" if port not in ("", "0") else ""  # 0: only its log tells
    return _spec(config, "collector", argv, ready=LogLine("collector.ready"), address=address, env=env)


def worker_spec(config: LocalStackConfig, index: int) -> ProcessSpec:
    """A worker."""
    argv = (*config.forebay, "worker", *config.worker_args)
    spec = _spec(config, f"worker-{index}", argv, ready=LogLine("worker.ready"))
    return replace(spec, stop_grace_s=spec.stop_grace_s + _drain_s(config))


def _drain_s(config: LocalStackConfig) -> float:
    """How long a worker is told to let its episodes finish. Killing it sooner would cost each of them an attempt."""
    try:
        given = float({**os.environ, **config.env}.get("FOREBAY_WORKER_DRAIN_TIMEOUT_S") or 0)
    except ValueError:
        return 0.0  # the worker itself says what is wrong with it
    return given if math.isfinite(given) and given > 0 else 0.0


def _spec(config: LocalStackConfig, name: str, argv: tuple[str, ...], **values: Any) -> ProcessSpec:
    return ProcessSpec(name, argv, start_timeout_s=config.start_timeout_s, stop_grace_s=config.stop_grace_s, **values)
