"""One data-parallel rank of a trainer, as a process: ``python rank_trainer.py FOLDER RANK WORLD_SIZE``.

It writes a line for each share to ``FOLDER/WORLD-RANK.jsonl``, and acknowledges it once the file
``FOLDER/ack-BATCH``, or ``FOLDER/ack-BATCH-RANK`` for itself alone, is there. It ends with the data.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from forebay import Client


def main(folder: Path, rank: int, world_size: int) -> None:
    """Read, note, wait for the word, acknowledge."""
    with (
        Client.connect(wait_s=30) as client,
        (folder / f"{world_size}-{rank}.jsonl").open("a") as book,
        client.batches(rank=rank, world_size=world_size, timeout_s=60) as stream,
    ):
        for batch in stream:
            about = batch.share_of
            record = {
                "batch": batch.batch_id,
                "groups": [group.task for group in batch.groups],
                "tokens": batch.tokens,
                "of": [about.batch_groups, about.batch_tokens],
                "partial": batch.partial,
                "again": batch.redelivered,
            }
            print(json.dumps(record), file=book, flush=True)
            words = [folder / f"ack-{batch.batch_id}", folder / f"ack-{batch.batch_id}-{rank}"]
            while not any(word.exists() for word in words):
                time.sleep(0.02)
            batch.ack()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
