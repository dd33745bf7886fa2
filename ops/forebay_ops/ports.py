"""TCP ports on this host."""

from __future__ import annotations

import errno
import socket

import psutil

__all__ = ["find_free_port", "is_free", "owner"]


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could bind the port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: connections of an earlier server that linger in TIME_WAIT are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
        return True


def find_free_port(preferred: int = 0, host: str = "127.0.0.1") -> int:
    """The preferred port if it is free, else one that the kernel picks. 0 means no preference."""
    if preferred and is_free(preferred, host):
        return preferred
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def owner(port: int) -> str:
    """Who listens on the port, as `` by NAME (pid N)``; empty where the system does not tell."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:  # macOS tells only root
        return ""
    for connection in connections:
        listens = connection.status == psutil.CONN_LISTEN
        if listens and connection.laddr and connection.laddr.port == port and connection.pid:
            try:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
            except psutil.NoSuchProcess:
                return ""
    return ""
