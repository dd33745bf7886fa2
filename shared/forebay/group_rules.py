"""What the rules of a group follow from its size and its normalizations (contract, section 4.6)."""

from __future__ import annotations

from forebay.errors import SubmitError
from forebay.reward_rules import NormConfig

__all__ = ["minimum_usable"]


def minimum_usable(group_size: int, explicit: int | None, *norms: NormConfig | None) -> int:
    """Usable rollouts below which a group is rejected.

    An explicit value wins; else 2 where a reward or an advantage is normalized by statistics of the group, the
    collector's or the trainer's, since they need two observations; else 1. A group of one is complete by itself.

    Args:
        group_size: slots of the group.
        explicit: what was asked for; None: derive it.
        norms: every normalization that the group will go through.

    Raises:
        SubmitError: the explicit value contradicts the group's size or its statistics.
    """
    group_statistics = group_size >= 2 and any(norm is not None and norm.uses_group for norm in norms)
    if explicit is None:
        return 2 if group_statistics else 1
    if type(explicit) is not int or not 1 <= explicit <= group_size:
        raise SubmitError(f"min_usable_group_size={explicit!r}: must be an integer from 1 to group_size={group_size}")
    if group_statistics and explicit < 2:
        raise SubmitError(
            f"min_usable_group_size={explicit}: rewards or advantages are normalized by group statistics, which need "
            "at least 2 usable rollouts; raise it, leave it out, or normalize by the batch"
        )
    return explicit
