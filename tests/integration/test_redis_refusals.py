"""What a Redis that refuses, or the wrong kind of URL, looks like to who connects: one line, soon, without a secret."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import guarded_redis
import pytest
from guarded_redis import Certificates, Guarded

from forebay import AsyncClient, Settings
from forebay.errors import ConnectionLostError, ForebayError, RedisRefusedError, SettingsError
from forebay.store import Store
from forebay_ops.embedded_redis import check_url

SECRET = "s3cr3t-of-nobody"


@pytest.fixture(scope="module", params=["valkey", "redis"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server with a password and no TLS."""
    binary = guarded_redis.binaries().get(request.param)
    if binary is None:
        pytest.skip(f"no {request.param} server here")
    with guarded_redis.guarded(binary, tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """A CA and what it has signed."""
    if guarded_redis.tls_binary() is None:
        pytest.skip(guarded_redis.NO_TLS)
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_server(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server with a password and TLS."""
    binary = guarded_redis.tls_binary()
    assert binary is not None
    with guarded_redis.guarded(binary, tmp_path_factory.mktemp("tls"), tls=certificates) as running:
        yield running


def told(url: str, *, timeout_s: float = 0.5) -> str:
    """What a client is told at once of `url`, the same as the supervisor's look at it; neither holds a secret."""

    async def ask() -> None:
        store = Store.open(Settings(REDIS_URL=url, redis_timeout_s=timeout_s))
        try:
            await store.ping()
        finally:
            await store.close()

    texts = []
    for look in (lambda: asyncio.run(ask()), lambda: check_url(url)):
        began = time.monotonic()
        with pytest.raises(ForebayError) as caught:
            look()
        assert time.monotonic() - began < 16
        text = str(caught.value)
        assert "\n" not in text
        assert not any(secret in f"{text} {caught.value!r}" for secret in (SECRET, guarded_redis.ADMIN, "adm1n"))
        texts.append(f"{type(caught.value).__name__}: {text}")
    return texts[0]


PLAIN: dict[str, tuple[Callable[[Guarded], str], str]] = {
    "wrong password": (lambda s: s.url(password=SECRET), "RedisRefusedError.*refused the user 'default'"),
    "no password": (lambda s: s.url(password=""), "RedisRefusedError.*asks for a password: set REDIS_URL"),
    "unknown user": (lambda s: s.url("nobody", SECRET), "RedisRefusedError.*refused the user 'nobody'.*ACL LIST"),
    "TLS to a plain port": (
        lambda s: s.url("u", SECRET).replace("redis:", "rediss:"), "ConnectionLostError.*TLS falls silent.*redis://",
    ),
    "unknown option": (lambda s: s.url("u", SECRET) + f"?pass={SECRET}", "SettingsError: an option after the"),
    "option of TLS": (lambda s: s.url("u", SECRET) + f"?ssl_ca_certs={SECRET}", "SettingsError: .* rediss:// only"),
    "no URL": (lambda _: f"redis://u:{SECRET}@[/0", "SettingsError: REDIS_URL is no Redis URL"),
    "a / in the password": (lambda _: f"redis://u:12/{SECRET}@127.0.0.1:1/0", "SettingsError: .* percent-encoded"),
    "a ? in the password": (lambda _: f"redis://u:12?{SECRET}@127.0.0.1:1/0", "SettingsError: .* percent-encoded"),
    "an @ in the password": (lambda _: f"redis://u:12@{SECRET}@127.0.0.1:1/0", "SettingsError: .* percent-encoded"),
    "a # in the password": (lambda _: f"redis://u:12#{SECRET}@127.0.0.1:1/0", "SettingsError: .* percent-encoded"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_plain(server: Guarded, name: str) -> None:
    """9: wrong, missing or malformed credentials are one clear line at once, in every client."""
    make, expected = PLAIN[name]
    text = told(make(server))
    assert re.search(expected, text), text


def test_a_password_where_there_is_none(tmp_path: Path) -> None:
    """9: a password for a server without one is told as that."""
    binary = next(iter(guarded_redis.binaries().values()), None)
    if binary is None:
        pytest.skip("no server here")
    with guarded_redis.guarded(binary, tmp_path, password="") as running:
        assert "has no password, but REDIS_URL gives one" in told(running.url(password=SECRET))


class TestTls:
    """9: what goes wrong with certificates is told with the remedy."""

    def test_it_works(self, tls_server: Guarded, certificates: Certificates) -> None:
        """The password, TLS and a CA of one's own: client and supervisor connect."""
        url = tls_server.url(tls=f"ssl_ca_certs={certificates.file('ca.pem')}")

        async def ask() -> None:
            store = Store.open(Settings(REDIS_URL=url))
            await store.ping()
            await store.close()

        asyncio.run(ask())
        check_url(url)

    @pytest.mark.parametrize("authority", ["", "other-ca.pem"])
    def test_unknown_authority(self, tls_server: Guarded, certificates: Certificates, authority: str) -> None:
        """A CA that nobody has vouched for."""
        tls = f"ssl_ca_certs={certificates.file(authority)}" if authority else ""
        text = told(tls_server.url(tls=tls))
        assert text.startswith("RedisRefusedError")
        assert "certificate that is not trusted (" in text
        assert "?ssl_ca_certs=FILE" in text

    @pytest.mark.parametrize(("name", "why"), [("expired", "expired"), ("elsewhere", "IP address mismatch")])
    def test_bad_certificate(self, certificates: Certificates, tmp_path: Path, name: str, why: str) -> None:
        """A certificate that is over, or is another host's, of the right CA: host names are checked by themselves."""
        binary = guarded_redis.tls_binary()
        assert binary is not None
        with guarded_redis.guarded(binary, tmp_path, tls=certificates, certificate=name) as running:
            ca = f"ssl_ca_certs={certificates.file('ca.pem')}"
            text = told(running.url(tls=ca))
            assert text.startswith("RedisRefusedError")
            assert why in text
            if name == "elsewhere":  # whoever wants that can have it
                check_url(running.url(tls=f"{ca}&ssl_check_hostname=false"))

    @pytest.mark.parametrize("file", ["nothing.pem", "server.key"])
    def test_bad_file(self, tls_server: Guarded, certificates: Certificates, file: str) -> None:
        """A CA's file that is not there, or is none."""
        text = told(tls_server.url(tls=f"ssl_ca_certs={certificates.file(file)}"))
        assert text.startswith("RedisRefusedError")
        assert "ssl_ca_certs" in text

    def test_plain_to_a_port_for_tls(self, tls_server: Guarded) -> None:
        """What hangs up at the first byte may be a port for TLS."""
        text = told(tls_server.url().replace(str(tls_server.port), str(tls_server.tls_port)))
        assert text.startswith("ConnectionLostError")
        assert "a port for TLS hangs up like this, and takes rediss://" in text

    def test_client_certificates(self, certificates: Certificates, tmp_path: Path) -> None:
        """A server that asks for a client's certificate: without, it is told; with it, all works."""
        binary = guarded_redis.tls_binary()
        assert binary is not None
        with guarded_redis.guarded(binary, tmp_path, "--tls-auth-clients", "yes", tls=certificates) as running:
            ca = f"ssl_ca_certs={certificates.file('ca.pem')}"
            text = told(running.url(tls=ca))
            assert "client's certificate" in text
            own = f"&ssl_certfile={certificates.file('client.pem')}&ssl_keyfile={certificates.file('client.key')}"
            check_url(running.url(tls=ca + own))


COMMANDS = {
    "status": ("status",),
    "submit": ("submit", os.devnull, "--workflow", "a:B"),
    "batches": ("batches", "--count", "1"),
    "worker": ("worker",),
    "collector": ("collector",),
    "up": ("up", "--no-server", "--workers", "0"),
}


@pytest.mark.parametrize("command", COMMANDS)
async def test_every_command(server: Guarded, tmp_path: Path, command: str) -> None:
    """9: each command and service says the same one line on stderr and ends with code 2, in seconds, not a retry."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "forebay", *COMMANDS[command],
        env={**os.environ, "REDIS_URL": server.url("ghost", SECRET), "FOREBAY_HOME": str(tmp_path)},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    text = output.decode()
    assert process.returncode == 2, text
    assert "refused the user 'ghost' with the password in REDIS_URL" in text
    assert "Traceback" not in text
    assert SECRET not in text


async def test_the_error_is_of_the_tree() -> None:
    """9: who catches OSError or PermissionError catches it, and who rides through a lost connection does not."""
    assert issubclass(RedisRefusedError, PermissionError)
    assert not issubclass(RedisRefusedError, ConnectionLostError)
    with pytest.raises(SettingsError, match="no Redis URL"):
        await AsyncClient.connect(Settings(REDIS_URL=f"redis://:{SECRET}@h:port/0"))
