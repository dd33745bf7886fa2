"""The command that serves a model folder. Torch is imported late: a bad start is told within a blink."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from forebay.http_metrics import is_loopback
from forebay_ops.tiny_server.folder import ModelError, check_folder

if TYPE_CHECKING:
    from forebay_ops.tiny_server.engine import Engine

# The engine's thread gives the interpreter lock away at every torch call; at Python's 5 ms it would often wait that
# long to get it back from the event loop.
_SWITCH_INTERVAL_S = 0.0002

KEY_VARIABLE = "FOREBAY_ENGINE_API_KEY"
"""The setting by which workers and trainers send the key, so that one variable sets a stack up."""


class LogLevel(StrEnum):
    """Least severe log message that is shown."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def serve_tiny(
    model: Annotated[Path, typer.Option(help="Hugging Face model folder (config.json and safetensors).")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 30000,
    max_running: Annotated[int, typer.Option(min=1, help="Requests in the running batch.")] = 256,
    max_queued: Annotated[int, typer.Option(min=1, help="Requests that may wait; above it the answer is 503.")] = 10000,
    context_length: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt plus completion, in tokens [default: the model's].")
    ] = None,
    weight_version: Annotated[str, typer.Option(help="Label of the weights in the folder.")] = "0",
    torch_threads: Annotated[int, typer.Option(min=1, help="Threads of one forward pass.")] = 1,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=KEY_VARIABLE,
            show_envvar=False,
            help=f"Requests must send it as `Authorization: Bearer KEY`. Give it in {KEY_VARIABLE}, where workers and "
            "trainers have it too: command lines are public on a host.",
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen off loopback without --api-key: on a closed network only.")
    ] = False,
    log_level: Annotated[LogLevel, typer.Option(help="Least severe message to log.")] = LogLevel.WARNING,
) -> None:
    """Serve a small model on CPU behind SGLang's HTTP protocol, for development."""
    logging.basicConfig(level=log_level.value.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if not api_key and not insecure and not is_loopback(host):
        _refuse(
            f"--host {host} can be reached from other machines, and whoever reaches it can load weights: set "
            f"{KEY_VARIABLE} here, for workers and for trainers, or pass --insecure on a closed network, or listen on "
            "127.0.0.1"
        )
    try:
        check_folder(model)
    except ModelError as error:
        _refuse(str(error))
    listener = _bind(host, port)
    try:
        from forebay_ops.tiny_server.engine import Engine, EngineSettings
        from forebay_ops.tiny_server.model import ServedModel
    except ModuleNotFoundError as error:
        _refuse(f"{error.name} is not installed: pip install 'forebay[demo]'")
    try:
        served = ServedModel.load(model, context_length)
    except ModelError as error:
        _refuse(str(error))
    settings = EngineSettings(max_running=max_running, max_queued=max_queued, torch_threads=torch_threads)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    asyncio.run(_serve(Engine(served, settings, weight_version), listener, api_key or None))


async def _serve(engine: Engine, listener: socket.socket, api_key: str | None) -> None:
    from aiohttp import web

    from forebay_ops.tiny_server.app import create_runner

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    runner = create_runner(engine, api_key)
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=1024).start()
        host, port = listener.getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        print(
            f"forebay tiny server: ready on http://{address} model={engine.model.path} version={engine.weight_version}",
            flush=True,
        )
        await stop.wait()
    finally:
        await runner.cleanup()


def _bind(host: str, port: int) -> socket.socket:
    """Take the port before the slow start, so that a conflict shows at once; it listens once the model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            _refuse(f"port {port} on {host} is in use: stop the other process or pass --port")
        _refuse(f"cannot listen on {host} port {port} ({error.strerror or error}): pass another --host or --port")
    return listener


def _refuse(message: str) -> NoReturn:
    print(f"forebay tiny server: {message}", file=sys.stderr)
    raise typer.Exit(code=2)
