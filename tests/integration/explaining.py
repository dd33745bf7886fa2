"""Runs ``forebay why`` as a user does."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from services import Services


async def why(running: Services, *words: str) -> subprocess.CompletedProcess[str]:
    """``forebay why`` in the run of `running`."""
    environment = {
        **os.environ,
        "REDIS_URL": running.settings.resolved_redis_url(),
        "FOREBAY_EXPERIMENT_NAME": running.settings.experiment_name,
        "FOREBAY_LOG_LEVEL": "error",
    }
    command = [sys.executable, "-m", "forebay", "why", *words]
    return await asyncio.to_thread(
        subprocess.run, command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


async def why_json(
    running: Services, until: Callable[[dict[str, Any]], bool] = lambda _: True, timeout_s: float = 30.0
) -> dict[str, Any]:
    """What ``forebay why --json`` prints, once it is as awaited."""
    async with asyncio.timeout(timeout_s):
        while True:
            done = await why(running, "--json")
            assert done.returncode == 0, done.stderr
            form: dict[str, Any] = json.loads(done.stdout)
            if until(form):
                return form
