"""How a workflow is named on submit and rebuilt on a worker (contract 2)."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
from helpers import reward_functions as functions
from helpers import workflows
from helpers.workflows import Configured, Frozen, Plain, Positional, Returning

from forebay import GenerationHyperparameters
from forebay.errors import ImportNotAllowedError, WorkflowError, WorkflowTypeError
from forebay.wire.values import TAG, pack, unpack
from forebay.workflow import NamedWorkflow, WorkflowKind, build_workflow, name_callable, name_workflow

ALLOWED = ["forebay", "forebay_workers", "helpers", __name__]
GCONFIG = GenerationHyperparameters(max_new_tokens=9)


def rebuilt(workflow: Any, kwargs: dict[str, Any] | None = None) -> Any:
    """The workflow as a worker builds it."""
    named = name_workflow(workflow, kwargs, ALLOWED)
    return build_workflow(named.name, unpack(pack(named.kwargs)), ALLOWED)


class TestWays:
    """contract 2: an instance, class + kwargs, import string + kwargs."""

    @pytest.mark.parametrize("named", [Configured, "helpers.workflows:Configured", "helpers.workflows.Configured"])
    def test_class_and_string_with_kwargs(self, named: Any) -> None:
        """A class and both forms of its import string name the same thing."""
        kwargs = {"reward_fn": functions.half, "gconfig": GCONFIG, "scale": 2.0, "other": [1]}
        found = name_workflow(named, kwargs, ALLOWED)
        assert (found.kind, found.name) == (WorkflowKind.ROLLOUT, "helpers.workflows:Configured")
        assert found.kwargs["reward_fn"] == {TAG: "callable", "name": "helpers.reward_functions:half"}
        found = rebuilt(named, kwargs)
        assert type(found) is Configured
        assert (found.reward_fn, found.gconfig, found.scale, found.extra) == (
            functions.half,
            GCONFIG,
            2.0,
            {"other": [1]},
        )

    def test_an_instance_remembers_its_arguments(self) -> None:
        """Positional, keyword and further keyword arguments of an instance travel; later changes do not."""
        one = Configured(functions.half, GCONFIG, scale=2.0, other=3)
        one.scale = 99.0
        found = rebuilt(one)
        assert (found.reward_fn, found.gconfig, found.scale, found.extra) == (
            functions.half,
            GCONFIG,
            2.0,
            {"other": 3},
        )
        assert rebuilt(Configured(reward_fn=functions.half)).gconfig is None

    def test_other_kinds_of_instances(self) -> None:
        """An instance without a constructor, a frozen dataclass and copies of instances travel."""
        assert type(rebuilt(Plain())) is Plain
        assert rebuilt(Frozen(scale=3.0)) == Frozen(scale=3.0)
        assert rebuilt(copy.deepcopy(Frozen(3.0))) == Frozen(3.0)
        assert rebuilt(rebuilt(Frozen(3.0))) == Frozen(3.0)

    def test_a_class_without_arguments(self) -> None:
        """``{}`` is enough where the constructor takes nothing."""
        assert type(rebuilt(Plain, {})) is Plain

    def test_a_local_import_path_is_made_canonical(self) -> None:
        """A re-export is named by where the class is defined, so that every process finds the same."""
        for string in ("helpers.workflows:Plain", f"{__name__}:Plain"):
            named = name_workflow(string, {}, ALLOWED)
            assert named == NamedWorkflow(WorkflowKind.ROLLOUT, "helpers.workflows:Plain", {})

    def test_the_built_in_workflow_of_the_workers(self) -> None:
        """The built-in RLVR workflow is allowed and buildable by its string, with a callable reward."""
        named = name_workflow(
            "forebay_workers.workflows:RLVRWorkflow",
            {"reward_fn": functions.half, "gconfig": GCONFIG, "tokenizer": "some/folder"},
            ALLOWED,
        )
        assert named.name == "forebay_workers.workflows.rlvr:RLVRWorkflow"
        assert named.kwargs["tokenizer"] == "some/folder"


class TestRules:
    """contract 2: the rules of naming."""

    @pytest.mark.parametrize("named", [Plain, "helpers.workflows:Plain"])
    def test_a_class_without_kwargs_is_refused(self, named: Any) -> None:
        """A class with kwargs None, not ``{}``, is a ValueError that says what to pass."""
        with pytest.raises(WorkflowError, match=r"Plain needs workflow_kwargs; pass \{\}") as caught:
            name_workflow(named, None, ALLOWED)
        assert isinstance(caught.value, ValueError)

    @pytest.mark.parametrize("kwargs", [{}, {"scale": 5.0}])
    def test_kwargs_beside_an_instance_warn_and_are_ignored(self, kwargs: dict[str, Any]) -> None:
        """An instance with kwargs warns, and travels with its own arguments."""
        with pytest.warns(UserWarning, match="workflow_kwargs are ignored"):
            named = name_workflow(Frozen(scale=2.0), kwargs, ALLOWED)
        assert named.kwargs == {"scale": 2.0}

    def test_an_instance_alone_does_not_warn(self) -> None:
        """Without kwargs there is nothing to warn of."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            name_workflow(Frozen(), None, ALLOWED)

    @pytest.mark.parametrize("named", [3, object, functions.half, "helpers.workflows:not_a_workflow", functions])
    def test_what_is_no_workflow_is_refused(self, named: Any) -> None:
        """Other objects, functions and modules are ValueErrors and TypeErrors that say what to pass."""
        with pytest.raises(WorkflowTypeError, match=r"is no RolloutWorkflow, and no agent either: .*; pass a"):
            name_workflow(named, {}, ALLOWED)

    @pytest.mark.parametrize("kwargs", [3, [("scale", 1.0)], "scale"])
    def test_kwargs_are_a_dict(self, kwargs: Any) -> None:
        """Arguments that are no dict are refused with what they are."""
        with pytest.raises(WorkflowError, match=f"workflow_kwargs is a {type(kwargs).__name__}; pass a dict"):
            name_workflow(Frozen, kwargs, ALLOWED)

    def test_an_abstract_class_is_refused_at_submit(self) -> None:
        """A class that no worker could make an instance of is refused with what it lacks."""
        with pytest.raises(WorkflowError, match="Abstract is abstract: it does not define arun_episode, more"):
            name_workflow(workflows.Abstract, {}, ALLOWED)

    @pytest.mark.parametrize(
        ("named", "kwargs", "said"),
        [
            (Configured, {}, "missing a required argument: 'reward_fn'"),
            (Frozen, {"size": 1}, "unexpected keyword argument 'size'"),
            (Plain, {"size": 1}, "it takes no arguments, not size"),
        ],
    )
    def test_kwargs_that_do_not_fit_are_refused_at_submit(self, named: Any, kwargs: dict[str, Any], said: str) -> None:
        """Arguments that the constructor would not take are refused, also where it is object's own."""
        with pytest.raises(WorkflowError, match=f"workflow_kwargs do not fit helpers.workflows:.*{said}"):
            name_workflow(named, kwargs, ALLOWED)

    def test_a_constructor_that_takes_nothing_takes_nothing(self) -> None:
        """A class without a constructor refuses arguments as any Python class does."""
        with pytest.raises(TypeError, match="takes no arguments"):
            Plain(1)
        with pytest.raises(TypeError, match="takes no arguments"):
            Plain(size=1)

    def test_a_local_class_is_refused(self) -> None:
        """A class inside a function cannot be imported."""

        class Local(Plain): ...

        for named in (Local, Local()):
            with pytest.raises(WorkflowError, match="Local is a local function or class"):
                name_workflow(named, None if isinstance(named, Local) else {}, ALLOWED)

    def test_an_argument_that_cannot_travel_is_named(self) -> None:
        """The error says which argument and why, for instances too."""
        with pytest.raises(WorkflowError, match=r"workflow_kwargs\['reward_fn'\]: .* is a lambda"):
            name_workflow(Configured(lambda: 1.0), None, ALLOWED)

    def test_arguments_without_a_name_are_refused(self) -> None:
        """An instance made with ``*args`` cannot travel; made without any it can."""
        with pytest.raises(WorkflowError, match="positional-only"):
            name_workflow(Positional(1, 2), None, ALLOWED)
        assert rebuilt(Positional()).values == ()

    def test_a_module_outside_the_allowlist_is_refused_at_once(self) -> None:
        """Submit refuses what no worker would import, whatever way it is named."""
        for named in (Plain, "helpers.workflows:Plain"):
            with pytest.raises(ImportNotAllowedError, match=r"helpers\.workflows"):
                name_workflow(named, {}, ["forebay"])
        with pytest.raises(ImportNotAllowedError):
            name_workflow(Plain(), None, ["forebay"])


class TestCallables:
    """contract 2: should_accept_fn is an import string or a module-level callable."""

    @pytest.mark.parametrize("function", [functions.half, "helpers.reward_functions:half"])
    def test_both_ways(self, function: Any) -> None:
        """Both give the import string."""
        assert name_callable(function, ALLOWED, "should_accept_fn") == "helpers.reward_functions:half"

    def test_refusals(self) -> None:
        """A lambda, what is not callable, what does not exist and what is not allowed are refused with the place."""
        with pytest.raises(WorkflowError, match=r"should_accept_fn: .* is a lambda"):
            name_callable(lambda _: True, ALLOWED, "should_accept_fn")
        with pytest.raises(WorkflowError, match=r"should_accept_fn: helpers\.workflows:NUMBER is not callable"):
            name_callable("helpers.workflows:NUMBER", ALLOWED, "should_accept_fn")
        with pytest.raises(WorkflowError, match="has no absent"):
            name_callable("helpers.workflows:absent", ALLOWED, "should_accept_fn")
        with pytest.raises(ImportNotAllowedError):
            name_callable(functions.half, ["forebay"], "should_accept_fn")


class TestBuilding:
    """What a worker does with a name it was sent."""

    @pytest.mark.parametrize(
        ("name", "kwargs", "said"),
        [
            ("helpers.workflows:not_a_workflow", {}, "is no RolloutWorkflow"),
            ("helpers.workflows:NUMBER", {}, "is no RolloutWorkflow"),
            ("helpers.workflows:Frozen", {"size": 1}, "could not be built: TypeError"),
            ("helpers.workflows:Plain", {"size": 1}, "could not be built: TypeError"),
            ("helpers.workflows:Abstract", {}, "could not be built: TypeError"),
            ("helpers.workflows:Broken", {"why": "on purpose"}, "could not be built: RuntimeError: on purpose"),
            ("helpers.workflows:Frozen", {"scale": {TAG: "of_the_future"}}, "unknown kind 'of_the_future'"),
            ("helpers.workflows:Frozen", {"scale": {TAG: "callable", "name": "os:system"}}, "os is not in the run's"),
            (
                "helpers.workflows:Frozen",
                {"scale": {TAG: "tokenizer", "path": "/absent"}},
                "the tokenizer /absent cannot",
            ),
        ],
    )
    def test_failures_say_why(self, name: str, kwargs: dict[str, Any], said: str) -> None:
        """Whatever goes wrong is a WorkflowError with the cause."""
        with pytest.raises(WorkflowError, match=said):
            build_workflow(name, kwargs, ALLOWED)

    def test_build_checks_the_allowlist_again(self) -> None:
        """A worker does not trust the name."""
        with pytest.raises(ImportNotAllowedError):
            build_workflow("helpers.workflows:Returning", {}, ["forebay"])
        assert isinstance(build_workflow("helpers.workflows:Returning", {}, ALLOWED), Returning)
