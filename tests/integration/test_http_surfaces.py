"""9: every HTTP surface is on loopback unless told otherwise, and elsewhere wants a token."""

from __future__ import annotations

import asyncio
import io
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from forebay.backends import make_backend, make_session
from forebay.errors import SettingsError
from forebay.http_metrics import HttpSettings, Listen, MetricsServer
from forebay.settings import EngineSettings

TOKEN = "t0k3n-of-the-test"
ASKED = [
    ("POST", "/generate"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/pause_generation"),
    ("POST", "/flush_cache"),
    ("GET", "/model_info"),
    ("GET", "/server_info"),
    ("GET", "/v1/models"),
    ("GET", "/nothing"),
]
OPEN = ["0.0.0.0", "::", "10.1.2.3", "somewhere.example"]


def _environment(**variables: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    return {**clean, "OMP_NUM_THREADS": "1", **variables}


async def _run(*words: str, **variables: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "forebay", *words, env=_environment(**variables),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, output.decode()


@pytest.mark.parametrize("host", OPEN)
def test_metrics_are_refused_without_a_token(host: str) -> None:
    """Collector and worker: a host that others can reach is an error before anything listens."""
    with pytest.raises(
        SettingsError, match=r"METRICS_HOST=.* can be reached from other machines: set FOREBAY_HTTP_TOKEN"
    ):
        MetricsServer(_render, Listen(0, host, None, host_setting="METRICS_HOST"))


async def _render() -> bytes:
    return b"metrics 1\n"


@pytest.mark.parametrize("given", [None, "", "Bearer ", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"bearer {TOKEN}"])
async def test_metrics_with_a_token(given: str | None) -> None:
    """With a token all that has it not, or something else, gets 401; also text that is no ASCII."""
    async with MetricsServer(_render, Listen(0, "0.0.0.0", HttpSettings(token=TOKEN).token)) as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        async with aiohttp.ClientSession() as session:
            headers = {} if given is None else {"Authorization": given}
            async with session.get(url, headers=headers) as response:
                assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
                assert TOKEN not in await response.text()
            async with session.get(url, headers={"Authorization": f"Bearer {TOKEN}"}) as response:
                assert (response.status, await response.read()) == (200, b"metrics 1\n")
            async with session.post(url, data=b"x", headers={"Authorization": "Bearer ü"}) as response:
                assert response.status == 405


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (("worker",), {"FOREBAY_WORKER_METRICS_PORT": "0", "FOREBAY_WORKER_METRICS_HOST": "0.0.0.0"}),
        (("collector",), {"FOREBAY_COLLECTOR_HTTP_PORT": "0", "FOREBAY_COLLECTOR_HTTP_HOST": "0.0.0.0"}),
        (("serve-tiny", "--model", ".", "--host", "0.0.0.0", "--port", "0"), {}),
        (("serve-tiny", "--model", ".", "--host", "0.0.0.0", "--port", "0"), {"FOREBAY_ENGINE_API_KEY": ""}),
    ],
)
async def test_services_refuse_to_start(redis_url: str, words: tuple[str, ...], variables: dict[str, str]) -> None:
    """Each service says at start which setting is missing, and ends with code 2."""
    code, said = await _run(*words, **variables, REDIS_URL=redis_url, FOREBAY_EXPERIMENT_NAME="http-surfaces",
                            FOREBAY_WORKER_WAIT_FOR_RUN_S="1")  # fmt: skip
    assert code == 2, said
    assert "can be reached from other machines" in said
    assert "Traceback" not in said


@asynccontextmanager
async def _tiny(model: Path, *words: str, **variables: str) -> AsyncIterator[str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "forebay", "serve-tiny", "--model", str(model), "--port", "0", *words,
        env=_environment(**variables), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(90):
            while True:
                line = (await process.stdout.readline()).decode()
                assert line, "it ended"
                if found := re.search(r"ready on http://\S+:(\d+)", line):
                    break
        yield f"http://127.0.0.1:{found[1]}"
    finally:
        process.terminate()
        await process.wait()


async def test_the_development_server_with_a_key(tmp_path: Path) -> None:
    """Off loopback with a key: whoever has it is served, others get 401 whatever they ask, and may ask for health."""
    pytest.importorskip("torch")
    from forebay_ops.tiny_model import create_tiny_model

    model = create_tiny_model(tmp_path / "model", seed=0)
    async with _tiny(model, "--host", "0.0.0.0", FOREBAY_ENGINE_API_KEY=TOKEN) as url:
        async with aiohttp.ClientSession() as session:
            for given in (None, "Bearer x", TOKEN, "Bearer ü"):
                headers = {} if given is None else {"Authorization": given}
                for method, path in ASKED:
                    async with session.request(method, url + path, json={}, headers=headers) as response:
                        assert (path, response.status) == (path, 401)
            async with session.get(url + "/health") as response:
                assert response.status == 200
        settings = EngineSettings(api_key=TOKEN)
        async with make_session(settings) as session:
            assert (await make_backend("sglang", url, session, settings).model_info()).version == 0


async def test_bodies_of_the_development_server_are_bounded(tmp_path: Path) -> None:
    """What is too long or too deep is refused, and the server goes on."""
    pytest.importorskip("torch")
    from forebay_ops.tiny_model import create_tiny_model

    model = create_tiny_model(tmp_path / "model", seed=0)
    async with _tiny(model, "--host", "0.0.0.0", "--insecure") as url, aiohttp.ClientSession() as session:
        for body, status in ((b" " * (65 * 2**20), 413), (b"[" * 100_000, 400), (b'{"input_ids": 1}', 400)):
            async with session.post(url + "/generate", data=io.BytesIO(body)) as response:
                assert response.status == status
        async with session.get(url + "/model_info") as response:
            assert response.status == 200


def test_the_compose_file() -> None:
    """All that the compose file publishes is on loopback, and what it runs does start."""
    yaml = pytest.importorskip("yaml")
    compose = yaml.safe_load((Path(__file__).parents[2] / "ops" / "compose.yaml").read_text())
    for service in compose["services"].values():
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", []))
    server = compose["services"]["server"]
    assert "--host 0.0.0.0 --insecure" in server["command"][0]
    assert "/health'" in server["healthcheck"]["test"][-1]
    assert server["environment"]["FOREBAY_ENGINE_API_KEY"] == "${FOREBAY_ENGINE_API_KEY:-}"
