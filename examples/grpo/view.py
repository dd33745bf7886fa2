"""What one sees while the demo runs: a live view on a terminal, a line every few steps elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from forebay.errors import ForebayError

if TYPE_CHECKING:
    from examples.grpo.train import Step
    from forebay import Batch, Client
    from forebay.store.records import RunStatus

__all__ = ["View", "sparkline", "watching"]

_BARS = "▁▂▃▄▅▆▇█"
_POLL_S = 0.5
_RATE_STEPS = 10


def sparkline(values: list[float], width: int) -> str:
    """The last `width` of `values`, each between 0 and 1, as bars."""
    return "".join(_BARS[min(int(max(value, 0.0) * len(_BARS)), len(_BARS) - 1)] for value in values[-width:])


class View:
    """Collects the steps of a run and shows them as lines. Seconds count from `began`, a monotonic time."""

    def __init__(self, steps: int, began: float) -> None:
        self.total = steps
        self.steps: list[Step] = []
        self.first_batch_s = 0.0
        self._began = began
        self._times: list[float] = []

    @property
    def seconds(self) -> float:
        """Since the demo began."""
        return time.monotonic() - self._began

    @property
    def rate(self) -> tuple[float, float]:
        """Steps and trained tokens per second over the last few steps."""
        recent = self.steps[-_RATE_STEPS:]
        took = self._times[-1] - self._times[-len(recent) - 1] if recent else 0.0
        return (len(recent) / took, sum(step.tokens for step in recent) / took) if took else (0.0, 0.0)

    def batch_came(self, batch: Batch) -> None:
        """Note, and say, when the first batch came."""
        if not self._times:
            self._times.append(time.monotonic())
            self.first_batch_s = round(self.seconds, 1)
            print(f"first batch after {self.first_batch_s} s ({len(batch.groups)} groups)", flush=True)

    def step_done(self, step: Step) -> None:
        """Take the step in; say so now and then."""
        self.steps.append(step)
        self._times.append(time.monotonic())
        if step.number % 10 == 0 or step.number in (1, self.total):
            self.say(step)

    def say(self, step: Step) -> None:
        """Print a line."""
        steps_s, tokens_s = self.rate
        print(
            f"step {step.number:>3}/{self.total}  reward {step.reward:.3f}  staleness {step.staleness}  "
            f"clipped {step.clipped:.1%}  {tokens_s:,.0f} tokens/s  {steps_s:.2f} steps/s  {self.seconds:.0f} s",
            flush=True,
        )


class _LiveView(View):
    def __init__(self, steps: int, began: float, client: Client) -> None:
        super().__init__(steps, began)
        self._client = client
        self._status: RunStatus | None = None
        self._ended = threading.Event()

    def say(self, step: Step) -> None:
        """Nothing: it is on the screen."""

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draw until the block ends."""
        poll = threading.Thread(target=self._poll, name="demo-view", daemon=True)
        with Live(get_renderable=self._render, refresh_per_second=4, console=Console()):
            poll.start()
            try:
                yield
            finally:
                self._ended.set()
                poll.join(timeout=2)

    def _poll(self) -> None:
        while not self._ended.wait(_POLL_S):
            try:
                self._status = self._client.status()
            except ForebayError:  # the trainer meets it too, and says so
                continue

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", justify="right")
        table.add_column()
        step = self.steps[-1] if self.steps else None
        steps_s, tokens_s = self.rate
        table.add_row("step", f"{step.number if step else 0} of {self.total}   {steps_s:.2f}/s   {self.seconds:.0f} s")
        bars = Text(sparkline([done.reward for done in self.steps], 60), style="green")
        table.add_row("reward", Text(f"{step.reward:.3f}  " if step else "waiting for the first batch  ") + bars)
        if step:
            table.add_row("tokens", f"{tokens_s:,.0f}/s   {step.clipped:.1%} clipped   KL {step.divergence:.4f}")
            table.add_row("staleness", f"{step.staleness}, at most {self._client.run_settings.max_staleness} allowed")
        if (status := self._status) is not None:
            table.add_row("groups", _groups(status))
            table.add_row("version", f"{status.version}   servers: {len(status.servers)}")
            busy = sum(int(about.get("busy", 0)) for about in status.workers.values())
            slots = sum(int(about.get("slots", 0)) for about in status.workers.values())
            table.add_row("workers", f"{len(status.workers)} alive   {busy} of {slots} slots busy")
        return Panel(Group(table), title="GRPO on the copy task", title_align="left", expand=False)


def _groups(status: RunStatus) -> str:
    way = f"{status.queued} queued > {status.running} running > {status.ready} ready > {status.cut} cut"
    ended = ", ".join(f"{status.count(name)} {name}" for name in ("delivered", "rejected", "evicted"))
    return f"{way}   ({ended})"


@contextmanager
def watching(client: Client, steps: int, began: float, *, plain: bool) -> Iterator[View]:
    """A view: live where standard output is a terminal, unless `plain`."""
    if plain or not sys.stdout.isatty():
        yield View(steps, began)
        return
    view = _LiveView(steps, began, client)
    with view.shown():
        yield view
