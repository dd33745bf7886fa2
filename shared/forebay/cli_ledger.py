"""Commands that tell what went wrong: drops, dead letters, what was set aside."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

import typer

from forebay.blocking import Client
from forebay.errors import FrameError, GroupNotDeliveredError, QueueFullError, SubmitError
from forebay.outcomes import FailureKind
from forebay.redaction import HIDDEN, without_userinfo
from forebay.store.ledger_records import DeadGroup, DeadSlot, Drop
from forebay.wire.envelopes import GroupSpec
from forebay.wire.values import TAG

__all__ = ["parse_since", "register", "shown", "tally"]

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SECRET_NAME = re.compile(r"(?i)(?:^|[_-])(?:token|api_?key|secret|password|passwd|authorization)$")
_NOT_REDRIVEN = {
    "exists": "its prompt came again before, as {new}; --again does it once more",
    "delivered": "it was delivered with the slots that it had; --again submits its prompt all the same",
    "open": "it has not ended",
    "no_prompt": "its prompt was too large to be kept (dead_letter_bytes); submit it from your data",
    "unknown": "it has no dead letters, or they are no longer kept",
}
_PASSED_OVER = {
    "exists": "came again before",
    "delivered": "delivered with the slots that they had",
    "open": "not ended",
    "no_prompt": "without their prompt",
    "unknown": "no longer kept",
}
_Reason = Annotated[str | None, typer.Option(help="Only slots whose reason has these words in it.")]


class By(StrEnum):
    """What drops are counted by."""

    REASON = "reason"
    PROMPT = "prompt"
    PLACE = "place"
    HOUR = "hour"


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(drops)
    app.command()(poison)
    letters = typer.Typer(
        help="Slots that failed for good: list them, show one, submit their prompts again.", no_args_is_help=True
    )
    letters.command("list")(dead_list)
    letters.command("show")(dead_show)
    letters.command("redrive")(dead_redrive)
    app.add_typer(letters, name="dead")


def drops(
    by: Annotated[By | None, typer.Option(help="Count them by this, instead of a line each.")] = None,
    since: Annotated[str | None, typer.Option(help="Only since then: 90s, 10m, 2h, 1d, or 2026-01-31T12:00.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many lines.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Tell why groups did not reach a trainer, the newest first."""
    start = 0.0 if since is None else parse_since(since, datetime.now(UTC))
    with Client.connect(wait_s=0) as client:
        found = client.drops(since=start, limit=limit if by is None else None)
    if by is None:
        for drop in found:
            form = dataclasses.asdict(drop) | {"detail": _plain(drop.detail)}
            print(json.dumps(form) if as_json else _drop_line(drop))
        if not found:
            print("no group was dropped", file=sys.stderr)
        return
    counts = tally(found, by)
    for name, count in counts[:limit]:
        print(json.dumps({by.value: name, "groups": count}) if as_json else f"{count:8}  {_plain(name)}")
    if not as_json:
        print(f"{len(found):8}  groups in all, {len(counts)} kinds", file=sys.stderr)


def tally(found: Sequence[Drop], by: By) -> list[tuple[str, int]]:
    """The numbers of drops by reason (with the outcome), prompt, place or hour (UTC).

    The largest come first; hours come in their order.
    """
    if by is By.HOUR:
        return sorted(Counter(_time(drop.at_ms)[:13] + "Z" for drop in found).items())
    name = {
        By.REASON: lambda drop: f"{drop.outcome}: {drop.reason}",
        By.PROMPT: lambda drop: drop.prompt or "(unknown)",
        By.PLACE: lambda drop: drop.place,
    }[by]
    return sorted(Counter(map(name, found)).items(), key=lambda item: (-item[1], item[0]))


def parse_since(text: str, now: datetime) -> float:
    """Unix time, s, of ``10m`` (before `now`) or of a time in ISO 8601, UTC unless it says otherwise.

    Raises:
        SubmitError: it is neither.
    """
    if found := re.fullmatch(r"(\d{1,6})([smhd])", text):
        return now.timestamp() - int(found[1]) * _UNITS_S[found[2]]
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise SubmitError(f"--since {text}: give 90s, 10m, 2h, 1d, or a time as 2026-01-31T12:00") from None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="seconds").removesuffix("+00:00")


def _plain(text: str) -> str:
    """One line without passwords, and without what a terminal would obey: others' words are not to be trusted."""
    return "".join(char if char.isprintable() else " " for char in without_userinfo(text))


def _lines(text: str) -> str:
    return "\n".join(_plain(line) for line in text.splitlines())


def _drop_line(drop: Drop) -> str:
    also = [f"parent {drop.parent}"] if drop.parent is not None else []
    also += [f"again as {drop.child}"] if drop.child is not None else []
    also += [f"prompt {drop.prompt}"] if drop.prompt else []
    more = f" ({', '.join(also)})" if also else ""
    detail = f": {drop.detail}" if drop.detail else ""
    return _plain(
        f"{_time(drop.at_ms)}Z  group {drop.task_id}  {drop.outcome} at {drop.place}, {drop.reason}{detail}{more}"
    )


def poison(
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """List what was set aside because it could not be read, the newest first."""
    with Client.connect(wait_s=0) as client:
        found = client.poison()
    for item in found[:limit]:
        if as_json:
            print(json.dumps({**dataclasses.asdict(item), "sample": item.sample.hex()}))
        else:
            print(_plain(f"{_time(item.at_ms)}Z  {item.name}  {item.reason}  {item.sample!r}"))
    if not found:
        print("nothing was set aside", file=sys.stderr)


def dead_list(
    kind: Annotated[FailureKind | None, typer.Option(help="Only slots that failed so.")] = None,
    reason: _Reason = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many slots.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """List the slots that failed for good, the newest groups first."""
    with Client.connect(wait_s=0) as client:
        groups = client.dead_letters(kind=None if kind is None else kind.value)
    slots = [(group, slot) for group in reversed(groups) for slot in group.slots if _chosen(slot, kind, reason)]
    for group, slot in slots[:limit]:
        if as_json:
            form = dataclasses.asdict(slot) | {"reason": _plain(slot.reason), "traceback": _lines(slot.traceback)}
            print(json.dumps({**form, "prompt": group.prompt, "ended": group.ended, "next_task": group.next_task}))
        else:
            print(_slot_line(group, slot))
    if not slots:
        print("no slot has failed for good", file=sys.stderr)
    elif len(slots) > limit:
        print(f"... and {len(slots) - limit} more", file=sys.stderr)


def _chosen(slot: DeadSlot, kind: FailureKind | None, reason: str | None) -> bool:
    return (kind is None or slot.kind == kind.value) and (reason is None or reason in slot.reason)


def _slot_line(group: DeadGroup, slot: DeadSlot) -> str:
    state = f"redriven as {group.next_task}" if group.next_task is not None else group.ended or "not ended"
    return _plain(
        f"{_time(slot.at_ms)}Z  {slot.task_id}:{slot.sample_idx}  {slot.kind}, attempt {slot.attempts}, worker "
        f"{slot.worker or 'none'}  {slot.reason}  (group {state})"
    )


def dead_show(
    slot: Annotated[str, typer.Argument(metavar="TASK[:IDX]", help="A group, or one slot of it.")],
) -> None:
    """Show the dead letters of a group, tracebacks and prompt included."""
    found = re.fullmatch(r"(\d{1,18})(?::(\d{1,9}))?", slot)
    if not found:
        raise SubmitError(f"{slot}: give a task id, or TASK:IDX")
    with Client.connect(wait_s=0) as client:
        group = client.dead_letter(int(found[1]))
    if group is None:
        raise GroupNotDeliveredError(f"group {found[1]} has no dead letters, or they are no longer kept")
    chosen = [one for one in group.slots if found[2] is None or one.sample_idx == int(found[2])]
    if not chosen:
        raise GroupNotDeliveredError(f"slot {found[2]} of group {found[1]} did not fail for good")
    for one in chosen:
        print(_slot_line(group, one))
        if one.traceback:
            print(_lines(one.traceback))
    print(f"prompt: {_plain(group.prompt) or '(no key)'}")
    print(_spec_text(group.spec))


def _spec_text(packed: bytes | None) -> str:
    if packed is None:
        return "its prompt was too large to be kept"
    try:
        spec = GroupSpec.unpack(packed)
    except FrameError as error:
        return f"its prompt cannot be read: {error}"
    form = {"workflow": spec.workflow, "kwargs": shown(spec.kwargs), "data": shown(spec.data)}
    return json.dumps(form, indent=2, ensure_ascii=True)


def shown(value: Any) -> Any:
    """An encoded value for people: arrays and bytes by their size, settings and names as they are written, no secrets.

    A secret is what has the name of one, and the user and password of a URL.
    """
    if isinstance(value, str):
        return without_userinfo(value)
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, list):
        return [shown(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(TAG)
    if kind == "array":
        return f"<array {value.get('dtype')} {value.get('shape')}>"
    plain = {
        str(name): HIDDEN if isinstance(item, str) and _SECRET_NAME.search(str(name)) else shown(item)
        for name, item in value.items()
        if name != TAG
    }
    return plain if kind is None else {f"<{kind}>": plain}


def dead_redrive(
    tasks: Annotated[list[int] | None, typer.Argument(metavar="[TASK]...", help="Groups, by task id.")] = None,
    kind: Annotated[FailureKind | None, typer.Option(help="All groups with a slot that failed so.")] = None,
    reason: Annotated[
        str | None, typer.Option(help="All groups with a slot whose reason has these words in it.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All groups with dead letters.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Also what came again before, or was delivered without those slots.")
    ] = False,
) -> None:
    """Submit the prompts of groups with dead letters again, each as a new group that names the old one."""
    if sum((bool(tasks), kind is not None or reason is not None, every)) != 1:
        raise SubmitError("say which: task ids, or --kind or --reason (or both), or --all")
    with Client.connect(wait_s=0) as client:
        chosen = tasks or [
            group.task_id for group in client.dead_letters() if any(_chosen(slot, kind, reason) for slot in group.slots)
        ]
        done, left = 0, Counter[str]()
        for task_id in chosen:
            try:
                answer = client.redrive(task_id, again=again)
            except QueueFullError as error:
                raise QueueFullError(f"redriven {done} groups; then, at group {task_id}: {error}") from None
            if answer.state == "created":
                done += 1
                print(f"group {task_id} comes again as {answer.new_task}")
                continue
            left[answer.state] += 1
            if tasks:
                why = _NOT_REDRIVEN[answer.state].format(new=answer.new_task)
                print(f"group {task_id} was not redriven: {why}", file=sys.stderr)
    passed = ", ".join(f"{count} {_PASSED_OVER[state]}" for state, count in sorted(left.items()))
    print(f"redriven {done} of {len(chosen)} groups{f'; passed over: {passed}' if passed else ''}", file=sys.stderr)
    if tasks and left:
        raise typer.Exit(1)
