"""``python -m examples.text``: sample a real model through the pipeline, show what it says, check the books, stop."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay import Batch, Client

BEGAN = time.monotonic()
"""Before the heavy imports, which are part of what one waits for."""

NO_BATCH_S = 240.0
"""Longest wait for a batch: two cores make a few tens of tokens per second."""


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    args = _arguments(argv)
    from examples.session import run_demo

    return run_demo(lambda: _demo(args))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.text", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the questions")
    parser.add_argument("--groups", type=int, default=16, help="questions")
    parser.add_argument("--group-size", type=int, default=4, help="answers to each")
    parser.add_argument("--batch-size", type=int, default=4, help="groups in a batch")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--workers", type=int, default=1, help="worker processes")
    args = parser.parse_args(argv)
    for name in ("groups", "group_size", "batch_size", "max_new_tokens", "workers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: give 1 or more")
    return args


def _demo(args: argparse.Namespace) -> dict[str, Any]:
    from examples.report import check_dumps
    from examples.session import new_home, run_environment, running, settings_of
    from examples.text.model import smollm2_folder
    from forebay import Client
    from forebay_ops.supervisor import LocalStackConfig

    print("looking for SmolLM2-135M-Instruct (the first time it is converted, which takes a while)", flush=True)
    model = smollm2_folder(Path(os.environ.get("FOREBAY_HOME", ".forebay")).absolute() / "models")
    home = new_home("demo-text")
    env = run_environment(
        home,
        model,
        batch_size=args.batch_size,
        group_size=args.group_size,
        # Nothing is trained, so the version never moves and nothing gets stale. That lets a trainer take
        # batches_per_version batches and no more (a further one would be trained on too late); so it is as many as
        # there will be.
        max_staleness=0,
        batches_per_version=-(-args.groups // args.batch_size),
        # All at once would be done a little sooner, but with nothing to be seen until the end.
        max_concurrent=2 * args.batch_size,
    )
    config = LocalStackConfig(
        home=home, workers=args.workers, model_path=model, server_port=0, torch_threads=2, env=env
    )
    with running(config) as stack, Client.connect(settings_of(stack)) as client:
        reader = _Reader(client, model, args)
        reader.read_all()
        groups = reader.ledger.account(client.status())
        version = client.version()
    dumps = home / "dumps"
    seconds = time.monotonic() - BEGAN
    checks = check_dumps(
        dumps, submitted=reader.ledger.submitted, delivered=reader.ledger.delivered, group_size=args.group_size
    )
    print(f"\ngroups     {', '.join(f'{number} {name}' for name, number in groups.items())}")
    for check in checks:
        print(f"check      {check}")
    print(f"dumps      {dumps}", flush=True)
    means = reader.means
    return {
        "seed": args.seed,
        "steps": len(means),
        "seconds": round(seconds, 1),
        "first_batch_s": reader.first_batch_s,
        "reward_first": round(means[0], 4) if means else 0.0,
        "reward_last": round(means[-1], 4) if means else 0.0,
        "groups": groups,
        "max_staleness_seen": reader.max_staleness_seen,
        "versions": version,
    }


class _Reader:
    """Asks all questions and shows the answers as they come."""

    def __init__(self, client: Client, model: Path, args: argparse.Namespace) -> None:
        import transformers

        from examples.ledger import Ledger
        from examples.text.task import questions, verify
        from forebay import GenerationHyperparameters

        loader: Any = transformers.AutoTokenizer
        self._tokenizer = loader.from_pretrained(model)
        self._client = client
        self._wanted: int = args.groups
        self._questions = questions(args.seed)
        self._shown = 0
        self._asked: dict[int, dict[str, Any]] = {}
        self._kwargs = {
            "reward_fn": verify,
            "gconfig": GenerationHyperparameters(max_new_tokens=args.max_new_tokens, temperature=0.7),
            "tokenizer": str(model),
            "reward_timeout_s": 60.0,  # the first call in a process imports reasoning_gym
        }
        self.ledger = Ledger(self._submit)
        self.means: list[float] = []
        """Mean reward of each batch."""
        self.first_batch_s = 0.0
        self.max_staleness_seen = 0

    def _submit(self) -> int:
        from forebay_workers.workflows import RLVRWorkflow

        data = next(self._questions)
        task_id = self._client.submit(data, RLVRWorkflow, self._kwargs)
        self._asked[task_id] = data
        return task_id

    def read_all(self) -> None:
        """Submit everything (it is little), then read to the end."""
        self.ledger.top_up(self._client, self._wanted)
        self._client.end_of_data()
        with self._client.batches("reader", timeout_s=NO_BATCH_S) as stream:
            for batch in stream:
                if not self.means:
                    self.first_batch_s = round(time.monotonic() - BEGAN, 1)
                    print(f"first batch after {self.first_batch_s} s", flush=True)
                self.ledger.deliver(batch)
                self._show(batch)
                batch.ack()

    def _show(self, batch: Batch) -> None:
        rewards = []
        rows = iter(batch.rows)
        for group in batch.groups:
            self._shown += 1
            data = self._asked[group.task]
            self.max_staleness_seen = max(self.max_staleness_seen, batch.version - max(group.head, 0))
            print(f"\n[{self._shown}/{self._wanted}] {data['dataset']}: {_one_line(_question(data))}")
            print(f"      wanted  {data['answer']}")
            for rollout in group.rollouts:
                for _ in rollout.rows:
                    row = next(rows)
                    reward = row.reward or 0.0
                    rewards.append(reward)
                    ids = row.tokens["input_ids"][row.prompt_len :].tolist()
                    print(f"      {reward:6.2f}  {_one_line(self._tokenizer.decode(ids, skip_special_tokens=True))}")
        sys.stdout.flush()
        self.means.append(sum(rewards) / len(rewards))


def _question(data: dict[str, Any]) -> str:
    return str(data["messages"][-1]["content"])


def _one_line(text: str, width: int = 150) -> str:
    short = " ".join(text.split())
    return short if len(short) <= width else short[: width - 3] + "..."


if __name__ == "__main__":
    sys.exit(main())
