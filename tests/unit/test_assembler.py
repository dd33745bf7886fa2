"""Groups from slot results in any order (contract 4.2, 4.3)."""

from __future__ import annotations

import pytest
from helpers.building import failed, usable
from hypothesis import given
from hypothesis import strategies as st

from forebay.store.records import ResultEntry
from forebay.wire.envelopes import GroupRules, SlotHeader
from forebay_collector.assembler import Assembled, Assembler

RULES = GroupRules(1)


def entry(task: int, idx: int, header: SlotHeader | None = None, number: int = 0) -> ResultEntry:
    """A result as it is read from the stream."""
    return ResultEntry(f"{number}-0", task, idx, (header or usable(task, idx)).pack())


def fed(assembler: Assembler, sizes: dict[int, int], entries: list[ResultEntry]) -> list[Assembled]:
    """What comes out, where each group is opened at its first entry as the service does it."""
    out = []
    done: set[int] = set()
    for one in entries:
        if one.task_id in done:
            continue  # its rules are gone once it is committed
        if not assembler.knows(one.task_id):
            assembler.open(one.task_id, RULES, sizes[one.task_id])
        if (group := assembler.add(one)) is not None:
            done.add(group.task_id)
            out.append(group)
    return out


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[dict[int, int], list[tuple[int, int]]]:
    """Groups of any size, and all their slots in any order, some of them several times."""
    sizes = draw(st.dictionaries(st.integers(0, 50), st.integers(1, 5), min_size=1, max_size=5))
    slots = [(task, idx) for task, size in sizes.items() for idx in range(size)]
    again = draw(st.lists(st.sampled_from(slots), max_size=8))
    return sizes, draw(st.permutations(slots + again))


@given(arrivals())
def test_case_19_never_a_group_of_two_prompts(case: tuple[dict[int, int], list[tuple[int, int]]]) -> None:
    """Case 19: whatever arrives when and how often, each group comes out once, whole, of its own slots only."""
    sizes, order = case
    assembler = Assembler()
    groups = fed(assembler, sizes, [entry(task, idx, number=at) for at, (task, idx) in enumerate(order)])
    assert sorted(group.task_id for group in groups) == sorted(sizes)
    for group in groups:
        assert group.group_size == sizes[group.task_id]
        assert sorted(group.headers) == list(range(group.group_size))
        assert {(header.task, header.idx) for header in group.headers.values()} == {
            (group.task_id, idx) for idx in range(group.group_size)
        }
    assert len(assembler) == 0


@given(arrivals(), st.data())
def test_an_incomplete_group_never_comes_out(
    case: tuple[dict[int, int], list[tuple[int, int]]], data: st.DataObject
) -> None:
    """A group that lacks one slot stays, however often its other slots arrive; the others are not held up."""
    sizes, order = case
    lacking = data.draw(st.sampled_from(order))
    assembler = Assembler()
    groups = fed(assembler, sizes, [entry(*slot) for slot in order if slot != lacking])
    assert {group.task_id for group in groups} == set(sizes) - {lacking[0]}
    assert len(assembler) == (1 if sizes[lacking[0]] > 1 else 0)


def test_contract_4_3_the_first_result_counts() -> None:
    """A second result of a slot does not replace the first."""
    assembler = Assembler()
    (group,) = fed(
        assembler,
        {1: 2},
        [entry(1, 0, usable(1, 0, [5.0])), entry(1, 0, failed(1, 0)), entry(1, 0, usable(1, 0, [9.0])), entry(1, 1)],
    )
    assert [row.reward for row in group.headers[0].rows] == [5.0]


def test_contract_4_3_indices_are_those_of_the_group() -> None:
    """An index outside 0..group_size-1 neither counts nor disturbs."""
    assembler = Assembler()
    (group,) = fed(assembler, {1: 2}, [entry(1, 2), entry(1, -1), entry(1, 0), entry(1, 7), entry(1, 1)])
    assert sorted(group.headers) == [0, 1]


@pytest.mark.parametrize("packed", [b"", b"\xc1", b"\x01\x02", failed(1, 0).pack()[:-3]])
def test_an_unreadable_result_is_a_failed_slot(packed: bytes) -> None:
    """A damaged header fails its slot as a contract error with the reason, and the group still ends."""
    assembler = Assembler()
    assembler.open(1, RULES, 1)
    group = assembler.add(ResultEntry("0-0", 1, 0, packed))
    assert group is not None
    header = group.headers[0]
    assert (header.task, header.idx, header.outcome, header.kind) == (1, 0, "failed", "contract")
    assert header.reason.startswith("unreadable result: ")


@pytest.mark.parametrize("other", [usable(2, 0), usable(1, 1)])
def test_case_19_a_header_of_another_slot_is_not_taken(other: SlotHeader) -> None:
    """Case 19: a header that says to be of another group or slot than its entry fails the slot."""
    assembler = Assembler()
    assembler.open(1, RULES, 1)
    group = assembler.add(entry(1, 0, other))
    assert group is not None
    assert group.headers[0].outcome == "failed"
    assert f"it is of slot {other.idx} of group {other.task}" in group.headers[0].reason


def test_opening_twice_keeps_what_has_arrived() -> None:
    """A group that is opened again has lost nothing; once it is whole it may be opened anew."""
    assembler = Assembler()
    assembler.open(1, RULES, 2)
    assembler.add(entry(1, 0))
    assembler.open(1, RULES, 2)
    assert assembler.add(entry(1, 1)) is not None
    assert (assembler.knows(1), len(assembler)) == (False, 0)
    assembler.open(1, RULES, 2)
    assert assembler.add(entry(1, 1)) is None


def test_rules_travel_with_the_group() -> None:
    """What comes out has the rules it was opened with."""
    assembler = Assembler()
    rules = GroupRules(1, should_accept_fn="a.b:c", is_eval=True)
    assembler.open(1, rules, 1)
    group = assembler.add(entry(1, 0))
    assert group is not None
    assert group.rules == rules
