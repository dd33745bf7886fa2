"""What the slots of a group share (contract 8)."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

from forebay.errors import SlotDataError
from forebay.processor_cache import ProcessorCache
from forebay_workers.group_caches import GroupCaches

DEADLINE_S = 20.0


class Value:
    """Something that can be referred to weakly."""


class Slow:
    """A computation that waits to be let go, and counts its calls."""

    def __init__(self, result: Any = "value") -> None:
        self.result = result
        self.calls = 0
        self.started = asyncio.Event()
        self.gate = asyncio.Event()
        self.ended = asyncio.Event()
        self.cancelled = False

    async def __call__(self) -> Any:
        """Compute."""
        self.calls += 1
        self.started.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        finally:
            self.ended.set()
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


def ask(cache: ProcessorCache, slow: Slow, count: int = 1, key: Any = "key") -> list[asyncio.Task[Any]]:
    """So many slots ask at once."""

    async def compute() -> Any:
        return await slow()

    return [asyncio.create_task(cache.aget_or_compute(key, compute)) for _ in range(count)]


class TestSingleFlight:
    async def test_coroutines_wait_for_one(self) -> None:
        """Contract 8: eight slots that ask at once get one value of one computation, and later ones get it too."""
        cache, slow = ProcessorCache(), Slow(Value())
        waiting = ask(cache, slow, 8)
        await slow.started.wait()
        slow.gate.set()
        values = await asyncio.gather(*waiting)
        assert slow.calls == 1
        assert {id(value) for value in values} == {id(slow.result)}
        assert cache.get_or_compute("key", lambda: None) is slow.result

    def test_threads_wait_for_one(self) -> None:
        """Contract 8: threads that ask at once get one value of one computation."""
        cache, calls, values = ProcessorCache(), [], []
        gate, everybody = threading.Event(), threading.Barrier(5)

        def compute() -> object:
            calls.append(1)
            gate.wait(DEADLINE_S)
            return object()

        def slot() -> None:
            everybody.wait(DEADLINE_S)
            values.append(cache.get_or_compute("key", compute))

        threads = [threading.Thread(target=slot) for _ in range(4)]
        for thread in threads:
            thread.start()
        everybody.wait(DEADLINE_S)
        gate.set()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert len(calls) == 1
        assert len(values) == 4
        assert len(set(map(id, values))) == 1

    async def test_a_thread_waits_for_a_coroutine(self) -> None:
        """A thread that asks for what a coroutine computes gets its value."""
        cache, slow = ProcessorCache(), Slow()
        (waiting,) = ask(cache, slow)
        await slow.started.wait()
        thread = asyncio.create_task(asyncio.to_thread(cache.get_or_compute, "key", lambda: "another"))
        slow.gate.set()
        assert await waiting == "value"
        assert await thread == "value"

    async def test_a_plain_function_runs_in_a_thread(self) -> None:
        """As in AReaL, aget_or_compute takes a plain function too, and does not stop the loop for it."""
        assert await ProcessorCache().aget_or_compute("key", threading.get_ident) != threading.get_ident()

    async def test_keys_are_apart(self) -> None:
        """Another key is another computation, which waits for nobody."""
        cache, slow = ProcessorCache(), Slow()
        (waiting,) = ask(cache, slow)
        await slow.started.wait()
        async with asyncio.timeout(DEADLINE_S):
            assert await cache.aget_or_compute(("key", 2), lambda: 2) == 2
        slow.gate.set()
        assert await waiting == "value"


class TestFailures:
    async def test_all_waiters_see_it_and_the_next_tries_again(self) -> None:
        """Contract 8: failures are not cached."""
        cache, slow = ProcessorCache(), Slow(ZeroDivisionError("no image"))
        waiting = ask(cache, slow, 3)
        await slow.started.wait()
        slow.gate.set()
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(end) for end in ends] == [ZeroDivisionError] * 3
        assert await cache.aget_or_compute("key", lambda: "now") == "now"

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), StopIteration(), SystemExit(3)])
    async def test_no_exception_hangs_or_ends_anything(self, error: BaseException) -> None:
        """What no future takes, or a task would raise through the loop, reaches those who wait like any other."""
        cache = ProcessorCache()

        async def slot() -> str:
            try:
                await cache.aget_or_compute("key", slow)
            except (KeyboardInterrupt, SystemExit, RuntimeError) as caught:
                return type(caught).__name__
            return "nothing"

        def slow() -> None:
            raise error

        async with asyncio.timeout(DEADLINE_S):
            seen = await asyncio.gather(slot(), slot())
        assert set(seen) == {"RuntimeError" if isinstance(error, StopIteration) else type(error).__name__}

    async def test_one_that_cancels_itself_is_an_error(self) -> None:
        """A computation that cancels itself is not taken for the cancellation of those who wait."""
        cache = ProcessorCache()

        async def compute() -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

        with pytest.raises(SlotDataError, match="was cancelled"):
            await cache.aget_or_compute("key", compute)


class TestCancellation:
    async def test_the_computing_slot_may_go(self) -> None:
        """Contract 8: the cancellation of the slot that computes neither fails nor hangs the others."""
        cache, slow = ProcessorCache(), Slow()
        first, *others = ask(cache, slow, 3)
        await slow.started.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        slow.gate.set()
        async with asyncio.timeout(DEADLINE_S):
            assert await asyncio.gather(*others) == ["value"] * 2
        assert slow.calls == 1

    async def test_what_nobody_waits_for_is_cancelled(self) -> None:
        """The computation ends with the last who waits for it, and the next begins anew."""
        cache, slow = ProcessorCache(), Slow()
        waiting = ask(cache, slow, 2)
        await slow.started.wait()
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        async with asyncio.timeout(DEADLINE_S):
            assert await cache.aget_or_compute("key", lambda: "anew") == "anew"
            await slow.ended.wait()
        assert slow.cancelled


class TestNoDeadlock:
    async def test_asking_on_the_loop_does_not_stop_it(self) -> None:
        """The plain call on a loop that computes the value itself computes it anew, rather than wait for ever."""
        cache, slow = ProcessorCache(), Slow()
        (waiting,) = ask(cache, slow)
        await slow.started.wait()
        assert cache.get_or_compute("key", lambda: "anew") == "anew"
        slow.gate.set()
        assert await waiting == "value"
        assert cache.get_or_compute("key", lambda: "late") == "value"

    async def test_a_computation_that_asks_for_itself(self) -> None:
        """A value that needs itself is an error, not a hang, in coroutines and in threads."""
        cache = ProcessorCache()

        async def compute() -> Any:
            return await cache.aget_or_compute("key", compute)

        def plain() -> Any:
            return cache.get_or_compute("key", plain)

        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(RuntimeError, match="asks for its own value"):
                await cache.aget_or_compute("key", compute)
            with pytest.raises(RuntimeError, match="asks for its own value"):
                await asyncio.to_thread(plain)


class TestRelease:
    def test_the_last_slot_of_a_group_takes_it_along(self) -> None:
        """Contract 8: what it holds is released when the group has no running slot left in the process."""
        caches, value = GroupCaches(), Value()
        alive = weakref.ref(value)
        with caches.of(7) as first:
            with caches.of(7) as second, caches.of(8) as other:
                assert first is second
                assert first is not other
                first.get_or_compute("key", lambda value=value: value)
                assert len(caches) == 2
            del value
            gc.collect()
            assert second.get_or_compute("key", Value) is alive()
        gc.collect()
        assert alive() is None
        assert len(caches) == 0
        assert len(first) == 0

    def test_a_closed_cache_keeps_nothing(self) -> None:
        """Code that outlives its group computes for itself."""
        caches = GroupCaches()
        with caches.of(7) as cache:
            pass
        assert cache.get_or_compute("key", lambda: 1) == 1
        assert cache.get_or_compute("key", lambda: 2) == 2

    def test_entries_are_bounded(self) -> None:
        """A group that uses very many keys loses those that it used longest ago."""
        cache = ProcessorCache(max_entries=2)
        for key in "abac":
            cache.get_or_compute(key, lambda key=key: key * 2)
        assert [cache.get_or_compute(key, lambda: "anew") for key in "ac"] == ["aa", "cc"]
        assert cache.get_or_compute("b", lambda: "anew") == "anew"
