"""``python -m examples.grpo``: start everything, train, show, check, stop."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()
"""Before the heavy imports, which are part of what one waits for."""


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    args = _arguments(argv)
    from examples.session import run_demo

    return run_demo(lambda: _demo(args))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.grpo", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the prompts")
    parser.add_argument("--steps", type=_positive, default=120, help="batches to train on")
    parser.add_argument("--workers", type=_positive, default=2, help="worker processes")
    parser.add_argument("--batch-size", type=_positive, default=32, help="groups in a batch")
    parser.add_argument("--group-size", type=_at_least_two, default=8, help="rollouts of each prompt")
    parser.add_argument("--max-staleness", type=int, default=1, choices=range(9), help="versions", metavar="N")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="at the start; a fifth of it at the end")
    parser.add_argument("--plain", action="store_true", help="lines instead of the live view")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value}: give 1 or more")
    return value


def _at_least_two(text: str) -> int:
    if (value := int(text)) < 2:
        raise argparse.ArgumentTypeError(f"{value}: advantages compare the rollouts of a group, so give 2 or more")
    return value


def _demo(args: argparse.Namespace) -> dict[str, Any]:
    print("making a tiny model with random weights", flush=True)
    from examples.session import new_home
    from forebay_ops.tiny_model import create_tiny_model

    home = new_home("demo")
    model = create_tiny_model(home / "model", seed=args.seed)
    return _run(args, home, model)


def _run(args: argparse.Namespace, home: Path, model: Path) -> dict[str, Any]:
    import torch
    import transformers

    from examples.grpo.report import ends, plot_rewards, summary
    from examples.grpo.train import GrpoSettings, Policy, train
    from examples.grpo.view import watching
    from examples.report import check_dumps
    from examples.session import run_environment, running, settings_of
    from forebay import Client
    from forebay_ops.supervisor import LocalStackConfig

    torch.set_num_threads(1)  # the model is too small to share among cores
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    env = run_environment(
        home, model, batch_size=args.batch_size, group_size=args.group_size, max_staleness=args.max_staleness
    )
    config = LocalStackConfig(home=home, workers=args.workers, model_path=model, server_port=0, env=env)
    with running(config) as stack, Client.connect(settings_of(stack)) as client:
        rate = args.learning_rate
        settings = GrpoSettings(learning_rate=rate, last_learning_rate=rate / 5, steps=args.steps)
        policy = Policy(model, settings, seed=args.seed)
        with watching(client, args.steps, BEGAN, plain=args.plain) as view:
            ledger = train(client, policy, model=model, versions=home / "versions", seed=args.seed, watcher=view)
        groups = ledger.account(client.status())
    seconds = view.seconds
    dumps = home / "dumps"
    checks = check_dumps(dumps, submitted=ledger.submitted, delivered=ledger.delivered, group_size=args.group_size)
    plot = plot_rewards(view.steps, home / "reward.png", f"GRPO on the copy task, seed {args.seed}")
    print(summary(view.steps, groups, checks, plot, dumps), flush=True)
    first, last = ends(view.steps)
    return {
        "seed": args.seed,
        "steps": len(view.steps),
        "seconds": round(seconds, 1),
        "first_batch_s": view.first_batch_s,
        "reward_first": round(first, 4),
        "reward_last": round(last, 4),
        "groups": groups,
        "max_staleness_seen": max((step.staleness for step in view.steps), default=0),
        "versions": policy.version,
    }


if __name__ == "__main__":
    sys.exit(main())
