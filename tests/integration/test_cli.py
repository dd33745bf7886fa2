"""The commands as a user types them: what they print, and how they fail."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from services import WORKFLOW, Services, services

from forebay import AsyncClient

CLOSED = "redis://user:hunter2@127.0.0.1:1/0"
"""Nothing listens there."""


async def forebay(*words: str, running: Services | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in the run of `running`."""
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = {**os.environ, "PYTHONPATH": paths, "FOREBAY_LOG_LEVEL": "error", **environment}
    if running is not None:
        env |= {
            "REDIS_URL": running.settings.resolved_redis_url(),
            "FOREBAY_EXPERIMENT_NAME": running.settings.experiment_name,
        }
    command = [sys.executable, "-m", "forebay", *words]
    return await asyncio.to_thread(
        subprocess.run, command, env=env, capture_output=True, text=True, timeout=60, check=False
    )


async def counted(client: AsyncClient) -> int:
    """Groups submitted so far."""
    return (await client.status()).count("submitted")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Four lines, two of them bad."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"ids": [1]}\nnot json\n[1, 2]\n\n{"ids": [2]}\n')
    return file


async def test_submit_and_read(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """Submit enqueues a group a line, once for each key; batches prints what came, as JSON where asked."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"ids": [1]}\n{"ids": [2]}\n')
    async with services(redis_url, run_name) as (running, client):
        words = ("submit", str(file), "--workflow", WORKFLOW, "--group-size", "2", "--key-prefix", "epoch0")
        for _ in range(2):
            done = await forebay(*words, running=running)
            assert (done.returncode, done.stderr) == (0, "")
            assert "submitted 2 groups" in done.stdout
        assert await counted(client) == 2
        read = await forebay("batches", "--count", "1", "--timeout", "20", "--json", "--advance", running=running)
        batch = json.loads(read.stdout)
        assert sorted(group["task_id"] for group in batch["groups"]) == [1, 2]
        assert [group["sample_idx"] for group in batch["groups"]] == [[0, 1], [0, 1]]
        assert await client.version() == 1
        await forebay("end", running=running)
        ended = await forebay("batches", "--timeout", "20", running=running)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "end of data\n")


async def test_batches_of_ranks_and_followers(redis_url: str, run_name: str) -> None:
    """Ranks read their shares, who follows reads beside them, and a second driver is told in one line what to do."""
    async with services(redis_url, run_name, retain_batches=1, max_staleness=9) as (running, client):
        for _ in range(4):
            await client.submit({"ids": [1]}, WORKFLOW, {})
        words = ("batches", "--count", "1", "--timeout", "20", "--json", "--world-size", "2", "--rank")
        shares = [json.loads((await forebay(*words, str(rank), running=running)).stdout) for rank in range(2)]
        assert [(share["batch_id"], share["rank"], share["batch_groups"]) for share in shares] == [(1, 0, 2), (1, 1, 2)]
        tasks = {group["task_id"] for share in shares for group in share["groups"]}
        assert len(tasks) == 2, "each group is in one share; which groups end first is a matter of chance"
        assert tasks < {1, 2, 3, 4}
        beside = await forebay("batches", "--follow", "--count", "1", "--timeout", "20", running=running)
        assert "batch 1: 2 groups" in beside.stdout
        again = await forebay(*words, "0", "--resume-after", "0", running=running)
        assert json.loads(again.stdout)["batch_id"] == 1
        other = await forebay("batches", "--consumer", "other", running=running)
        assert (other.returncode, other.stderr.count("\n")) == (2, 1)
        assert "follows=True" in other.stderr
        both = await forebay("batches", "--follow", "--advance", running=running)
        assert (both.returncode, both.stderr.count("\n")) == (2, 1)


async def test_submit_normalizes(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """--normalize and --no-normalize win over the run's setting; without either it holds (contract 5)."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"ids": [1], "rewards": {"0": 1.0, "1": 3.0}}\n')
    async with services(redis_url, run_name, batch_size=3, reward_normalization=True) as (running, client):
        for words in [("--normalize",), ("--no-normalize",), ()]:
            done = await forebay("submit", str(file), "--workflow", WORKFLOW, *words, running=running)
            assert (done.returncode, done.stderr) == (0, "")
        read = await forebay("batches", "--count", "1", "--timeout", "20", "--json", running=running)
        found = {group["task_id"]: group["rewards"] for group in json.loads(read.stdout)["groups"]}
        assert (await client.status()).count("submitted") == 3
    assert found[1] == pytest.approx([-1, 1], abs=1e-6)
    assert found[2] == [1.0, 3.0]
    assert found[3] == found[1]


async def test_bad_lines_are_named_and_the_others_go(redis_url: str, run_name: str, prompts: Path) -> None:
    """A bad line is named by its number, exit code 1; with --strict nothing is submitted, exit code 2."""
    async with services(redis_url, run_name) as (running, client):
        words = ("submit", str(prompts), "--workflow", WORKFLOW)
        strict = await forebay(*words, "--strict", running=running)
        assert strict.returncode == 2
        assert "nothing was submitted" in strict.stderr
        assert await counted(client) == 0
        loose = await forebay(*words, running=running)
        assert loose.returncode == 1
        assert [line.split(":")[0] for line in loose.stderr.splitlines()] == ["line 2", "line 3"]
        assert await counted(client) == 2


async def test_bad_submits_are_one_line(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """What cannot run is refused in one line with the remedy, exit code 2, no traceback, nothing half-submitted."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"ids": [1]}\n' * 3)
    bad = {
        ("--workflow", "os.path"): "import allowlist",
        ("--workflow", "pipeline_workflows.Missing"): "has no Missing",
        ("--workflow", WORKFLOW, "--kwargs", "{"): "--kwargs is no JSON",
        ("--workflow", WORKFLOW, "--kwargs", '{"x": 1}'): "do not fit",
        ("--workflow", WORKFLOW, "--group-size", "0"): "group_size=0",
        ("--workflow", WORKFLOW, "--reward", "json.dumps"): "import allowlist",
    }
    async with services(redis_url, run_name) as (running, client):
        for words, text in bad.items():
            done = await forebay("submit", str(file), *words, running=running)
            assert done.returncode == 2, words
            assert text in done.stderr
            assert done.stderr.count("\n") == 1, done.stderr
            assert "Traceback" not in done.stderr
        assert await counted(client) == 0


async def test_unreachable_redis_is_one_line_without_its_password() -> None:
    """A Redis that cannot be reached is one line with its address and the remedy; never its password."""
    for command in ("batches", "worker", "collector"):
        done = await forebay(command, REDIS_URL=CLOSED, FOREBAY_REDIS_TIMEOUT_S="0.5")
        assert done.returncode == 2
        assert "Redis at redis://127.0.0.1:1/0 cannot be reached" in done.stderr
        assert "make up" in done.stderr
        assert "hunter2" not in done.stderr + done.stdout
        assert "Traceback" not in done.stderr


async def test_missing_file_and_missing_run(redis_url: str, tmp_path: Path) -> None:
    """A file or a run that is not there is named, with what to do."""
    gone = await forebay("submit", str(tmp_path / "gone.jsonl"), "--workflow", WORKFLOW, REDIS_URL=redis_url)
    assert (gone.returncode, "gone.jsonl" in gone.stderr) == (2, True)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"ids": [1]}\n')
    words = ("submit", str(file), "--workflow", WORKFLOW, "--wait", "0.2")
    done = await forebay(*words, REDIS_URL=redis_url, FOREBAY_TRIAL_NAME="nobody-serves-this")
    assert done.returncode == 2
    assert "no collector has published the settings of run dev/nobody-serves-this" in done.stderr


async def test_bad_settings_name_the_variable(redis_url: str) -> None:
    """A bad setting is named as the environment variable that it is, with its value."""
    done = await forebay("collector", REDIS_URL=redis_url, FOREBAY_BATCH_SIZE="0")
    assert done.returncode == 2
    assert "FOREBAY_BATCH_SIZE='0'" in done.stderr
    norm = await forebay("collector", REDIS_URL=redis_url, FOREBAY_REWARD_NORMALIZATION='{"mean": "group"}')
    assert (norm.returncode, norm.stderr.count("\n")) == (2, 1)
    assert 'FOREBAY_REWARD_NORMALIZATION=\'{"mean": "group"}\': unknown field mean of a NormConfig' in norm.stderr
    starved = await forebay("collector", REDIS_URL=redis_url, FOREBAY_GROUP_DEADLINE_S="5")
    assert "group_deadline_s=5 is below episode_timeout_s=600" in starved.stderr
