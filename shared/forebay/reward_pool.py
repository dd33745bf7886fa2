"""The processes in which plain reward functions run: one pool for all wrappers of this process (contract, section 8).

Invariants (tests in ``tests/unit/test_rewards.py``):

- However many wrappers there are, there are at most as many processes as the largest bound that one of them asks for
  (``test_wrappers_share_their_processes``); while a pool makes room for a larger one, those of both.
- Every call ends: with a number, with an error, or with its process killed (``TestProcesses``).
- A pool that has broken is replaced at the next call (``test_a_broken_pool_is_replaced``).
- A call that ends its process is a crash and no time-out, also if it does so by ``os._exit(0)``
  (``test_leaving_with_0_is_a_crash``).
- No process outlives the one that it works for (``test_no_process_outlives_its_worker``): on Linux at once and
  whatever it does; elsewhere only once its code lets another thread run.
- What a call has started itself ends with it when it is killed (``test_what_a_killed_call_has_started_is_killed``),
  with two exceptions: what is in a session or process group of its own, and what a call has started that does not let
  go of the interpreter, because the process cannot end it then.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NoReturn

from pebble import ProcessPool

from forebay.errors import SlotDataError
from forebay.pools import PoolUse

__all__ = [
    "EXIT_CODE_OF_0",
    "MAX_PROCESSES",
    "BrokenProcessPool",
    "RewardProcesses",
    "default_processes",
    "is_time_out",
    "name_of",
    "number",
    "shared_processes",
]

MAX_PROCESSES = 512
"""More is a mistake, and would take the host's memory."""
EXIT_CODE_OF_0 = 90
"""What a reward function's ``os._exit(0)`` ends its process with: the pool takes 0 for an orderly end, and would wait
for the call's time-out."""


def default_processes() -> int:
    """Half of the processors that this process may use, from 2 to 8: several workers share a host."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    return max(2, min(8, usable // 2))


class RewardProcesses:
    """A pool that starts at its first call, is replaced when it breaks or grows, and ends with the interpreter."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._size = 0
        self._calls = 0
        self._counting = threading.Lock()  # of its own: calls may end while the pool's is held
        self.limit = MAX_PROCESSES
        """Bound on the processes, whatever wrappers ask for; counts when the pool is started next."""
        self._pool: ProcessPool | None = None
        self._end: weakref.finalize[[ProcessPool], Any] | None = None

    def want(self, processes: int) -> None:
        """See to it that so many calls can run at once."""
        with self._lock:
            self._wanted = min(max(self._wanted, processes), self.limit)

    @property
    def use(self) -> PoolUse:
        """The processes that run a call, and the calls that wait for one."""
        in_use = min(self._calls, self._size)
        return PoolUse(in_use, self._calls - in_use, self.limit)

    @property
    def size(self) -> int:
        """Processes of the pool that runs; 0 before the first call."""
        return self._size

    @property
    def warm(self) -> bool:
        """Whether :meth:`schedule` will not have to start processes, which takes long."""
        return self._pool is not None and self._size >= self._wanted

    def start(self) -> None:
        """Start the pool if it does not run, or is too small. Blocks for as long as that takes."""
        with self._lock:
            self._ready()

    def _ready(self) -> ProcessPool:
        if self._pool is not None and self._size < self._wanted:
            self._retire(_drain)  # its calls go on
        return self._pool or self._start()

    def schedule(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
    ) -> Future[float]:
        """Call `fn` in one of the processes. Cancelling the future kills the call.

        The future ends with a float, what `fn` raised, ``TimeoutError`` after `timeout_s` from the call's start,
        ``pebble.ProcessExpired``, or BrokenProcessPool: try again.

        Raises:
            SlotDataError: `fn` or an argument cannot be pickled.
        """
        call = _packed(fn, args, kwargs)
        with self._lock:
            try:
                future: Future[float] = self._ready().schedule(_call, args=(name_of(fn), call), timeout=timeout_s)
            except RuntimeError as error:  # pebble says so of a pool that has broken before
                self._retire(_kill)
                raise BrokenProcessPool(str(error)) from None
        with self._counting:
            self._calls += 1
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: Future[float]) -> None:
        with self._counting:
            self._calls -= 1

    def close(self) -> None:
        """Kill what runs, and end the processes. A later call starts new ones."""
        with self._lock:
            self._retire(_kill)

    def _start(self) -> ProcessPool:
        # A fork of a process with threads and an event loop may deadlock; a fork server is forked before them. It
        # imports what every process needs once, and forks in milliseconds then.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", __name__])
        pool = ProcessPool(max_workers=max(1, self._wanted), initializer=_prepare, context=context)
        if not pool.active:  # asking starts its processes
            raise SlotDataError("the processes for reward functions cannot be started")
        self._pool, self._size = pool, max(1, self._wanted)
        self._end = weakref.finalize(self, _stop, pool)  # runs at interpreter exit too
        return pool

    def _retire(self, how: Callable[[Any], None]) -> None:
        pool, end = self._pool, self._end
        self._pool, self._end, self._size = None, None, 0
        if end is not None:
            end.detach()
        if pool is not None:
            how(pool)
            threading.Thread(target=_join, args=(pool,), name="forebay-rewards-retired", daemon=True).start()


def _drain(pool: Any) -> None:
    pool.close()


def _kill(pool: Any) -> None:
    pool.stop()


def _join(pool: Any) -> None:
    pool.join()  # bounded by the time-outs of the calls that it still has


def _stop(pool: Any) -> None:
    pool.stop()
    pool.join(timeout=5)


def name_of(fn: Callable[..., Any]) -> str:
    """What errors call `fn`."""
    return f"reward function {getattr(fn, '__qualname__', repr(fn))}"


def _packed(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    # Here and not by the pool: some of what pickling raises would end its thread, and the error should name `fn`.
    try:
        return pickle.dumps((fn, args, kwargs), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # objects may refuse in any way
        raise SlotDataError(
            f"{name_of(fn)}: it or an argument cannot be sent to a process for rewards "
            f"({type(error).__name__}: {error}); functions must stand at the top of a module, arguments be plain values"
        ) from error


def _call(name: str, call: bytes) -> float:
    """In a process of the pool. What leaves it can be read by the other side, whatever the function does."""
    try:
        fn, args, kwargs = pickle.loads(call)  # noqa: S301 (made by the process that this one works for)
    except Exception as error:  # imports run, and may raise anything
        raise SlotDataError(
            f"{name}: it or an argument cannot be loaded in a process for rewards ({type(error).__name__}: {error})"
        ) from None
    try:
        with _exit_is_a_crash():
            value = fn(*args, **kwargs)
    except Exception as error:  # a user's function may raise anything
        if isinstance(error, StopIteration) or not _travels(error):
            raise SlotDataError(f"{name} raised {type(error).__name__}: {error}") from None
        raise
    except BaseException as error:  # KeyboardInterrupt, SystemExit: not the worker's
        raise SlotDataError(f"{name} raised {type(error).__name__}: {error}") from None
    return number(name, value)


@contextlib.contextmanager
def _exit_is_a_crash() -> Iterator[None]:
    end, process = os._exit, os.getpid()

    def leave(status: int) -> NoReturn:
        # What the function forks has this too, and its 0 means 0.
        end(EXIT_CODE_OF_0 if status == 0 and os.getpid() == process else status)

    os._exit = leave
    try:
        yield
    finally:
        os._exit = end


def number(name: str, value: Any) -> float:
    """`value` as a float. Raises SlotDataError if it is no number."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch: RuntimeError for several elements
        raise SlotDataError(f"{name} returned {value!r:.200}, expected a number") from None


def is_time_out(error: TimeoutError) -> bool:
    """Whether the pool made `error`, rather than the function that was called."""
    return error.args[:1] == ("Task timeout",) and not hasattr(error, "traceback")


def _travels(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 (made here, a moment ago)
    except Exception:  # a user's exception may fail to be copied in any way, and would break the pool for all
        return False
    return True


def _prepare() -> None:
    """In a process of the pool, at its start."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, lambda *_: _kill_group())
    parent = multiprocessing.parent_process()
    if parent is not None:
        _die_by_signal(parent.sentinel)
        threading.Thread(target=_die_by_thread, args=(parent,), name="forebay-parent", daemon=True).start()


def _kill_group() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)  # this process, and what the reward function has started


def _die_by_signal(sentinel: int) -> None:
    """Have the kernel kill this process's group when `sentinel`, a pipe, is closed by the end of the other side.

    That needs nothing of this process, in which a reward function may compute for ever without letting another thread
    run. A limit on CPU time would not see one that waits, and would end one that computes in many threads.
    """
    if sys.platform != "linux":
        return  # the thread remains
    import fcntl

    with contextlib.suppress(OSError):  # what stands in for Linux in some sandboxes does not know this
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)


def _die_by_thread(parent: Any) -> None:
    parent.join()  # an endless call would not notice that nobody waits for it any more
    _kill_group()


# The processes belong to the process, as its threads do: wrappers come by import and by copy, and have no owner in
# common that could hold them.
_SHARED = RewardProcesses()


def shared_processes() -> RewardProcesses:
    """The pool of this process."""
    return _SHARED
