"""Weight updates of a fleet from disk."""

from __future__ import annotations

import asyncio

import pytest
from scripted_server import fast_settings, scripted, until

from forebay.errors import WeightUpdateError
from forebay.weights import UpdatePhase, update_weights_from_disk

pytestmark = pytest.mark.asyncio

PAUSE, UPDATE, CONTINUE = "/pause_generation", "/update_weights_from_disk", "/continue_generation"


async def test_all_servers_take_the_weights() -> None:
    """Every server pauses, loads with the decimal label, and goes on; nothing loads before all have paused."""
    phases: list[tuple[str, UpdatePhase]] = []
    async with scripted(3) as servers:
        urls = [server.url for server in servers]
        result = await update_weights_from_disk(
            urls, "/m/7", 7, fast_settings(), on_progress=lambda url, phase: phases.append((url, phase))
        )
        assert [server.calls for server in servers] == [[PAUSE, UPDATE, CONTINUE]] * 3
        assert all(server.info["weight_version"] == "7" for server in servers)
        assert not any(server.info["paused"] for server in servers)
    assert result.out == []
    assert all(update.ok and update.seconds > 0 and not update.message for update in result.servers.values())
    assert list(result.servers) == urls
    assert [phase for _, phase in phases] == ["paused"] * 3 + ["updated"] * 3 + ["resumed"] * 3


async def test_failed_server_stays_paused_and_is_reported() -> None:
    """A server that fails is in `out` with its own words and stays paused; the others go on."""
    async with scripted(2) as [good, bad]:
        bad.changes_weights = False
        bad.update_replies.append((400, "no space left on device"))
        result = await update_weights_from_disk([good.url, bad.url], "/m/7", 7, fast_settings())
        assert (good.info["paused"], bad.info["paused"]) == (False, True)
    assert result.out == [bad.url]
    assert result.servers[good.url].ok
    assert "no space left on device" in result.servers[bad.url].message


async def test_dead_server_is_reported() -> None:
    """A server that is not there does not keep the others from their update."""
    async with scripted(2) as [good, dead]:
        await dead.stop()
        result = await update_weights_from_disk([good.url, dead.url], "/m/7", 7, fast_settings())
        assert good.calls == [PAUSE, UPDATE, CONTINUE]
    assert result.out == [dead.url]


async def test_failed_but_happened() -> None:
    """A 400 of a server whose weights did change is a success."""
    async with scripted() as [server]:
        server.update_replies.append((400, "Cache flush failed"))
        result = await update_weights_from_disk([server.url], "/m/7", 7, fast_settings())
        assert server.info["paused"] is False
    assert result.out == []


async def test_all_fail() -> None:
    """If no server takes the weights, the error names each reason, and all go on with their old weights."""
    async with scripted(2) as servers:
        for number, server in enumerate(servers):
            server.changes_weights = False
            server.update_replies.append((400, f"reason {number}"))
        with pytest.raises(WeightUpdateError, match=r"(?s)version 7.*reason 0.*reason 1") as caught:
            await update_weights_from_disk([server.url for server in servers], "/m/7", 7, fast_settings())
        assert not any(server.info["paused"] for server in servers)
        results = vars(caught.value)["results"]
        assert {url: update.ok for url, update in results.items()} == dict.fromkeys([s.url for s in servers], False)


async def test_no_servers() -> None:
    """Without any server there is nothing that could hold the weights."""
    with pytest.raises(WeightUpdateError, match="no inference server is registered"):
        await update_weights_from_disk([], "/m/7", 7, fast_settings())


async def test_server_that_cannot_go_on_is_out() -> None:
    """An updated server that cannot be resumed is reported, after a few tries."""
    async with scripted(2) as [good, stuck]:
        stuck.fail_paths[CONTINUE] = 500
        result = await update_weights_from_disk([good.url, stuck.url], "/m/7", 7, fast_settings())
        assert stuck.calls.count(CONTINUE) == 3
    assert result.out == [stuck.url]
    assert "could not be told to go on" in result.servers[stuck.url].message


async def test_time_limit() -> None:
    """A server that hangs in its update is out after update_timeout_s; the others go on."""
    async with scripted(2) as [good, hung]:
        hung.update_gate = asyncio.Event()
        result = await update_weights_from_disk([good.url, hung.url], "/m/7", 7, fast_settings(update_timeout_s=0.2))
        assert good.info["paused"] is False
    assert result.out == [hung.url]
    assert "within 0.2 s" in result.servers[hung.url].message


async def test_cancellation_leaves_no_server_paused() -> None:
    """Cancelled in the middle, even twice, the call resumes every server before it ends."""
    async with scripted(2) as [quick, slow]:
        slow.update_gate = asyncio.Event()
        update = asyncio.create_task(update_weights_from_disk([quick.url, slow.url], "/m/7", 7, fast_settings()))
        await until(lambda: slow.updates and quick.info["weight_version"] == "7")
        update.cancel()
        await asyncio.wait([update], timeout=0)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert (quick.info["paused"], slow.info["paused"]) == (False, False)


async def test_error_in_a_progress_callback() -> None:
    """An error of the caller's own callback is raised, and every server goes on."""

    def fail(_: str, phase: UpdatePhase) -> None:
        if phase == "updated":
            raise RuntimeError("callback")

    async with scripted(2) as servers:
        with pytest.raises(RuntimeError, match="callback"):
            await update_weights_from_disk([s.url for s in servers], "/m/7", 7, fast_settings(), on_progress=fail)
        assert not any(server.info["paused"] for server in servers)
