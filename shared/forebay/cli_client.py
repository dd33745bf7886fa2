"""Commands for producers and readers: submit, batches, end, status of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from forebay import cli_acl, cli_ledger, cli_why
from forebay.blocking import Batch, Client
from forebay.cli_why import look_at_run
from forebay.errors import ConsumerError, QueueFullError, SubmitError
from forebay.settings import RunSettings
from forebay.stalls import diagnose
from forebay.store.connection import address
from forebay.store.look_records import RunLook
from forebay.store.records import RunStatus
from forebay.wire.values import encode_plain

__all__ = ["print_run", "register", "run_table"]

_MAX_LINE_BYTES = 16 * 2**20


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(submit)
    app.command()(batches)
    app.command()(end)
    app.command()(resume)
    cli_why.register(app)
    cli_ledger.register(app)
    cli_acl.register(app)


def submit(
    file: Annotated[Path, typer.Argument(help="JSONL, one prompt (an object) a line; '-' reads standard input.")],
    workflow: Annotated[str, typer.Option(help="Import string of the workflow, package.module:Name.")],
    group_size: Annotated[int | None, typer.Option(help="Slots for each prompt; default: the run's setting.")] = None,
    kwargs: Annotated[str, typer.Option(help="The workflow's arguments, a JSON object.")] = "{}",
    reward: Annotated[
        str | None, typer.Option(help="Import string of a function, passed as the workflow's reward_fn.")
    ] = None,
    normalize: Annotated[
        bool | None, typer.Option("--normalize/--no-normalize", help="Normalize rewards within each group.")
    ] = None,
    key_prefix: Annotated[
        str | None,
        typer.Option(
            help="Makes the command repeatable: line N is submitted once for PREFIX:N, however often it runs."
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Submit nothing if any line is bad.")] = False,
    end_of_data: Annotated[
        bool, typer.Option("--end", help="End the data afterwards: a partial batch is cut.")
    ] = False,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the run and, in all, for room in its queue.")] = 30.0,
) -> None:
    """Submit the prompts in a JSONL file, one group each.

    A bad line is named with its number, and the others still go, unless --strict.
    """
    arguments = _json_object(kwargs, "--kwargs")
    good, bad = _read_prompts(file)
    with Client.connect(wait_s=wait) as client:
        if reward is not None:
            arguments["reward_fn"] = _function(reward, client)
        if bad and strict:
            _report_bad(bad)
            raise SubmitError(f"{len(bad)} bad lines in {file}; --strict: nothing was submitted")
        ids = []
        for number, data in good:
            key = f"{key_prefix}:{number}" if key_prefix is not None else None
            try:
                ids.append(_submit_one(client, data, workflow, arguments, group_size, normalize, key, wait))
            except QueueFullError as error:
                raise QueueFullError(f"submitted {len(ids)} groups, the lines before {number}; then: {error}") from None
        if end_of_data:
            client.end_of_data()
    span = f", task ids {ids[0]} to {ids[-1]}" if ids else ""
    print(f"submitted {len(ids)} groups to run {client.settings.run}{span}")
    if bad:
        _report_bad(bad)
        raise typer.Exit(1)


def _function(name: str, client: Client) -> Any:
    from forebay.imports import import_object

    return import_object(name, client.run_settings.import_allowlist)


def _submit_one(
    client: Client,
    data: dict[str, Any],
    workflow: str,
    kwargs: dict[str, Any],
    group_size: int | None,
    normalize: bool | None,
    key: str | None,
    wait_s: float,
) -> int:
    import time

    deadline = time.monotonic() + wait_s
    while True:
        try:
            return client.submit(
                data, workflow, kwargs, group_size=group_size, reward_normalization=normalize, idempotency_key=key
            )
        except QueueFullError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)


def _json_object(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SubmitError(f"{option} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise SubmitError(f"{option} must be a JSON object, not {type(value).__name__}")
    return value


def _read_prompts(file: Path) -> tuple[list[tuple[int, dict[str, Any]]], list[tuple[int, str]]]:
    if str(file) == "-":
        lines = sys.stdin.buffer.read().splitlines()
    else:
        try:
            lines = file.read_bytes().splitlines()
        except OSError as error:
            raise SubmitError(f"cannot read {file}: {error.strerror}") from None
    good: list[tuple[int, dict[str, Any]]] = []
    bad: list[tuple[int, str]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if len(line) > _MAX_LINE_BYTES:
            bad.append((number, f"{len(line)} bytes, above the bound of {_MAX_LINE_BYTES}"))
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            bad.append((number, f"no JSON: {error}"))
            continue
        if isinstance(value, dict):
            try:
                encode_plain(value)
            except SubmitError as error:
                bad.append((number, str(error)))
                continue
            good.append((number, value))
        else:
            bad.append((number, f"a JSON {type(value).__name__}, expected an object"))
    return good, bad


def _report_bad(bad: list[tuple[int, str]]) -> None:
    for number, reason in bad[:20]:
        print(f"line {number}: {reason}", file=sys.stderr)
    if len(bad) > 20:
        print(f"... and {len(bad) - 20} more bad lines", file=sys.stderr)


def batches(
    count: Annotated[int | None, typer.Option(help="Stop after so many batches.")] = None,
    consumer: Annotated[
        str | None, typer.Option(help="Whose cursor; else `trainer`, with --follow `follower`.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Read what the trainer is handed, beside it; its batches stay its own.")
    ] = False,
    rank: Annotated[int, typer.Option(help="Read this rank's share of each batch.")] = 0,
    world_size: Annotated[int, typer.Option(help="Of how many ranks; a batch is done with when all have it.")] = 1,
    resume_after: Annotated[
        int | None, typer.Option(help="The last batch id that is done with: later ones come again, if they are kept.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds to wait for each batch.")] = None,
    ack: Annotated[bool, typer.Option("--ack/--no-ack", help="Acknowledge; else the batches come again.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a batch.")] = False,
    advance: Annotated[
        bool, typer.Option("--advance", help="Move the version by one after each batch, as a trainer would.")
    ] = False,
) -> None:
    """Read batches, and print what is in them."""
    if follow and advance:
        raise ConsumerError("--advance with --follow: who follows does not move the version; leave one of them out")
    seen = 0
    with (
        Client.connect() as client,
        client.batches(
            consumer or ("follower" if follow else "trainer"),
            rank=rank,
            world_size=world_size,
            follows=follow,
            resume_after=resume_after,
            timeout_s=timeout,
        ) as stream,
    ):
        while count is None or seen < count:
            batch = stream.next()
            if batch is None:
                print("end of data", file=sys.stderr)
                break
            print(json.dumps(_batch_form(batch)) if as_json else _batch_line(batch), flush=True)
            seen += 1
            if ack:
                batch.ack()
            if advance:
                client.set_version(client.version() + 1)


def _batch_form(batch: Batch) -> dict[str, Any]:
    return {
        "batch_id": batch.batch_id,
        "version": batch.version,
        "partial": batch.partial,
        "tokens": batch.tokens,
        "rank": batch.share_of.rank,
        "world_size": batch.share_of.world_size,
        "batch_groups": batch.share_of.batch_groups,
        "groups": [
            {
                "task_id": group.task,
                "sample_idx": [rollout.sample_idx for rollout in group.rollouts],
                "rewards": [row.reward for rollout in group.rollouts for row in rollout.rows],
                "head_version": group.head,
                "tail_version": group.tail,
            }
            for group in batch.groups
        ],
    }


def _batch_line(batch: Batch) -> str:
    raw = [row.original_reward if row.original_reward is not None else row.reward for row in batch.rows]
    known = [value for value in raw if value is not None]
    mean = f"{sum(known) / len(known):.3f}" if known else "none"
    tasks = ", ".join(str(group.task) for group in batch.groups[:16]) + (", ..." if len(batch.groups) > 16 else "")
    extra = " partial" if batch.partial else ""
    share = batch.share_of
    if share.world_size > 1:
        extra += f", rank {share.rank} of {share.world_size} ({share.batch_groups} groups in all)"
    return (
        f"batch {batch.batch_id}{extra}: {len(batch.groups)} groups, {len(batch.rows)} rows, {batch.tokens} tokens, "
        f"version {batch.version}, mean reward {mean}, tasks {tasks}"
    )


def resume() -> None:
    """Let a run that has stopped itself go on, with its failure budgets anew."""
    with Client.connect() as client:
        stopped = client.resume()
    print(f"run {client.settings.run} {'goes on' if stopped else 'had not stopped'}")


def end() -> None:
    """End the data: the last batch may be partial, and readers come to an end. A later submit opens it again."""
    with Client.connect() as client:
        client.end_of_data()
    print(f"the data of run {client.settings.run} has ended")


def run_table(look: RunLook, rules: RunSettings, run: str) -> Table:
    """What `forebay status` shows of a run."""
    status = look.status
    table = Table(title=f"run {run}", show_header=False, title_justify="left")
    rows = {
        "version": f"{status.version} ({status.delivered_ahead} groups handed over ahead of it)",
        "groups": f"{status.queued} queued, {status.running} running, {status.ready} ready, {status.cut} cut",
        "slots": f"{status.queued_jobs} queued, {status.leased} leased",
        "totals": ", ".join(
            f"{status.count(name)} {name}" for name in ("submitted", "requeued", "delivered", "rejected", "evicted")
        ),
        "asked for by id": f"{status.direct_queued} queued, {status.direct_running} running, {status.held} to collect",
        "collectors": _collectors(status),
        "results": ", ".join(f"{one.unread} unread in {one.number}" for one in status.owners.partitions),
        "workers": str(len(status.workers)),
        "servers": ", ".join(map(address, status.servers)) or "none",
        "bounds": ", ".join(str(bound) for bound in status.bounds if bound.used or bound.reached) or "far from any",
        "next batch": f"{diagnose(look, rules).verdict} (`forebay why` has more)",
    }
    for name, value in rows.items():
        table.add_row(name, value.replace("[", r"\["))
    return table


def _collectors(status: RunStatus) -> str:
    """Who collects, one a line: which leads, which partitions each owns; and what nobody does."""
    owners = status.owners
    names = sorted({*owners.collectors, owners.leader, *(one.owner for one in owners.partitions)} - {""})
    lines = []
    for name in names:
        owned = ", ".join(str(one.number) for one in owners.partitions if one.owner == name) or "none"
        lines.append(f"{name}: partitions {owned}" + (", leads" if name == owners.leader else ""))
    if not owners.leader:
        lines.append("none leads")
    if owners.unowned:
        lines.append(f"nobody owns partitions {', '.join(map(str, owners.unowned))}")
    return "\n".join(lines)


def print_run(console: Console | None = None) -> None:
    """Print the status of the run that the environment names; a line where nobody serves it."""
    out = console or Console()
    seen = look_at_run()
    if seen.look is None or seen.rules is None:
        out.print(seen.nobody, markup=False)
        return
    out.print(run_table(seen.look, seen.rules, seen.run))
