"""The embedded Redis: configuration, re-use, durability, and that it is never left behind."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis
import redis_servers
from conditions import until

from forebay.errors import ConnectionLostError, SettingsError
from forebay_ops import embedded_redis
from forebay_ops.embedded_redis import (
    RedisHandle,
    ensure_redis,
    find_running,
    path_binary,
    redact_url,
    stop_running,
    wheel_binary,
)
from forebay_ops.errors import RedisStartError
from forebay_ops.spawning import create_time

_HOLDER = """
import sys, time
from pathlib import Path
from forebay_ops.embedded_redis import ensure_redis
handle = ensure_redis(Path(sys.argv[1]))
print(handle.pid, handle.url, handle.started_here, flush=True)
time.sleep(600)
"""

pytestmark = pytest.mark.skipif(wheel_binary() is None and path_binary() is None, reason=redis_servers.NONE_FOUND)


def _client(handle: RedisHandle) -> redis.Redis:
    return redis.Redis.from_url(handle.url, decode_responses=True)


def _hold(home: Path) -> tuple[subprocess.Popen[str], int]:
    """Another process that starts the server of `home`; its handle and the server's pid."""
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, str(home)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    return holder, int(holder.stdout.readline().split()[0])


def test_it_is_durable_local_and_never_evicts(tmp_path: Path) -> None:
    """The server syncs every write, listens on loopback only, takes no snapshots and refuses rather than evicts."""
    with ensure_redis(tmp_path) as handle, _client(handle) as client:
        wanted = {
            "bind": "127.0.0.1",
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "maxmemory-policy": "noeviction",
            "protected-mode": "yes",
            "dir": str(tmp_path / "redis"),
        }
        assert {name: client.config_get(name)[name] for name in wanted} == wanted
        assert handle.started_here


def test_writes_survive_sigkill_of_the_server(tmp_path: Path) -> None:
    """What was acknowledged before a SIGKILL is there after the next start."""
    with ensure_redis(tmp_path) as first:
        with _client(first) as client:
            client.set("kept", "yes")
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        assert first.wait(10) == -signal.SIGKILL
        with ensure_redis(tmp_path) as second, _client(second) as client:
            assert second.started_here
            assert client.get("kept") == "yes"


def test_a_running_server_is_reused_and_left_alone(tmp_path: Path) -> None:
    """A second call finds the server of the first, and its stop does not end it."""
    with ensure_redis(tmp_path) as first:
        second = ensure_redis(tmp_path)
        assert (second.url, second.pid, second.started_here) == (first.url, first.pid, False)
        second.stop()
        with _client(first) as client:
            assert client.ping()


def test_stop_leaves_nothing(tmp_path: Path) -> None:
    """After stop there is no process and no record."""
    handle = ensure_redis(tmp_path)
    handle.stop()
    handle.stop()
    assert handle.pid is not None
    assert not psutil.pid_exists(handle.pid)
    assert find_running(tmp_path) is None


def test_the_server_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    """SIGKILL of the starter takes the server along; the folder can be used again at once."""
    holder, pid = _hold(tmp_path)
    with holder:
        holder.kill()
    until(lambda: create_time(pid) is None, "the server to end")
    with ensure_redis(tmp_path) as handle:
        assert handle.started_here


def test_another_process_finds_and_stops_it(tmp_path: Path) -> None:
    """`stop_running` ends a server that another process started, and says which."""
    holder, pid = _hold(tmp_path)
    with holder:
        found = ensure_redis(tmp_path)
        assert (found.pid, found.started_here) == (pid, False)
        assert stop_running(tmp_path) == pid
        assert stop_running(tmp_path) is None
        holder.kill()


def test_two_starts_at_once_give_one_server(tmp_path: Path) -> None:
    """Two processes that start the server of one folder at the same moment end up with the same one."""
    holders = [
        subprocess.Popen([sys.executable, "-c", _HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    lines = [holder.stdout.readline().split() for holder in holders if holder.stdout is not None]
    for holder in holders:
        with holder:
            holder.kill()
    assert lines[0][:2] == lines[1][:2]
    assert sorted(line[2] for line in lines) == ["False", "True"]


def test_a_stale_record_is_not_believed(tmp_path: Path) -> None:
    """A record that names an unrelated live process neither counts as a server nor harms that process."""
    ensure_redis(tmp_path).stop()
    other = os.getppid()
    record = f'{{"pid": {other}, "create_time": {create_time(other)}, "port": 6390}}'
    (tmp_path / "redis" / "server.json").write_text(record)
    assert stop_running(tmp_path) is None
    assert psutil.pid_exists(other)
    with ensure_redis(tmp_path) as handle:
        assert handle.started_here


def test_a_taken_preferred_port_is_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its usual port taken the server uses another one."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(embedded_redis, "PREFERRED_PORT", port)
        with ensure_redis(tmp_path) as handle, _client(handle) as client:
            assert not handle.url.startswith(f"redis://127.0.0.1:{port}/")
            assert client.ping()


def test_a_taken_explicit_port_is_an_error_with_the_log(tmp_path: Path) -> None:
    """A port that was asked for and is taken is an error that quotes the server's log; nothing stays behind."""
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(RedisStartError, match=r"(?s)exited with code 1.*(in use|bind)"),
    ):
        ensure_redis(tmp_path, port=taken.getsockname()[1])
    assert find_running(tmp_path) is None


def test_a_path_with_spaces_and_quotes_works(tmp_path: Path) -> None:
    """The home may have any name."""
    home = tmp_path / 'my "own" folder\\'
    with ensure_redis(home) as handle, _client(handle) as client:
        assert client.config_get("dir")["dir"] == str(home / "redis")


def test_a_given_url_is_used(tmp_path: Path) -> None:
    """With a URL that answers nothing is started, and stop does nothing to it."""
    with ensure_redis(tmp_path / "a") as handle:
        given = ensure_redis(tmp_path / "b", url=handle.url)
        given.stop()
        assert (given.url, given.started_here) == (handle.url, False)
        assert not (tmp_path / "b").exists()
        with _client(handle) as client:
            assert client.ping()


def test_a_dead_url_is_an_error_without_its_password(tmp_path: Path) -> None:
    """A URL that does not answer is an error that names the server but not its password."""
    with pytest.raises(ConnectionLostError, match="REDIS_URL") as caught:
        ensure_redis(tmp_path, url="redis://user:hunter2@127.0.0.1:1/0")
    assert "hunter2" not in str(caught.value)
    assert "127.0.0.1:1" in str(caught.value)
    with pytest.raises(SettingsError, match="REDIS_URL"):
        ensure_redis(tmp_path, url="http://127.0.0.1:1")


def test_without_any_server_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither wheel nor PATH has a server: the error names the extra and REDIS_URL."""

    def missing(name: str) -> object:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(RedisStartError, match=r"forebay\[demo\].*REDIS_URL"):
        ensure_redis(tmp_path)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6390/0", "redis://127.0.0.1:6390/0"),
        ("redis://:secret@host:1/2", "redis://***@host:1/2"),
        ("rediss://me:s%40cret@host/0?x=1", "rediss://***@host/0"),
    ],
)
def test_urls_are_shown_without_credentials(url: str, shown: str) -> None:
    """User, password and query, which may hold one too, never leave `redact_url`."""
    assert redact_url(url) == shown
