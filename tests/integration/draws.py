"""What the state machine draws from."""

from __future__ import annotations

from hypothesis import strategies as st

from forebay.outcomes import FailureKind, SlotOutcome

__all__ = ["AGAIN", "COLLECTORS", "ENDS", "PICK", "REASONS", "RULES", "WORKERS"]

PICK = st.integers(0, 63)
"""Which one of what there is, modulo their number."""
AGAIN = st.booleans()
WORKERS = st.sampled_from(["w1", "w2", "w3"])
COLLECTORS = st.sampled_from([0, 1, 2, 2, 2])
"""2: the one that leads, if one does."""
ENDS = st.sampled_from([
    *[(SlotOutcome.USABLE, None)] * 5,
    (SlotOutcome.REJECTED, None),
    *((SlotOutcome.FAILED, kind) for kind in FailureKind),
])  # fmt: skip
REASONS = st.sampled_from(["", "", "", "", "filtered", "contract_error", "below_minimum"])
RULES = st.fixed_dictionaries({
    "partitions": st.sampled_from([1, 2, 3]),
    "batch_size": st.integers(1, 3),
    "batches_per_version": st.integers(1, 2),
    "max_staleness": st.integers(0, 2),
    "max_concurrent": st.sampled_from([2, 100]),
    "max_queued_groups": st.sampled_from([3, 100]),
    "max_concurrent_direct": st.sampled_from([1, 100]),
    "requeue_evicted": st.booleans(),
    "max_requeues": st.integers(1, 2),
    "attempts_infra": st.integers(1, 3),
    "max_contract_errors": st.sampled_from([2, 100]),
    "max_barren_groups": st.sampled_from([3, 100]),
    "retain_batches": st.sampled_from([0, 0, 2]),
    "max_follower_lag": st.sampled_from([0, 1, 100]),
})  # fmt: skip
