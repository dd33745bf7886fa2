"""Reads batches, steps the version, pushes weights: ``python -m chaos.trainer FOLDER``.

Its book is its checkpoint. Each hand-over is recorded before anything else is done with it, each step before the new
weights are pushed; then the batch is acknowledged, and that recorded. One that is started anew goes on at the version
that its last step led to, and acknowledges without training what it had trained on and not acknowledged. Now and then
it holds two batches at once, as a trainer that prefetches; and now and then it moves the version by two at once, so
that batches that wait go stale, and have to be dissolved when they are read.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from chaos.journal import Journal, read_journal
from chaos.workflow import read_token
from forebay import Batch, BatchStream, Client, load, log
from forebay.errors import CollectorUnavailableError, ConnectionLostError, StallError, WeightUpdateError
from forebay.settings import Settings

__all__ = ["BOOK"]

BOOK = "trainer.jsonl"

_STALL_S = 3.0
"""After this long without a batch, push the weights again: a server that was started anew holds old ones."""
_PREFETCH_S = 0.1
_PREFETCHES = 0.25
_DOUBLE_STEPS = 0.3
"""Share of steps that move the version by two: what was cut for the version between is older than was thought then."""
_STEP_S = (0.0, 0.6)
_KEEP = 5
_WAIT_S = 60.0
_AWAY_S = 0.2


def describe(batch: Batch) -> dict[str, Any]:
    """What the books hold of a hand-over.

    ``groups`` has for each group its task id, its prompt's number, its smallest head version as the pipeline says, and
    the oldest version of weights that its tokens say. ``faults`` are what is wrong with the content, in words.
    """
    digest = hashlib.sha256()
    faults: list[str] = []
    groups: list[tuple[int, int, int, int]] = []
    rows = iter(batch.rows)
    for group in batch.groups:
        numbers: set[int] = set()
        oldest: set[int] = set()
        for rollout in group.rollouts:
            for _ in rollout.rows:
                row = next(rows)
                ids = [int(token) for token in row.tokens["input_ids"]]
                number, versions = ids[0], [int(version) for version in row.tokens["versions"]]
                real = [read_token(token, number) for token in ids[2:]]
                numbers.add(number)
                oldest |= {version for version in real if version is not None}
                where = f"group {group.task}, slot {rollout.sample_idx}"
                if ids[1] != rollout.sample_idx:
                    faults.append(f"{where}: the tokens are of slot {ids[1]}")
                if real != versions[2:]:
                    faults.append(f"{where}: the tokens are of versions {real}, labelled {versions[2:]}")
                digest.update(repr((ids, versions, row.reward, row.original_reward)).encode())
                digest.update(row.tokens["logprobs"].tobytes())
        if len(numbers) != 1:
            faults.append(f"group {group.task} is of prompts {sorted(numbers)}")
        digest.update(repr(group.task).encode())
        groups.append((group.task, min(numbers), group.head, min(oldest, default=-1)))
    return {"batch": batch.batch_id, "groups": groups, "digest": digest.hexdigest(), "faults": faults}


class _Trainer:
    def __init__(self, folder: Path, client: Client) -> None:
        steps = [record for record in read_journal(folder / BOOK) if record["kind"] == "step"]
        self._trained = {record["batch"] for record in steps}
        self._version = max((record["next"] for record in steps), default=0)
        self._client = client
        self._servers = client.settings.servers
        self._weights = folder / "weights"
        self._journal = Journal(folder / BOOK)
        self._rng = random.Random()

    def run(self) -> None:
        self._ride(lambda: self._client.recover(self._version))
        self._push()
        with self._client.batches(timeout_s=_STALL_S) as stream:
            while (batch := self._next(stream)) is not None:
                held = [batch]
                if self._rng.random() < _PREFETCHES:
                    held += self._prefetched(stream)
                for one in held:
                    self._step(one, alone=len(held) == 1)
        self._journal.write("end")

    def _next(self, stream: BatchStream) -> Batch | None:
        while True:
            try:
                batch = stream.next()
            except (StallError, CollectorUnavailableError, ConnectionLostError) as error:
                print(f"trainer.waiting {error}", flush=True)
                self._push()
            else:
                if batch is not None:
                    self._journal.write("handed", again=batch.redelivered, **describe(batch))
                return batch

    def _prefetched(self, stream: BatchStream) -> list[Batch]:
        """The next batch too, if it is there soon."""
        time.sleep(_PREFETCH_S)
        if not self._ride(self._client.status).cut:
            return []
        batch = self._next(stream)
        return [] if batch is None else [batch]

    def _step(self, batch: Batch, *, alone: bool) -> None:
        if batch.batch_id not in self._trained:
            time.sleep(self._rng.uniform(*_STEP_S))
            # Never with another batch in hand, which would be older then than at its hand-over.
            after = self._version + (2 if alone and self._rng.random() < _DOUBLE_STEPS else 1)
            self._journal.write("step", batch=batch.batch_id, version=self._version, next=after)
            self._trained.add(batch.batch_id)
            self._version = after
            self._push()
        self._ride(batch.ack)
        self._journal.write("acked", batch=batch.batch_id)

    def _push(self) -> None:
        """The weights of the present version to all servers, those included that had left the rotation."""
        folder = self._save()
        while True:
            try:
                self._client.add_servers(self._servers)
                self._client.update_weights_from_disk(folder, self._version)
            except (WeightUpdateError, ConnectionLostError) as error:
                print(f"trainer.waiting {error}", flush=True)
                time.sleep(_AWAY_S)
            else:
                return

    def _save(self) -> Path:
        folder = self._weights / str(self._version)
        if not folder.exists():
            scratch = self._weights / f".{self._version}-{os.getpid()}"
            scratch.mkdir(parents=True, exist_ok=True)
            (scratch / "version").write_text(str(self._version))
            scratch.rename(folder)
        shutil.rmtree(self._weights / str(self._version - _KEEP), ignore_errors=True)
        return folder

    @staticmethod
    def _ride(call: Any) -> Any:
        while True:
            try:
                return call()
            except ConnectionLostError as error:
                print(f"trainer.waiting {error}", flush=True)


def _main() -> None:
    log.configure(level="warning")
    with Client.connect(load(Settings), wait_s=_WAIT_S) as client:
        print("trainer.ready", flush=True)
        _Trainer(Path(sys.argv[1]), client).run()
        signal.pause()  # a supervisor would start it again; it is told to go when all has ended


if __name__ == "__main__":
    _main()
