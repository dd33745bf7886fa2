"""What the rules of a group follow from its size and its normalizations (contract, section 4.6)."""

from __future__ import annotations

from forebay.errors import SubmitError
from forebay.reward_rules import NormConfig

__all__ = ["minimum_usable"]


def minimum_usable(
    group_size: int,
    explicit: int | None,
    reward_normalization: NormConfig | None,
    trainer_reward_norm: NormConfig | None = None,
    trainer_adv_norm: NormConfig | None = None,
) -> int:
    """Usable rollouts below which a group is rejected.

    An explicit value wins; else 2 where a reward or an advantage is normalized by statistics of the group, the
    collector's or the trainer's, since they need two observations; else 1. A group of one is complete by itself.

    Args:
        group_size: slots of the group.
        explicit: what was asked for; None: derive it.
        reward_normalization: the collector's rule for this group.
        trainer_reward_norm: what the trainer says it does to rewards.
        trainer_adv_norm: what the trainer says it does to advantages.

    Raises:
        SubmitError: a ValueError; the explicit value contradicts the group's size or its statistics.
    """
    norms = {
        "reward_normalization": reward_normalization,
        "trainer_reward_norm": trainer_reward_norm,
        "trainer_adv_norm": trainer_adv_norm,
    }
    users = [name for name, norm in norms.items() if norm is not None and norm.uses_group] if group_size >= 2 else []
    if explicit is None:
        return 2 if users else 1
    if type(explicit) is not int or not 1 <= explicit <= group_size:
        raise SubmitError(f"min_usable_group_size={explicit!r}: must be an integer from 1 to group_size={group_size}")
    if users and explicit < 2:
        raise SubmitError(
            f"min_usable_group_size={explicit}: statistics of the group (by {' and '.join(users)}) need at least 2 "
            "usable rollouts; raise it, leave it out, or normalize by the batch"
        )
    return explicit
