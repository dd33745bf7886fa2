"""Holds what Redis has against the reference, at one instant (the invariants of the architecture page)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from reference import Reference
from snapshot import Snapshot

__all__ = ["violations"]

_FAMILIES = re.compile(
    r"settings|state|counters|prompts(:direct)?|running(:direct)?|held|collected|ready|cut|leases|deadlines|evicted"
    r"|drops|dead|dead:sizes|dead:\d+|poison|poison:about|jobs|results:\d+|batches|batches:(kept|gone)|batch:\d+(:tasks)?"
    r"|followers|followers:missed|collectors|partitions|tally|rewrites|lease:results:\d+|workers|workers:seen|lease:collector.*|wake:\w+|group:\d+|rows:\d+:\d+:\d+"
    r"|submitted:.*|arq:job:.*"
)


def violations(look: Snapshot, model: Reference) -> list[str]:
    """What is not as it must be, a line each."""
    checks = (
        _groups,
        _conservation,
        _places,
        _slots,
        _results,
        _rows,
        _counters,
        _state,
        _batches,
        _ledgers,
        _partitions,
        _sums,
        _names,
    )
    return [f"{check.__name__.strip('_')}: {line}" for check in checks for line in check(look, model)]


def _differ(what: str, found: Any, expected: Any) -> Iterator[str]:
    if found != expected:
        yield f"{what}: found {found!r}, expected {expected!r}"


def _ints(members: Any) -> list[int]:
    return [int(member) for member in members]


def _state_of(look: Snapshot, task: int) -> str:
    value = look.get(f"group:{task}", {}).get(b"st")
    return "" if value is None else str(value.decode())


def _groups(look: Snapshot, model: Reference) -> Iterator[str]:
    """Each group is in the state it must be in; what has ended and holds no rows has a TTL, and nothing else has."""
    for task, group in model.groups.items():
        yield from _differ(f"group {task}", _state_of(look, task), group.state)
        yield from _differ(f"TTL of group {task}", f"group:{task}" in look.expiring, group.gone)
    yield from _differ("the number of groups", len(look.names("group:")), len(model.groups))


def _conservation(look: Snapshot, model: Reference) -> Iterator[str]:
    """Submitted + requeued = delivered + rejected + evicted + in flight, in numbers and as sets of ids."""
    counters = {name.decode(): int(value) for name, value in look.get("counters", {}).items()}
    flying = [
        *(int(fields[b"t"]) for name in ("prompts", "prompts:direct") for fields in look.get(name, {}).values()),
        *_ints(look.get("running", ())),
        *_ints(look.get("running:direct", ())),
        *_ints(look.get("ready", ())),
        *_ints(look.get("cut", ())),
        *_ints(look.get("held", ())),
    ]
    yield from _differ("ids in two places", [task for task, times in Counter(flying).items() if times > 1], [])
    ended = {
        name: {task for task in model.groups if _state_of(look, task) == name}
        for name in ("delivered", "rejected", "evicted")
    }
    for name, tasks in ended.items():
        yield from _differ(f"the counter {name} and the ids", counters.get(name, 0), len(tasks))
    begun = counters.get("submitted", 0) + counters.get("requeued", 0)
    yield from _differ("begun and accounted for", begun, len(flying) + sum(map(len, ended.values())))
    everything = sorted([*flying, *(task for tasks in ended.values() for task in tasks)])
    yield from _differ("the ids", everything, sorted(model.groups))
    used = len(look.get("running", ())) + len(look.get("ready", ())) + len(look.get("cut", ())) + look.number("ahead")
    if used > model.capacity and not model.excused:
        yield f"capacity: {used} groups on their way, {model.capacity} allowed"


def _places(look: Snapshot, model: Reference) -> Iterator[str]:
    """Sets, queues and hashes name the groups that they must, in order where there is one."""
    for direct, suffix in ((False, ""), (True, ":direct")):
        queued = [int(fields[b"t"]) for fields in look.get("prompts" + suffix, {}).values()]
        yield from _differ("prompts" + suffix, queued, model.tasks("queued", direct=direct))
        running = sorted(_ints(look.get("running" + suffix, ())))
        yield from _differ("running" + suffix, running, model.tasks("running", direct=direct))
    ready = look.get("ready", {})
    yield from _differ("ready", _ints(sorted(ready, key=ready.__getitem__)), model.ready)
    cut = {int(task): int(batch) for task, batch in look.get("cut", {}).items()}
    yield from _differ("cut", cut, {task: model.groups[task].batch for task in model.tasks("batched")})
    yield from _differ("held", sorted(_ints(look.get("held", ()))), model.tasks("held"))
    collected = [g.task for g in model.groups.values() if g.collected and not g.gone]
    yield from _differ("collected", sorted(_ints(look.get("collected", ()))), collected)
    dead = set(_ints(look.get("deadlines", ()))) - set(model.tasks("running"))
    yield from _differ("deadlines of groups that do not run", sorted(dead), [])


def _slots(look: Snapshot, model: Reference) -> Iterator[str]:
    """Each open slot is queued or leased, unless a test has lost its records; nothing that has ended is either."""
    jobs = sorted(tuple(map(int, job.decode().rsplit(":", 3)[1:])) for job in look.get("jobs", ()))
    yield from _differ("jobs", jobs, sorted(model.open_slots("queued")))
    leases = {tuple(map(int, member.split(b":"))): past for member, past in look.get("leases", {}).items()}
    expected = dict.fromkeys(model.open_slots("leased"), False) | dict.fromkeys(model.open_slots("lapsed"), True)
    yield from _differ("leases", leases, expected)
    records = {tuple(map(int, name.rsplit(":", 3)[1:])) for name in look.names("arq:job:")}
    lost = set(model.open_slots("lost"))
    yield from _differ("job records", sorted(records - lost), sorted({*expected, *model.open_slots("queued")}))
    for group in model.groups.values():
        known = look.get(f"group:{group.task}", {})
        for idx, slot in enumerate([] if group.gone or group.state == "queued" else group.slots):
            counted = known.get(b"d%d" % idx)
            yield from _differ(f"what counts in slot {idx} of {group.task}", counted and int(counted), slot.by)
            yield from _differ(f"attempt of slot {idx} of {group.task}", int(known.get(b"a%d" % idx, 0)), slot.attempt)


def _results(look: Snapshot, model: Reference) -> Iterator[str]:
    """Each ended slot of a running group has one entry, its own, and nothing else has."""
    found = sorted(
        (int(fields[b"t"]), int(fields[b"i"])) for name in look.names("results:") for fields in look.get(name).values()
    )
    expected = [
        (group.task, idx)
        for group in model.groups.values()
        if group.state == "running"
        for idx, slot in enumerate(group.slots)
        if slot.by is not None
    ]
    yield from _differ("results", found, expected)
    entries = {entry for name in look.names("results:") for entry in look.get(name)}
    own = {look.get(f"group:{task}", {}).get(b"e%d" % idx, b"").decode() for task, idx in expected}
    yield from _differ("entries that are no slot's own", sorted(entries - own), [])


def _rows(look: Snapshot, model: Reference) -> Iterator[str]:
    """Each counted rollout of a group that is not gone has its rows, for good; a publish leaves no others."""
    expected = sorted(
        f"rows:{group.task}:{idx}:{slot.by}"
        for group in model.groups.values()
        if not group.gone
        for idx, slot in enumerate(group.slots)
        if slot.outcome == "usable"
    )
    yield from _differ("rows", sorted(look.names("rows:")), expected)
    yield from _differ("rows with a TTL", [name for name in expected if name in look.expiring], [])


def _counters(look: Snapshot, model: Reference) -> Iterator[str]:
    """Every counter; those of slots agree with the slots."""
    found = {name.decode(): int(value) for name, value in look.get("counters", {}).items() if int(value)}
    expected = {name: value for name, value in model.counts.items() if value}
    for name in sorted(found.keys() | expected.keys()):
        yield from _differ(name, found.get(name, 0), expected.get(name, 0))
    ended = Counter(slot.outcome for group in model.groups.values() for slot in group.slots if slot.by is not None)
    for outcome in ("usable", "rejected", "failed"):
        yield from _differ(f"slots {outcome}", found.get(f"slots:{outcome}", 0), ended[outcome])


def _state(look: Snapshot, model: Reference) -> Iterator[str]:
    """The numbers of the capacity rule, the epoch, and the flags."""
    numbers = {
        "version": model.version, "ahead": model.ahead, "cut_batches": model.unread, "settled": model.settled,
        "epoch": model.epoch, "recoveries": model.recoveries, "batch_seq": model.numbers,
        "task_seq": len(model.groups), "eod": model.end, "dynamic": model.dynamic,
    }  # fmt: skip
    for name, expected in numbers.items():
        yield from _differ(name, look.number(name), int(expected or 0))
    yield from _differ("stopped", b"stopped" in look.get("state", {}), model.stopped)
    driver = look.get("state", {}).get(b"driver")
    yield from _differ("driver", driver and driver.decode(), model.driver)
    for row in ("slots", "groups", "barren"):
        yield from _differ(f"in a row: {row}", look.number(f"streak:{row}"), model.streaks[row])


def _batches(look: Snapshot, model: Reference) -> Iterator[str]:
    """Each batch that lives has one entry and its groups, and nothing of another is left."""
    live = sorted(model.batches)
    yield from _differ("entries", [int(fields[b"b"]) for fields in look.get("batches", {}).values()], live)
    hashes = sorted(int(name[6:]) for name in look.names("batch:") if not name.endswith(":tasks"))
    yield from _differ("hashes", hashes, live)
    lists = sorted(int(name.split(":")[1]) for name in look.names("batch:") if name.endswith(":tasks"))
    yield from _differ("lists", lists, live)
    seen: Counter[int] = Counter()
    for number, batch in model.batches.items():
        tasks = _ints(look.get(f"batch:{number}:tasks", ()))
        yield from _differ(f"groups of batch {number}", tasks, batch.tasks)
        state = look.get(f"batch:{number}", {}).get(b"st")
        yield from _differ(f"batch {number}", state, b"delivered" if batch.read else b"unread")
        seen.update(tasks)
    yield from _differ("groups in two batches", [task for task, times in seen.items() if times > 1], [])
    kept = sorted(_ints(look.get("batches:kept", ())))
    yield from _differ("kept", kept, [number for number in live if model.batches[number].read])
    yield from _differ("gone", sorted(_ints(look.get("batches:gone", ()))), sorted(model.gone))
    yield from _differ("followers", {name.decode() for name in look.get("followers", ())}, model.followers)
    missed = {name.decode(): int(value) for name, value in look.get("followers:missed", {}).items()}
    yield from _differ("missed", missed, model.missed)


def _ledgers(look: Snapshot, model: Reference) -> Iterator[str]:
    """One drop for each group that ended short of a trainer, one letter for each slot that failed for good."""
    drops = [
        (int(f[b"t"]), f[b"o"].decode(), f[b"p"].decode(), f[b"r"].decode(), int(f[b"child"]) if f[b"child"] else None)
        for f in look.get("drops", {}).values()
    ]
    # Within one step they may come in another order.
    yield from _differ("drops", sorted(map(repr, drops)), sorted(map(repr, model.drops)))
    yield from _differ("dead", sorted(_ints(look.get("dead", ()))), sorted(model.letters))
    for task, letter in model.letters.items():
        known = look.get(f"dead:{task}", {})
        slots = {int(name[1:]) for name in known if re.fullmatch(rb"k\d+", name)}
        yield from _differ(f"dead slots of {task}", slots, letter.slots)
        following, ended = known.get(b"next"), known.get(b"end")
        yield from _differ(f"the redrive of {task}", following and int(following), letter.following)
        yield from _differ(f"the end of {task}", ended and ended.decode(), letter.ended)
    yield from _differ("dumps to mark", sorted(_ints(look.get("evicted", ()))), sorted(model.marks))


def _partitions(look: Snapshot, model: Reference) -> Iterator[str]:
    """Each partition has the owner and the epoch that it must, and its groups' results alone."""
    known = look.get("partitions", {})
    for partition in range(model.rules.partitions):
        owner = look.get(f"lease:results:{partition}")
        yield from _differ(f"owner of {partition}", owner and owner.decode(), model.owners.get(partition))
        epoch = int(known.get(b"epoch:%d" % partition, 0))
        yield from _differ(f"epoch of {partition}", epoch, model.partition_epochs[partition])
        tasks = {int(fields[b"t"]) for fields in look.get(f"results:{partition}", {}).values()}
        foreign = [task for task in tasks if task % model.rules.partitions != partition]
        yield from _differ(f"groups of others in {partition}", foreign, [])


def _sums(look: Snapshot, model: Reference) -> Iterator[str]:
    """The sums of bytes are those of what is there: rows not acknowledged, results, prompts that wait."""
    groups = {task: look.get(f"group:{task}", {}) for task in model.groups}
    acked = {task for batch in model.batches.values() if batch.finished for task in batch.tasks}
    counted = {
        task: sum(len(look.get(name)) for name in look.names(f"rows:{task}:"))
        for task, group in model.groups.items()
        if not group.gone and task not in acked
    }
    yield from _differ("rows_bytes", look.number("rows_bytes"), sum(counted.values()))
    own = {task: int(known.get(b"rb", 0)) for task, known in groups.items()}
    yield from _differ("rb", {t: n for t, n in own.items() if n}, {t: n for t, n in counted.items() if n})
    headers = [len(f[b"h"]) for name in look.names("results:") for f in look.get(name).values()]
    yield from _differ("results_bytes", look.number("results_bytes"), sum(headers))
    yield from _differ("hb", sum(int(known.get(b"hb", 0)) for known in groups.values()), sum(headers))
    for direct, name in ((False, "queued_bytes"), (True, "queued_bytes:direct")):
        waiting = (groups[task] for task in model.tasks("queued", direct=direct))
        yield from _differ(name, look.number(name), sum(len(g[b"spec"]) + len(g[b"rules"]) for g in waiting))
    counters = look.get("counters", {})
    dropped = int(counters.get(b"rejected", 0)) + int(counters.get(b"evicted", 0))
    yield from _differ("drops, rejected and evicted", len(look.get("drops", ())), dropped)


def _names(look: Snapshot, model: Reference) -> Iterator[str]:
    """No key is of a family that nobody knows, and no wake-up waits twice."""
    yield from _differ("strange keys", [name for name in look.values if not _FAMILIES.fullmatch(name)], [])
    twice = [name for name in look.names("wake:") if len(look.get(name)) > 1]
    yield from _differ("wake-ups that wait twice", twice, [])
