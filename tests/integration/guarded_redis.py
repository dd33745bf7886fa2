"""Redis servers that ask who calls: with a password, with ACL users, with TLS."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import redis

from forebay.store.acl import Role, rules
from forebay_ops.embedded_redis import path_binary, wheel_binary

ADMIN = "adm1n-pässwörd/@:?#%"
"""The default user's, of characters that a URL has to encode."""


def binaries() -> dict[str, Path]:
    """The servers that there are, by name."""
    return {name: path for name, path in (("valkey", wheel_binary()), ("redis", path_binary())) if path is not None}


def has_tls(binary: Path) -> bool:
    """Whether `binary` is built with TLS: one that is not says so of an option for it."""
    done = subprocess.run(
        [str(binary), "--port", "0", "--tls-port", "1", "--tls-auth-clients", "no"],
        capture_output=True, text=True, timeout=10, check=False,
    )  # fmt: skip
    # Both refuse to start, without a certificate.
    return "No tls-cert-file" in done.stdout + done.stderr


def tls_binary() -> Path | None:
    """A server with TLS, if there is one, and what makes certificates for it."""
    if shutil.which("openssl") is None:
        return None
    return next((path for path in binaries().values() if has_tls(path)), None)


NO_TLS = "no server built with TLS (Debian: apt-get install redis-server), or no openssl to make certificates"


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Certificates:
    """A CA, and what it has signed, as files."""

    folder: Path

    def file(self, name: str) -> Path:
        """``ca.pem``, ``other-ca.pem`` (which signed nothing), ``NAME.pem`` and ``NAME.key``."""
        return self.folder / name

    @classmethod
    def make(cls, folder: Path) -> Certificates:
        """Certificates for 127.0.0.1: ``server``, and ``expired``, which is over; ``elsewhere`` is for another host."""
        made = cls(folder)
        for name in ("ca", "other-ca"):
            made._openssl(
                "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
                "-keyout", f"{name}.key", "-out", f"{name}.pem",
            )  # fmt: skip
        for name, host, days in (
            ("server", "IP:127.0.0.1", 1),
            ("expired", "IP:127.0.0.1", -1),
            ("elsewhere", "DNS:elsewhere.test", 1),
            ("client", "DNS:client.test", 1),
        ):
            made.file(f"{name}.ext").write_text(f"subjectAltName={host}\n")
            made._openssl(
                "req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}",
                "-keyout", f"{name}.key", "-out", f"{name}.csr",
            )  # fmt: skip
            made._openssl(
                "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-days", str(days), "-extfile", f"{name}.ext", "-out", f"{name}.pem",
            )  # fmt: skip
        return made

    def _openssl(self, *words: str) -> None:
        subprocess.run(["openssl", *words], cwd=self.folder, check=True, capture_output=True, timeout=60)


@dataclass
class Guarded:
    """A server that runs, and URLs for it."""

    port: int
    tls_port: int
    admin: redis.Redis
    process: subprocess.Popen[bytes]

    def url(self, user: str = "", password: str = ADMIN, *, tls: str | None = None) -> str:
        """A URL with credentials; `tls` is what follows the ``?`` of a ``rediss://`` one."""
        who = f"{quote(user, safe='')}:{quote(password, safe='')}@" if user or password else ""
        if tls is None:
            return f"redis://{who}127.0.0.1:{self.port}/0"
        return f"rediss://{who}127.0.0.1:{self.tls_port}/0?{tls}"

    def add_role(self, role: Role, password: str, run: str, *, less: Sequence[str] = ()) -> str:
        """Make the user of a role with exactly its rules, but for the commands in `less`: its name."""
        name = f"forebay-{role.value}"
        taken = [f"-{command}" for command in less]
        self.admin.execute_command(
            "ACL", "SETUSER", name, "reset", "on", f">{password}", *rules(role, run).split(), *taken
        )
        return name


@contextmanager
def guarded(binary: Path, folder: Path, *options: str, tls: Certificates | None = None, certificate: str = "server",
            password: str = ADMIN) -> Iterator[Guarded]:  # fmt: skip
    """A server of `binary` with a password, and with a second port for TLS if there are certificates for it."""
    port, tls_port = free_port(), 0
    words = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", "--appendonly", "yes"]
    if tls is not None:
        tls_port = free_port()
        words += [
            "--tls-port", str(tls_port), "--tls-auth-clients", "no",
            "--tls-cert-file", str(tls.file(f"{certificate}.pem")),
            "--tls-key-file", str(tls.file(f"{certificate}.key")),
            "--tls-ca-cert-file", str(tls.file("ca.pem")),
        ]  # fmt: skip
    process = subprocess.Popen([str(binary), *words, *options], stdout=subprocess.DEVNULL)
    admin = redis.Redis(port=port, socket_timeout=5)
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                admin.ping()
                break
            except redis.ConnectionError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.05)
        if password:
            admin.config_set("requirepass", password)
            admin.close()
            admin = redis.Redis(port=port, password=password, socket_timeout=5)
        yield Guarded(port, tls_port, admin, process)
    finally:
        admin.close()
        process.kill()
        process.wait(10)
