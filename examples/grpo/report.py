"""The end of the demo: a plot of the reward, and a summary that says what was checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from examples.grpo.train import Step
    from examples.report import Check

__all__ = ["ENDS", "ends", "plot_rewards", "summary"]

ENDS = 5
"""Batches that ``reward_first`` and ``reward_last`` are the means of."""
_WINDOW = 10


def ends(steps: list[Step]) -> tuple[float, float]:
    """Mean raw reward over the first and over the last :data:`ENDS` batches."""
    rewards = [step.reward for step in steps]
    return _mean(rewards[:ENDS]), _mean(rewards[-ENDS:])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def plot_rewards(steps: list[Step], path: Path, title: str) -> Path:
    """Draw the reward of each batch to the PNG file `path`, which appears whole or not at all."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display needed
    from matplotlib import pyplot as plt

    numbers = [step.number for step in steps]
    rewards = [step.reward for step in steps]
    smooth = [_mean(rewards[max(0, at - _WINDOW + 1) : at + 1]) for at in range(len(rewards))]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(numbers, rewards, color="tab:blue", alpha=0.35, linewidth=1, label="each batch")
    axes.plot(numbers, smooth, color="tab:blue", linewidth=2, label=f"mean of {_WINDOW} batches")
    axes.set(xlabel="step", ylabel="mean reward of the sampled rollouts", ylim=(0, 1.02), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    draft = path.with_name(f".{path.name}")
    try:
        figure.savefig(draft, format="png", dpi=120)
        draft.replace(path)
    finally:
        plt.close(figure)
        draft.unlink(missing_ok=True)
    return path


def summary(steps: list[Step], groups: dict[str, int], checks: list[Check], plot: Path, dumps: Path) -> str:
    """A few lines for people."""
    first, last = ends(steps)
    oldest = max((step.staleness for step in steps), default=0)
    lines = [
        "",
        f"reward     {first:.3f} -> {last:.3f} (means of the first and the last {min(ENDS, len(steps))} batches)",
        f"steps      {len(steps)}, each pushed to the servers as a version; staleness at most {oldest}",
        "groups     " + ", ".join(f"{number} {name}" for name, number in groups.items()),
        *(f"check      {check}" for check in checks),
        f"plot       {plot}",
        f"dumps      {dumps}",
    ]
    return "\n".join(lines)
