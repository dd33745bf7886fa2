"""How the processes of a local stack are started and stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay_ops.specs import LocalStackConfig, worker_spec


@pytest.mark.parametrize(("given", "grace_s"), [("", 10), ("45", 55), ("inf", 10), ("-3", 10), ("soon", 10)])
def test_a_worker_is_not_killed_while_it_may_drain(tmp_path: Path, given: str, grace_s: float) -> None:
    """4.2: the supervisor waits as long as FOREBAY_WORKER_DRAIN_TIMEOUT_S gives episodes, and its own grace."""
    config = LocalStackConfig(home=tmp_path, env={"FOREBAY_WORKER_DRAIN_TIMEOUT_S": given})
    assert worker_spec(config, 0).stop_grace_s == grace_s
