"""A workflow that was written for AReaL runs after only its imports were changed, by the table of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from services import read, services

from forebay import GenerationHyperparameters
from forebay_ops.tiny_model import create_tiny_model

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "areal_style"
_ROW = re.compile(r"^\| `(from areal\.[^`]+)` \| `(from forebay[^`]*)` \|$", re.MULTILINE)


def import_table() -> dict[str, str]:
    """The rows of the documentation that replace import lines."""
    return dict(_ROW.findall((ROOT / "docs" / "migrating-from-areal.md").read_text()))


def ported() -> str:
    """The workflow for AReaL with its imports replaced."""
    table = import_table()
    lines = (EXAMPLE / "areal_workflow.txt").read_text().splitlines()
    return "\n".join(table.get(line, line) for line in lines) + "\n"


def body(text: str) -> list[str]:
    """A module without its import lines."""
    return text[text.index("logger = ") :].splitlines()


def test_only_the_imports_differ() -> None:
    """The two files of the example are the same below their imports, and the table names every import of AReaL."""
    original = (EXAMPLE / "areal_workflow.txt").read_text()
    assert body(original) == body((EXAMPLE / "workflow.py").read_text())
    imports = [line for line in original.splitlines() if line.startswith(("from areal", "import areal"))]
    assert sorted(imports) == sorted(import_table())


async def test_ported_workflow_runs(
    redis_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Submitted as a class with its arguments, it generates, scores in another process, and its phases are timed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "ported_workflow.py").write_text(ported())
    module = __import__("ported_workflow")
    model = create_tiny_model(tmp_path / "model")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    traces = tmp_path / "traces"
    monkeypatch.setenv("FOREBAY_WORKER_TRACE_DIR", str(traces))
    async with services(redis_url, run_name, import_allowlist=["ported_workflow"]) as (running, client):
        digits = tokenizer.encode("12:=", add_special_tokens=False)
        from scripted_server import answer

        running.server.default = answer(digits, weight_version="0")
        for text in ("c:1=", "c:2="):
            await client.submit(
                {"messages": [{"role": "user", "content": text}], "answer": "12"},
                module.ChatScoreWorkflow,
                {
                    "reward_fn": module.digits_share,
                    "tokenizer": tokenizer,
                    "gconfig": GenerationHyperparameters(max_new_tokens=8),
                },
            )
        (batch,) = await read(client, 1, timeout_s=60)
        tensors = batch.tensors()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        for text in ("c:1=", "c:2=")
    ]
    assert sorted(tensors["input_ids"].tolist()) == sorted([prompt + digits for prompt in prompts for _ in range(2)])
    assert tensors["rewards"].tolist() == [0.5] * 4
    request = running.server.requests[0]["sampling_params"]
    assert tokenizer.eos_token_id in request["stop_token_ids"]
    assert request["max_new_tokens"] == 8
    text = "".join(path.read_text() for path in traces.iterdir())
    assert text.count('"status":"usable"') == 4
    assert all(text.count(f'["{phase}"') == 4 for phase in ("generate", "reward"))
