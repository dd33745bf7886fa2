"""Reward functions in processes of their own (contract 8)."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers import reward_functions as functions
from helpers.waiting import DEADLINE_S, until

from forebay import AsyncRewardWrapper, rewards
from forebay.errors import RewardTimeoutError, SettingsError, SlotDataError
from forebay.reward_pool import RewardProcesses, default_processes

# Generous: a process must be able to start within them on a busy machine.
START_S = 20.0


def alive(pid: int) -> bool:
    """Whether a process runs; one that was killed and not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not Path("/proc/self/stat").exists()


def marks(folder: Path) -> list[int]:
    """The process ids that calls have left in `folder`."""
    return [int(mark.name) for mark in folder.iterdir()]


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardProcesses]:
    """Processes of the test's own, so that it decides how many there are."""
    made = RewardProcesses()
    monkeypatch.setattr(rewards, "shared_processes", lambda: made)
    yield made
    made.close()


class TestProcesses:
    """contract 8: sync functions run in separate processes with a timeout."""

    async def test_a_plain_function_runs_in_another_process(self) -> None:
        """A plain function's reward comes from a process that is not this one."""
        wrapper = AsyncRewardWrapper(functions.process_id, timeout_s=START_S, max_workers=1)
        assert await wrapper() not in {0.0, float(os.getpid())}

    async def test_case_30_endless_reward_is_killed_and_capacity_restored(self, tmp_path: Path) -> None:
        """Case 30: a verifier that never returns is an error, its process is gone, and the pool serves as before."""
        wrapper = AsyncRewardWrapper(functions.forever_at, timeout_s=0.5, max_workers=2, max_retries=0)
        with pytest.raises(RewardTimeoutError, match=r"forever_at ran longer than 0\.5 s; its process was killed"):
            await wrapper(str(tmp_path))
        (pid,) = marks(tmp_path)
        await until(lambda: not alive(pid))

        others = AsyncRewardWrapper(functions.process_slowly, timeout_s=START_S, max_workers=2)
        async with asyncio.timeout(DEADLINE_S):
            while len(set(await asyncio.gather(*(others() for _ in range(4))))) < 2:
                pass  # until both places are taken again

    async def test_endless_reward_does_not_hold_up_its_neighbours(self) -> None:
        """With two processes, one endless call times out while all others are served."""
        wrapper = AsyncRewardWrapper(functions.forever_if, timeout_s=2.0, max_workers=2, max_retries=0)
        async with asyncio.timeout(DEADLINE_S):
            hang, *others = await asyncio.gather(
                wrapper(hang=True), *(wrapper(hang=False) for _ in range(6)), return_exceptions=True
            )
        assert isinstance(hang, RewardTimeoutError)
        assert others == [1.0] * 6

    async def test_time_in_the_queue_does_not_count(self) -> None:
        """The time-out is counted from a call's start: eight calls of 0.2 s each pass one process with 1.5 s."""
        wrapper = AsyncRewardWrapper(functions.burn, timeout_s=1.5, max_workers=1, max_retries=0)
        began = time.monotonic()
        async with asyncio.timeout(DEADLINE_S):
            assert await asyncio.gather(*(wrapper(0.2) for _ in range(8))) == [1.0] * 8
        assert time.monotonic() - began > 1.5

    async def test_tries_after_a_timeout_are_bounded(self, tmp_path: Path) -> None:
        """max_retries=2 means three tries, each in a process of its own."""
        wrapper = AsyncRewardWrapper(functions.forever_at, timeout_s=0.3, max_workers=1, max_retries=2)
        with pytest.raises(RewardTimeoutError):
            await wrapper(str(tmp_path))
        assert len(marks(tmp_path)) == 3

    async def test_a_crash_is_a_data_failure_that_names_the_exit_code(self) -> None:
        """A function that takes its process down in every try is a SlotDataError with the exit code."""
        wrapper = AsyncRewardWrapper(functions.die, timeout_s=START_S, max_workers=1)
        with pytest.raises(SlotDataError, match="die: its process died with exit code 3"):
            await wrapper()

    async def test_leaving_with_0_is_a_crash(self) -> None:
        """A function that leaves by os._exit(0) is a SlotDataError, and no time-out that on_timeout makes a reward of.

        The processes that it forks may leave so.
        """
        wrapper = AsyncRewardWrapper(functions.die, timeout_s=START_S, max_workers=1, on_timeout=0.0)
        with pytest.raises(SlotDataError, match=r"died with exit code 90 \(of os\._exit\(0\)"):
            await wrapper(0)
        assert await AsyncRewardWrapper(functions.forked_exit, timeout_s=START_S, max_workers=1)() == 0.0

    async def test_a_crash_is_tried_again(self, tmp_path: Path) -> None:
        """A process that dies once costs nothing but the second try."""
        wrapper = AsyncRewardWrapper(functions.die_once, timeout_s=START_S, max_workers=1)
        assert await wrapper(str(tmp_path)) == 1.0

    async def test_an_exception_passes_through(self) -> None:
        """What the function raises reaches the workflow as it is."""
        wrapper = AsyncRewardWrapper(functions.explode, timeout_s=START_S, max_workers=1)
        with pytest.raises(ZeroDivisionError, match="by the reward"):
            await wrapper()

    async def test_cancelling_kills_the_process(self, tmp_path: Path) -> None:
        """A call that nobody waits for any more does not go on burning a core."""
        wrapper = AsyncRewardWrapper(functions.forever_at, timeout_s=300, max_workers=1)
        call = asyncio.create_task(wrapper(str(tmp_path)))
        await until(lambda: marks(tmp_path))
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        (pid,) = marks(tmp_path)
        await until(lambda: not alive(pid))

    async def test_what_a_killed_call_has_started_is_killed(self, tmp_path: Path) -> None:
        """A verifier that runs code in a process of its own does not leave that behind when it is killed."""
        wrapper = AsyncRewardWrapper(functions.child_at, timeout_s=0.5, max_workers=1, max_retries=0)
        with pytest.raises(RewardTimeoutError):
            await wrapper(str(tmp_path))
        (pid,) = marks(tmp_path)
        await until(lambda: not alive(pid))

    async def test_a_call_that_never_lets_go_of_the_interpreter_is_killed(self) -> None:
        """A regular expression that backtracks for ever takes SIGKILL; the next call is served."""
        wrapper = AsyncRewardWrapper(functions.backtrack, timeout_s=0.5, max_workers=1, max_retries=0)
        with pytest.raises(RewardTimeoutError):
            await wrapper("a" * 80 + "b")
        assert await wrapper("aaa") == 1.0

    @pytest.mark.parametrize(
        ("function", "said"),
        [
            (functions.untidy, "untidy raised Untidy: 7: by the reward"),
            (functions.stop_iteration, "stop_iteration raised StopIteration"),
            (functions.interrupt, "interrupt raised KeyboardInterrupt"),
            (functions.gentle_interrupt, "gentle_interrupt raised KeyboardInterrupt"),
        ],
    )
    async def test_what_cannot_leave_the_function_is_named(self, function: Callable[..., Any], said: str) -> None:
        """An exception that cannot be copied, that no future takes, or that would end the worker, is the slot's."""
        wrapper = AsyncRewardWrapper(function, timeout_s=START_S, max_workers=1, max_retries=0)
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(SlotDataError, match=said):
                await wrapper()
            assert await AsyncRewardWrapper(functions.half, timeout_s=START_S, max_workers=1)() == 0.5

    @pytest.mark.parametrize("argument", [threading.Lock(), lambda: 1, functions.Unsendable()])
    async def test_what_cannot_be_sent_is_named(self, argument: Any) -> None:
        """An argument that cannot be pickled, however it refuses, is an error that names the function; others go on."""
        wrapper = AsyncRewardWrapper(functions.half, timeout_s=START_S, max_workers=1)
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(SlotDataError, match="reward function half: it or an argument cannot be sent"):
                await wrapper(argument)
            assert await wrapper() == 0.5

    async def test_what_cannot_be_loaded_is_named(self) -> None:
        """An argument that its process cannot load is an error that names the function; others go on."""
        wrapper = AsyncRewardWrapper(functions.half, timeout_s=START_S, max_workers=1)
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(SlotDataError, match=r"half: it or an argument cannot be loaded .*ZeroDivisionError"):
                await wrapper(functions.Unloadable())
            assert await wrapper() == 0.5

    async def test_its_own_time_out_is_no_kill(self) -> None:
        """A TimeoutError that the function raises itself passes through, and is not tried again."""
        wrapper = AsyncRewardWrapper(functions.own_timeout, timeout_s=START_S, max_workers=1)
        with pytest.raises(TimeoutError, match="the judge did not answer") as caught:
            await wrapper()
        assert not isinstance(caught.value, RewardTimeoutError)

    async def test_wrappers_share_their_processes(self, processes: RewardProcesses) -> None:
        """Fifty wrappers, one for each workflow instance, use no more processes than the largest asks for."""
        wrappers = [AsyncRewardWrapper(functions.process_slowly, START_S, max_workers=1 + at % 2) for at in range(50)]
        async with asyncio.timeout(DEADLINE_S):
            await wrappers[0]()
            assert processes.size == 1
            await wrappers[1]()
            seen = set(await asyncio.gather(*(wrapper() for wrapper in wrappers)))
        assert processes.size == 2
        assert len(seen) <= 2

    async def test_growing_disturbs_no_call(self) -> None:
        """Calls that run when a wrapper asks for more processes end as if nothing had happened."""
        small = AsyncRewardWrapper(functions.burn, timeout_s=START_S, max_workers=1, max_retries=0)
        running = [asyncio.create_task(small(0.2)) for _ in range(3)]
        async with asyncio.timeout(DEADLINE_S):
            await small(0.0)  # they have begun
            assert await AsyncRewardWrapper(functions.half, timeout_s=START_S, max_workers=2)() == 0.5
            assert await asyncio.gather(*running) == [1.0] * 3

    async def test_a_broken_pool_is_replaced(self, processes: RewardProcesses) -> None:
        """Case 30: processes that are killed while they idle, as for want of memory, cost no call."""
        wrapper = AsyncRewardWrapper(functions.process_id, timeout_s=START_S, max_workers=1, max_retries=0)
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(3):
                pid = int(await wrapper())
                os.kill(pid, signal.SIGKILL)
                await until(lambda pid=pid: not alive(pid))
            assert await wrapper() > 0

    @pytest.mark.parametrize(
        "function",
        [
            "forever_at",
            pytest.param(
                "backtrack_at",
                marks=pytest.mark.skipif(sys.platform != "linux", reason="needs a signal from a pipe's end"),
            ),
        ],
    )
    async def test_no_process_outlives_its_worker(self, tmp_path: Path, function: str) -> None:
        """An endless call dies with the process that waits for it, however that is killed.

        So does one that never lets go of the interpreter.
        """
        program = (
            "import asyncio\nfrom forebay import AsyncRewardWrapper\nfrom helpers import reward_functions\n"
            f"asyncio.run(AsyncRewardWrapper(reward_functions.{function}, 300, 1)({str(tmp_path)!r}))\n"
        )
        paths = os.pathsep.join([str(Path(functions.__file__).parents[1]), *sys.path])
        environment = {**os.environ, "PYTHONPATH": paths}
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, env=environment)
        await until(lambda: marks(tmp_path))
        process.kill()
        await process.wait()
        (pid,) = marks(tmp_path)
        await until(lambda: not alive(pid))

    async def test_an_argument_may_be_called_self(self) -> None:
        """A prompt's data may have any key, also the names of the wrapper's own parameters."""
        wrapper = AsyncRewardWrapper(functions.named, timeout_s=START_S, max_workers=1)
        assert await wrapper(self=1, args=2, kwargs=3) == 6.0


async def test_case_31_a_cpu_bound_reward_does_not_block_the_loop() -> None:
    """Case 31: while a reward computes for 5 s of CPU, the loop's lag stays under 100 ms, its process's start included.

    The lag is that of a task that ticks every 5 ms. Of its hundreds of ticks, 98 in 100 must be in time, and none a
    second late: on a busy machine a tick may wait for other programs, but a reward on the loop would be one tick that
    is 5 s late.
    """
    wrapper = AsyncRewardWrapper(functions.burn, timeout_s=120, max_workers=1)
    lags: list[float] = []

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.005)
            now = time.perf_counter()
            lags.append(now - last - 0.005)
            last = now

    ticker = asyncio.create_task(tick())
    await asyncio.sleep(0)
    assert await wrapper(5.0) == 1.0
    ticker.cancel()
    lags.sort()
    assert len(lags) > 100
    assert lags[int(len(lags) * 0.98)] < 0.1
    assert lags[-1] < 1.0


async def test_the_pool_is_started_off_the_loop(processes: RewardProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting the processes, which takes as long as their imports, is not done on the event loop."""
    start, threads = processes.start, []

    def watched() -> None:
        threads.append(threading.get_ident())
        start()

    monkeypatch.setattr(processes, "start", watched)
    wrapper = AsyncRewardWrapper(functions.half, timeout_s=START_S, max_workers=1)
    assert await asyncio.gather(*(wrapper() for _ in range(4))) == [0.5] * 4
    assert threads
    assert threading.get_ident() not in threads


class TestCoroutines:
    """contract 8: coroutine functions are awaited directly."""

    async def test_a_coroutine_function_is_awaited_here(self) -> None:
        """A coroutine function needs no process."""
        wrapper = AsyncRewardWrapper(functions.gentle)
        assert await wrapper(0.125) == 0.125
        assert await AsyncRewardWrapper(functions.gentle_process_id)() == os.getpid()

    async def test_an_object_with_an_async_call_is_awaited_here(self) -> None:
        """An object with a coroutine ``__call__`` is one too, though no process could be given it."""
        assert await AsyncRewardWrapper(functions.Callable())() == 0.75

    async def test_a_coroutine_function_has_the_time_out_too(self) -> None:
        """A coroutine that never ends is a RewardTimeoutError that does not speak of a process."""
        wrapper = AsyncRewardWrapper(functions.gentle_forever, timeout_s=0.01, max_retries=0)
        with pytest.raises(RewardTimeoutError) as caught:
            await wrapper()
        assert "process" not in str(caught.value)


class TestNeverASilentZero:
    """contract 8: a time-out never silently becomes reward 0; ``on_timeout`` restores that."""

    @pytest.mark.parametrize("value", [0.0, -1.0])
    async def test_on_timeout_is_given_where_it_was_asked_for(self, value: float) -> None:
        """With on_timeout, a time-out of every try gives that value, also zero."""
        wrapper = AsyncRewardWrapper(functions.gentle_forever, timeout_s=0.01, on_timeout=value)
        assert await wrapper() == value

    async def test_on_timeout_does_not_hide_a_crash(self) -> None:
        """A crash is no time-out: on_timeout does not apply."""
        wrapper = AsyncRewardWrapper(functions.die, timeout_s=START_S, max_workers=1, max_retries=0, on_timeout=0.0)
        with pytest.raises(SlotDataError):
            await wrapper()

    @pytest.mark.parametrize("function", [functions.nothing, functions.words, functions.huge])
    async def test_what_is_no_number_is_an_error(self, function: object) -> None:
        """None, text and integers beyond floats are SlotDataErrors that name the function."""
        wrapper = AsyncRewardWrapper(function, timeout_s=START_S, max_workers=1)  # type: ignore[arg-type]
        with pytest.raises(SlotDataError, match="expected a number"):
            await wrapper()

    async def test_nan_stays_nan(self) -> None:
        """NaN is handed on for the slot to fail by; it does not become a number here."""
        wrapper = AsyncRewardWrapper(functions.not_a_number, timeout_s=START_S, max_workers=1)
        assert math.isnan(await wrapper())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"reward_fn": "module:function"}, "not callable"),
        ({"reward_fn": functions.half, "timeout_s": 0}, "timeout_s=0"),
        ({"reward_fn": functions.half, "max_workers": 0}, "max_workers=0"),
        ({"reward_fn": functions.half, "max_retries": -1}, "max_retries=-1"),
        ({"reward_fn": functions.half, "timeout_seconds": -2}, "timeout_s=-2"),
        ({"reward_fn": functions.half, "timeout_s": math.nan}, "timeout_s=nan"),
        ({"reward_fn": functions.half, "timeout_s": math.inf}, "timeout_s=inf"),
        ({"reward_fn": functions.half, "timeout_s": 10**400}, "timeout_s=1000"),
        ({"reward_fn": functions.half, "timeout_s": True}, "timeout_s=True"),
        ({"reward_fn": functions.half, "timeout_s": "5"}, "timeout_s='5'"),
        ({"reward_fn": functions.half, "max_workers": True}, "max_workers=True"),
        ({"reward_fn": functions.half, "max_workers": 1.5}, r"max_workers=1\.5"),
        ({"reward_fn": functions.half, "max_workers": 100_000}, "max_workers=100000: .* at most 512"),
        ({"reward_fn": functions.half, "max_retries": 1.5}, r"max_retries=1\.5"),
        ({"reward_fn": functions.half, "on_timeout": math.nan}, "on_timeout=nan"),
        ({"reward_fn": functions.half, "on_timeout": "0"}, "on_timeout='0'"),
        ({"reward_fn": functions.half, "timeout_s": 1, "timeout_seconds": 2}, "are one; pass either"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: dict[str, object], said: str) -> None:
    """Arguments that cannot work are a SettingsError when the wrapper is made."""
    with pytest.raises(SettingsError, match=said):
        AsyncRewardWrapper(**arguments)  # type: ignore[arg-type]


class TestAsInAReaL:
    """contract 8: a wrapper that was made for AReaL works, or is refused."""

    async def test_arguments_by_name_and_by_place(self) -> None:
        """``(reward_fn, timeout_seconds, max_workers, max_retries)`` means the same."""
        named = AsyncRewardWrapper(functions.half, timeout_seconds=START_S, max_workers=None, max_retries=3)
        placed = AsyncRewardWrapper(functions.gentle_forever, 0.01, None, 0)
        assert await named() == 0.5
        with pytest.raises(RewardTimeoutError, match=r"longer than 0\.01 s"):
            await placed()

    def test_default_number_of_processes(self) -> None:
        """Without a number there are from 2 to 8 processes."""
        assert 2 <= default_processes() <= 8
        assert AsyncRewardWrapper(functions.half)._max_workers == default_processes()
