"""Starts queued groups as the capacity rule lets (contract, section 6).

Every worker runs this loop; check and move are one script, so any number of them may.
"""

from __future__ import annotations

import asyncio

import structlog

from forebay.errors import ConnectionLostError, StoreFullError
from forebay.store.store import Store

__all__ = ["admit_groups"]

log = structlog.get_logger(__name__)

_GROUPS_PER_CALL = 64
_RECHECK_S = 1.0


async def admit_groups(store: Store, deadline_s: float) -> None:
    """Admit until cancelled. Waits for a wake-up, and looks once a second even without one."""
    short = False
    while True:
        try:
            started, left = await store.admit(_GROUPS_PER_CALL, deadline_s)
            if started:
                log.debug("groups.started", count=started, capacity_left=left)
                continue
            short = False
            await store.wait_for_wake("admission", _RECHECK_S)
        except StoreFullError as error:
            if not short:
                log.warning("admission.no_memory", reason=str(error))
            short = True
            await asyncio.sleep(_RECHECK_S)
        except ConnectionLostError as error:
            log.warning("admission.waiting", reason=str(error))
            await asyncio.sleep(_RECHECK_S)
