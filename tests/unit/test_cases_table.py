"""``tests/CASES.md`` says the truth: its tests exist, and name their cases."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAST = 42
_ROW = re.compile(r"\| (\d+) \| [^|]+ \| ([^|]+) \|")
_CASES = re.compile(r"[Cc]ases? (\d+(?:(?:, | and )\d+)*)")
TO_BE_COMPLETED = "to be completed"


def rows() -> dict[int, list[str]]:
    """Case -> ids of its tests."""
    found = map(_ROW.fullmatch, (ROOT / "tests" / "CASES.md").read_text().splitlines())
    cells = {int(match[1]): match[2] for match in found if match}
    return {case: re.findall(r"`([^`]+)`", cell) for case, cell in cells.items()}


@cache
def sources_in(path: Path) -> dict[str, str]:
    """The source of each test of a file, by the rest of its id."""
    text = path.read_text()
    out: dict[str, str] = {}

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}::")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
                out[prefix + node.name] = ast.get_source_segment(text, node) or ""

    walk(ast.parse(text).body, "")
    return out


def source(test: str) -> str | None:
    """The source of a test by its id; None if there is no such test."""
    name, _, rest = test.partition("::")
    return sources_in(ROOT / name).get(rest) if (ROOT / name).is_file() else None


def test_every_case_has_its_line() -> None:
    """Each case is there once, with a test, or with the word that it is still to be completed."""
    assert list(rows()) == list(range(1, LAST + 1))
    text = (ROOT / "tests" / "CASES.md").read_text()
    assert sum(not ids for ids in rows().values()) == text.count(f"| {TO_BE_COMPLETED} |")


def test_every_test_exists() -> None:
    """Each id in the table is one of a test that there is."""
    assert [test for ids in rows().values() for test in ids if source(test) is None] == []


def test_one_test_of_each_case_names_it() -> None:
    """Whoever searches the tests for a case finds one that the table has."""
    for case, ids in rows().items():
        named = {int(n) for test in ids for m in _CASES.findall(source(test) or "") for n in re.findall(r"\d+", m)}
        assert not ids or case in named, case
