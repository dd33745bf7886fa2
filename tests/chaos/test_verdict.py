"""The judgement of ``make chaos``: every kind of fault, written into the books, is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chaos.journal import Journal, read_journal
from chaos.ledger import ledger_faults
from chaos.recovery import percentile
from chaos.schedule import Action, Target, blows
from chaos.verdict import Verdict, judge
from chaos.workflow import read_token, write_token
from forebay.store.ledger_records import Drop

Record = dict[str, Any]


def submitted(*pairs: tuple[int, int]) -> list[Record]:
    """The producer's book for ``(prompt, task id)``."""
    return [
        record
        for number, task in pairs
        for record in (
            {"kind": "submit", "number": number},
            {"kind": "submitted", "number": number, "task": task},
        )
    ]


def handed(batch: int, *groups: tuple[int, int, int, int], digest: str = "a", faults: tuple[str, ...] = ()) -> Record:
    """A hand-over of groups ``(task, prompt, head as labelled, oldest real version)``."""
    return {"kind": "handed", "batch": batch, "groups": groups, "digest": digest, "faults": faults, "again": False}


def step(batch: int, version: int) -> Record:
    """A step on `batch`, trained on at `version`."""
    return {"kind": "step", "batch": batch, "version": version}


def faults(verdict: Verdict) -> tuple[int, int, int, int]:
    """How many lost, duplicated, stale and wrong."""
    return len(verdict.lost), len(verdict.duplicated), len(verdict.stale), len(verdict.wrong)


GOOD = [handed(1, (10, 1, 3, 3), (11, 2, 4, 4)), step(1, 4)]
ENDS = {10: "delivered", 11: "delivered"}


def test_clean_books() -> None:
    """A run in which all went well has no fault, and its figures are right."""
    verdict = judge(submitted((1, 10), (2, 11)), GOOD, ENDS, 1)
    assert faults(verdict) == (0, 0, 0, 0)
    assert (verdict.groups, verdict.delivered, verdict.batches, verdict.redelivered) == (2, 2, 1, 0)
    assert verdict.staleness == {1: 1, 0: 1}


def test_the_same_batch_again_is_no_duplicate() -> None:
    """6: redelivery of a batch with the same content is what the contract promises."""
    verdict = judge(submitted((1, 10), (2, 11)), [GOOD[0], *GOOD], ENDS, 1)
    assert faults(verdict) == (0, 0, 0, 0)
    assert verdict.redelivered == 1


def test_a_batch_with_other_content_is_a_duplicate() -> None:
    """6: after its first hand-over a batch is frozen."""
    again = handed(1, (10, 1, 3, 3), (11, 2, 4, 4), digest="b")
    assert faults(judge(submitted((1, 10), (2, 11)), [*GOOD, again], ENDS, 1)) == (0, 1, 0, 0)


def test_a_batch_after_its_ack_is_a_duplicate() -> None:
    """13: an ack that was answered ends the batch: it comes again neither with this content nor with another."""
    again = [*GOOD, {"kind": "acked", "batch": 1}, GOOD[0]]
    assert faults(judge(submitted((1, 10), (2, 11)), again, ENDS, 1)) == (0, 1, 0, 0)


def drop(task: int, outcome: str = "evicted", reason: str = "stale") -> Drop:
    """An entry of the drop ledger."""
    return Drop(task, 0, outcome, "cut", reason, "", None, None, f"prompt {task}")


def doomed(prompt: str) -> bool:
    """Whether a prompt is one that the workflow rejects."""
    return prompt == "prompt 12"


def test_the_runs_own_ledger_is_held_against_the_outcomes() -> None:
    """4.4, 6: one entry for each group that did not arrive, none for others, for reasons that chaos has; sums agree."""
    ends = {10: "delivered", 11: "evicted", 12: "rejected"}
    good = [drop(11), drop(12, "rejected", "no_usable_slot")]
    counts = {"rejected": 1, "evicted": 1, "dead_letters": 2, "slots:failed": 2}
    assert ledger_faults(ends, good, counts, doomed) == []
    wrong: list[tuple[list[Drop], dict[str, int], str]] = [
        ([*good, drop(11)], counts | {"evicted": 2}, "group 11 evicted has 2 entries"),
        ([*good, drop(10)], counts | {"evicted": 2}, "group 10 evicted has 1 entries, not 0"),
        (good[:1], counts | {"rejected": 0}, "group 12 rejected has 0 entries"),
        (good, counts | {"evicted": 2}, "1 entries evicted, counted 2"),
        (good, counts | {"dead_letters": 1}, "1 dead letters, 2 slots"),
        (
            [drop(11, "rejected", "no_usable_slot"), good[1]],
            {**counts, "evicted": 0, "rejected": 2},
            "is not one to be",
        ),
        ([good[0], drop(12, "rejected", "rows_lost")], counts, "group 12 was rejected at cut for rows_lost"),
    ]
    for drops, counters, text in wrong:
        own = ends | {11: "rejected"} if "not one" in text else ends
        (fault,) = ledger_faults(own, drops, counters, doomed)
        assert text in fault


def test_group_and_prompt_in_two_batches() -> None:
    """6: no task id is in two batches; nor is a prompt under two ids, as of a requeue that should not have been."""
    twice = [*GOOD, handed(2, (10, 1, 4, 4)), step(2, 5)]
    assert faults(judge(submitted((1, 10), (2, 11)), twice, ENDS, 1)) == (0, 2, 0, 0)
    other = [*GOOD, handed(2, (12, 1, 4, 4)), step(2, 5)]
    assert faults(judge(submitted((1, 10), (2, 11)), other, ENDS | {12: "delivered"}, 1)) == (0, 1, 0, 0)


def test_a_step_taken_twice_is_a_duplicate() -> None:
    """13: a trainer that resumes does not train on a batch that its checkpoint names."""
    assert faults(judge(submitted((1, 10), (2, 11)), [*GOOD, step(1, 5)], ENDS, 2)) == (0, 1, 0, 0)


def test_key_with_two_groups() -> None:
    """13: submit is idempotent by its key."""
    books = [*submitted((1, 10), (2, 11)), {"kind": "submitted", "number": 1, "task": 12}]
    assert faults(judge(books, GOOD, ENDS | {12: "rejected"}, 1)) == (0, 1, 0, 0)


def test_lost_prompt() -> None:
    """Case 16: a prompt without an end is lost, whether it was acknowledged, is still in flight, or was never sent."""
    books = [*submitted((1, 10), (2, 11), (3, 12)), {"kind": "submit", "number": 4}]
    assert faults(judge(books, GOOD, ENDS, 1)) == (2, 0, 0, 0)
    assert faults(judge(submitted((1, 10), (2, 11), (3, 12)), GOOD, ENDS | {12: "running"}, 1)) == (2, 0, 0, 0)


def test_ends_that_are_recorded_are_no_losses() -> None:
    """A rejected group, an evicted one, and one that came under the id of its requeue, are not lost."""
    books = submitted((1, 10), (2, 11), (3, 12), (4, 13), (5, 14))
    came = [*GOOD, handed(2, (15, 5, 5, 5)), step(2, 5)]
    ends = ENDS | {12: "rejected", 13: "evicted", 14: "evicted", 15: "delivered"}
    verdict = judge(books, came, ends, 1)
    assert faults(verdict) == (0, 0, 0, 0)
    assert (verdict.rejected, verdict.evicted) == (1, 2)


def test_delivered_only_in_the_counters() -> None:
    """A group that counts as delivered and never reached the trainer is lost."""
    verdict = judge(submitted((1, 10), (2, 11), (3, 12)), GOOD, ENDS | {12: "delivered"}, 1)
    assert any("never got it" in text for text in verdict.lost)


def test_batch_that_was_never_trained_on() -> None:
    """A batch that was handed over and has no step is lost: it should have come again."""
    books = submitted((1, 10), (2, 11), (3, 12))
    assert faults(judge(books, [*GOOD, handed(2, (12, 3, 4, 4))], ENDS | {12: "delivered"}, 1)) == (1, 0, 0, 0)


def test_stale_by_label_and_by_tokens() -> None:
    """6: staleness counts from the oldest version, and a label that is too new does not hide an old token."""
    ends, books = {10: "delivered"}, submitted((1, 10))
    assert faults(judge(books, [handed(1, (10, 1, 2, 4)), step(1, 4)], ends, 1)) == (0, 0, 1, 0)
    assert faults(judge(books, [handed(1, (10, 1, 4, 2)), step(1, 4)], ends, 1)) == (0, 0, 1, 0)
    assert faults(judge(books, [handed(1, (10, 1, 3, 3)), step(1, 4)], ends, 1)) == (0, 0, 0, 0)


def test_wrong_content() -> None:
    """Case 19: what the trainer finds wrong in the tokens is a fault."""
    books = [handed(1, (10, 1, 3, 3), faults=("group 10 is of prompts [1, 2]",)), step(1, 3)]
    assert faults(judge(submitted((1, 10)), books, {10: "delivered"}, 1)) == (0, 0, 0, 1)


def test_tokens_tell_version_and_prompt() -> None:
    """A token gives its version back to whoever knows the prompt, and nothing for another prompt."""
    token = write_token(37, 4021)
    assert read_token(token, 4021) == 37
    assert read_token(token, 4022) is None


def test_torn_line_is_skipped(tmp_path: Path) -> None:
    """A writer that was killed in the middle of a line spoils neither the lines before nor those after."""
    path = tmp_path / "books" / "book.jsonl"
    journal = Journal(path)
    journal.write("submit", number=1)
    journal.close()
    with path.open("ab") as file:
        file.write(b'{"kind": "submit", "num')
    journal = Journal(path)
    journal.write("submit", number=2)
    journal.close()
    assert [record["number"] for record in read_journal(path)] == [1, 2]
    assert read_journal(tmp_path / "none.jsonl") == []


def test_schedule_is_the_seeds() -> None:
    """The seed alone decides who is hit; every kind is, in every dozen; stops are shorter and longer than a lease."""
    first, again, other = (blows(seed, 2.0) for seed in (5, 5, 6))
    mine = [next(first) for _ in range(240)]
    assert mine == [next(again) for _ in range(240)]
    assert mine != [next(other) for _ in range(240)]
    assert all({blow.target for blow in mine[at : at + 12]} == set(Target) for at in range(0, 240, 12))
    holds = [blow.hold_s for blow in mine if blow.action is Action.STOP]
    assert min(holds) < 2.0 < max(holds)
    assert all(not blow.hold_s for blow in mine if blow.action is not Action.STOP)
    assert 60 * len(mine) / sum(blow.gap_s for blow in mine) > 20
    hits = {(blow.target, blow.action) for blow in mine[:150]}
    assert hits == {(target, action) for target in Target for action in Action}, "in five minutes"
    assert min(blow.hold_s for blow in mine if blow.target is Target.REDIS and blow.hold_s) > 2.0
    kills = sum(blow.action is Action.KILL for blow in mine)
    assert 60 * kills / sum(blow.gap_s for blow in mine) > 10


def test_percentiles() -> None:
    """The nearest rank: never a value that nobody measured."""
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (50.0, 99.0)
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([], 0.5) is None
