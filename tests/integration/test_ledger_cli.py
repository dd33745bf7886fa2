"""The commands `drops`, `dead` and `poison`, against a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from driver import Driver
from typer.testing import CliRunner, Result

from forebay.cli import build_app
from forebay.outcomes import FailureKind, SlotOutcome
from forebay.settings import Settings
from forebay.store import Store
from forebay.wire.envelopes import GroupSpec, SlotHeader

Command = Callable[..., Result]


@pytest.fixture
def command(redis_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs ``forebay ...`` for a run with two dead groups, 1 (data) and 2 (infra), and one that was filtered, 3."""
    name = run_name.split("/", maxsplit=1)[0]
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.setenv("FOREBAY_EXPERIMENT_NAME", name)

    async def prepare() -> None:
        store = Store.open(Settings(REDIS_URL=redis_url, experiment_name=name))
        driver = Driver(store)
        await driver.lead(attempts_infra=1)
        spec = GroupSpec("my.module:Flow", {"n": 1, "api_key": "sk-1"}, {"question": "1+1"})
        for at, kind in enumerate((FailureKind.DATA, FailureKind.INFRA)):
            await store.submit(spec.pack(), b"rules", 1, f"q{at}")
            await driver.admit()
            (attempt,) = await driver.claim()
            header = SlotHeader(
                *attempt,
                outcome="failed",
                kind=kind.value,
                reason=f"it\x1b[31m broke {kind}",
                traceback="a\nhttp://me:pw@host",
            )
            await store.publish(
                *attempt, outcome=SlotOutcome.FAILED, kind=kind, header=header.pack(), rows=None, rows_ttl_s=60
            )
            await driver.commit(attempt[0], size=1, reason="no_usable_slot", detail="1 x failed")
        await driver.submit(1, 1)
        await driver.admit()
        (attempt,) = await driver.claim()
        await driver.publish(attempt)
        await driver.commit(3, size=1, reason="filtered")
        await store._run("set_aside", "", "", "", "rows:x", "rows", "truncated", b"\x01\xff")
        await store.close()

    asyncio.run(prepare())
    app = build_app()
    return lambda *words: CliRunner().invoke(app, list(words))


def test_drops(command: Command) -> None:
    """Each drop is a line, or a JSON object; they are counted by reason; the newest come first."""
    lines = command("drops").stdout.splitlines()
    assert len(lines) == 3
    assert "group 3  rejected at assembly, filtered" in lines[0]
    assert "group 1  rejected at assembly, no_usable_slot: 1 x failed (prompt q0)" in lines[2]
    found = [json.loads(line) for line in command("drops", "--json", "--since", "1h").stdout.splitlines()]
    assert [drop["task_id"] for drop in found] == [3, 2, 1]
    counts = [json.loads(line) for line in command("drops", "--by", "reason", "--json").stdout.splitlines()]
    assert counts == [
        {"reason": "rejected: no_usable_slot", "groups": 2},
        {"reason": "rejected: filtered", "groups": 1},
    ]
    prompts = command("drops", "--by", "prompt").stdout.split()
    assert (prompts[::2], {"q0", "q1"} < set(prompts[1::2])) == (["1", "1", "1"], True)
    assert command("drops", "--since", "2999-01-01").stdout == ""


def test_dead_list_and_show(command: Command) -> None:
    """Letters are listed by kind, and one is shown with traceback and prompt; control characters are not printed."""
    assert [line.split()[1] for line in command("dead", "list").stdout.splitlines()] == ["2:0", "1:0"]
    (line,) = command("dead", "list", "--kind", "infra").stdout.splitlines()
    assert "2:0  infra, attempt 1, worker w1  it [31m broke infra  (group rejected)" in line
    assert json.loads(command("dead", "list", "--json", "--limit", "1").stdout)["prompt"] == "q1"
    text = command("dead", "show", "1:0").stdout
    assert "\x1b" not in text
    assert "\na\nhttp://***@host\nprompt: q0\n" in text
    assert json.loads(text[text.index("{") :]) == {
        "workflow": "my.module:Flow",
        "kwargs": {"n": 1, "api_key": "***"},
        "data": {"question": "1+1"},
    }
    for words in (("dead", "list", "--json"), ("dead", "list"), ("drops", "--json"), ("dead", "show", "1")):
        assert not any(secret in command(*words).stdout for secret in ("me:pw", "sk-1"))
    assert [line.split()[1] for line in command("dead", "list", "--reason", "broke data").stdout.splitlines()] == [
        "1:0"
    ]
    assert command("dead", "list", "--reason", "broke data", "--kind", "infra").stdout == ""
    assert command("dead", "show", "1:7").exit_code == 1
    assert command("dead", "show", "3").exit_code == 1


def test_dead_redrive(command: Command) -> None:
    """By kind, by id, all; what came again before is passed over, and by id that is an error."""
    nothing = command("dead", "redrive", "--reason", "no such words")
    assert (nothing.stdout, nothing.stderr) == ("", "redriven 0 of 0 groups\n")
    assert command("dead", "redrive", "--reason", "broke infra").stdout == "group 2 comes again as 4\n"
    every = command("dead", "redrive", "--all")
    assert every.stdout == "group 1 comes again as 5\n"
    assert "redriven 1 of 2 groups; passed over: 1 came again before" in every.stderr
    one = command("dead", "redrive", "1")
    assert (one.exit_code, "came again before, as 5" in one.stderr) == (1, True)
    assert command("dead", "redrive", "1", "--again").stdout == "group 1 comes again as 6\n"
    assert command("dead", "redrive").exit_code == 1
    assert command("dead", "redrive", "1", "--all").exit_code == 1


def test_poison(command: Command) -> None:
    """What was set aside is listed with its first bytes."""
    assert "rows:x  truncated  b'\\x01\\xff'" in command("poison").stdout
    assert json.loads(command("poison", "--json").stdout)["sample"] == "01ff"
