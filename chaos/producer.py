"""Submits prompts until it is told to end: ``python -m chaos.producer FOLDER SEED``.

Each prompt has a key. What will be submitted is recorded before, what was submitted after; one that is started anew
submits again whatever has no second record, under the same key, so nothing is lost and nothing comes twice. Now and
then it submits a prompt again that it has the answer of, as a client would that lost it: the same task id must come.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from pathlib import Path

from chaos.journal import Journal, read_journal
from chaos.workflow import TOKENS, ChaosWorkflow, fate_of
from forebay import Client, GenerationHyperparameters, load, log
from forebay.errors import ConnectionLostError, QueueFullError
from forebay.settings import Settings

__all__ = ["BOOK", "END", "key_of"]

BOOK = "producer.jsonl"
END = "end"
"""File whose presence tells the producer that the data is to end."""

_FULL_S = 0.05
_AGAIN = 0.03
"""Share of submissions that are repeated."""
_WAIT_S = 60.0


def key_of(seed: int, number: int) -> str:
    """The idempotency key of a prompt."""
    return f"chaos-{seed}-{number}"


class _Producer:
    def __init__(self, folder: Path, seed: int, client: Client) -> None:
        self._end = folder / END
        self._seed = seed
        self._client = client
        self._arguments = {"gconfig": GenerationHyperparameters(max_new_tokens=TOKENS)}
        self._rng = random.Random()
        records = read_journal(folder / BOOK)
        known = {record["number"] for record in records if record["kind"] == "submitted"}
        wanted = {record["number"] for record in records if record["kind"] == "submit"}
        self._unsure = sorted(wanted - known)
        self._next = max(wanted, default=0) + 1
        self._journal = Journal(folder / BOOK)

    def run(self) -> None:
        for number in self._unsure:
            self._submit(number)
        while not self._end.exists():
            number = self._next
            self._next += 1
            self._journal.write("submit", number=number)
            self._submit(number)
            if self._rng.random() < _AGAIN:
                self._submit(self._rng.randint(max(1, number - 200), number))
        self._ride(self._client.end_of_data)
        self._journal.write("end")

    def _submit(self, number: int) -> None:
        data = {"number": number, "fate": fate_of(self._seed, number)}
        while True:
            try:
                task = self._client.submit(
                    data, ChaosWorkflow, self._arguments, idempotency_key=key_of(self._seed, number)
                )
            except QueueFullError:
                time.sleep(_FULL_S)
            except ConnectionLostError as error:
                print(f"producer.waiting {error}", flush=True)
            else:
                break
        self._journal.write("submitted", number=number, task=task)

    def _ride(self, call: object) -> None:
        while callable(call):
            try:
                call()
            except ConnectionLostError as error:
                print(f"producer.waiting {error}", flush=True)
            else:
                return


def _main() -> None:
    log.configure(level="warning")
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    with Client.connect(load(Settings), wait_s=_WAIT_S) as client:
        print("producer.ready", flush=True)
        _Producer(folder, seed, client).run()
        signal.pause()  # a supervisor would start it again; it is told to go when all has ended


if __name__ == "__main__":
    _main()
