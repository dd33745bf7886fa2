"""What a Redis refuses for good, told from what passes.

A wrong password, a certificate that is not trusted, a command that the user may not run: trying again changes nothing,
so each becomes one clear :class:`RedisRefusedError`, at once, that holds no secret. All else is left to the caller.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from forebay.errors import RedisRefusedError
from forebay.store.scripts import name_of
from forebay.store.sentinel import shown_url

__all__ = ["address", "hint", "named", "refusal"]

_OF_SCRIPTS = ("ACL failure in script", "The user executing the script")
"""How Valkey and Redis begin the error of a script whose user lacks a permission."""
_PASSING_SSL = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)


def address(url: str) -> str:
    """`url` without user, password and options, fit to be shown."""
    return shown_url(url)


def named(error: Exception, command: tuple[Any, ...]) -> Exception:
    """`error`, with a note of the command that it answers, which servers do not always name."""
    if isinstance(error, ResponseError):
        script = name_of(str(command[1])) if command[0] == "EVALSHA" else ""
        error.add_note(f"script {script}" if script else f"command {str(command[0]).lower()}")
    return error


def hint(url: str, error: BaseException) -> str:
    """What else may be wrong with a server at `url` that hangs up, or says nothing."""
    cause = next((one for one in _chain(error) if isinstance(one, OSError)), error)
    if _is_tls(url):
        return "; a port without TLS falls silent like this, and takes redis://" if _silent(error) else ""
    closed = isinstance(cause, ConnectionResetError) or "closed by server" in str(error)
    return "; a port for TLS hangs up like this, and takes rediss://" if closed else ""


def _is_tls(url: str) -> bool:
    return url.startswith(("rediss:", "rediss+"))


def _silent(error: BaseException) -> bool:
    return isinstance(error, (TimeoutError, RedisTimeoutError))


def refusal(error: BaseException, url: str) -> RedisRefusedError | None:
    """The error to raise in place of `error`, if the server at `url`, or what `url` says of TLS, refuses for good."""
    if isinstance(error, (AuthenticationError, AuthorizationError)):
        return RedisRefusedError(f"Redis at {address(url)} {_credentials(error, url)}")
    if isinstance(error, NoPermissionError) or (
        isinstance(error, ResponseError) and str(error).startswith(_OF_SCRIPTS)
    ):
        said = str(error).partition(" script: ")[0]
        of = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        return RedisRefusedError(
            f"Redis at {address(url)} refuses {_user(url)} a command{of}: {said}; `forebay acl` prints the rules that "
            "each role needs"
        )
    if isinstance(error, (RedisError, OSError)) and _is_tls(url):
        return _tls(error, url)
    return None


def _user(url: str) -> str:
    name = urlsplit(url).username
    return f"the user {unquote(name)!r}" if name else "the user 'default'"


def _credentials(error: Exception, url: str) -> str:
    said = str(error)
    if "without any password configured" in said or "no password is set" in said:
        return "has no password, but REDIS_URL gives one: take it out, or set one on the server"
    if "Authentication required" in said:
        return "asks for a password: set REDIS_URL=redis://[user]:PASSWORD@host:port/db (rediss:// for TLS)"
    return (
        f"refused {_user(url)} with the password in REDIS_URL ({said}); check both, percent-encode special characters "
        "in them, and see `ACL LIST` on the server"
    )


def _tls(error: BaseException, url: str) -> RedisRefusedError | None:
    where = f"Redis at {address(url)}"
    for cause in _chain(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return RedisRefusedError(
                f"{where} shows a certificate that is not trusted ({cause.verify_message or cause.reason}): name the "
                "CA with ?ssl_ca_certs=FILE in REDIS_URL, or renew the certificate; the host in REDIS_URL must be one "
                "that it is for"
            )
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, _PASSING_SSL):
            reason = (cause.reason or "unknown").lower().replace("_", " ")
            return RedisRefusedError(
                f"{where}: TLS failed ({reason}): check that the port is for TLS, the files that ssl_ca_certs, "
                "ssl_certfile and ssl_keyfile in REDIS_URL name, and whether the server asks for a client's certificate"
            )
        if isinstance(cause, (FileNotFoundError, PermissionError, IsADirectoryError)):
            return RedisRefusedError(
                f"{where}: a file that ssl_ca_certs, ssl_certfile or ssl_keyfile in REDIS_URL names cannot be read "
                f"({cause.strerror})"
            )
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """`error` and what it came from: redis-py raises its own ``from None`` of the reason."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
