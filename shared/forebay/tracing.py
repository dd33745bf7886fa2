"""Where the time of an episode goes: sessions and their phases (contract, section 8).

A worker opens one :class:`Session` for each attempt; what is traced while it runs, in whatever task or thread the
episode starts, belongs to it. Without a session nothing is recorded, and nothing fails.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar, cast

__all__ = ["Session", "Span", "current_session", "session_context", "trace_session"]

F = TypeVar("F", bound=Callable[..., Any])

MAX_PHASES = 64
"""Names that a session tells apart; its header travels, so it must stay small. Further ones count as ``(other)``."""
MAX_SPANS = 1000
"""Spans that a session keeps for the trace; seconds are counted beyond."""
MAX_NAME = 100
"""Characters of a phase's name that are kept."""
_OTHER = "(other)"


@dataclass(slots=True)
class Span:
    """One time that a phase ran."""

    name: str
    began_s: float
    """Since the session began."""
    seconds: float = 0.0
    error: str = ""
    """The type of what it raised."""


@dataclass(slots=True)
class Session:
    """One episode, as it is traced. Safe to use from several threads."""

    run: str = ""
    task_id: int = -1
    sample_idx: int = 0
    attempt: int = 0
    is_eval: bool = False
    spans: list[Span] = field(default_factory=list)
    spans_dropped: int = 0
    began: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    _began_s: float = field(default_factory=time.perf_counter, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    _seconds: dict[str, float] = field(default_factory=dict, repr=False)
    _open: dict[str, tuple[int, float]] = field(default_factory=dict, repr=False)
    """By phase: how many run, and since when at least one has."""

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self._began_s

    @property
    def phases(self) -> dict[str, float]:
        """Seconds during which each phase ran.

        Times when it ran more than once count once, so none exceeds the session's own; a phase that still runs counts
        up to now.
        """
        with self._lock:
            now = self.seconds
            seconds = dict(self._seconds)
            for name, (_, since) in self._open.items():
                seconds[name] += now - since
            return seconds

    @property
    def open_phases(self) -> dict[str, float]:
        """The phases that run, the one that began first before the others: for how many seconds each has."""
        with self._lock:
            now = self.seconds
            return {name: now - since for name, (_, since) in self._open.items()}

    def enter(self, phase: str) -> Span:
        """`phase` begins."""
        name = phase[:MAX_NAME]
        with self._lock:
            if name not in self._seconds and len(self._seconds) >= MAX_PHASES:
                name = _OTHER
            self._seconds.setdefault(name, 0.0)
            span = Span(name, self.seconds)
            running, since = self._open.get(name, (0, span.began_s))
            self._open[name] = running + 1, since
            return span

    def leave(self, span: Span, error: str = "") -> None:
        """The phase that `span` is of has ended."""
        with self._lock:
            now = self.seconds
            span.seconds, span.error = now - span.began_s, error
            running, since = self._open.pop(span.name)
            if running > 1:
                self._open[span.name] = running - 1, since
            else:
                self._seconds[span.name] += now - since
            if len(self.spans) < MAX_SPANS:
                self.spans.append(span)
            else:
                self.spans_dropped += 1

    @contextmanager
    def active(self) -> Iterator[Self]:
        """What is traced inside the block belongs to this session."""
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)


_current: ContextVar[Session | None] = ContextVar("forebay_trace_session", default=None)
_entered: ContextVar[tuple[tuple[Session | None, Span | None], ...]] = ContextVar("forebay_trace_entered", default=())
"""The blocks around the current code, innermost last: the session to go back to, and the span that ends with it."""


def current_session() -> Session | None:
    """The session that is open here."""
    return _current.get()


class _Traced:
    """A context manager, plain and async, and a decorator of plain functions and of coroutine functions.

    One object may decorate many functions and be entered many times at once: what an entry must remember stands in
    the context variable, not here.
    """

    def __enter__(self) -> Any:
        raise NotImplementedError

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        entered = _entered.get()
        if not entered:
            return  # left in another context than it was entered in
        _entered.set(entered[:-1])
        session, span = entered[-1]
        if span is not None and session is not None:
            session.leave(span, "" if kind is None else kind.__name__)
        elif span is None:
            _current.set(session)

    async def __aenter__(self) -> Any:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: F) -> F:
        """Trace each call of `function`."""
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(
                f"{function!r} is a generator, between whose values other code runs; use 'with {self!r}:' inside it"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def traced(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await function(*args, **kwargs)

            return cast("F", traced)

        @functools.wraps(function)
        def traced_plainly(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return cast("F", traced_plainly)


class trace_session(_Traced):  # noqa: N801 (a function to its users)
    """Count the time of a block, or of each call of a function, as `phase` of the open session.

    ::

        @trace_session("reward")
        async def score(self, response): ...

        with trace_session("tools"):
            ...

    Seconds of a phase travel with the slot, and stand in the batch's metrics. Any name will do. Entered without a
    session it does nothing.
    """

    def __init__(self, phase: str) -> None:
        if not isinstance(phase, str) or not phase:
            raise TypeError(f'trace_session needs the name of a phase, such as "reward", not {phase!r}')
        self._phase = phase

    def __repr__(self) -> str:
        return f"trace_session({self._phase!r})"

    def __enter__(self) -> Self:
        session = _current.get()
        _entered.set((*_entered.get(), (session, None if session is None else session.enter(self._phase))))
        return self


class session_context(_Traced):  # noqa: N801 (a function to its users)
    """Mark a block, or each call of a function, as part of a session.

    In an episode the session is open already and stays as it is. Elsewhere, as in a test of a workflow, one is opened
    for the block::

        with session_context() as session:
            asyncio.run(workflow.arun_episode(engine, data))
        print(session.phases)
    """

    def __repr__(self) -> str:
        return "session_context()"

    def __enter__(self) -> Session:
        outer = _current.get()
        _entered.set((*_entered.get(), (outer, None)))
        session = outer or Session()
        _current.set(session)
        return session
