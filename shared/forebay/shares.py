"""How the groups of one batch are dealt to the ranks of a trainer (contract, section 13). Pure: all ranks agree."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.wire.envelopes import GroupSummary

__all__ = ["ShareOf", "deal", "tokens_of", "trained_tokens_of"]


@dataclass(frozen=True, slots=True)
class ShareOf:
    """Of which batch a share is. The totals are those of all ranks' shares together, the same on each rank."""

    rank: int
    world_size: int
    batch_groups: int
    batch_tokens: int
    """Real tokens, prompts included."""
    batch_trained_tokens: int
    """What a loss that is weighted by tokens is divided by, so that ranks with unequal shares add up."""


def tokens_of(group: GroupSummary) -> int:
    """Real tokens of all its rows, prompts included."""
    return sum(row.seqlen for rollout in group.rollouts for row in rollout.rows)


def trained_tokens_of(group: GroupSummary) -> int:
    """Trained tokens of all its rows."""
    return sum(row.trained for rollout in group.rollouts for row in rollout.rows)


def deal(tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """The places of `tokens`, one number for each group, that each of so many ranks gets, in ascending order.

    Ranks differ by at most one group; with fewer groups than ranks some get none. Under that rule the tokens are
    balanced: the longest group first, each to the rank with the fewest tokens so far; then the fullest and the emptiest
    rank exchange groups while that helps. Afterwards no two ranks differ by more tokens than the longest group has.
    """
    least, ranks_with_one_more = divmod(len(tokens), ranks)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for place in sorted(range(len(tokens)), key=lambda place: (-tokens[place], place)):
        open_ranks = [
            rank
            for rank, share in enumerate(shares)
            if len(share) < least or (len(share) == least and ranks_with_one_more > 0)
        ]
        rank = min(open_ranks, key=lambda rank: (loads[rank], len(shares[rank]), rank))
        ranks_with_one_more -= len(shares[rank]) == least
        shares[rank].append(place)
        loads[rank] += tokens[place]
    # Each exchange makes the sum of squared loads smaller, so this ends; the bound is for the reader's peace.
    for _ in range(100 * (len(tokens) + 1)):
        if not _exchange(tokens, shares, loads):
            break
    return [sorted(share) for share in shares]


def _exchange(tokens: Sequence[int], shares: list[list[int]], loads: list[int]) -> bool:
    """Let the fullest and the emptiest rank exchange two groups, or move one: the best way, if one helps.

    Where they differ by more tokens than the longest group has there is one: the fuller rank has a longer group for
    some group of the other, or one more group.
    """
    full = max(range(len(loads)), key=lambda rank: (loads[rank], -rank))
    empty = min(range(len(loads)), key=lambda rank: (loads[rank], rank))
    gap = loads[full] - loads[empty]
    theirs = sorted((tokens[place], place) for place in shares[empty])
    ways: list[tuple[int, int, int | None]] = []  # what is left of the gap, and the two groups
    for place in sorted(shares[full]):
        at = bisect.bisect_left(theirs, (tokens[place] - gap // 2, -1))
        for length, other in theirs[max(0, at - 1) : at + 1]:
            ways.append((abs(gap - 2 * (tokens[place] - length)), place, other))
        if len(shares[full]) > len(shares[empty]):
            ways.append((abs(gap - 2 * tokens[place]), place, None))
    best = min(ways, key=lambda way: way[0], default=None)
    if best is None or best[0] >= gap:
        return False
    _, given, taken = best
    shares[full].remove(given)
    shares[empty].append(given)
    moved = tokens[given]
    if taken is not None:
        shares[empty].remove(taken)
        shares[full].append(taken)
        moved -= tokens[taken]
    loads[full] -= moved
    loads[empty] += moved
    return True
