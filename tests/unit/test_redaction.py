"""Secrets in texts: log lines, tracebacks, reprs, settings that travel, words of servers; and what is never read."""

from __future__ import annotations

import io
import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import answer, fast_settings, scripted

from forebay.backends import ServerError, make_backend, make_session
from forebay.errors import ForebayError, SettingsError, SlotDataError
from forebay.generation import GenerationHyperparameters
from forebay.http_metrics import HttpSettings, Listen
from forebay.redaction import RedactingFormatter, Redactor, is_secret, without_userinfo
from forebay.settings import EngineSettings, Settings, check_server_url, load
from forebay.store import Store
from forebay.store.connection import connect, connection_pool
from forebay.wire.values import decode_plain, encode_kwargs
from forebay_ops.embedded_redis import RedisHandle
from forebay_ops.process import ProcessSpec
from forebay_ops.specs import LocalStackConfig

SECRET = 'hunter2-"quoted"-ü'
KEY = "sk-0123456789"


class TestRedactor:
    """Texts that others make."""

    @pytest.mark.parametrize(
        ("text", "shown"),
        [
            ("redis://u:p@h:1/0", "redis://***@h:1/0"),
            ("see http://a@b/c, and rediss://:p@ss@h/0.", "see http://***@b/c, and rediss://***@h/0."),
            ("mail me@home.org", "mail me@home.org"),
            ("http://h/0?x=1", "http://h/0?x=1"),
        ],
    )
    def test_urls(self, text: str, shown: str) -> None:
        """User and password of any URL go, and nothing else of it."""
        assert without_userinfo(text) == shown

    def test_what_the_process_was_given(self) -> None:
        """Passwords, tokens and keys of the environment go as they are, encoded, and as JSON has them; words stay."""
        redact = Redactor(
            {"REDIS_URL": "redis://u:p%40ssw0rd@h/0", "FOREBAY_HTTP_TOKEN": SECRET, "FOREBAY_ENGINE_API_KEY": "abc",
             "FOREBAY_MAX_NEW_TOKENS": "4096", "OTHER_TOKEN": "theirs"},
        )  # fmt: skip
        text = f"p%40ssw0rd p@ssw0rd {SECRET} {json.dumps(SECRET)} abc 4096 theirs"
        assert redact(text) == '*** *** *** "***" abc 4096 theirs'

    @given(st.text(alphabet=st.characters(codec="utf-8"), min_size=4), st.text(), st.text())
    def test_any_secret(self, secret: str, before: str, after: str) -> None:
        """Whatever characters a secret has, it does not stand in what is left of a line that had it."""
        if secret in "***":
            return
        redact = Redactor({"FOREBAY_HTTP_TOKEN": secret})
        assert secret not in redact(f"{before} {secret} {after}").replace("***", "\0")

    @pytest.mark.parametrize("name", ["FOREBAY_HTTP_TOKEN", "api_key", "FOREBAY_X_PASSWORD", "token", "client_secret"])
    def test_names_of_secrets(self, name: str) -> None:
        """Settings whose names end so are secrets, counts of tokens are not."""
        assert is_secret(name)
        assert not is_secret("FOREBAY_MAX_NEW_TOKENS")

    def test_logging(self) -> None:
        """Libraries that use the standard library's loggers write none either, nor do their tracebacks."""
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(RedactingFormatter("%(message)s", Redactor({"FOREBAY_HTTP_TOKEN": KEY})))
        logger = logging.getLogger("library")
        logger.addHandler(handler)
        try:
            raise ValueError(f"bad header Bearer {KEY}")
        except ValueError:
            logger.exception("could not call http://u:p@h")
        assert KEY not in stream.getvalue()
        assert "u:p" not in stream.getvalue()
        assert "bad header Bearer ***" in stream.getvalue()


PROGRAM = """
import structlog
from forebay import cli, log

def connect(url):
    note = "local-" + url
    raise RuntimeError("cannot connect to " + url)

def fail(app=None):
    try:
        connect("redis://u:Hidden-w0rd@h/0")
    except RuntimeError:
        structlog.get_logger().error("job.failed", url="redis://u:Hidden-w0rd@h", exc_info=True)
    connect("redis://u:Hidden-w0rd@h/0 Hidden-t0ken")

cli.build_app = lambda: fail
cli.main()
"""


@pytest.mark.parametrize("as_json", ["0", "1"])
def test_a_crash(as_json: str) -> None:
    """A logged traceback has no local variables; neither it nor that of a crash has a password or a token."""
    environment = {"FOREBAY_LOG_JSON": as_json, "FOREBAY_HTTP_TOKEN": "Hidden-t0ken", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    text = done.stdout + done.stderr
    assert text.count("cannot connect to redis://***@h/0") == 2
    assert "job.failed" in text
    assert "Hidden" not in text
    assert "local-redis" not in text


class TestSettings:
    """Secrets among the settings."""

    @pytest.mark.parametrize(
        "kept",
        [load(EngineSettings, api_key=KEY), HttpSettings(token=KEY), Listen(1, token=HttpSettings(token=KEY).token)],
    )
    def test_not_in_texts(self, kept: Any) -> None:
        """Keys and tokens stand in no text form of what holds them."""
        texts = [repr(kept), str(kept), f"{kept}"]
        if hasattr(kept, "model_dump"):
            texts += [kept.model_dump_json(), str(kept.model_dump()), str(dict(kept))]
        assert all(KEY not in text for text in texts)

    def test_a_key_does_not_travel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Settings among a workflow's arguments leave the key behind; a worker has its own."""
        sent = encode_kwargs({"engine": load(EngineSettings, api_key=KEY, request_timeout_s=7)})
        assert KEY not in str(sent)
        monkeypatch.setenv("FOREBAY_ENGINE_API_KEY", "the-workers")
        got = decode_plain(sent)["engine"]
        assert (got.request_timeout_s, got.api_key.get_secret_value()) == (7, "the-workers")

    def test_pickle_is_for_oneself(self) -> None:
        """A pickle of settings holds its secrets, for a process of one's own: nothing of ours writes one anywhere."""
        assert KEY.encode() in pickle.dumps(load(EngineSettings, api_key=KEY))

    @pytest.mark.parametrize(
        "url",
        ["http://u:hidden@h:1", "http://hidden@h", "http://h?key=hidden", "http://h/#hidden@x", "http://h/a@hidden"],
    )
    def test_servers_hold_no_secret(self, url: str) -> None:
        """A server's URL is shown to all: one with a user, a password or a query is refused without quoting it."""
        with pytest.raises(SettingsError) as caught:
            load(Settings, servers=[url])
        assert "hidden" not in f"{caught.value!r}{caught.value.__cause__}"
        with pytest.raises(SettingsError):
            check_server_url(url)

    @pytest.mark.parametrize("url", ["http://h", "https://h:1/", "http://[::1]:3/prefix", "http://10.0.0.1:30000"])
    def test_servers(self, url: str) -> None:
        """A base URL is taken as it is."""
        assert load(Settings, servers=[url]).servers == [url]


@pytest.mark.parametrize(
    "kept",
    [
        RedisHandle(f"redis://:{KEY}@h/0", None, started_here=False),
        LocalStackConfig(redis_url=f"redis://:{KEY}@h/0", env={"FOREBAY_HTTP_TOKEN": KEY}),
        ProcessSpec("x", ("y",), {"REDIS_URL": f"redis://:{KEY}@h/0"}),
        connect(f"rediss://u:{KEY}@h/0"),
        connection_pool(f"redis://u:{KEY}@h/0"),
        Store.open(Settings(REDIS_URL=f"redis://u:{KEY}@h/0")),
    ],
)
def test_reprs(kept: object) -> None:
    """What holds a URL or an environment does not show it."""
    assert KEY not in repr(kept)


class TestServers:
    """What goes to inference servers, and what comes back."""

    async def test_the_key_is_sent(self) -> None:
        """Every call has it, by the header that SGLang and OpenAI's servers take."""
        seen: list[str | None] = []

        async def handle(request: web.Request) -> web.Response:
            seen.append(request.headers.get("Authorization"))
            return web.json_response({})

        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        options = fast_settings(api_key=KEY)
        async with make_session(options) as session:
            backend = make_backend("sglang", f"http://127.0.0.1:{runner.addresses[0][1]}", session, options)
            await backend.model_info()
            await backend.pause("abort")
        await runner.cleanup()
        assert seen == [f"Bearer {KEY}"] * 2

    async def test_a_server_that_quotes_the_key(self) -> None:
        """An error that repeats what was sent has the key taken out: reasons are kept in Redis, and shown."""
        options = fast_settings(api_key=KEY)
        async with scripted() as [server], make_session(options) as session:

            async def step(_: Any) -> web.Response:
                return web.json_response({"error": {"message": f"who is Bearer {KEY}?"}}, status=400)

            server.default = step
            backend = make_backend("sglang", server.url, session, options)
            with pytest.raises(ForebayError, match=r"who is Bearer \*\*\*\?"):
                await backend.generate("r", [1], GenerationHyperparameters(), 4)

    @pytest.mark.parametrize("way", ["length", "chunks", "gzip"])
    async def test_long_answers(self, way: str) -> None:
        """An answer is read to its bound and no further, however it comes: whole, in parts, or compressed."""
        options = fast_settings(max_answer_bytes=4096)
        body = json.dumps({**answer([1]), "padding": "x" * 50_000_000}).encode()

        async def step(_: Any) -> web.StreamResponse:
            response = web.Response(body=body)
            if way == "chunks":
                response.enable_chunked_encoding()
            if way == "gzip":
                response.enable_compression(web.ContentCoding.gzip)
            return response

        async with scripted() as [server], make_session(options) as session:
            server.default = step
            backend = make_backend("sglang", server.url, session, options)
            with pytest.raises(SlotDataError, match="longer than FOREBAY_ENGINE_MAX_ANSWER_BYTES=4096"):
                await backend.generate("r", [1], GenerationHyperparameters(), 4)
            server.info = {"model_path": "x" * 5000}
            with pytest.raises(ServerError, match="longer than"):
                await backend.model_info()


FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle", "yaml"}
MAY_PICKLE = {"reward_pool.py"}
"""Between a worker and the processes that it has itself started, over their pipes."""


def test_nothing_unpickles() -> None:
    """9: no module imports what could run code while it reads, none calls eval, exec or an unpickling loader."""
    import ast

    root = Path(__file__).parents[2]
    found = []
    for path in [file for name in ("shared", "workers", "collector", "ops") for file in (root / name).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            bad = any(name.split(".")[0] in FORBIDDEN for name in names) and path.name not in MAY_PICKLE
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                bad |= called in {"eval", "exec", "torch.load", "np.load", "numpy.load"}
                remote = [word for word in node.keywords if word.arg == "trust_remote_code"]
                if called.endswith("from_pretrained"):  # code that comes with a model is never run
                    bad |= [ast.unparse(word.value) for word in remote] != ["False"]
            if bad:
                found.append(f"{path.name}:{node.lineno}")
    assert found == []
