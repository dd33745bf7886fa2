"""Ranks of a trainer as real processes: one is killed, and the others begin again without it (contract, section 13)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from conditions import eventually
from services import WORKFLOW, Services, services

SCRIPT = Path(__file__).parent / "rank_trainer.py"


def start(running: Services, folder: Path, world: int) -> list[subprocess.Popen[bytes]]:
    """A process for each rank."""
    environment = {
        **os.environ,
        "REDIS_URL": running.settings.resolved_redis_url(),
        "FOREBAY_EXPERIMENT_NAME": running.settings.experiment_name,
    }
    words = [[sys.executable, str(SCRIPT), str(folder), str(rank), str(world)] for rank in range(world)]
    return [subprocess.Popen(argv, env=environment) for argv in words]


@asynccontextmanager
async def ranks(running: Services, folder: Path, world: int) -> AsyncIterator[list[subprocess.Popen[bytes]]]:
    """The ranks of one life of the trainer; SIGKILLed at the end."""
    processes = start(running, folder, world)
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            await asyncio.to_thread(process.wait, 10)


def books(folder: Path, world: int) -> list[list[dict[str, Any]]]:
    """What each rank of that world has noted."""
    paths = [folder / f"{world}-{rank}.jsonl" for rank in range(world)]
    return [[json.loads(line) for line in path.read_text().splitlines()] if path.exists() else [] for path in paths]


def have(folder: Path, world: int, batch: int) -> bool:
    """Whether every rank of that world has been given the batch."""
    return all(any(record["batch"] == batch for record in book) for book in books(folder, world))


def whole(folder: Path, world: int, batch: int) -> list[int]:
    """The groups of a batch, put together from the ranks' shares, each of which must be fair."""
    shares = [next(record for record in book if record["batch"] == batch) for book in books(folder, world)]
    counts = [len(share["groups"]) for share in shares]
    tokens = [share["tokens"] for share in shares]
    assert max(counts) - min(counts) <= 1
    assert all(share["of"] == [sum(counts), sum(tokens)] for share in shares)
    return sorted(task for share in shares for task in share["groups"])


async def test_a_rank_is_killed_and_three_go_on_for_four(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """13: what the four had not all acknowledged comes to the three, dealt anew; nothing is lost or comes twice."""
    async with services(redis_url, run_name, batch_size=7, max_staleness=9) as (running, client):
        tasks = [await client.submit({"ids": [5] * (1 + at % 4)}, WORKFLOW, {}) for at in range(7 * 3 + 2)]
        async with ranks(running, tmp_path, 4) as processes:
            await eventually(lambda: have(tmp_path, 4, 1), "the first batch on each rank", timeout_s=60)
            (tmp_path / "ack-1").touch()
            await eventually(lambda: have(tmp_path, 4, 2), "the second", timeout_s=60)
            for rank in (0, 1, 2):
                (tmp_path / f"ack-2-{rank}").touch()
            await eventually(lambda: all(len(book) == 3 for book in books(tmp_path, 4)[:3]), "three to go on")
            processes[3].kill()
            assert (await client.status()).count("batches_acked") == 1
        for batch in range(2, 5):
            (tmp_path / f"ack-{batch}").touch()
        await client.end_of_data()
        async with ranks(running, tmp_path, 3) as processes:
            await eventually(lambda: all(one.poll() == 0 for one in processes), "all to end", timeout_s=60)
        again = books(tmp_path, 3)
        assert [[record["batch"] for record in book] for book in again] == [[2, 3, 4]] * 3
        assert [[(record["again"], record["partial"]) for record in book] for book in again] == [
            [(True, False), (True, False), (False, True)]
        ] * 3
        assert whole(tmp_path, 3, 2) == whole(tmp_path, 4, 2)
        assert sorted(whole(tmp_path, 4, 1) + [task for b in (2, 3, 4) for task in whole(tmp_path, 3, b)]) == tasks
        status = await client.status()
        assert (status.count("batches_acked"), status.count("delivered"), status.in_flight) == (4, 23, 0)
