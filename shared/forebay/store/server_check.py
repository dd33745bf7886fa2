"""Whether a Redis keeps what it is given: the promise to lose nothing rests on that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import structlog

from forebay.errors import SettingsError
from forebay.store.base import StoreBase
from forebay.store.bounds import memory_of

__all__ = ["check_server"]

log = structlog.get_logger(__name__)

_KEEPS_ALL = "noeviction"


async def check_server(store: StoreBase) -> None:
    """Look at the server's rules for memory and for its append-only file, and warn of what is weaker than ours.

    What the server does not tell this user (managed ones may not) is not judged.

    Raises:
        SettingsError: it drops keys when its memory is full, so that groups would be lost in silence.
    """
    memory = memory_of(await store.answer("INFO", "memory"))
    if memory is not None and memory.policy not in {"", _KEEPS_ALL}:
        if memory.maximum:
            which = "keys that expire" if memory.policy.startswith("volatile-") else "any keys"
            ours = (
                "rows that were just written, leases and idempotency keys are such"
                if memory.policy.startswith("volatile-")
                else "groups and their rows would vanish in silence"
            )
            raise SettingsError(
                f"Redis has maxmemory-policy={memory.policy} with maxmemory={memory.maximum}: it drops {which} when "
                f"its memory is full, and {ours}; set maxmemory-policy noeviction, with which it refuses to write, and "
                "workers and producers wait"
            )
        log.warning(
            "redis.may_evict",
            policy=memory.policy,
            reason="it drops keys as soon as somebody sets maxmemory; set maxmemory-policy noeviction",
        )
    if weak := _weakness(await store.answer("INFO", "persistence"), await store.answer("CONFIG GET", "appendfsync")):
        log.warning("redis.may_forget", reason=weak)


def _weakness(persistence: Any, fsync: Any) -> str:
    """What a crash of the server may cost; "" where nothing, or where it does not say."""
    if isinstance(persistence, Mapping) and persistence.get("aof_enabled") == 0:
        return "appendonly no: a restart of Redis forgets all since its last snapshot; set appendonly yes"
    if not isinstance(fsync, Mapping):
        return ""
    how = fsync.get("appendfsync")
    if how in {None, "always"}:
        return ""
    lost = "the last second" if how == "everysec" else "whatever its host had not written"
    return f"appendfsync {how}: a crash of Redis or of its host may forget {lost}; set appendfsync always"
