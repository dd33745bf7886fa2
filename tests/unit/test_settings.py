"""Settings: names, bounds, contradictions, and passwords that are never shown."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from forebay import EngineSettings, FailureKind, NormConfig, RunSettings, Settings, load
from forebay.errors import SettingsError
from forebay.reward_rules import ROLLOUT_NORM, RewardShaping
from forebay.settings import unknown_variables

SECRET = "hunter2"
URL = f"redis://user:{SECRET}@example.invalid:6379/3"


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting comes from the environment in which the tests run."""
    for name in os.environ:
        if name.startswith("FOREBAY_") or name == "REDIS_URL":
            monkeypatch.delenv(name)


class TestPasswords:
    """A Redis URL is never printed with its password."""

    @pytest.mark.parametrize("way", ["environment", "argument"])
    def test_not_in_any_text_of_the_settings(self, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """No text form of the settings, JSON included, shows the password; the client gets it."""
        if way == "environment":
            monkeypatch.setenv("REDIS_URL", URL)
        settings = load(Settings) if way == "environment" else load(Settings, redis_url=URL)
        texts = (repr(settings), str(settings), f"{settings}", settings.model_dump_json(), str(settings.model_dump()))
        assert all(SECRET not in text for text in texts)
        assert settings.resolved_redis_url() == URL

    @pytest.mark.parametrize(
        "values",
        [
            {"redis_url": [URL]},
            {"redis_url": {"url": URL}},
            {"redis_url": URL.encode() + b"\xff"},
            {"redis_url": URL, "trial_name": "/"},
            {"redis_urll": URL},
            {"password": SECRET},
        ],
    )
    def test_not_in_errors(self, values: dict[str, Any]) -> None:
        """A wrong type, another wrong setting and a misspelt name do not show it either."""
        with pytest.raises(SettingsError) as caught:
            load(Settings, **values)
        error = caught.value
        assert SECRET not in f"{error} {error!r} {error.__cause__}"
        assert error.__suppress_context__


class TestEnvironment:
    """Names in the environment."""

    def test_names_and_forms(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Settings are read from FOREBAY_..., the engine's from FOREBAY_ENGINE_...; lists are comma-separated."""
        for name, value in {
            "FOREBAY_EXPERIMENT_NAME": "exp",
            "FOREBAY_TRIAL_NAME": "t.1",
            "FOREBAY_SERVERS": "http://a:1, http://b:2,",
            "FOREBAY_BATCH_SIZE": "3",
            "FOREBAY_DROP_INCOMPLETE_GROUP": "true",
            "FOREBAY_IMPORT_ALLOWLIST": "mine,yours.sub",
            "FOREBAY_EPISODE_TIMEOUT_S": "2.5",
            "FOREBAY_ENGINE_REQUEST_TIMEOUT_S": "7",
        }.items():
            monkeypatch.setenv(name, value)
        settings, run = load(Settings), load(RunSettings)
        assert (settings.run, settings.servers) == ("exp/t.1", ["http://a:1", "http://b:2"])
        assert (run.batch_size, run.drop_incomplete_group, run.episode_timeout_s) == (3, True, 2.5)
        assert run.import_allowlist == ["forebay", "forebay_workers", "mine", "yours.sub"]
        assert load(EngineSettings).request_timeout_s == 7

    def test_arguments_win(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An argument is stronger than the environment."""
        monkeypatch.setenv("FOREBAY_BATCH_SIZE", "3")
        assert load(RunSettings, batch_size=4).batch_size == 4

    def test_an_error_names_the_variable_its_value_and_the_rule(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One line for all bad settings, each with its variable, its value and what is allowed."""
        monkeypatch.setenv("FOREBAY_BATCH_SIZE", "0")
        monkeypatch.setenv("FOREBAY_LEASE_S", "soon")
        with pytest.raises(SettingsError) as caught:
            load(RunSettings)
        text = str(caught.value)
        assert "FOREBAY_BATCH_SIZE='0': Input should be greater than or equal to 1" in text
        assert "FOREBAY_LEASE_S='soon': Input should be a valid number" in text
        assert "\n" not in text

    def test_an_error_of_the_engine_names_its_prefix(self) -> None:
        """The prefix is that of the settings' kind."""
        with pytest.raises(SettingsError, match="FOREBAY_ENGINE_PAUSE_MODE='never'"):
            load(EngineSettings, pause_mode="never")

    def test_unknown_arguments_are_refused(self) -> None:
        """A misspelt setting is an error, not ignored."""
        with pytest.raises(SettingsError, match="FOREBAY_BATCHSIZE: Extra inputs are not permitted"):
            load(RunSettings, batchsize=3)

    def test_settings_cannot_be_changed(self) -> None:
        """Settings are frozen: all processes follow the published ones."""
        with pytest.raises(ValidationError):
            RunSettings().batch_size = 3  # type: ignore[misc]


class TestRunName:
    """contract 1: the run is the namespace of keys and folders."""

    @pytest.mark.parametrize("name", ["a", "A-1_b.c", "0", "x" * 100])
    def test_good_names(self, name: str) -> None:
        """Letters, digits, '.', '_' and '-'."""
        assert load(Settings, experiment_name=name, trial_name=name).run == f"{name}/{name}"

    @pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "-a", "a b", "a\n", "a:b", "a{b}", "x" * 101, "ä"])
    def test_names_that_could_leave_the_namespace(self, name: str) -> None:
        """Nothing that means something in a path or a key."""
        for field in ("experiment_name", "trial_name"):
            with pytest.raises(SettingsError, match=f"FOREBAY_{field.upper()}="):
                load(Settings, **{field: name})


class TestRedisUrl:
    """Where Redis is."""

    def test_of_the_local_stack(self, tmp_path: Path) -> None:
        """Without a URL it is that of the stack in `home`."""
        (tmp_path / "state.json").write_text(json.dumps({"redis_url": "redis://127.0.0.1:7777/0"}), encoding="utf-8")
        assert load(Settings, home=tmp_path).resolved_redis_url() == "redis://127.0.0.1:7777/0"
        assert load(Settings, home=tmp_path, redis_url=URL).resolved_redis_url() == URL

    def test_password_of_a_stack(self, tmp_path: Path) -> None:
        """The password of a stack's Redis is not written down: who needs it is told to set REDIS_URL."""
        (tmp_path / "state.json").write_text('{"redis_url": "redis://***@10.0.0.1:7777/0"}')
        with pytest.raises(SettingsError, match=r"\*\*\*@10\.0\.0\.1:7777/0, whose password .* set REDIS_URL"):
            load(Settings, home=tmp_path).resolved_redis_url()

    @pytest.mark.parametrize("state", [None, "", "{", "[]", "{}", '{"redis_url": null}', "\udcff"])
    def test_of_no_stack(self, tmp_path: Path, state: str | None) -> None:
        """Without a stack, or with an unreadable state of one, it is the usual local port."""
        if state is not None:
            (tmp_path / "state.json").write_bytes(state.encode(errors="surrogateescape"))
        assert load(Settings, home=tmp_path).resolved_redis_url() == "redis://127.0.0.1:6379/0"


class TestContradictions:
    """Settings that contradict each other are refused at start, with the arithmetic and the remedy."""

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            (
                {"group_deadline_s": 10, "episode_timeout_s": 20.5},
                r"group_deadline_s=10 is below episode_timeout_s=20\.5: .*raise the deadline or lower the time-out",
            ),
            (
                {"group_size": 4, "min_usable_group_size": 5},
                "min_usable_group_size=5: must be an integer from 1 to group_size=4",
            ),
            ({"dump_to_file": True}, "dump_to_file needs tokenizer_path"),
            (
                {"group_size": 4, "min_usable_group_size": 1, "reward_normalization": True},
                r"min_usable_group_size=1: statistics of the group \(by reward_normalization\) need at least 2 usable",
            ),
        ],
    )
    def test_refused(self, values: dict[str, Any], said: str) -> None:
        """The error shows both values."""
        with pytest.raises(SettingsError, match=said):
            load(RunSettings, **values)

    @pytest.mark.parametrize(
        "values",
        [
            {"group_deadline_s": 20, "episode_timeout_s": 20},
            {"group_size": 4, "min_usable_group_size": 4},
            {"dump_to_file": True, "tokenizer_path": "folder"},
            {"group_size": 4, "min_usable_group_size": 2, "reward_normalization": True},
            {"group_size": 1, "min_usable_group_size": 1, "reward_normalization": True},
            {"group_size": 4, "min_usable_group_size": 1},
        ],
    )
    def test_borders_are_allowed(self, values: dict[str, Any]) -> None:
        """Values that just fit are taken (contract 4.6: groups of one stay at one)."""
        load(RunSettings, **values)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("batch_size", 0),
            ("batches_per_version", 0),
            ("max_staleness", -1),
            ("max_concurrent", 0),
            ("group_size", 0),
            ("min_usable_group_size", 0),
            ("attempts_infra", 0),
            ("lease_s", 0.5),
            ("episode_timeout_s", 0),
            ("max_rows_bytes", 2**40),  # a reader takes no frame of this size
            ("batch_size", 1.5),
            ("group_deadline_s", float("nan")),
        ],
    )
    def test_bounds(self, name: str, value: float) -> None:
        """What cannot work is out of bounds."""
        with pytest.raises(SettingsError, match=f"FOREBAY_{name.upper()}="):
            load(RunSettings, **{name: value})


class TestRewards:
    """contract 5: what is done to rewards, as the environment says it."""

    @pytest.mark.parametrize(
        ("text", "want"),
        [
            ("true", ROLLOUT_NORM),
            (" True ", ROLLOUT_NORM),
            ("1", ROLLOUT_NORM),
            ("false", None),
            ("off", None),
            ("null", None),
            ("", None),
            ("{}", NormConfig()),
            ('{"mean_level": "group", "std_level": null}', NormConfig("group", std_level=None)),
            (
                '{"mean_leave1out": true, "std_unbiased": false, "eps": 0.5}',
                NormConfig("batch", True, "batch", False, 0.5),
            ),
            ('{"mean_level": null, "std_level": null}', None),
        ],
    )
    def test_normalization(self, text: str, want: NormConfig | None, monkeypatch: pytest.MonkeyPatch) -> None:
        """A word or a JSON object; published and read again, it is the same."""
        monkeypatch.setenv("FOREBAY_REWARD_NORMALIZATION", text)
        published = load(RunSettings)
        assert published.norm == want
        monkeypatch.setenv("FOREBAY_REWARD_NORMALIZATION", "rubbish")
        assert RunSettings(**json.loads(published.model_dump_json())).norm == want

    @pytest.mark.parametrize("text", ["false", "", "null", "none"])
    def test_a_trainer_without_normalization(self, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """No norm of the trainer's is None."""
        monkeypatch.setenv("FOREBAY_TRAINER_REWARD_NORM", text)
        assert load(RunSettings).trainer_reward_norm is None

    def test_a_trainers_normalization(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Contract 4.6: the trainer declares its own normalizations; the minimum is derived from them."""
        monkeypatch.setenv("FOREBAY_TRAINER_ADV_NORM", '{"mean_level": "batch", "std_level": "group"}')
        run = load(RunSettings)
        assert run.trainer_adv_norm == NormConfig("batch", std_level="group")
        assert RunSettings(**json.loads(run.model_dump_json())) == run

    @pytest.mark.parametrize(
        "name", ["FOREBAY_REWARD_NORMALIZATION", "FOREBAY_TRAINER_REWARD_NORM", "FOREBAY_TRAINER_ADV_NORM"]
    )
    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("{", 'write true, false, or a JSON object such as {"mean_level": "group"}'),
            ("group", "write true, false, or a JSON object"),
            ("[" * 100_000, "write true, false, or a JSON object"),
            ("3", "must be true, false, or a NormConfig (in the environment a JSON object"),
            ("[1]", "must be true, false, or a NormConfig"),
            ('{"mean_lvl": "group"}', "unknown field mean_lvl of a NormConfig; it has eps, mean_leave1out, mean_level"),
            ('{"mean_level": "token"}', "mean_level='token': must be 'batch', 'group' or None"),
            ('{"eps": NaN}', "eps=nan: must be a finite number of at least 1e-12"),
            ('{"mean_level": null, "mean_leave1out": true}', "mean_leave1out=True with mean_level=None"),
        ],
    )
    def test_bad_normalization(self, name: str, text: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """One line that names the variable, its value and what is allowed."""
        monkeypatch.setenv(name, text)
        with pytest.raises(SettingsError) as caught:
            load(RunSettings)
        assert str(caught.value).startswith(f"{name}={text!r}: {said}")
        assert "\n" not in str(caught.value)

    def test_a_trainers_bare_true_says_too_little(self) -> None:
        """The trainer's true would not say by which statistics."""
        with pytest.raises(SettingsError, match="FOREBAY_TRAINER_ADV_NORM='true': say by which statistics"):
            load(RunSettings, trainer_adv_norm="true")

    def test_shaping(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each setting reaches the shaping."""
        for name, value in {
            "REWARD_BIAS": "-0.5",
            "REWARD_SCALING": "2",
            "REWARD_CLIP": "3",
            "OVERLONG_TOKENS": "16",
            "OVERLONG_PENALTY_FACTOR": "0.5",
            "MAX_NEW_TOKENS": "64",
        }.items():
            monkeypatch.setenv(f"FOREBAY_{name}", value)
        assert load(RunSettings).shaping == RewardShaping(-0.5, 2, 3, 16, 0.5, 64)

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"REWARD_BIAS": "inf"}, "FOREBAY_REWARD_BIAS='inf': Input should be a finite number"),
            ({"REWARD_BIAS": "much"}, "FOREBAY_REWARD_BIAS='much': Input should be a valid number"),
            ({"REWARD_SCALING": "0"}, "FOREBAY_REWARD_SCALING='0': every reward would be 0; leave it at 1"),
            ({"REWARD_CLIP": "-1"}, "FOREBAY_REWARD_CLIP='-1': must be above 0 and at most 1e+20"),
            ({"REWARD_CLIP": "inf"}, "FOREBAY_REWARD_CLIP='inf': Input should be a finite number"),
            ({"OVERLONG_PENALTY_FACTOR": "-1"}, "FOREBAY_OVERLONG_PENALTY_FACTOR='-1': must be at least 0"),
            (
                {"OVERLONG_PENALTY_FACTOR": "2"},
                "settings: overlong_penalty_factor=2.0: there is no penalty without overlong_tokens; set",
            ),
            (
                {"OVERLONG_TOKENS": "8"},
                "settings: overlong_tokens=8: the penalty is counted from max_new_tokens, which is not set",
            ),
            (
                {"OVERLONG_TOKENS": "65", "MAX_NEW_TOKENS": "64"},
                "settings: overlong_tokens=65: must be an integer from 1 to max_new_tokens=64",
            ),
            ({"OVERLONG_TOKENS": "few"}, "FOREBAY_OVERLONG_TOKENS='few': Input should be a valid integer"),
            ({"MAX_NEW_TOKENS": "0"}, "FOREBAY_MAX_NEW_TOKENS='0': Input should be greater than or equal to 1"),
        ],
    )
    def test_bad_shaping(self, values: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """One line that names the setting, its value and what is allowed; once, although it is looked at twice."""
        for name, value in values.items():
            monkeypatch.setenv(f"FOREBAY_{name}", value)
        with pytest.raises(SettingsError) as caught:
            load(RunSettings)
        assert str(caught.value).startswith(said)
        text = str(caught.value)
        assert (text.count("FOREBAY_") + text.count("settings: "), text.count("\n")) == (1, 0)


def test_capacity_is_the_contracts() -> None:
    """Contract 6: (s + 1) * k * B groups; s = 0 progresses."""
    assert load(RunSettings, batch_size=8, batches_per_version=2, max_staleness=3).capacity == 64
    assert load(RunSettings, batch_size=8, max_staleness=0).capacity == 8


def test_attempts_by_kind() -> None:
    """Contract 4.2: default attempts infra 5, timeout 2, data 1, contract 1."""
    run = load(RunSettings)
    assert {kind.value: run.attempts(kind) for kind in FailureKind} == {
        "infra": 5,
        "timeout": 2,
        "data": 1,
        "contract": 1,
    }


def test_published_settings_are_read_whatever_the_readers_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector's settings win over a worker's environment: JSON there and back is equal."""
    published = load(RunSettings, batch_size=5, import_allowlist=["mine"], min_usable_group_size=2).model_dump_json()
    monkeypatch.setenv("FOREBAY_BATCH_SIZE", "9")
    monkeypatch.setenv("FOREBAY_MAX_STALENESS", "7")
    read = RunSettings.model_validate_json(published)
    assert (read.batch_size, read.max_staleness, read.min_usable_group_size) == (5, 1, 2)
    assert read.import_allowlist == ["forebay", "forebay_workers", "mine"]


def test_settings_survive_another_process() -> None:
    """Settings can be pickled to a process of one's own, password included."""
    assert pickle.loads(pickle.dumps(load(Settings, redis_url=URL))).resolved_redis_url() == URL


class TestUnknownVariables:
    def test_named_with_what_may_be_meant(self) -> None:
        """A misspelt FOREBAY_ variable is found; settings of every process, and other people's variables, are not."""
        environment = {
            "FOREBAY_GROUPSIZE": "4",
            "FOREBAY_NO_SUCH_THING_AT_ALL": "1",
            "FOREBAY_GROUP_SIZE": "4",
            "FOREBAY_ENGINE_PAUSE_MODE": "abort",
            "FOREBAY_WORKER_MAX_SLOTS": "4",
            "FOREBAY_LOG_LEVEL": "debug",
            "GROUP_SIZE": "4",
        }
        assert unknown_variables(environment) == [
            ("FOREBAY_GROUPSIZE", "FOREBAY_GROUP_SIZE"),
            ("FOREBAY_NO_SUCH_THING_AT_ALL", None),
        ]


class TestFleet:
    def test_more_slots_than_the_fleet_can_run(self) -> None:
        """Groups that could start but never all run are refused, with the arithmetic and the remedy."""
        with pytest.raises(
            SettingsError,
            match=r"= 16 groups of group_size=8 are 128 slots, but .* fleet_slots=64: .* set max_concurrent to 8",
        ):
            load(RunSettings, fleet_slots=64)
        assert load(RunSettings, fleet_slots=64, max_concurrent=8).max_concurrent == 8

    def test_a_group_that_the_fleet_cannot_run(self) -> None:
        """One group alone is too much: the remedy is its size."""
        with pytest.raises(SettingsError, match=r"group_size=8 is above fleet_slots=4: .* lower group_size"):
            load(RunSettings, fleet_slots=4, max_concurrent=1)


class TestNumbers:
    @pytest.mark.parametrize(
        "name", ["group_deadline_s", "lease_s", "rows_ttl_s", "stall_timeout_s", "retry_backoff_s"]
    )
    @pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e18])
    def test_durations_are_finite(self, name: str, value: float) -> None:
        """Nothing waits for ever, and what is published can be read again."""
        with pytest.raises(SettingsError, match=f"FOREBAY_{name.upper()}="):
            load(RunSettings, **{name: value})

    @pytest.mark.parametrize("name", ["batch_size", "max_staleness", "attempts_infra", "max_queued_groups"])
    def test_integers_can_be_counted(self, name: str) -> None:
        """Numbers that scripts cannot count with are refused."""
        with pytest.raises(SettingsError, match=f"FOREBAY_{name.upper()}=.*at most 2147483647"):
            load(RunSettings, **{name: 10**20})


def test_retained_batches_beyond_their_budget() -> None:
    """More batches than the byte budget could ever hold are refused, with the arithmetic."""
    with pytest.raises(
        SettingsError,
        match=r"retain_batches=100 of batch_size=8 groups of group_size=8 are 6400 slots, at least 243200 bytes .* "
        r"above max_retained_bytes=100000: .* retain fewer batches",
    ):
        load(RunSettings, retain_batches=100, max_retained_bytes=100_000)
    assert load(RunSettings, retain_batches=100, max_retained_bytes=243_200).retain_batches == 100
