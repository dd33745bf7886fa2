"""The supervisor of the local processes, mostly with stand-ins for the real services."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from conditions import eventually, until

from forebay.errors import ConnectionLostError, PortInUseError, SettingsError
from forebay_ops.control import call
from forebay_ops.embedded_redis import ensure_redis, find_running
from forebay_ops.errors import AlreadyUpError, NotUpError, ProcessFailedError, StackFailedError
from forebay_ops.logs import LogTail, last_lines, open_log
from forebay_ops.process import ProcessSpec, ProcessState, RestartPolicy
from forebay_ops.readiness import LogLine
from forebay_ops.spawning import create_time
from forebay_ops.state import ProcessRecord, StackState, read_live_state, read_state, write_state
from forebay_ops.supervisor import LocalStack, LocalStackConfig
from forebay_ops.terminal import Terminal

_HERE = Path(__file__).parent
_STAND_IN = (sys.executable, str(_HERE / "stand_in_forebay.py"))
_FAST = RestartPolicy(max_quick_failures=3, backoff_s=0.02, max_backoff_s=0.1)
_FOREVER = "import time; print('up', flush=True); time.sleep(600)"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the caller's environment decides what is started."""
    for name in ("REDIS_URL", "FOREBAY_SERVERS", "FOREBAY_HOME"):
        monkeypatch.delenv(name, raising=False)


def _stand_ins(home: Path, **values: Any) -> LocalStackConfig:
    defaults: dict[str, Any] = {"server_port": 0, "model_path": home, "workers": 1, "forebay": _STAND_IN}
    return LocalStackConfig(home=home, **{**defaults, "policy": _FAST, "terminal": Terminal(hidden=True), **values})


def _only(home: Path, *extra: ProcessSpec, **values: Any) -> LocalStackConfig:
    """A stack of these processes alone."""
    return _stand_ins(home, redis=False, collector=False, server_count=0, workers=0, extra=extra, **values)


def _python(name: str, code: str, *args: str, **values: Any) -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-c", code, *args), **values)


@contextmanager
def _supervisor(home: Path, *values: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A supervisor in a process of its own."""
    argv = [sys.executable, str(_HERE / "run_stack.py"), str(home), *values]
    process = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **env},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


def _read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """Read the supervisor's output up to a line with `text`; the test's own time limit bounds the wait."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip())
        if text in line:
            return lines
    raise AssertionError(f"no {text!r} in:\n" + "\n".join(lines))


def _in_a_session_of_its_own() -> subprocess.Popen[bytes]:
    """A process that does nothing."""
    return subprocess.Popen([sys.executable, "-c", _FOREVER], start_new_session=True, stdout=subprocess.DEVNULL)


def _starts(folder: Path) -> list[Path]:
    """What each start of a stand-in worker left."""
    return list(folder.glob("worker-*"))


def _pids(home: Path) -> list[int]:
    state = read_state(home)
    return [record.pid for record in state.processes if record.pid is not None] if state is not None else []


def _gone(pids: list[int]) -> bool:
    return all(create_time(pid) is None for pid in pids)


def _children() -> set[psutil.Process]:
    """Processes of ours; the session's Redis may be one."""
    return set(psutil.Process().children(recursive=True))


def _grandchildren(home: Path) -> list[int]:
    texts = [path.read_text() for path in (home / "logs").glob("*.log")]
    return [int(pid) for text in texts for pid in re.findall(r"child pid (\d+)", text)]


# Start and environment


async def test_everything_is_up_inside_the_block_and_gone_after_it(tmp_path: Path) -> None:
    """All processes are ready inside the block; after it no process, socket or state is left."""
    before = _children()
    async with LocalStack(_stand_ins(tmp_path, workers=2)) as stack:
        assert list(stack.processes) == ["redis", "server-0", "collector", "worker-0", "worker-1"]
        assert {process.state for process in stack.processes.values()} == {ProcessState.READY}
        state = read_live_state(tmp_path)
        assert state is not None
        assert state.phase == "up"
        pids = _pids(tmp_path)
        assert len(pids) == 5
    assert _gone(pids)
    assert _children() == before
    assert not (tmp_path / "state.json").exists()
    assert not (tmp_path / "control.sock").exists()
    assert find_running(tmp_path) is None


async def test_processes_get_addresses_and_path(tmp_path: Path) -> None:
    """Children know Redis, servers, home and the current folder, and what the configuration adds."""
    code = "import json, os; print(json.dumps(dict(os.environ)), flush=True); import time; time.sleep(600)"
    probe = _python("probe", code, ready=LogLine("{"))
    config = _stand_ins(tmp_path, workers=0, collector=False, server_count=2, extra=(probe,), env={"COLOUR": "teal"})
    async with LocalStack(config) as stack:
        env = json.loads((tmp_path / "logs" / "probe.log").read_text())
        assert stack.env.items() <= env.items()
        assert env["REDIS_URL"] == stack.redis_url
        assert env["FOREBAY_SERVERS"].split(",") == stack.servers
        assert len(stack.servers) == 2
        assert env["FOREBAY_HOME"] == str(tmp_path)
        assert env["PYTHONPATH"].split(os.pathsep)[0] == str(Path.cwd())
        assert env["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")
        assert env["COLOUR"] == "teal"


async def test_a_running_redis_is_reused_and_left_running(tmp_path: Path) -> None:
    """The embedded Redis of the home that is up already is used, and outlives the stack."""
    with ensure_redis(tmp_path) as redis:
        async with LocalStack(_stand_ins(tmp_path, server_count=0, workers=0)) as stack:
            assert stack.redis_url == redis.url
            assert "redis" not in stack.processes
        assert find_running(tmp_path) is not None


async def test_a_given_redis_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """REDIS_URL wins over the embedded server; one that does not answer is an error without its password."""
    with ensure_redis(tmp_path / "other") as redis:
        monkeypatch.setenv("REDIS_URL", redis.url)
        async with LocalStack(_stand_ins(tmp_path, server_count=0, workers=0)) as stack:
            assert stack.env["REDIS_URL"] == redis.url
            assert list(stack.processes) == ["collector"]
    monkeypatch.setenv("REDIS_URL", "redis://:hunter2@127.0.0.1:1/0")
    with pytest.raises(ConnectionLostError) as caught:
        async with LocalStack(_stand_ins(tmp_path)):
            pass
    assert "hunter2" not in str(caught.value)
    assert not (tmp_path / "state.json").exists()


async def test_a_taken_server_port_is_one_clear_line(tmp_path: Path) -> None:
    """A taken port is named, with who has it and what to do, before anything is started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=rf"port {port} .*pid {os.getpid()}.*--server-port") as caught:
            async with LocalStack(_stand_ins(tmp_path, server_port=port)):
                pass
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "redis").exists()


async def test_a_missing_model_is_a_settings_error(tmp_path: Path) -> None:
    """An inference server without a model is refused."""
    with pytest.raises(SettingsError, match="model_path"):
        async with LocalStack(_stand_ins(tmp_path, model_path=None)):
            pass


async def test_progress_names_addresses_and_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Progress lines say what is ready, where and how fast; quiet hides only the processes' own lines."""
    config = _stand_ins(tmp_path, terminal=Terminal(quiet=True))
    async with LocalStack(config) as stack:
        address = stack.servers[0]
    shown = capsys.readouterr().out
    assert re.search(r"^redis +ready on redis://127\.0\.0\.1:\d+/0 \(\d+\.\d s\)$", shown, re.MULTILINE)
    assert re.search(rf"^server-0 +ready on {address} \(\d+\.\d s\)$", shown, re.MULTILINE)
    assert "worker.ready" not in shown


async def test_lines_are_shown_with_the_name_of_their_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless quiet, each line of a process appears with its name, without colours where there is no terminal."""
    async with LocalStack(_stand_ins(tmp_path, terminal=Terminal(), server_count=0)):
        pass
    assert re.search(
        r"^worker-0 +\| 2026-01-01 \[info \] worker\.ready pid=\d+$", capsys.readouterr().out, re.MULTILINE
    )


# One supervisor per home


async def test_a_second_stack_in_one_home_is_refused(tmp_path: Path) -> None:
    """While one is up, another one is refused with the pid of the first and the way to stop it."""
    with _supervisor(tmp_path) as first:
        _read_until(first, "stack is up")
        with pytest.raises(AlreadyUpError, match=rf"pid {first.pid}.*make down"):
            async with LocalStack(_stand_ins(tmp_path)):
                pass
        assert first.poll() is None
        assert call(tmp_path, "status")["state"]["phase"] == "up"


async def test_a_stale_state_is_cleared(tmp_path: Path) -> None:
    """The state of a dead supervisor is not believed; processes it left are killed, unrelated ones are not."""
    left, other = _in_a_session_of_its_own(), _in_a_session_of_its_own()
    created = create_time(left.pid)
    assert created is not None
    record = ProcessRecord(
        name="worker-0", state="ready", pid=left.pid, create_time=created, restarts=0, address="", log=tmp_path
    )
    reused = record.model_copy(update={"name": "worker-1", "pid": other.pid, "create_time": created - 1000})
    state = StackState(
        pid=os.getpid(),
        create_time=created - 1000,
        phase="up",
        socket=tmp_path / "control.sock",
        redis_url="",
        servers=[],
        processes=[record, reused],
    )
    write_state(tmp_path, state)
    try:
        assert read_live_state(tmp_path) is None
        with pytest.raises(NotUpError, match="make up"):
            call(tmp_path, "status")
        async with LocalStack(_only(tmp_path)):
            assert left.wait(10) == -signal.SIGKILL
            assert other.poll() is None
    finally:
        for process in (left, other):
            process.kill()
            process.wait(10)


def test_a_state_file_that_is_no_state_is_ignored(tmp_path: Path) -> None:
    """Garbage in the state file counts as none."""
    (tmp_path / "state.json").write_text('{"pid": "x"')
    assert read_state(tmp_path) is None


# Restarts


async def test_a_process_that_exits_is_started_again(tmp_path: Path) -> None:
    """A killed worker comes back with a new pid, and the count says so."""
    async with LocalStack(_stand_ins(tmp_path, server_count=0)) as stack:
        worker = stack.processes["worker-0"]
        pid = worker.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: worker.restarts == 1 and worker.state is ProcessState.READY, "the restart")
        assert worker.pid not in (None, pid)
        state = read_state(tmp_path)
        assert state is not None
        assert [record.restarts for record in state.processes if record.name == "worker-0"] == [1]


async def test_redis_comes_back_with_its_data_and_address(tmp_path: Path) -> None:
    """A killed embedded Redis is started again on the same port and has what was written."""
    import redis

    async with LocalStack(_stand_ins(tmp_path, server_count=0, workers=0, collector=False)) as stack:
        with redis.Redis.from_url(stack.redis_url) as client:
            client.set("kept", "yes")
        process = stack.processes["redis"]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        await eventually(lambda: process.restarts == 1 and process.state is ProcessState.READY, "the restart")
        with redis.Redis.from_url(stack.redis_url) as client:
            assert client.get("kept") == b"yes"


async def test_quick_failures_end_the_stack_with_the_log(tmp_path: Path) -> None:
    """A process that exits quickly too often ends everything with an error that quotes its log."""
    before = _children()
    config = _stand_ins(tmp_path, env={"STAND_IN_FAIL": "worker", "STAND_IN_FOLDER": str(tmp_path)})
    with pytest.raises(ProcessFailedError, match=r"(?s)worker-0 exited with code 3, 3 times in a row.*left shoe"):
        async with LocalStack(config):
            pytest.fail("it came up")
    assert len(_starts(tmp_path)) == 3
    assert _children() == before


async def test_a_refusal_is_final(tmp_path: Path) -> None:
    """A process that names bad input (exit code 2) before it was ever ready is not started again."""
    probe = _python("probe", "import sys; print('error: BATCH=0: too small'); sys.exit(2)", ready=LogLine("up"))
    stack = LocalStack(_only(tmp_path, probe))
    with pytest.raises(ProcessFailedError, match=r"(?s)probe refused to start.*BATCH=0: too small"):
        async with stack:
            pytest.fail("it came up")
    assert stack.processes["probe"].restarts == 0


async def test_a_failure_while_up_cancels_the_body(tmp_path: Path) -> None:
    """When a process fails for good later on, the body of the block ends with that error."""
    marker = tmp_path / "broken"
    code = "import os, sys, time; print('up', flush=True)\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)"
    probe = _python("probe", code, str(marker), ready=LogLine("up"))
    with pytest.raises(ProcessFailedError, match="probe exited with code 0, 3 times"):  # noqa: PT012 - the body counts
        async with LocalStack(_only(tmp_path, probe)):
            marker.touch()
            await asyncio.sleep(60)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_wait_raises_what_ended_the_stack(tmp_path: Path) -> None:
    """`wait` reports a failure in the same way."""
    probe = _python("probe", "import sys; sys.exit('no luck')")
    with pytest.raises(ProcessFailedError, match=r"(?s)probe.*no luck"):
        async with LocalStack(_only(tmp_path, probe)) as stack:
            await stack.wait()


async def test_a_process_that_is_never_ready_ends_the_start(tmp_path: Path) -> None:
    """A process that does not become ready in time fails for good, log quoted."""
    config = _stand_ins(tmp_path, start_timeout_s=1.0, env={"STAND_IN_SILENT": "collector"})
    with pytest.raises(ProcessFailedError, match=r"(?s)collector was not ready within 1 s.*collector thinks"):
        async with LocalStack(config):
            pytest.fail("it came up")


async def test_a_command_that_does_not_exist_is_told(tmp_path: Path) -> None:
    """A missing program is reported by name."""
    with pytest.raises(ProcessFailedError, match="cannot run no-such-program"):
        async with LocalStack(_only(tmp_path, ProcessSpec("probe", ("no-such-program",), ready=LogLine("never")))):
            pytest.fail("it came up")


def test_the_wait_between_restarts_doubles_up_to_its_bound() -> None:
    """Back-off: doubling, bounded."""
    policy = RestartPolicy(backoff_s=0.25, max_backoff_s=5)
    assert [policy.wait_s(failures) for failures in (1, 2, 3, 6, 50)] == [0.25, 0.5, 1.0, 5.0, 5.0]


# Scale


async def test_workers_scale_up_and_down(tmp_path: Path) -> None:
    """Scaling starts workers until they are ready and stops those that are too many, newest first."""
    async with LocalStack(_stand_ins(tmp_path, server_count=0)) as stack:
        first = stack.processes["worker-0"].pid
        answer = await asyncio.to_thread(call, tmp_path, "scale", workers=3)
        names = [record["name"] for record in answer["state"]["processes"] if record["state"] == "ready"]
        assert names == ["redis", "collector", "worker-0", "worker-1", "worker-2"]
        dropped = [stack.processes[f"worker-{index}"].pid for index in (1, 2)]
        await stack.scale(1)
        assert [name for name in stack.processes if name.startswith("worker")] == ["worker-0"]
        assert stack.processes["worker-0"].pid == first
        assert _gone([pid for pid in dropped if pid is not None])
        await stack.scale(0)
        with pytest.raises(SettingsError):
            await stack.scale(-1)


async def test_a_stubborn_process_is_killed_after_its_grace(tmp_path: Path) -> None:
    """A process that ignores SIGTERM is killed when its grace is over."""
    config = _stand_ins(tmp_path, server_count=0, stop_grace_s=0.3, env={"STAND_IN_STUBBORN": "worker"})
    async with LocalStack(config) as stack:
        pid = stack.processes["worker-0"].pid
        assert pid is not None
    assert _gone([pid])


# Commands


async def test_malformed_commands_are_answered(tmp_path: Path) -> None:
    """Unknown commands and wrong values are refused without harm."""
    async with LocalStack(_only(tmp_path)):
        for command, values in (("dance", {}), ("scale", {"workers": "many"}), ("scale", {"workers": -1})):
            with pytest.raises(StackFailedError):
                await asyncio.to_thread(call, tmp_path, command, **values)
        for line in (b"not json\n", b"[]\n", b"x" * 200_000 + b"\n", b""):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "control.sock")
            writer.write(line)
            writer.write_eof()
            with contextlib.suppress(ConnectionError):  # it hangs up on an endless line
                await asyncio.wait_for(reader.read(), 10)
            writer.close()
        assert (await asyncio.to_thread(call, tmp_path, "status"))["state"]["phase"] == "up"


async def test_stop_by_command_ends_wait_and_body(tmp_path: Path) -> None:
    """`stop` lets `wait` return; in any other body it raises SystemExit."""
    async with LocalStack(_only(tmp_path)) as stack:
        command = asyncio.create_task(asyncio.to_thread(call, tmp_path, "stop"))
        await stack.wait()
        await command
    with pytest.raises(SystemExit) as caught:  # noqa: PT012 - the body counts
        async with LocalStack(_only(tmp_path)):
            await asyncio.to_thread(call, tmp_path, "stop")
            await asyncio.sleep(60)
    assert caught.value.code == 143


async def test_a_long_home_still_has_a_socket(tmp_path: Path) -> None:
    """Where the home's path is too long for a socket, a short folder is used and removed afterwards."""
    home = tmp_path / ("long" * 30)
    async with LocalStack(_only(home)):
        state = read_live_state(home)
        assert state is not None
        assert state.socket.parent != home
        assert len(os.fsencode(state.socket)) < 104
        assert state.socket.stat().st_mode & 0o077 == 0
        assert (await asyncio.to_thread(call, home, "status"))["ok"]
    assert not state.socket.parent.exists()


# Ends


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_all_in_order(tmp_path: Path, number: signal.Signals) -> None:
    """A signal stops workers first, Redis last, with exit code 0 of a program that waits."""
    with _supervisor(tmp_path) as supervisor:
        _read_until(supervisor, "stack is up")
        pids = _pids(tmp_path)
        supervisor.send_signal(number)
        output = supervisor.communicate(timeout=30)[0]
        assert supervisor.returncode == 0
        assert re.findall(r"^(\w+) +stopped", output, re.MULTILINE) == ["worker", "collector", "server", "redis"]
        assert len(pids) == 4
        assert _gone(pids)
        assert not (tmp_path / "control.sock").exists()


@pytest.mark.parametrize("silent", ["serve-tiny", "collector", "worker"])
def test_ctrl_c_during_the_start(tmp_path: Path, silent: str) -> None:
    """Ctrl-C at any stage of the start stops what has been started; the exit code says it was interrupted."""
    with _supervisor(tmp_path, STAND_IN_SILENT=silent) as supervisor:
        until(lambda: len(_pids(tmp_path)) == (4 if silent == "worker" else 3), "the stage to begin")
        pids = _pids(tmp_path)
        supervisor.send_signal(signal.SIGINT)
        supervisor.communicate(timeout=30)
        assert supervisor.returncode == 128 + signal.SIGINT
        assert _gone(pids)
        assert not (tmp_path / "state.json").exists()


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    """The second Ctrl-C does not wait for a process that ignores SIGTERM."""
    with _supervisor(tmp_path, "stop_grace_s=600", STAND_IN_STUBBORN="worker") as supervisor:
        _read_until(supervisor, "stack is up")
        pids = _pids(tmp_path)
        supervisor.send_signal(signal.SIGINT)
        _read_until(supervisor, "once more kills at once")
        state = read_state(tmp_path)
        assert state is not None
        # Two that come within a moment count as one (wrappers pass on what the terminal has sent already).
        done = threading.Event()

        def press_again() -> None:
            while not done.wait(0.4):
                supervisor.send_signal(signal.SIGINT)

        presser = threading.Thread(target=press_again)
        presser.start()
        try:
            supervisor.communicate(timeout=30)
        finally:
            done.set()
            presser.join()
        assert _gone(pids)


@pytest.mark.parametrize("stage", ["starting", "up"])
def test_sigkill_of_the_supervisor_leaves_nothing(tmp_path: Path, stage: str) -> None:
    """After SIGKILL of the supervisor its processes end too, with those that they have started."""
    silent = "worker" if stage == "starting" else ""
    env = {"STAND_IN_CHILD": "worker,collector", "STAND_IN_STUBBORN": "worker", "STAND_IN_SILENT": silent}
    with _supervisor(tmp_path, **env) as supervisor:
        until(lambda: len(_grandchildren(tmp_path)) == 2, "the processes of the processes")
        if stage == "up":
            _read_until(supervisor, "stack is up")
        pids = [*_pids(tmp_path), *_grandchildren(tmp_path)]
        guardians = [child.pid for child in psutil.Process(supervisor.pid).children()]
        assert len(pids) == 6
        supervisor.kill()
        until(lambda: _gone(pids), "all processes to end")
        until(lambda: _gone(guardians), "the guardian to end")
    with ensure_redis(tmp_path) as redis:
        assert redis.started_here


def test_a_home_can_be_used_again_after_sigkill(tmp_path: Path) -> None:
    """The next supervisor of a home whose supervisor was killed starts as usual."""
    with _supervisor(tmp_path) as supervisor:
        _read_until(supervisor, "stack is up")
        supervisor.kill()
    with _supervisor(tmp_path) as supervisor:
        _read_until(supervisor, "stack is up")
        supervisor.terminate()
        supervisor.communicate(timeout=30)
        assert supervisor.returncode == 0


async def test_processes_of_a_process_end_with_it(tmp_path: Path) -> None:
    """What a process has started and left behind is killed when it exits."""
    code = "import subprocess; print('child pid', subprocess.Popen(['sleep', '600']).pid, flush=True)"
    with pytest.raises(ProcessFailedError):
        async with LocalStack(_only(tmp_path, _python("probe", code))) as stack:
            await stack.wait()
    assert len(_grandchildren(tmp_path)) == 3
    assert _gone(_grandchildren(tmp_path))


# Logs


def test_logs_are_rotated_at_the_start(tmp_path: Path) -> None:
    """A log above its bound is moved aside when it is opened; a reader goes on with the new one."""
    path = tmp_path / "a.log"
    path.write_text("old\n" * 10)
    tail = LogTail(path)
    with open_log(path, max_bytes=20) as log:
        log.write(b"new\n")
    assert path.read_text() == "new\n"
    assert (tmp_path / "a.log.1").exists()
    assert tail.read() == ["new"]
    with open_log(path, max_bytes=20) as log:
        log.write(b"half")
    assert tail.read() == []
    assert tail.read(flush=True) == ["half"]
    assert last_lines(path, 1) == ["half"]
    assert last_lines(tmp_path / "none.log", 3) == []
