"""Arguments of the built-in workflows (contract, sections 2, 7 and 10): refused at submit and when built."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from helpers import reward_functions
from helpers.chat import make_tokenizer

from forebay import GenerationHyperparameters
from forebay.errors import WorkflowError
from forebay_workers.workflows import MultiTurnWorkflow, RLVRWorkflow, VisionRLVRWorkflow

TOKENIZER = make_tokenizer()
GOOD: dict[str, Any] = {
    "reward_fn": reward_functions.half,
    "gconfig": GenerationHyperparameters(),
    "tokenizer": TOKENIZER,
}
NO_TEMPLATE = make_tokenizer(template=None)


class Processor:
    """What a processor has."""

    image_processor = None
    chat_template = "{{ messages }}"

    def __call__(self) -> None:
        """Process."""

    def apply_chat_template(self) -> None:
        """Make a text."""


WORKFLOWS: dict[type[Any], dict[str, Any]] = {
    RLVRWorkflow: GOOD,
    MultiTurnWorkflow: {**GOOD, "max_turns": 2, "turn_discount": 0.9},
    VisionRLVRWorkflow: {**GOOD, "processor": Processor()},
}

COMMON: list[tuple[dict[str, Any], str]] = [
    ({"reward_fn": None}, "reward_fn=None: is not callable; pass the function itself"),
    ({"reward_fn": "my.rewards:f"}, "reward_fn='my.rewards:f': is not callable.*--reward"),
    ({"gconfig": 5}, "gconfig=5: must be GenerationHyperparameters or a dict of its fields"),
    ({"gconfig": {"max_tokens_": 5}}, "gconfig: unknown field max_tokens_; there are .*max_new_tokens"),
    ({"gconfig": {"n_samples": 2}}, "gconfig.n_samples=2: must be 1; .*larger group_size"),
    ({"gconfig": GenerationHyperparameters(n_samples=0)}, "gconfig.n_samples=0: must be 1"),
    ({"gconfig": {"max_new_tokens": 0}}, "gconfig.max_new_tokens=0: must be an integer of at least 1"),
    ({"gconfig": {"max_new_tokens": 8.0}}, "gconfig.max_new_tokens=8.0: must be an integer"),
    ({"gconfig": {"max_new_tokens": True}}, "gconfig.max_new_tokens=True: must be an integer"),
    ({"gconfig": {"max_tokens": 1}}, "gconfig.max_tokens=1: must be an integer of at least 2"),
    ({"gconfig": {"min_new_tokens": 9, "max_new_tokens": 8}}, "min_new_tokens=9: is above max_new_tokens=8"),
    ({"gconfig": {"temperature": -0.1}}, "gconfig.temperature=-0.1: must be a number of at least 0"),
    ({"gconfig": {"temperature": float("nan")}}, "gconfig.temperature=nan"),
    ({"gconfig": {"top_p": 0}}, "gconfig.top_p=0: must be above 0 and at most 1"),
    ({"gconfig": {"top_k": 0}}, "gconfig.top_k=0: must be an integer of at least 1, or -1"),
    ({"gconfig": {"stop": "abc"}}, "gconfig.stop='abc': must be None or a list of non-empty strings"),
    ({"gconfig": {"stop_token_ids": ["a"]}}, r"gconfig.stop_token_ids=\['a'\]: must be a list of token ids"),
    ({"gconfig": {"greedy": 1}}, "gconfig.greedy=1: must be True or False"),
    ({"gconfig": {"frequency_penalty": 3}}, "gconfig.frequency_penalty=3: must be between -2 and 2"),
    ({"gconfig": {"seed": -1}}, "gconfig.seed=-1: must be an integer of at least 0, or None"),
    ({"tokenizer": ""}, "tokenizer='': is empty"),
    ({"tokenizer": Path("model")}, r"tokenizer=.*is no tokenizer.*\(a path as a string\)"),
    ({"tokenizer": None}, "tokenizer=None: is no tokenizer"),
    ({"tokenizer": NO_TEMPLATE}, "has no chat template; set its chat_template"),
    ({"enable_thinking": "no"}, "enable_thinking='no': must be True or False"),
    ({"reward_timeout_s": 0}, "reward_timeout_s=0: must be a number of seconds above 0"),
]
TURNS: list[tuple[dict[str, Any], str]] = [
    ({"max_turns": 0}, "max_turns=0: must be an integer of at least 1"),
    ({"max_turns": 2.0}, "max_turns=2.0: must be an integer"),
    ({"turn_discount": 0.0}, "turn_discount=0.0: must be above 0 and at most 1"),
    ({"turn_discount": 1.1}, "turn_discount=1.1: must be above 0 and at most 1"),
    ({"turn_discount": "0.9"}, "turn_discount='0.9'"),
    ({"retry_message": " "}, "retry_message=' ': must be a string that is not empty"),
]
VISION: list[tuple[dict[str, Any], str]] = [
    ({"processor": ""}, "processor='': is empty"),
    ({"processor": 3}, "processor=3: is no processor"),
    ({"processor": TOKENIZER}, "processor=.*has no image_processor; pass the processor of a vision-language model"),
]
CASES = [
    *((cls, changes, message) for cls in WORKFLOWS for changes, message in COMMON),
    *((MultiTurnWorkflow, changes, message) for changes, message in TURNS),
    *((VisionRLVRWorkflow, changes, message) for changes, message in VISION),
]


@pytest.mark.parametrize(("cls", "changes", "message"), CASES)
def test_refused_at_submit_and_when_built(cls: type[Any], changes: dict[str, Any], message: str) -> None:
    """10: check_arguments and the constructor refuse the same, and name workflow, argument, value and remedy."""
    arguments = WORKFLOWS[cls] | changes
    for refuses in (cls.check_arguments, cls):
        with pytest.raises(WorkflowError, match=f"{cls.__name__}: .*{message}"):
            refuses(**arguments)


@pytest.mark.parametrize("cls", WORKFLOWS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gconfig": {}},
        {"gconfig": {"temperature": 0, "top_k": -1, "seed": 7, "stop": ["x"], "stop_token_ids": [3], "top_p": 1}},
        {"tokenizer": "org/model"},
        {"reward_fn": reward_functions.gentle},
        {"reward_fn": reward_functions.Callable()},
        {"reward_timeout_s": 2},
    ],
)
def test_accepted(cls: type[Any], changes: dict[str, Any]) -> None:
    """10: what can be used passes without a word; arguments that are not given have their defaults."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls.check_arguments(**WORKFLOWS[cls] | changes)


def test_a_folder_that_is_not_here() -> None:
    """2: a folder that is not on this host is warned of and no more, since workers may be on others."""
    for name, folder in (("tokenizer", "/no/such/folder"), ("processor", "./none"), ("tokenizer", "models/a/b")):
        with pytest.warns(UserWarning, match=f"{name}='{folder}' is not on this host"):
            VisionRLVRWorkflow.check_arguments(**WORKFLOWS[VisionRLVRWorkflow] | {name: folder})


def test_a_folder_that_is_here(tmp_path: Path) -> None:
    """2: of a folder that exists nothing is said."""
    RLVRWorkflow.check_arguments(**GOOD | {"tokenizer": str(tmp_path)})


def test_checking_needs_neither_torch_nor_transformers_nor_pillow() -> None:
    """A trainer that submits need not have what workers need."""
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'PIL'): sys.modules[name] = None\n"
        "from forebay_workers.workflows import *\n"
        "for cls, more in ((RLVRWorkflow, {}), (MultiTurnWorkflow, {'max_turns': 2}), "
        "(VisionRLVRWorkflow, {'processor': 'a/b'})):\n"
        "    cls.check_arguments(reward_fn=print, gconfig={}, tokenizer='a/b', **more)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_images_need_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pillow the vision workflow is not built, and the error names what to install."""
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(WorkflowError, match=r"install forebay\[vision\]"):
        VisionRLVRWorkflow(**WORKFLOWS[VisionRLVRWorkflow])


@pytest.mark.parametrize("cls", WORKFLOWS)
def test_the_check_stands_beside_the_constructor(cls: type[Any]) -> None:
    """2: submit asks a check only where it knows the constructor's arguments: both are defined in one class."""
    owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
    assert "check_arguments" in vars(owner)
