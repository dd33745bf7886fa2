"""A stack of processes that is given secrets in every place that takes one, under faults: no text shows one of them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import aiohttp
import guarded_redis
import psutil
import pytest
from aiohttp import web
from guarded_redis import Guarded
from scripted_server import answer

from forebay.store.acl import Role, rules
from forebay.store.keys import Keys
from forebay_ops.control import call

PASSWORD = "Rvx-p4ss/w0rd@%"
TOKEN = "Rvx-http-t0ken"
API_KEY = "Rvx-engine-k3y"
USERINFO = "Rvx-us3rinfo"
SECRETS = (PASSWORD, quote(PASSWORD, safe=""), TOKEN, API_KEY, USERINFO, "Rvx-")
RUN = "secrets/trial0"
WORKFLOW = "pipeline_workflows.EchoWorkflow"


@dataclass
class Engine:
    """An inference server that asks for a key."""

    asked_without: int = 0
    asked: int = 0
    url: str = ""
    broken: bool = False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer as SGLang does, or with an error that quotes what it was sent, as servers do."""
        if request.headers.get("Authorization") != f"Bearer {API_KEY}":
            self.asked_without += 1
            return web.json_response({"error": {"message": "no key"}}, status=401)
        self.asked += 1
        if self.broken:
            return web.json_response({"error": {"message": f"bad headers: {dict(request.headers)}"}}, status=500)
        if request.path == "/model_info":
            return web.json_response({"model_path": "m", "weight_version": "0", "vocab_size": 1000})
        return web.json_response(answer([7, 8, 9]))


@asynccontextmanager
async def engine() -> AsyncIterator[Engine]:
    """One that runs."""
    made = Engine()
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", made.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield made
    finally:
        await runner.cleanup()


@dataclass
class Commands:
    """Runs `forebay`, and keeps all that was said."""

    environment: dict[str, str]
    home: Path
    said: dict[str, str] = field(default_factory=dict)

    async def run(self, *words: str, **more: str) -> str:
        """The output of a command."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "forebay", *words, env={**self.environment, **more},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await asyncio.wait_for(process.communicate(), 250)
        self.said[" ".join(words) + f" [{len(self.said)}]"] = text = output.decode(errors="replace")
        return text

    def logs(self) -> str:
        """What the processes have written."""
        return "".join(path.read_text(errors="replace") for path in sorted((self.home / "logs").glob("*.log")))

    async def until_logged(self, *events: str) -> None:
        """Wait for one of the events in the logs, for at most 90 s."""
        await until(lambda: any(event in self.logs() for event in events))


async def until(done: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait for a condition, for at most 90 s."""
    async with asyncio.timeout(90):
        while True:
            found = done()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.1)


async def scrape(url: str, token: str | None) -> tuple[int, str]:
    """Status and text of a scrape."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        return response.status, await response.text()


def command_lines(pid: int) -> str:
    """Those of a process and of all that it has started, as anybody on the host may read them."""
    found = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return "\n".join(Path(f"/proc/{one.pid}/cmdline").read_text().replace("\0", " ") for one in found)


def leaks(commands: Commands) -> dict[str, list[str]]:
    """Which secrets stand in which text or file."""
    files = {
        str(path): path.read_text(errors="replace")
        for path in commands.home.rglob("*")
        if path.is_file() and not path.is_socket()
    }
    found = {}
    for name, text in {**commands.said, **files}.items():
        if hits := [secret for secret in SECRETS if secret in text]:
            found[name] = hits
    return found


@pytest.fixture
def binary() -> Path:
    """A server, with TLS if there is one."""
    found = guarded_redis.tls_binary() or next(iter(guarded_redis.binaries().values()), None)
    if found is None:
        pytest.skip("no Redis server here")
    return found


def redis_url(server: Guarded, tls: str | None) -> str:
    """For one user who may do all that the roles do."""
    merged = [word for role in Role for word in rules(role, RUN).split() if word.startswith("+")]
    keys = [word for word in rules(Role.COLLECTOR, RUN).split() if word.startswith("~")]
    server.admin.execute_command("ACL", "SETUSER", "stack", "reset", "on", f">{PASSWORD}", *keys, *merged)
    return server.url("stack", PASSWORD, tls=tls)


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_no_text_shows_a_secret(binary: Path, tmp_path: Path) -> None:
    """9: logs, errors, tracebacks, status, metrics, state files and command lines, in good and in bad times."""
    (data := tmp_path / "redis").mkdir()
    home = tmp_path / "home"
    certificates = None
    if guarded_redis.has_tls(binary):
        (folder := tmp_path / "tls").mkdir()
        certificates = guarded_redis.Certificates.make(folder)
    tls = None if certificates is None else f"ssl_ca_certs={certificates.file('ca.pem')}"
    with guarded_redis.guarded(binary, data, tls=certificates) as server:
        url = redis_url(server, tls)
        ports = guarded_redis.free_port(), guarded_redis.free_port()
        async with engine() as served:
            environment = {
                **{name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")},
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
                "REDIS_URL": url,
                "FOREBAY_EXPERIMENT_NAME": "secrets",
                "FOREBAY_HOME": str(home),
                "FOREBAY_SERVERS": served.url,
                "FOREBAY_ENGINE_API_KEY": API_KEY,
                "FOREBAY_ENGINE_HEALTH_INTERVAL_S": "0.2",
                "FOREBAY_HTTP_TOKEN": TOKEN,
                "FOREBAY_COLLECTOR_HTTP_PORT": str(ports[0]),
                "FOREBAY_WORKER_METRICS_PORT": str(ports[1]),
                "FOREBAY_WORKER_TRACE_DIR": str(home / "traces"),
                "FOREBAY_IMPORT_ALLOWLIST": "pipeline_workflows",
                "FOREBAY_BATCH_SIZE": "1",
                "FOREBAY_LEASE_S": "2",
                "FOREBAY_REDIS_TIMEOUT_S": "3",
            }
            commands = Commands(environment, home)
            stack = asyncio.create_task(commands.run("up", "--no-server", "--workers", "1"))
            try:
                await commands.until_logged("worker.ready")
                await _good_times(commands, served, server, ports)
                await _bad_times(commands, served, server)
                # The user is taken away: the services end, are started again, and refused.
                server.admin.execute_command("ACL", "SETUSER", "stack", "resetpass", ">another")
                server.admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                await commands.until_logged("refused the user 'stack' with the password in REDIS_URL")
                assert "Traceback" in await commands.run("status", FOREBAY_DEBUG="1")
            finally:
                if not stack.done():
                    await commands.run("down")
                    await asyncio.wait([stack], timeout=90)
    assert leaks(commands) == {}
    modes = {path.stat().st_mode & 0o077 for path in [home / "logs", *(home / "logs").iterdir()]}
    assert modes == {0}


async def _good_times(commands: Commands, served: Engine, server: Guarded, ports: tuple[int, int]) -> None:
    prompts = commands.home / "prompts.jsonl"
    prompts.write_text('{"ids": [1, 2]}\n{"ids": [3], "action": "raise"}\n')
    await commands.run("submit", str(prompts), "--workflow", WORKFLOW, "--group-size", "1")
    assert "batch 1" in await commands.run("batches", "--count", "1", "--timeout", "30")
    assert served.asked > 0
    assert served.asked_without == 0
    # Somebody's own hand in the registry: a URL that no setting would have let pass.
    server.admin.sadd(Keys(RUN).servers, f"http://admin:{USERINFO}@127.0.0.1:1")
    await commands.until_logged("server.added                   server=http://***@127.0.0.1:1", "***@127.0.0.1:1")
    status = await commands.run("status")
    assert "http://127.0.0.1:1" in status
    for port, name in zip(ports, ("forebay_run_stopped", "forebay_worker_slots"), strict=True):
        where = f"http://127.0.0.1:{port}/metrics"
        assert (await scrape(where, None))[0] == 401
        code, commands.said[where] = await scrape(where, TOKEN)
        assert (code, name in commands.said[where]) == (200, True)
    commands.said["control"] = str(await asyncio.to_thread(call, commands.home, "status"))
    pid = call(commands.home, "status")["state"]["pid"]
    commands.said["cmdline"] = lines = command_lines(pid)
    assert "forebay worker" in lines


async def _bad_times(commands: Commands, served: Engine, server: Guarded) -> None:
    served.broken = True
    await commands.run("submit", str(commands.home / "prompts.jsonl"), "--workflow", WORKFLOW, "--group-size", "1")
    await commands.until_logged("server.down", "server.failed", "server.suspect", "HTTP 500")
    server.process.send_signal(signal.SIGSTOP)
    try:
        await commands.until_logged("redis.away")
        await commands.run("status")
    finally:
        server.process.send_signal(signal.SIGCONT)
    served.broken = False
    for words, variables in (
        (("worker",), {"FOREBAY_SERVERS": f"http://admin:{USERINFO}@h:1"}),
        (("collector",), {"FOREBAY_HTTP_TOKENS": TOKEN, "FOREBAY_COLLECTOR_HTTP_PORT": "x"}),
        (("worker",), {"FOREBAY_WORKER_METRICS_HOST": "0.0.0.0", "FOREBAY_HTTP_TOKEN": ""}),
        (("status",), {"REDIS_URL": f"redis://stack:{USERINFO}@127.0.0.1:{server.port}/0"}),
        (("serve-tiny", "--model", "/nothing"), {}),
        (("dead", "list"), {}),
        (("drops",), {}),
        (("poison",), {}),
    ):
        await commands.run(*words, **variables)
