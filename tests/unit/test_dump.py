"""JSONL dumps of groups (contract 11), with a real tokenizer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.building import group_of, headers_of, row
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import SettingsError
from forebay.settings import RunSettings
from forebay.wire.envelopes import GroupRules, GroupSummary
from forebay.wire.rows import Row
from forebay_collector.dump import Dumper, run_lengths, segments
from forebay_ops.tiny_model import VOCABULARY, create_tiny_model

RUN = "exp/trial"


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's tokenizer: one token for each character."""
    return create_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def dumper(tokenizer_path: Path, tmp_path: Path) -> Dumper:
    """A dumper that is open."""
    made = Dumper(RunSettings(dump_to_file=True, fileroot=tmp_path, tokenizer_path=str(tokenizer_path)), RUN)
    await made.open()
    return made


def ids(text: str) -> list[int]:
    """`text` as the tiny model's tokens; ``$`` is the end of text."""
    return [VOCABULARY.index("<eos>" if char == "$" else char) for char in text]


def spoken(prompt: str, completion: str, version: int = 4, **values: Any) -> Row:
    """A row of a prompt and a completion by one version."""
    mask = [0] * len(prompt) + [1] * len(completion)
    return row(ids(prompt + completion), mask, [version if on else -1 for on in mask], **values)


async def write(
    dumper: Dumper,
    summary: GroupSummary,
    rows: Sequence[Row],
    outcome: str = "accepted",
    reason: str = "",
    version: int = 9,
) -> list[dict[str, Any]]:
    """Dump a group: the lines of its file."""
    folder = dumper.folder(summary, GroupRules(1), version)
    await dumper.write(folder, summary, rows, headers_of(summary), outcome, reason, version)
    return read(dumper, folder, summary.task)


def read(dumper: Dumper, folder: str, task: int) -> list[dict[str, Any]]:
    """The lines of a group's file, each of which must parse; none if there is no file."""
    path = dumper._root / folder / f"{task}.jsonl"
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text[:-1].split("\n")]


def files(folder: Path) -> list[str]:
    """The files below `folder`."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


class TestLines:
    """contract 11: a line per row."""

    async def test_a_row_in_full(self, dumper: Dumper) -> None:
        """Every field of the contract, special tokens kept in the texts."""
        summary, rows = group_of({2: [spoken("c:12=", "12$", reward=0.5, truncated=False)]}, attempt=3)
        assert await write(dumper, summary, rows) == [
            {
                "task_id": 7,
                "sample_idx": 2,
                "row": 0,
                "seqlen": 8,
                "prompt_len": 5,
                "head_version": 4,
                "tail_version": 4,
                "version_rle": [[4, 3]],
                "reward": 0.5,
                "prompt": "c:12=",
                "completion": "12<eos>",
                "stop_reason": "stop",
                "outcome": "accepted",
                "reason": "",
                "attempt": 3,
            }
        ]

    async def test_rows_and_rollouts_are_told_apart(self, dumper: Dumper) -> None:
        """sample_idx is the slot and row counts within it."""
        summary, rows = group_of({0: [spoken("1", "2"), spoken("3", "4")], 3: [spoken("5", "6", truncated=True)]})
        lines = await write(dumper, summary, rows)
        assert [(line["sample_idx"], line["row"], line["completion"]) for line in lines] == [
            (0, 0, "2"),
            (0, 1, "4"),
            (3, 0, "6"),
        ]
        assert [line.get("stop_reason") for line in lines] == [None, None, "length"]

    async def test_case_24_versions_over_three_segments(self, dumper: Dumper) -> None:
        """Case 24: a sample that was aborted twice: version_rle covers the trained tokens, and only these."""
        one = row(ids("12=123456"), [0, 0, 0, 1, 1, 1, 1, 1, 1], [-1, -1, -1, 5, 5, 6, 8, 8, 8])
        (line,) = await write(dumper, *group_of({0: [one]}))
        assert line["version_rle"] == [[5, 2], [6, 1], [8, 3]]
        assert (line["head_version"], line["tail_version"]) == (5, 8)
        assert "segments" not in line

    async def test_case_23_head_version_is_of_trained_tokens(self, dumper: Dumper) -> None:
        """Case 23: prompt tokens, of version -1, do not make the head -1."""
        (line,) = await write(dumper, *group_of({0: [spoken("c:1=", "1", version=6)]}))
        assert line["head_version"] == 6

    async def test_segments_of_several_turns(self, dumper: Dumper) -> None:
        """With more than one generation run, segments name prompt, gen and context with their texts; a tail is kept."""
        one = row(ids("12=3+45-6"), [0, 0, 0, 1, 0, 1, 1, 0, 0], [-1, -1, -1, 5, -1, 6, 6, -1, -1])
        (line,) = await write(dumper, *group_of({0: [one]}))
        assert line["segments"] == [
            {"role": "prompt", "len": 3, "text": "12="},
            {"role": "gen", "len": 1, "text": "3"},
            {"role": "context", "len": 1, "text": "+"},
            {"role": "gen", "len": 2, "text": "45"},
            {"role": "context", "len": 2, "text": "-6"},
        ]
        assert line["completion"] == "3+45-6"
        assert line["version_rle"] == [[5, 1], [6, 2]]

    async def test_original_reward_whenever_carried(self, dumper: Dumper) -> None:
        """The raw reward beside the normalized one; a reward that is missing is null."""
        summary, rows = group_of({0: [spoken("1", "2")], 1: [spoken("1", "2", reward=None)]})
        summary.rollouts[0].rows[0].original_reward = 3.0
        lines = await write(dumper, summary, rows, "rejected", "missing_reward")
        assert [(line["reward"], line.get("original_reward", "absent")) for line in lines] == [
            (1.0, 3.0),
            (None, "absent"),
        ]
        assert {(line["outcome"], line["reason"]) for line in lines} == {("rejected", "missing_reward")}

    @given(st.data())
    def test_any_mask_and_versions_are_consistent(self, tokenizer_path: Path, data: st.DataObject) -> None:
        """For any masks and versions: version_rle sums to the trained tokens and segments to the whole row."""
        length = data.draw(st.integers(1, 12))
        mask = data.draw(st.lists(st.integers(0, 1), min_size=length, max_size=length).filter(any))
        versions = data.draw(st.lists(st.integers(0, 3), min_size=length, max_size=length))
        one = row([3] * length, mask, [v if on else -1 for v, on in zip(versions, mask, strict=True)])
        made = Dumper(RunSettings(dump_to_file=True, tokenizer_path=str(tokenizer_path)), RUN)
        made._tokenizer = type("Names", (), {"decode": staticmethod(lambda ids, **_: "0" * len(ids))})
        summary, _ = group_of({0: [one]})
        line = made._describe(one, summary.rollouts[0].rows[0], 9)
        expanded = [version for version, count in line["version_rle"] for _ in range(count)]
        assert expanded == [v for v, on in zip(versions, mask, strict=True) if on]
        assert (line["head_version"], line["tail_version"]) == (min(expanded), max(expanded))
        assert len(line["prompt"]) == line["prompt_len"] == mask.index(1)
        runs = segments(one.trained)
        assert [end for _, _, end in runs] == [start for _, start, _ in runs[1:]] + [length]
        assert [int(role == "gen") for role, start, end in runs for _ in range(start, end)] == mask
        assert ("segments" in line) == (sum(role == "gen" for role, _, _ in runs) > 1)


class TestRuns:
    """Runs of equal neighbours."""

    @given(st.lists(st.integers(-1, 2), max_size=30))
    def test_run_lengths(self, values: list[int]) -> None:
        """They give back the values, and neighbours differ."""
        runs = run_lengths(np.array(values, dtype=np.int32))
        assert [value for value, count in runs for _ in range(count)] == values
        assert all(count > 0 for _, count in runs)
        assert all(left[0] != right[0] for left, right in pairwise(runs))


class TestFiles:
    """contract 11: one file per group, written whole and renamed into place."""

    async def test_path(self, dumper: Dumper, tmp_path: Path) -> None:
        """The folders are run, scope and the group's largest version."""
        summary, rows = group_of({0: [spoken("1", "2", version=3)], 1: [spoken("1", "2", version=5)]})
        await write(dumper, summary, rows)
        assert files(tmp_path) == ["exp/trial/rollout/5/7.jsonl"]
        assert dumper.folder(summary, GroupRules(1, is_eval=True), 9) == "eval-rollout/5"

    async def test_a_retry_overwrites(self, dumper: Dumper) -> None:
        """Writing again replaces the file; it never appends, and leaves nothing else behind."""
        summary, rows = group_of({0: [spoken("1", "2")]})
        await write(dumper, summary, rows)
        assert [line["outcome"] for line in await write(dumper, summary, rows, "rejected")] == ["rejected"]
        assert files(dumper._root) == ["rollout/4/7.jsonl"]

    async def test_a_failed_write_keeps_the_old_file(self, dumper: Dumper, monkeypatch: pytest.MonkeyPatch) -> None:
        """A write that fails half-way is counted, and what was there stays whole, with no draft beside it."""
        summary, rows = group_of({0: [spoken("1", "2")]})
        await write(dumper, summary, rows)

        def torn(path: Path, text: str, **_: Any) -> int:
            path.write_bytes(text.encode()[:10])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_text", torn)
        assert [line["outcome"] for line in await write(dumper, summary, rows, "rejected")] == ["accepted"]
        assert dumper.skipped == {"write_failed": 1}
        assert files(dumper._root) == ["rollout/4/7.jsonl"]

    async def test_case_34_writing_while_marking(self, dumper: Dumper) -> None:
        """Case 34: many writes and marks of one group at once: every line parses and belongs to one whole writing."""
        summary, rows = group_of({idx: [spoken("12=", "12$")] for idx in range(20)})
        lines = await write(dumper, summary, rows)
        works = [dumper.write("rollout/4", summary, rows, headers_of(summary), "accepted", "", 4) for _ in range(10)]
        marks = [dumper.mark_evicted(7, "rollout/4", "stale") for _ in range(10)]
        await asyncio.gather(*(work for pair in zip(works, marks, strict=True) for work in pair))
        found = read(dumper, "rollout/4", 7)
        assert len({(line["outcome"], line["reason"]) for line in found}) == 1
        assert [line | {"outcome": "accepted", "reason": ""} for line in found] == lines
        assert files(dumper._root) == ["rollout/4/7.jsonl"]
        assert dumper.skipped == {}

    async def test_marking_an_evicted_group(self, dumper: Dumper) -> None:
        """A group that was evicted after its file was written has it rewritten, and nothing else in it changes."""
        summary, rows = group_of({0: [spoken("1", "2"), spoken("3", "4")]})
        before = await write(dumper, summary, rows)
        await dumper.mark_evicted(7, "rollout/4", "stale by 2")
        assert read(dumper, "rollout/4", 7) == [
            line | {"outcome": "evicted", "reason": "stale by 2"} for line in before
        ]

    async def test_marking_what_is_not_there(self, dumper: Dumper) -> None:
        """A missing or damaged file is counted; the pipeline goes on."""
        await dumper.mark_evicted(7, "rollout/4", "stale")
        (dumper._root / "rollout/4").mkdir(parents=True)
        (dumper._root / "rollout/4/8.jsonl").write_text("{", encoding="utf-8")
        await dumper.mark_evicted(8, "rollout/4", "stale")
        assert dumper.skipped == {"mark_failed": 2}

    async def test_texts_with_every_kind_of_line_break(self, dumper: Dumper, monkeypatch: pytest.MonkeyPatch) -> None:
        """Texts with Unicode's line separators and other alphabets are one line each, before and after a mark."""
        odd = "a\u2028b\u2029c\x85d\r\n\x0b\x0c\x1e ä 漢 \U0001f600"
        monkeypatch.setattr(dumper._tokenizer, "decode", lambda *_, **__: odd, raising=False)
        (line,) = await write(dumper, *group_of({0: [spoken("1", "2")]}))
        await dumper.mark_evicted(7, "rollout/4", "stale")
        assert line["completion"] == odd
        assert [one["completion"] for one in read(dumper, "rollout/4", 7)] == [odd]
        assert dumper.skipped == {}


class TestSkipping:
    """contract 11: what is missing is counted with its reason, and the pipeline goes on."""

    async def test_rows_without_a_trained_token(self, dumper: Dumper) -> None:
        """Such rows are skipped and counted; the others keep their numbers."""
        summary, rows = group_of({0: [row([3, 4], [0, 0]), spoken("1", "2")], 1: [row([3, 4], [0, 0])]})
        assert [(line["sample_idx"], line["row"]) for line in await write(dumper, summary, rows)] == [(0, 1)]
        assert dumper.skipped == {"no_trained_token": 2}

    async def test_a_group_of_skipped_rows_has_no_file(self, dumper: Dumper) -> None:
        """Nothing to write, no empty file."""
        assert await write(dumper, *group_of({0: [row([3, 4], [0, 0])]})) == []
        assert files(dumper._root) == []

    async def test_without_versions_the_current_one_is_used(self, dumper: Dumper) -> None:
        """Rows without versions are dumped under the current version."""
        one = spoken("1", "23")
        del one.tokens["versions"]
        (line,) = await write(dumper, *group_of({0: [one]}), version=9)
        assert (line["head_version"], line["tail_version"], line["version_rle"]) == (9, 9, [[9, 2]])
        assert read(dumper, "rollout/9", 7) == [line]

    async def test_an_id_that_the_tokenizer_refuses(self, dumper: Dumper) -> None:
        """An id that no tokenizer decodes costs the file, not the collector."""
        summary, rows = group_of({0: [row([1, -5])]})
        assert await write(dumper, summary, rows) == []
        assert dumper.skipped == {"write_failed": 1}

    def test_off_or_empty(self, tmp_path: Path) -> None:
        """Without dump_to_file, or without a usable rollout, there is no file."""
        summary, _ = group_of({0: [spoken("1", "2")]})
        assert Dumper(RunSettings(fileroot=tmp_path), RUN).folder(summary, GroupRules(1), 0) == ""
        on = Dumper(RunSettings(dump_to_file=True, tokenizer_path="x", fileroot=tmp_path), RUN)
        assert on.folder(GroupSummary(1, 1, []), GroupRules(1), 0) == ""
        assert on.folder(summary, GroupRules(1), 0) == "rollout/4"


class TestOpening:
    """A bad setting is an error at start."""

    async def test_no_tokenizer_there(self, tmp_path: Path) -> None:
        """A folder without a tokenizer is a SettingsError that names the setting and the folder."""
        made = Dumper(RunSettings(dump_to_file=True, fileroot=tmp_path, tokenizer_path=str(tmp_path / "absent")), RUN)
        with pytest.raises(SettingsError, match=r"FOREBAY_TOKENIZER_PATH=.*absent"):
            await made.open()

    async def test_no_folder_there(self, tmp_path: Path, tokenizer_path: Path) -> None:
        """A root that is a file cannot be written."""
        (tmp_path / "file").touch()
        settings = RunSettings(dump_to_file=True, fileroot=tmp_path / "file", tokenizer_path=str(tokenizer_path))
        with pytest.raises(SettingsError, match=r"FOREBAY_FILEROOT=.*cannot be written"):
            await Dumper(settings, RUN).open()

    async def test_off_needs_nothing(self, tmp_path: Path) -> None:
        """Without dump_to_file neither folder nor tokenizer is touched."""
        await Dumper(RunSettings(fileroot=tmp_path / "root"), RUN).open()
        assert not (tmp_path / "root").exists()
