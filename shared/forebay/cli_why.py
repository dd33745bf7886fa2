"""``forebay why``: what the next batch waits for."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from forebay.errors import ConnectionLostError
from forebay.settings import RunSettings, Settings, load
from forebay.stalls import Cause, Diagnosis, as_form, diagnose, seconds
from forebay.store.connection import address
from forebay.store.look_records import OpenSlot, RunLook
from forebay.store.store import Store

__all__ = ["RunSeen", "look_at_run", "register"]

_ANSWER_S = 3.0
"""Whoever asks looks at a terminal: a Redis that is away is said by then."""
_RETRY_S = 2.0
_PIPE_WIDTH = 160
"""Columns where the output is no terminal."""


@dataclass(frozen=True, slots=True)
class RunSeen:
    """A run as a command sees it; without rules and look where no collector has ever served it."""

    run: str
    rules: RunSettings | None = None
    look: RunLook | None = None

    @property
    def nobody(self) -> str:
        """What to say where no collector has ever served it."""
        return (
            f"no collector has published the settings of run {self.run}; start one (`make up` or `forebay collector`) "
            "with the same FOREBAY_EXPERIMENT_NAME and FOREBAY_TRIAL_NAME"
        )


def look_at_run(*, groups: int = 8, slots: int = 16) -> RunSeen:
    """One look at the run that the environment names. Raises ConnectionLostError within about 3 s."""
    settings = load(Settings, redis_timeout_s=_RETRY_S)

    async def look() -> RunSeen:
        store = Store.open(settings)
        try:
            async with asyncio.timeout(_ANSWER_S):
                rules = await store.run_settings()
                if rules is None:
                    return RunSeen(settings.run)
                return RunSeen(settings.run, rules, await store.look(groups=groups, slots=slots))
        except TimeoutError:
            where = address(settings.resolved_redis_url())
            raise ConnectionLostError(
                f"Redis at {where} gave no answer within {_ANSWER_S:g} s; start one with `make up`, or set REDIS_URL"
            ) from None
        finally:
            await store.close()

    return asyncio.run(look())


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(why)


def why(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks of --watch.")] = 2.0,
    groups: Annotated[int, typer.Option(min=1, max=64, help="Show so many of the oldest running groups.")] = 8,
    slots: Annotated[int, typer.Option(min=1, max=64, help="And so many open slots of each.")] = 16,
) -> None:
    """Say why the trainer's next batch does not come: the cause in one sentence, then what it was judged by.

    Of the oldest running groups it shows each open slot: what it does, on which worker, at which inference server, for
    how long, and why its last attempt failed. What a slot does is as old as its worker's last heart-beat, a third of
    lease_s at most.
    """
    out = Console(soft_wrap=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, emoji=False)
    while True:
        try:
            seen = look_at_run(groups=groups, slots=slots)
        except ConnectionLostError as error:
            if not watch:
                raise
            _say(out, str(error), as_json=as_json)
        else:
            _show(out, seen, as_json=as_json, clear=watch and out.is_terminal and not as_json)
        if not watch:
            return
        time.sleep(interval)


def _say(out: Console, text: str, *, as_json: bool, cause: str = "redis_away") -> None:
    if as_json:
        print(json.dumps({"cause": cause, "verdict": text}), flush=True)
    else:
        out.print(text, markup=False)


def _show(out: Console, seen: RunSeen, *, as_json: bool, clear: bool) -> None:
    if seen.look is None or seen.rules is None:
        _say(out, seen.nobody, as_json=as_json, cause=Cause.NO_COLLECTOR.value)
        return
    found = diagnose(seen.look, seen.rules)
    if as_json:
        print(json.dumps({"run": seen.run, **as_form(found)}), flush=True)
        return
    if clear:
        out.clear()
    out.print(f"{found.cause.value}: {found.verdict}", markup=False)
    out.print()
    out.print(_facts(seen.run, seen.rules, found))
    if seen.look.groups:
        out.print(_slots(seen.look))


def _facts(run: str, rules: RunSettings, found: Diagnosis) -> Table:
    look = found.look
    status = look.status
    trainer = "has not asked for a batch yet"
    if look.reader_idle_s is not None:
        asked = f"last asked {seconds(look.reader_idle_s)} ago"
        trainer = f"{look.driver}: {'waits' if found.trainer_waits else 'does not wait'} ({asked})"
    submitted = "nothing yet" if look.since_submit_s is None else f"last {seconds(look.since_submit_s)} ago"
    unread = status.cut_batches * rules.batch_size
    slots = sum(int(about.get("slots", 0)) for about in status.workers.values())
    rows = {
        "trainer": f"{trainer}, version {status.version}",
        "last batch": "none yet" if look.since_cut_s is None else f"cut {seconds(look.since_cut_s)} ago",
        "groups": f"{status.queued} queued, {status.running} running, {status.ready} of {rules.batch_size} ready",
        "capacity": f"{status.running} running + {status.ready} ready + {unread} unread + {status.delivered_ahead} "
        f"handed over ahead = {status.running + status.ready + unread + status.delivered_ahead} of {status.capacity}",
        "submitted": submitted + (", and the data has ended" if look.ended else ""),
        "attempts": f"{status.leased} run, {look.due_attempts} wait for a free slot, {look.later_attempts} back off",
        "collector": "alive" if status.collector_alive else "none",
        "workers": f"{len(status.workers)} with {slots} slots",
        "servers": "; ".join(_servers(look)) or "none registered",
        "dropped since": ", ".join(f"{count} {kind}" for kind, count in sorted(look.drops.items())) or "none",
    }
    if status.direct_queued or status.direct_running or status.held:
        rows["asked for by id"] = (
            f"{status.direct_queued} queued, {status.direct_running} running, {status.held} to collect"
        )
    table = Table(title=f"run {run}", show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, _plain(value))
    return table


def _servers(look: RunLook) -> list[str]:
    lines = []
    for url in sorted({*map(address, look.status.servers), *look.servers}):
        seen = look.servers.get(url)
        if seen is None:
            lines.append(f"{url} not seen by a worker yet")
        elif not seen.healthy:
            lines.append(f"{url} down for {seconds(seen.down_s or 0.0)}" + (f" ({seen.error})" if seen.error else ""))
        elif seen.paused_s is not None:
            lines.append(f"{url} paused for {seconds(seen.paused_s)}")
        else:
            lines.append(f"{url} healthy")
    return lines


def _slots(look: RunLook) -> Table:
    direct = look.groups[0].direct
    title = "oldest running groups" + (" (asked for by id: none of them comes in a batch)" if direct else "")
    table = Table(title=title, title_justify="left")
    columns = ("group", "runs for", "deadline in", "slot", "attempt", "does", "for", "worker", "server", "last failure")
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in {"group", "slot", "attempt"} else "left")
    for group in look.groups:
        head = [str(group.task_id), seconds(group.age_s), seconds(max(0.0, group.deadline_in_s))]
        if not group.slots:
            table.add_row(*head, "", "", f"all {group.size} slots ended", "", "", "", "")
        for slot in group.slots:
            table.add_row(*head, *_slot(slot))
            head = ["", "", ""]
        if group.open_slots > len(group.slots):
            table.add_row("", "", "", "", "", f"and {group.open_slots - len(group.slots)} more", "", "", "", "")
        table.add_section()
    return table


def _slot(slot: OpenSlot) -> list[str]:
    what: Any = slot.state if slot.state != "backing off" else f"backing off for {seconds(slot.due_in_s)}"
    age = "" if slot.state == "backing off" else seconds(slot.age_s)
    if slot.state == "running":
        what = f"{slot.phase} ({seconds(slot.phase_s)})" if slot.phase else "running"
    return [
        str(slot.sample_idx), str(slot.attempt), _plain(what), age, _plain(slot.worker), _plain(slot.server),
        _plain(slot.last_failure[:120]),
    ]  # fmt: skip


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
