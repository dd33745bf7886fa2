"""Commands for the processes on this machine: ``forebay up``, ``down``, ``status``, ``logs``, ``scale`` and others.

Whatever is slow to import is imported by the command that needs it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from forebay.errors import ModelFolderError, SettingsError
from forebay_ops.tiny_server.cli import serve_tiny

if TYPE_CHECKING:
    from forebay_ops.specs import LocalStackConfig
    from forebay_ops.state import StackState
    from forebay_ops.terminal import Terminal

__all__ = ["register"]

_DOWN_TIMEOUT_S = 90.0
_SCALE_TIMEOUT_S = 240.0
_POLL_S = 0.1


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command("up")(up)
    app.command("down")(down)
    app.command("status")(status)
    app.command("logs")(logs)
    app.command("scale")(scale)
    app.command("serve-tiny")(serve_tiny)
    app.command("redis")(redis_server)


def up(
    workers: Annotated[int, typer.Option(min=0, help="Worker processes.")] = 2,
    model: Annotated[
        Path | None, typer.Option(help="Model folder [default: a tiny demo model, made at the first start].")
    ] = None,
    server_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the inference server; 0 takes a free one.")
    ] = 30000,
    server: Annotated[
        bool, typer.Option(help="Start an inference server; without, FOREBAY_SERVERS names those to use.")
    ] = True,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once all is ready.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not show the processes' log lines.")] = False,
) -> None:
    """Start Redis, an inference server, the collector and workers here; stay until Ctrl-C or `forebay down`."""
    home = _home()
    if detach:
        _up_detached(home)
        return
    from forebay_ops.errors import AlreadyUpError
    from forebay_ops.specs import LocalStackConfig
    from forebay_ops.terminal import Terminal

    terminal = Terminal(quiet=quiet)
    _check_settings(terminal, server=server)
    config = LocalStackConfig(
        home=home,
        workers=workers,
        model_path=model or home / "models" / "tiny",
        server_port=server_port,
        server_count=1 if server else 0,
        terminal=terminal,
    )
    if server and model is not None and not (model / "config.json").is_file():
        raise ModelFolderError(f"{model} is no model folder: it has no config.json; give --model a Hugging Face folder")
    try:
        asyncio.run(_run(config, terminal, make_model=server and model is None))
    except AlreadyUpError as error:
        _fail(str(error))


def _check_settings(terminal: Terminal, *, server: bool) -> None:
    """What a process would refuse is refused before any is started."""
    from forebay.settings import EngineSettings, RunSettings, Settings, load, unknown_variables
    from forebay_workers.settings import WorkerSettings

    load(RunSettings)
    load(EngineSettings)
    load(WorkerSettings)
    for name, meant in unknown_variables(os.environ):
        terminal.progress("settings", f"{name} is no setting of forebay{f'; did you mean {meant}?' if meant else ''}")
    if not server and not load(Settings).servers:
        terminal.progress("settings", "--no-server without FOREBAY_SERVERS: workers wait until a server is registered")


async def _run(config: LocalStackConfig, terminal: Terminal, *, make_model: bool) -> None:
    from forebay_ops.supervisor import LocalStack

    stack = LocalStack(config)
    if make_model and config.model_path is not None and not config.model_path.exists():
        stack.check()  # what would be refused is refused before the slow part
        terminal.progress("model", f"making the tiny demo model in {config.model_path} (once, takes seconds)")
        from forebay_ops.tiny_model import create_tiny_model

        create_tiny_model(config.model_path)
    async with stack:
        terminal.progress("forebay", f"up (pid {os.getpid()}); stop with Ctrl-C or `forebay down`")
        await stack.wait()
    terminal.progress("forebay", "down")


def _up_detached(home: Path) -> None:
    """Run the same command without ``--detach`` in a session of its own, and show its start."""
    from forebay_ops.logs import LogTail, last_lines, open_log
    from forebay_ops.state import read_live_state

    if (state := read_live_state(home)) is not None:
        _fail(f"already up in {home}: supervisor pid {state.pid}; stop it with `make down` or `forebay down`")
    words = [word for word in _own_arguments() if word not in ("--detach", "-d")]
    log = home / "logs" / "supervisor.log"
    with open_log(log) as output:
        tail = LogTail(log)
        process = subprocess.Popen(  # noqa: S603 - our own command line
            [sys.executable, "-m", "forebay", *words, "--quiet"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        while process.poll() is None:
            for line in tail.read():
                typer.echo(line)
            state = read_live_state(home)
            if state is not None and state.pid == process.pid and state.phase == "up":
                typer.echo(f"up in the background (pid {process.pid}); log: {log}; stop with `forebay down`")
                return
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        process.terminate()  # it stops what it has started
        process.wait(_DOWN_TIMEOUT_S)
        _fail("interrupted: nothing is up")
    for line in tail.read(flush=True):
        typer.echo(line)
    reason = "".join(last_lines(log, 1)).removeprefix("error: ")
    _fail(f"the local processes did not start: {reason or 'no output'} (log: {log})")


def _own_arguments() -> list[str]:
    """The words of this command line after the program's name."""
    return sys.argv[1:]


def down() -> None:
    """Stop everything that runs in this home."""
    home = _home()
    from forebay_ops import embedded_redis
    from forebay_ops.state import clear_stale, read_live_state

    state = read_live_state(home)
    if state is not None:
        typer.echo(f"stopping {len(state.processes)} processes (supervisor pid {state.pid})")
        _stop_supervisor(home, state)
    killed = clear_stale(home)
    pid = embedded_redis.stop_running(home)  # one that `forebay redis` or a crashed program left running
    if pid is not None:
        typer.echo(f"stopped the embedded Redis (pid {pid})")
    if state is None and not killed and pid is None:
        typer.echo(f"nothing is up in {home}")
    else:
        typer.echo("down")


def _stop_supervisor(home: Path, state: StackState) -> None:
    from forebay_ops.control import call
    from forebay_ops.errors import NotUpError, StackFailedError
    from forebay_ops.spawning import is_alive, terminate

    try:
        call(home, "stop")
    except (NotUpError, StackFailedError):  # it takes no commands: a signal does the same
        if is_alive(state.pid, state.create_time):
            os.kill(state.pid, signal.SIGTERM)
    deadline = time.monotonic() + _DOWN_TIMEOUT_S
    while is_alive(state.pid, state.create_time):
        if time.monotonic() > deadline:
            typer.echo(f"the supervisor did not end within {_DOWN_TIMEOUT_S:g} s: killing it and its processes")
            terminate(state.pid, state.create_time, grace_s=0)
            return
        time.sleep(_POLL_S)


def status() -> None:
    """Show the processes of this home, and where the groups of the run are."""
    home = _home()
    from forebay_ops.state import read_live_state

    state = read_live_state(home)
    if state is None:
        typer.echo(f"nothing is up in {home}: start it with `make up` or `forebay up`")
    else:
        _print_processes(home, state)
    if os.environ.get("REDIS_URL") or state is not None:
        from forebay.cli_client import print_run

        print_run()
    if state is None:
        raise typer.Exit(3)


def _print_processes(home: Path, state: StackState) -> None:
    from rich.console import Console
    from rich.table import Table

    from forebay_ops.state import ProcessRecord

    rows: list[ProcessRecord] = state.processes
    table = Table(title=f"{home}: {state.phase}, supervisor pid {state.pid}", title_justify="left")
    for column in ("process", "state", "pid", "uptime", "restarts", "address"):
        justify: Any = "right" if column in ("pid", "uptime", "restarts") else "left"
        table.add_column(column, justify=justify, overflow="fold" if column == "address" else "ellipsis")
    colours = {"ready": "green", "starting": "yellow", "waiting": "red", "failed": "red"}
    for row in rows:
        colour = colours.get(row.state, "dim")
        uptime = _duration(time.time() - row.create_time) if row.pid and row.create_time else ""
        pid = str(row.pid or "")
        table.add_row(row.name, f"[{colour}]{row.state}[/]", pid, uptime, str(row.restarts), row.address)
    Console().print(table)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def logs(
    name: Annotated[str | None, typer.Argument(help="One process; a prefix such as `worker` takes several.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Lines of each log to begin with.")] = 20,
) -> None:
    """Show the processes' logs, also of a stack that is down."""
    home = _home()
    from forebay_ops.logs import follow as follow_logs
    from forebay_ops.logs import last_lines
    from forebay_ops.terminal import Terminal

    every = {path.stem: path for path in sorted((home / "logs").glob("*.log"))}
    if (redis_log := home / "redis" / "server.log").exists():
        every["redis"] = redis_log
    chosen = {key: path for key, path in every.items() if name is None or key == name or key.startswith(f"{name}-")}
    if not chosen:
        known = ", ".join(every) or "none yet"
        raise SettingsError(f"no log {name!r} in {home}: there are {known}" if name else f"no logs in {home} yet")
    terminal = Terminal()
    for key, path in chosen.items():
        for line in last_lines(path, lines):
            terminal.line(key, line)
    if follow:
        try:
            for key, line in follow_logs(chosen, stop=lambda: False):
                terminal.line(key, line)
        except KeyboardInterrupt:
            raise typer.Exit(0) from None


def scale(workers: Annotated[int, typer.Option(min=0, help="Worker processes to run from now on.")]) -> None:
    """Change the number of workers of the stack that is up."""
    home = _home()
    from forebay_ops.control import call

    call(home, "scale", workers=workers, timeout_s=_SCALE_TIMEOUT_S)
    typer.echo(f"{workers} workers are up")


def redis_server(
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port [default: 6390 if free, else any].")] = None,
) -> None:
    """Run only the embedded Redis, in the foreground."""
    home = _home()
    from forebay_ops.embedded_redis import ensure_redis

    with _interruptible(), ensure_redis(home, port=port, report=lambda text: typer.echo(f"redis {text}")) as handle:
        if not handle.started_here:
            _fail(f"the embedded Redis of {home} is up already: pid {handle.pid}, {handle.url}")
        typer.echo("stop with Ctrl-C")
        code = handle.wait()
        if code != 0:
            _fail(f"the embedded Redis ended with code {code}; its log: {home / 'redis' / 'server.log'}")
        typer.echo("redis was stopped from elsewhere")


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, and ending it so is no failure."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("stopped")
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _settings() -> Any:
    from forebay.settings import Settings, load

    return load(Settings)


def _home() -> Path:
    """The home of the local processes; checks that what they need is installed."""
    if importlib.util.find_spec("psutil") is None:
        raise SettingsError("the local processes need the demo extra: pip install 'forebay[demo]'")
    return Path(_settings().home).resolve()


def _fail(text: str) -> NoReturn:
    typer.secho(text, fg=typer.colors.RED, err=True)
    raise typer.Exit(1)
