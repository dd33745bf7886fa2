"""Nothing from the wire runs code: pickles in every place that Redis has, and names of what is not allowed."""

from __future__ import annotations

import asyncio
import io
import os
import pickle
from pathlib import Path
from typing import Any, NoReturn

import pytest
from pipeline_workflows import EchoWorkflow
from services import read, services

from forebay.errors import ForebayError
from forebay.pretrained import PretrainedCache
from forebay.wire.codec import decode_rows
from forebay.wire.envelopes import BatchIndex, GroupRules, GroupSpec, GroupSummary, SlotHeader
from forebay.wire.values import decode_plain, pack, unpack
from forebay.workflow import build_workflow

ALLOWED = ("forebay", "forebay_workers", "pipeline_workflows")


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


async def test_pickles_in_every_place(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """9: a pickle in arq's records, in jobs, results, specs, rows, batches and the rest is data that cannot be read."""
    mark = tmp_path / "it-ran"
    bomb = pickle.dumps(Bomb(mark))
    async with services(redis_url, run_name, batch_size=1, batches_per_version=100) as (running, client):
        store, keys = running.store, running.store.keys
        await store._ask(
            ("XADD", keys.results(0), "*", "t", 1, "i", 0, "h", bomb),
            ("XADD", keys.results(0), "*", b"bomb", bomb),
            ("XADD", keys.prompts, "*", "t", bomb),
            ("ZADD", keys.jobs, 0, bomb, 0, keys.job_id(9, 0, 1)),
            ("SET", f"arq:job:{keys.job_id(9, 0, 1)}", bomb),
            ("SET", f"arq:result:{keys.job_id(9, 0, 1)}", bomb),
            ("HSET", keys.workers, "w", bomb), ("ZADD", keys.workers_seen, 9e15, "w"),
            ("XADD", keys.drops, "*", "t", bomb), ("RPUSH", keys.rewrites, bomb), ("RPUSH", keys.evicted, bomb),
        )  # fmt: skip
        await store.submit(bomb, bomb, 1)
        task = await client.submit({"ids": [1, 2]}, EchoWorkflow, {}, group_size=1)
        # The record that arq itself would read, of a job that runs.
        await store._ask(("SET", f"arq:job:{keys.job_id(task, 0, 1)}", bomb))
        (batch,) = await read(client, 1)
        assert [group.task for group in batch.groups] == [task]
        await client.status()
        await client.drops()
        await client.poison()
    assert not mark.exists()


async def test_a_pipeline_that_cannot_unpickle(redis_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """9: prompts, jobs, results and batches pass through processes in which unpickling fails."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    async with services(redis_url, run_name, batch_size=1, batches_per_version=100) as (_, client):
        for number in range(3):
            await client.submit({"ids": [1, number]}, EchoWorkflow, {}, group_size=2)
        assert len(await read(client, 3)) == 3
        with pytest.raises(AssertionError):
            pickle.loads(pickle.dumps(1))


def test_decoders_of_a_pickle(tmp_path: Path) -> None:
    """9: no decoder makes anything of a pickle."""
    mark = tmp_path / "it-ran"
    bomb = pickle.dumps(Bomb(mark))
    for decode in (decode_rows, unpack, *(kind.unpack for kind in (SlotHeader, GroupSpec, GroupRules, GroupSummary))):
        with pytest.raises(ForebayError):
            decode(bomb)
    with pytest.raises(ForebayError):
        BatchIndex.unpack(bomb)
    assert decode_plain(unpack(pack({"b": bomb}))) == {"b": bomb}
    assert not mark.exists()


@pytest.mark.parametrize(
    "kwargs",
    [
        {"f": {"__forebay__": "callable", "name": "os:system"}},
        {"f": {"__forebay__": "callable", "name": "forebay.imports:importlib.import_module"}},
        {"f": {"__forebay__": "callable", "name": "forebay.__main__:main"}},
        {"f": {"__forebay__": "callable", "name": "forebay.store.base:StoreBase.__init__.__globals__"}},
        {"f": [{"deep": {"__forebay__": "callable", "name": "subprocess:Popen"}}]},
        {"f": {"__forebay__": "settings.Settings", "fields": {}}},
        {"f": {"__forebay__": "pickle", "data": b"x"}},
        {"f": {"__forebay__": "gconfig", "fields": {"stop": {"__forebay__": "callable", "name": "os:system"}}}},
        {"f": {"__forebay__": {"a": 1}, "name": "os:system"}},
    ],
)
@pytest.mark.parametrize("workflow", ["pipeline_workflows:EchoWorkflow"])
def test_forms_of_what_is_not_allowed(workflow: str, kwargs: dict[str, Any]) -> None:
    """2, 9: a form from the wire leads to allowed modules only, wherever it stands; nothing else is imported."""
    with pytest.raises(ForebayError):
        build_workflow(workflow, kwargs, ALLOWED)


@pytest.mark.parametrize("kind", ["tokenizer", "processor"])
def test_code_that_comes_with_a_tokenizer(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """9: a tokenizer by a path from the wire brings no code: it is refused, and nobody is asked."""
    pytest.importorskip("transformers")
    mark = tmp_path / "it-ran"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\nclass Evil: pass\n")
    auto = '"auto_map": {"AutoTokenizer": ["evil.Evil", null], "AutoProcessor": "evil.Evil", "AutoConfig": "evil.Evil"}'
    for name in ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
        (folder / name).write_text('{"model_type": "evil", ' + auto + "}")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 10))
    with pytest.raises(ForebayError):
        PretrainedCache().get(kind, str(folder))
    assert not mark.exists()


async def test_the_spec_of_a_group_names_what_is_not_allowed(redis_url: str, run_name: str, tmp_path: Path) -> None:
    """2, 9: whoever writes to Redis himself, past submit, has no module imported that the allowlist has not."""
    mark = tmp_path / "it-ran"
    async with services(redis_url, run_name, batch_size=1, max_failed_share_data=1.0) as (running, client):
        store = running.store
        for workflow in ("os:mkdir", "pathlib:Path.mkdir", "pipeline_workflows:asyncio.create_subprocess_shell"):
            spec = GroupSpec(workflow, {"path": str(mark)}, {"ids": [1]})
            await store.submit(spec.pack(), GroupRules(1, should_accept_fn="os:mkdir").pack(), 1)
        async with asyncio.timeout(20):
            while len(await client.drops()) < 3:  # noqa: ASYNC110 (what is waited for is in Redis)
                await asyncio.sleep(0.05)
        reasons = [slot.reason for group in await client.dead_letters() for slot in group.slots]
    assert len(reasons) == 3
    assert all("ImportNotAllowedError" in reason for reason in reasons)
    assert not mark.exists()
