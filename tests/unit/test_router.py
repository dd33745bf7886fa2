"""Routing of requests to servers."""

from __future__ import annotations

from collections import Counter

from forebay_workers.engines.router import Router


def router_of(*urls: str, affinity_entries: int = 100) -> Router:
    """A router of healthy servers."""
    router = Router(affinity_entries)
    for url in urls:
        router.add(url)
        router.set_health(url, healthy=True)
    return router


def test_affinity() -> None:
    """A rid stays on its server, even when that has more in flight than others."""
    router = router_of("a", "b")
    first = router.acquire("r")
    assert {router.acquire("r") for _ in range(5)} == {first}


def test_new_server_is_unhealthy() -> None:
    """A server that no check has passed yet is not picked."""
    router = Router(10)
    router.add("a")
    assert router.acquire("r") is None
    assert not router.any_healthy


def test_least_loaded() -> None:
    """New rids go to the server with the fewest requests in flight."""
    router = router_of("a", "b", "c")
    held = [router.acquire(f"r{i}") for i in range(6)]
    assert Counter(held) == {"a": 2, "b": 2, "c": 2}
    router.release("b")
    assert router.in_flight("b") == 1
    assert router.acquire("new") == "b"


def test_ties_are_fair() -> None:
    """Idle servers take turns."""
    router = router_of("a", "b", "c")
    order = []
    for number in range(6):
        url = router.acquire(f"r{number}")
        assert url is not None
        order.append(url)
        router.release(url)
    assert order == ["a", "b", "c", "a", "b", "c"]


def test_affinity_to_unhealthy_is_dropped() -> None:
    """Case 35: a rid leaves a server that is unhealthy or removed, and does not go back by itself."""
    router = router_of("a", "b")
    assert router.acquire("r") == "a"
    router.set_health("a", healthy=False)
    assert router.acquire("r") == "b"
    router.set_health("a", healthy=True)
    assert router.acquire("r") == "b"
    router.remove("b")
    assert router.acquire("r") == "a"


def test_affinity_is_bounded() -> None:
    """The least recently used rid is forgotten first."""
    router = router_of("a", "b", affinity_entries=2)
    assert router.acquire("r1") == "a"
    assert router.acquire("r2") == "b"
    router.acquire("r1")
    router.acquire("r3")  # forgets r2
    assert len(router._affinity) == 2
    for _ in range(3):
        router.release("a")
    assert router.acquire("r1") == "a"
    assert router.acquire("r2") == "a"  # least loaded, not the b of before


def test_paused_servers_come_last() -> None:
    """A paused server gets new rids only where all are paused."""
    router = router_of("a", "b")
    router.set_health("a", healthy=True, paused=True)
    assert [router.acquire(f"r{i}") for i in range(3)] == ["b", "b", "b"]
    router.set_health("b", healthy=True, paused=True)
    assert router.acquire("new") == "a"


def test_release_after_removal() -> None:
    """A request may end after its server is forgotten."""
    router = router_of("a")
    router.acquire("r")
    router.remove("a")
    router.release("a")
    assert router.in_flight("a") == 0
