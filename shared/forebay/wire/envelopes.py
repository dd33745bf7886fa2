"""The messages between the processes. Each field says why it is there and what its absence means."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

from forebay.errors import FrameError
from forebay.outcomes import FailureKind, OnSlotError, ResultKind, SlotOutcome
from forebay.reward_rules import NormConfig, norm_of
from forebay.wire.rows import Row
from forebay.wire.values import pack, unpack

__all__ = [
    "BatchIndex",
    "DumpRewrite",
    "GroupRules",
    "GroupSpec",
    "GroupSummary",
    "RolloutSummary",
    "RowSummary",
    "SlotHeader",
]


def _plain(value: Any) -> Any:
    """Dataclasses as maps, all the way down; ``dataclasses.asdict`` would copy every value besides."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    names = getattr(type(value), "__dataclass_fields__", None)
    return value if names is None else {name: _plain(getattr(value, name)) for name in names}


class _Envelope:
    """Packs a dataclass as a msgpack map by field name; unknown fields are ignored, so that releases may differ."""

    def pack(self) -> bytes:
        """The message as bytes."""
        return pack(_plain(self))

    @classmethod
    def unpack(cls, frame: bytes) -> Self:
        """The message in `frame`. Raises FrameError."""
        return cls._build(unpack(frame))

    @classmethod
    def _build(cls, form: Any) -> Self:
        try:
            return cls(**_typed(cls, form))
        except (TypeError, ValueError, OverflowError) as error:
            raise FrameError(f"malformed {cls.__name__}: {error}") from None


def _known(cls: Any, form: Any) -> dict[str, Any]:
    if not isinstance(form, dict):
        raise FrameError(f"a {cls.__name__} is a map, not a {type(form).__name__}")
    names = {item.name for item in fields(cls)}
    return {name: value for name, value in form.items() if name in names}


_SIMPLE: dict[Any, tuple[type, ...]] = {int: (int,), float: (float, int), str: (str,), bool: (bool,)}


def _check_of(hint: Any) -> Callable[[Any], bool] | None:
    """Whether a value is of the type that `hint` says; None: it is not checked here (Any, nested messages)."""
    if hint in _SIMPLE:
        kinds = _SIMPLE[hint]
        return lambda value: type(value) in kinds  # a bool is no number here
    if hint is NoneType:
        return lambda value: value is None
    origin, of = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        checks = [_check_of(item) for item in of]
        known = [check for check in checks if check is not None]
        return (lambda value: any(check(value) for check in known)) if len(known) == len(checks) else None
    if origin is list:
        inner = _check_of(of[0])
        return lambda value: type(value) is list and (inner is None or all(map(inner, value)))
    if origin is dict:
        inner = _check_of(of[1])
        return lambda value: (
            type(value) is dict
            and all(type(name) is str for name in value)
            and (inner is None or all(map(inner, value.values())))
        )
    return None


@cache
def _checks(cls: Any) -> tuple[tuple[str, Callable[[Any], bool]], ...]:
    hints = get_type_hints(cls)
    found = ((item.name, _check_of(hints[item.name])) for item in fields(cls))
    return tuple((name, check) for name, check in found if check is not None)


def _typed(cls: Any, form: Any) -> dict[str, Any]:
    """The known fields of a message, each of its type: whoever reads one need not look again. Raises FrameError."""
    known = _known(cls, form)
    for name, check in _checks(cls):
        if name in known and not check(known[name]):
            raise FrameError(f"{name} of a {cls.__name__} is a {type(known[name]).__name__} of the wrong kind")
    return known


def _norm(form: Any) -> NormConfig | None:
    """The rule in a message, which may have more fields than this release knows; what users write is checked."""
    return norm_of(NormConfig(**_known(NormConfig, form)) if isinstance(form, dict) else form)


@dataclass(slots=True)
class GroupSpec(_Envelope):
    """What a worker needs to run any slot of the group."""

    workflow: str
    """``module:name`` of the workflow class."""
    kwargs: dict[str, Any]
    """Its arguments, encoded."""
    data: Any
    """The prompt, encoded; every slot gets a copy of its own."""
    is_eval: bool = False


@dataclass(slots=True)
class GroupRules(_Envelope):
    """What the collector needs to decide on the group: small, whatever the prompt holds."""

    min_usable_group_size: int
    """Resolved at submit: usable rollouts below which the group is rejected."""
    drop_incomplete_group: bool = False
    on_slot_error: str = OnSlotError.KEEP.value
    reward_normalization: NormConfig | None = None
    """None: rewards are not normalized. True stands for the rule at rollout time."""
    should_accept_fn: str | None = None
    """``module:name``; None: accept all."""
    is_eval: bool = False

    def __post_init__(self) -> None:
        """Check the closed set, and build the nested rule."""
        OnSlotError(self.on_slot_error)
        self.reward_normalization = _norm(self.reward_normalization)


@dataclass(slots=True)
class RowSummary:
    """What the collector and the cutter know of a row without reading its tokens."""

    seqlen: int
    prompt_len: int
    trained: int
    """Trained tokens."""
    head: int
    """Smallest version of the trained tokens, -1 if none."""
    tail: int
    reward: float | None
    original_reward: float | None = None
    truncated: bool | None = None
    turns: int = 1
    """Generation runs."""
    completion: str | None = None
    """Completion id of an interaction; None: a row of a tensor result."""

    @classmethod
    def of(cls, row: Row) -> RowSummary:
        """The summary of `row`."""
        head, tail = row.head_tail
        return cls(
            seqlen=row.seqlen,
            prompt_len=row.prompt_len,
            trained=int(row.trained.sum()),
            head=head,
            tail=tail,
            reward=row.reward,
            original_reward=row.original_reward,
            truncated=row.is_truncated,
            turns=row.turns,
            completion=row.completion,
        )


def _row_summaries(forms: Sequence[Any]) -> list[RowSummary]:
    return [form if isinstance(form, RowSummary) else RowSummary(**_typed(RowSummary, form)) for form in forms]


@dataclass(slots=True)
class SlotHeader(_Envelope):
    """How a slot's attempt ended: small, whatever the number of tokens."""

    task: int
    idx: int
    attempt: int
    outcome: str
    kind: str | None = None
    """The failure's kind; None unless failed."""
    reason: str = ""
    """Human text: the first line of the cause, with the server's own words where it has any."""
    traceback: str = ""
    """Of a failure, shortened from the middle."""
    result_kind: str = ResultKind.TENSOR.value
    keys: list[str] = field(default_factory=list)
    """Key set of the result, so that groups can be checked without reading rows."""
    rows: list[RowSummary] = field(default_factory=list)
    reference: float | None = None
    """``rollout_reward`` if the workflow supplied one."""
    rows_bytes: int = 0
    worker: str = ""
    seconds: float = 0.0
    """The attempt, start to published."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds in each traced phase of the episode."""

    def __post_init__(self) -> None:
        """Check the closed sets."""
        SlotOutcome(self.outcome)
        if self.kind is not None:
            FailureKind(self.kind)
        ResultKind(self.result_kind)
        self.rows = _row_summaries(self.rows)
        if self.outcome == SlotOutcome.USABLE and not self.rows:
            raise ValueError("a usable slot delivers one or more rows")
        for value in (self.reference, *(row.reward for row in self.rows)):
            if value is not None and not math.isfinite(value):  # clipping would make a number of it
                raise ValueError(f"a reward is {value}")


@dataclass(slots=True)
class RolloutSummary:
    """One usable rollout of an accepted group."""

    sample_idx: int
    attempt: int
    """Names the rows' key."""
    rows: list[RowSummary]
    """With the rewards as shaped, and as normalized where that is done; the raw ones in ``original_reward``."""
    reference: float | None = None
    """The reference reward, as shaped: what the workflow supplied, else the common reward of its rows. None: they have
    none in common, or have none."""

    def __post_init__(self) -> None:
        """Build the nested rows."""
        self.rows = _row_summaries(self.rows)


@dataclass(slots=True)
class GroupSummary(_Envelope):
    """What a batch needs to know of an accepted group."""

    task: int
    group_size: int
    rollouts: list[RolloutSummary]
    rewards_normalized: bool = False
    rows_bytes: int = 0
    batch_norm: NormConfig | None = None
    """A rule with statistics of the batch, None where there is none. Until a batch is cut the rewards here are as
    shaped; in its index they are normalized, and `rewards_normalized` says so."""
    result_kind: str = ResultKind.TENSOR.value
    is_eval: bool = False
    parent: int | None = None
    """The evicted group whose prompt this one is."""
    seconds: float = 0.0
    """The longest of its counted attempts."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds in each traced phase, the mean of its usable slots."""

    def __post_init__(self) -> None:
        """Build the nested rollouts."""
        self.batch_norm = _norm(self.batch_norm)
        self.rollouts = [
            r if isinstance(r, RolloutSummary) else RolloutSummary(**_typed(RolloutSummary, r)) for r in self.rollouts
        ]

    @property
    def head(self) -> int:
        """Smallest head version >= 0 of its rows, -1 if none: what its staleness is counted from."""
        heads = [row.head for rollout in self.rollouts for row in rollout.rows if row.head >= 0]
        return min(heads, default=-1)

    @property
    def tail(self) -> int:
        """Largest version of its trained tokens, -1 if none."""
        return max((row.tail for rollout in self.rollouts for row in rollout.rows), default=-1)


@dataclass(slots=True)
class DumpRewrite(_Envelope):
    """The file of a group that was dumped before a batch's statistics gave it its rewards; `_lib.lua` packs it."""

    task: int
    folder: str
    """Below the run's folder."""
    summary: GroupSummary
    """With the rewards that the file is to have."""

    def __post_init__(self) -> None:
        """Build the nested summary, which must be the group's own."""
        given = self.summary
        self.summary = given if isinstance(given, GroupSummary) else GroupSummary._build(given)
        if type(self.task) is not int or not isinstance(self.folder, str) or self.summary.task != self.task:
            raise ValueError(f"task {self.task!r}, folder {self.folder!r}, summary of task {self.summary.task!r}")


@dataclass(slots=True)
class BatchIndex(_Envelope):
    """What a trainer reads from the batches stream: which rows to fetch, and their rewards."""

    groups: list[GroupSummary]
    partial: bool = False
    """Fewer groups than ``batch_size``: the end of the data."""
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Build the nested groups."""
        self.groups = [g if isinstance(g, GroupSummary) else GroupSummary._build(g) for g in self.groups]
