"""Import strings and the allowlist (contract 2)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers import reward_functions as functions
from helpers.workflows import Configured

from forebay.errors import ImportNotAllowedError, WorkflowError
from forebay.imports import check_allowed, import_object, split

ALLOWED = ["forebay", "helpers"]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a:B", ("a", "B")),
        ("a.b:C", ("a.b", "C")),
        ("a.b:C.d", ("a.b", "C.d")),
        ("a.b.C", ("a.b", "C")),
    ],
)
def test_both_forms_of_an_import_string(name: str, parts: tuple[str, str]) -> None:
    """``package.module:Name`` and ``package.module.Name`` are import strings."""
    assert split(name) == parts


@pytest.mark.parametrize(
    "name", ["", "a", ":", "a:", ":b", "a:b:c", "a..b:c", "a b:c", "../x:y", "a:b()", "a.b-c:d", "a/b:c"]
)
def test_what_is_no_import_string_is_refused(name: str) -> None:
    """Anything else is a ValueError that quotes the string and says what to write."""
    with pytest.raises(WorkflowError, match=r"is no import string; write package\.module:Name") as caught:
        split(name)
    assert isinstance(caught.value, ValueError)
    assert repr(name) in str(caught.value)


class TestAllowlist:
    """contract 2: import only from allowed modules; anything else is never an import."""

    @pytest.mark.parametrize("name", ["helpers:x", "helpers.workflows:x", "helpers.workflows.x"])
    def test_prefixes_are_of_whole_packages(self, name: str) -> None:
        """A package and what lies below it is allowed."""
        check_allowed(name, ALLOWED)

    @pytest.mark.parametrize("name", ["helpersx:x", "helpers_workflows.a:x", "other.helpers:x", "os:system"])
    def test_neighbours_are_not(self, name: str) -> None:
        """A name that merely begins alike is not; the error says how to allow it."""
        with pytest.raises(
            ImportNotAllowedError, match=r"\(forebay, helpers\); add its package to FOREBAY_IMPORT_ALLOWLIST"
        ):
            check_allowed(name, ALLOWED)
        with pytest.raises(ImportNotAllowedError):
            check_allowed("helpers:x", [])

    def test_nothing_is_imported(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A module that is not allowed is not even imported."""
        (tmp_path / "forbidden_module.py").write_text("raise SystemExit('it ran')", encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ImportNotAllowedError):
            import_object("forbidden_module:anything", ALLOWED)
        assert "forbidden_module" not in sys.modules

    @pytest.mark.parametrize(
        "name",
        [
            "helpers.reward_functions:os.system",
            "helpers.reward_functions:os",
            "forebay.imports:importlib.import_module",
            "helpers.reward_functions:Path",
            "helpers.workflows:dataclass",
            "helpers.workflows:__loader__.exec_module",
            "helpers.reward_functions:half.__globals__.get",
            "helpers.workflows:ERRORS.get",
        ],
    )
    def test_an_allowed_module_is_no_door_to_others(self, name: str) -> None:
        """What an allowed module has imported from elsewhere, or any other way out of it, is refused."""
        with pytest.raises(ImportNotAllowedError):
            import_object(name, ALLOWED)

    def test_re_exports_within_the_allowlist(self) -> None:
        """What an allowed module re-exports from another allowed one is found."""
        import forebay

        assert import_object("forebay:RolloutWorkflow", ALLOWED) is forebay.RolloutWorkflow
        assert import_object("helpers.workflows:RolloutWorkflow", ALLOWED) is forebay.RolloutWorkflow
        with pytest.raises(ImportNotAllowedError, match=r"RolloutWorkflow is defined in forebay\.workflow"):
            import_object("helpers.workflows:RolloutWorkflow", ["helpers"])


class TestImporting:
    """contract 2: a bad import is a ValueError naming the string."""

    def test_functions_classes_methods_and_objects(self) -> None:
        """Whatever a module has defined or made is found, attributes of classes too."""
        assert import_object("helpers.reward_functions:half", ALLOWED) is functions.half
        assert import_object("helpers.workflows.Configured", ALLOWED) is Configured
        assert import_object("helpers.workflows:Configured.arun_episode", ALLOWED) is Configured.arun_episode
        assert import_object("helpers.workflows:NUMBER", ALLOWED) == 3

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("helpers.absent:x", r"cannot import helpers\.absent: .*PYTHONPATH"),
            ("helpers.workflows:Absent", r"helpers\.workflows has no Absent"),
            ("helpers.workflows:Configured.absent", r"has no Configured\.absent"),
            ("helpers.broken.raises:x", r"importing helpers\.broken\.raises failed: RuntimeError: broken on purpose"),
            ("helpers.broken.exits:x", r"importing helpers\.broken\.exits failed: SystemExit: no program"),
        ],
    )
    def test_bad_imports(self, name: str, said: str) -> None:
        """A missing module or attribute, and a module that fails or exits, are ValueErrors with the string and why."""
        with pytest.raises(WorkflowError, match=said) as caught:
            import_object(name, ALLOWED)
        assert isinstance(caught.value, ValueError)
        assert str(caught.value).startswith(f"{name}: ")
