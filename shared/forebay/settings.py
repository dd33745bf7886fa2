"""Settings, read from the environment (``FOREBAY_...``) or given as keyword arguments.

Three groups: :class:`Settings` says which run and where Redis is, and every process has one; :class:`RunSettings` are
the rules of the run, published in Redis by its collector, so that all processes follow the same; the settings of one
engine client are :class:`EngineSettings`. Durations end in ``_s`` and are seconds.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from forebay.errors import SettingsError
from forebay.group_rules import minimum_usable
from forebay.outcomes import FailureKind, OnSlotError
from forebay.redaction import is_secret, without_userinfo
from forebay.reward_rules import NormConfig, RewardShaping, norm_of

__all__ = ["EngineSettings", "RunSettings", "Settings", "check_server_url", "load", "unknown_variables"]

_LEAST_SLOT_BYTES = 38
"""The encoded rows of a slot with one row of one token; real ones are far larger."""
_LARGEST = 2**31 - 1
"""Of every number: what Redis scripts and tensors count with, and some 68 years in seconds."""
_MOST_BYTES = 2**50
"""Of bytes: scripts count with doubles, which hold this exactly."""
MAX_GROUP_SIZE = 4096
"""Slots of one group; Redis starts them all in one step."""
DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SERVER = re.compile(r"https?://[^\s/@?#]+(?:/[^\s@?#]*)?")


def _valid_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError("use 1 to 100 letters, digits, '.', '_' or '-', and start with a letter or a digit")
    return value


def check_server_url(url: str) -> None:
    """Raise SettingsError unless `url` is the base URL of an inference server, without a secret in it.

    The registry in Redis, logs and ``status`` show these URLs.
    """
    if not _SERVER.fullmatch(url):
        secret = "@" in url or "?" in url
        raise SettingsError(
            "the URL of a server has a user, a password or a query: put the key that servers ask for into "
            "FOREBAY_ENGINE_API_KEY, which is sent as `Authorization: Bearer KEY`"
            if secret
            else f"{url!r} is no base URL of a server; write http://host:port"
        )


def _split(value: object) -> object:
    """``a,b`` from the environment as a list."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


_WORDS = {"": None, "null": None, "none": None, "true": True, "1": True, "yes": True, "on": True,
          "false": False, "0": False, "no": False, "off": False}  # fmt: skip


def _norm(value: object) -> object:
    """A normalization, as the word or the JSON object that the environment has for it, or as it is."""
    if isinstance(value, str):
        word = value.strip().lower()
        try:
            value = _WORDS[word] if word in _WORDS else json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError('write true, false, or a JSON object such as {"mean_level": "group"}') from None
    if isinstance(value, Mapping):
        return NormConfig.of(value)
    if value is None or isinstance(value, (bool, NormConfig)):
        return value
    raise ValueError('must be true, false, or a NormConfig (in the environment a JSON object: {"mean_level": "group"})')


def _trainer_norm(value: object) -> object:
    """The same of what the trainer does, where a bare true would not say by which statistics."""
    norm = _norm(value)
    if norm is True:
        raise ValueError('say by which statistics the trainer normalizes, such as {"mean_level": "batch"}, or false')
    return norm or None


_SHAPING = {"reward_bias": "bias", "reward_scaling": "scaling", "reward_clip": "clip",
            "overlong_penalty_factor": "overlong_factor"}  # fmt: skip
"""Settings of shaping by what :class:`RewardShaping` calls them."""

S = TypeVar("S", bound=BaseSettings)
_Name = Annotated[str, AfterValidator(_valid_name)]


class _Base(BaseSettings):
    # inf would be published as null; nothing here waits for ever.
    model_config = SettingsConfigDict(
        env_prefix="FOREBAY_", frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False
    )

    @field_validator("*", mode="after")
    @classmethod
    def _can_be_counted(cls, value: object, info: ValidationInfo) -> object:
        name = str(info.field_name)
        counts = not name.startswith("reward_")  # rewards have bounds of their own
        most = _MOST_BYTES if name.endswith("_bytes") else _LARGEST
        if counts and isinstance(value, (int, float)) and value > most:
            raise ValueError(f"must be at most {most}")
        return value


class Settings(_Base):
    """Which run this process belongs to, and where its Redis is."""

    experiment_name: _Name = "dev"
    trial_name: _Name = "trial0"
    redis_url: SecretStr | None = Field(None, validation_alias="REDIS_URL")
    """``redis://[[user]:password@]host:port/db``; ``rediss://`` for TLS;
    ``redis+sentinel://host:port,host:port/name/db`` for the primary that Sentinels name (docs/operations.md). Never
    printed with its password. None: the Redis of the stack that ``make up`` started in `home`, else the usual local
    port."""
    redis_timeout_s: float = Field(10.0, gt=0)
    """How long a process waits for Redis to answer for the first time, before it is an error."""
    redis_away_s: float = Field(300.0, gt=0)
    """How long one call waits for a Redis that has answered before and is away, before it is an error. Workers and
    collectors begin anew then, for ever."""
    servers: Annotated[list[str], NoDecode] = Field(default_factory=list)
    """Base URLs of inference servers to add to the run's registry; comma-separated in the environment."""
    home: Path = Path(".forebay")
    """Folder of the local processes: Redis data, logs, process table."""

    @field_validator("redis_url", mode="before")
    @classmethod
    def _empty_is_unset(cls, value: object) -> object:
        return None if value == "" else value

    _split_servers = field_validator("servers", mode="before")(_split)

    @field_validator("servers")
    @classmethod
    def _check_servers(cls, value: list[str]) -> list[str]:
        for url in value:
            check_server_url(url)
        return value

    @property
    def run(self) -> str:
        """The namespace of every key and of the dump folder: ``experiment/trial``."""
        return f"{self.experiment_name}/{self.trial_name}"

    def resolved_redis_url(self) -> str:
        """Where Redis is. The result may hold a password: hand it to a client, never to a log.

        Raises:
            SettingsError: only the stack that is up in `home` knows, and its URL has a password, which is not written
                down.
        """
        if self.redis_url is not None:
            return self.redis_url.get_secret_value()
        try:
            found = json.loads((self.home / "state.json").read_text()).get("redis_url")
        except (OSError, ValueError, AttributeError):
            found = None
        if found and "***@" in str(found):
            raise SettingsError(
                f"the stack in {self.home} uses the Redis at {found}, whose password is not written down: set "
                "REDIS_URL here too"
            )
        return str(found or DEFAULT_REDIS_URL)


class RunSettings(_Base):
    """The rules of a run. The collector publishes them when it starts; workers and trainers read them from Redis."""

    batch_size: int = Field(8, ge=1)
    """Groups in a batch."""
    batches_per_version: int = Field(1, ge=1)
    """Batches that the trainer takes for each step of the version."""
    max_staleness: int = Field(1, ge=0)
    """Bound on staleness, in versions (contract, section 6)."""
    max_concurrent: int = Field(1024, ge=1)
    """Bound on groups that run at once."""
    max_queued_groups: int = Field(10_000, ge=1)
    """Bound on submitted groups that wait to start; past it ``submit`` raises QueueFullError."""
    max_queued_bytes: int = Field(2**30, ge=0)
    """Bound on the prompts (with their workflows' arguments) that wait to start; those that are asked for by their task
    id have as much besides. 0: none. One prompt may always wait."""
    max_stored_bytes: int = Field(4 * 2**30, ge=0)
    """Bound on the encoded rows of all groups in Redis that no trainer has acknowledged yet; 0: none. At it only groups
    that the next batch needs are started. Retained batches have a bound of their own."""
    max_unread_results: int = Field(100_000, ge=0)
    """Bound on ended slots whose groups no collector has committed yet; at it no group is started. 0: none."""
    max_concurrent_direct: int = Field(256, ge=1)
    """Bound on running groups of evaluations and of ``rollout_batch``, which are outside the capacity."""
    fleet_slots: int | None = Field(None, ge=1)
    """The most slots that the fleet will ever run at once (workers x FOREBAY_WORKER_MAX_SLOTS), to check the groups of
    the capacity against; None: not checked."""
    requeue_evicted: bool = False
    """Submit the prompt of an evicted group again, under a new task id that names its parent."""
    max_requeues: int = Field(1, ge=1)
    """How often one prompt may come again that way."""
    early_cancel: bool = False
    """Cancel running groups that can no longer be fresh, to save their compute."""

    group_size: int = Field(8, ge=1, le=MAX_GROUP_SIZE)
    """Default of ``submit``."""
    min_usable_group_size: int | None = Field(None, ge=1)
    """None: derived, 2 where rewards or advantages are normalized by group statistics, else 1."""
    drop_incomplete_group: bool = False
    on_slot_error: OnSlotError = OnSlotError.KEEP
    """``drop_group``: a failed slot rejects its group, as in AReaL."""

    reward_normalization: Annotated[bool | NormConfig, NoDecode] = False
    """Default of ``submit``: True subtracts the group's mean and divides by its (biased) standard deviation; a
    NormConfig, in the environment a JSON object, says otherwise."""
    trainer_reward_norm: Annotated[NormConfig | None, NoDecode] = None
    """What the trainer itself does to rewards; only ``min_usable_group_size`` is derived from it."""
    trainer_adv_norm: Annotated[NormConfig | None, NoDecode] = None
    """What the trainer does to advantages; likewise."""
    reward_bias: float = 0.0
    """Added to each reward."""
    reward_scaling: float = 1.0
    """Multiplies each reward, after the bias."""
    reward_clip: float = 20.0
    """Bound on the absolute value of a reward, after bias and scaling; 1e20 is as good as none."""
    overlong_tokens: int | None = None
    """The last so many of `max_new_tokens` cost a penalty that grows linearly; None: no penalty."""
    overlong_penalty_factor: float = 1.0
    """The penalty of a row that has used up `max_new_tokens`."""
    max_new_tokens: int | None = Field(None, ge=1)
    """The budget that the overlong penalty is counted from."""
    check_trajectory_format: bool = False
    """Check shapes, types and the key set of each result before it counts (contract, section 2)."""

    episode_timeout_s: float = Field(600.0, gt=0)
    group_deadline_s: float = Field(1800.0, gt=0)
    """From the start of a group to its end; slots that are unfinished then have failed(timeout)."""
    attempts_infra: int = Field(5, ge=1)
    attempts_timeout: int = Field(2, ge=1)
    attempts_data: int = Field(1, ge=1)
    attempts_contract: int = Field(1, ge=1)
    max_contract_errors: int = Field(8, ge=1)
    """So many contract errors in a row, of slots or of groups, stop the run."""
    max_barren_groups: int = Field(100, ge=1)
    """So many rejected groups in a row stop the run; ``filtered`` ends the row, as acceptance does."""
    failure_window: int = Field(100, ge=1)
    """Over about how many ended slots the shares below are counted."""
    max_failed_share_infra: float = Field(0.9, gt=0, le=1)
    """Share of recent slots that failed for good with this kind; past it the run stops. 1: never."""
    max_failed_share_timeout: float = Field(0.9, gt=0, le=1)
    max_failed_share_data: float = Field(0.9, gt=0, le=1)
    max_failed_share_contract: float = Field(0.9, gt=0, le=1)
    retry_backoff_s: float = Field(0.5, ge=0)
    """Wait before the second attempt; doubles with each further one, up to 30 s."""
    lease_s: float = Field(10.0, gt=0.5)
    """A worker that has been silent for this long has lost its slots; they run again elsewhere."""
    collector_lease_s: float = Field(5.0, gt=0.5)
    """A collector that has been silent for this long has lost the lead and its partitions; others take them."""
    partitions: int = Field(4, ge=1, le=64)
    """Of the results: the live collectors share them, so at least as many as there are collectors. It may change in a
    run; a group stays in the partition that it was given when it was put in the queue."""
    stall_timeout_s: float = Field(300.0, gt=0)
    """A trainer's read that cannot be served before the version moves is an error after this time."""
    stall_warn_s: float = Field(60.0, gt=0)
    """When groups run, or a trainer waits, and no batch was cut for so long, and for three times the usual time between
    two, the collector's log says what the next batch waits for; again each time the wait has doubled. So does the log
    of a reader that has waited for so long."""

    retain_batches: int = Field(0, ge=0, le=1000)
    """The last so many acknowledged batches are kept, for a trainer that goes back to an older checkpoint
    (``resume_after``): at least the batches between two checkpoints."""
    max_retained_bytes: int | None = Field(None, ge=1)
    """Bound on the rows of acknowledged batches that are kept; past it the oldest go, with a warning. None: no bound
    but their number."""
    follower_ttl_s: float = Field(3600.0, ge=1)
    """Acknowledged batches are kept for readers that follow, unless these have been silent for this long."""
    max_follower_lag: int = Field(100, ge=0, le=1000)
    """So many at most; a follower that is further behind misses batches, and is told."""

    max_rows_bytes: int = Field(256 * 2**20, ge=1024, le=256 * 2**20)
    """Bound on the encoded rows of one slot; more is failed(data)."""
    rows_ttl_s: float = Field(6 * 3600.0, gt=60)
    """Rows that no group counts vanish after this time."""
    drop_ledger_entries: int = Field(100_000, ge=0)
    """Groups that did not reach a trainer, of which ``forebay drops`` tells; the oldest go first. 0: none."""
    dead_letter_entries: int = Field(10_000, ge=0)
    """Groups with slots that failed for good, which ``forebay dead`` lists; the oldest go first. 0: none."""
    dead_letter_bytes: int = Field(64 * 2**20, ge=0)
    """Bound on the prompts kept with them, to be redriven. One that is larger is not kept."""
    dead_letter_ttl_s: float = Field(7 * 86400.0, gt=0)
    """How long they are kept."""
    import_allowlist: Annotated[list[str], NoDecode] = Field(default_factory=lambda: ["forebay", "forebay_workers"])
    """Module prefixes that workers and collectors may import for workflows, rewards and filters."""

    dump_to_file: bool = False
    fileroot: Path = Path(".forebay/dumps")
    tokenizer_path: str | None = None
    """Needed for dumps: what decodes token ids to text."""

    _split_allowlist = field_validator("import_allowlist", mode="before")(_split)
    _parse_norm = field_validator("reward_normalization", mode="before")(lambda value: _norm(value) or False)
    _parse_trainer_norms = field_validator("trainer_reward_norm", "trainer_adv_norm", mode="before")(_trainer_norm)

    @field_validator("import_allowlist")
    @classmethod
    def _with_own_modules(cls, value: list[str]) -> list[str]:
        return list(dict.fromkeys(["forebay", "forebay_workers", *value]))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.group_deadline_s < self.episode_timeout_s:
            raise ValueError(
                f"group_deadline_s={self.group_deadline_s:g} is below episode_timeout_s={self.episode_timeout_s:g}: "
                "every group would end before its first episode may; raise the deadline or lower the time-out"
            )
        minimum_usable(
            self.group_size,
            self.min_usable_group_size,
            self.norm,
            self.trainer_reward_norm,
            self.trainer_adv_norm,
        )
        self._check_shaping()
        self._check_fleet()
        self._check_retained()
        if self.dump_to_file and not self.tokenizer_path:
            raise ValueError("dump_to_file needs tokenizer_path, the model folder or name whose tokenizer decodes rows")
        return self

    @field_validator(*_SHAPING)
    @classmethod
    def _check_shaping_alone(cls, value: float, info: ValidationInfo) -> float:
        values: dict[str, Any] = {_SHAPING[str(info.field_name)]: value}
        if "overlong_factor" in values:  # whether there is a penalty is looked at with all settings at hand
            values |= {"overlong_tokens": 1, "max_new_tokens": 1}
        try:
            RewardShaping(**values)
        except SettingsError as error:
            raise ValueError(str(error).partition(": ")[2]) from None
        return value

    def _check_shaping(self) -> None:
        try:
            _ = self.shaping
        except SettingsError as error:
            name, equals, rest = str(error).partition("=")
            field = next((field for field, part in _SHAPING.items() if part == name), name)
            raise ValueError(f"{field}{equals}{rest}") from None

    def _check_fleet(self) -> None:
        groups = min(self.max_concurrent, self.capacity)
        if self.fleet_slots is not None and self.group_size > self.fleet_slots:
            raise ValueError(
                f"group_size={self.group_size} is above fleet_slots={self.fleet_slots}: the fleet could not run even "
                "one group at once; lower group_size, or add workers and raise fleet_slots"
            )
        if self.fleet_slots is not None and groups * self.group_size > self.fleet_slots:
            raise ValueError(
                f"min(max_concurrent={self.max_concurrent}, capacity={self.capacity}) = {groups} groups of "
                f"group_size={self.group_size} are {groups * self.group_size} slots, but the fleet runs at most "
                f"fleet_slots={self.fleet_slots}: the others would wait while their deadline runs; set max_concurrent "
                f"to {self.fleet_slots // self.group_size}, or add workers and raise fleet_slots"
            )

    def _check_retained(self) -> None:
        slots = self.retain_batches * self.batch_size * self.group_size
        if self.max_retained_bytes is not None and slots * _LEAST_SLOT_BYTES > self.max_retained_bytes:
            raise ValueError(
                f"retain_batches={self.retain_batches} of batch_size={self.batch_size} groups of "
                f"group_size={self.group_size} are {slots} slots, at least {slots * _LEAST_SLOT_BYTES} bytes of rows, "
                f"above max_retained_bytes={self.max_retained_bytes}: so many can never be kept; raise the budget, "
                "or retain fewer batches"
            )

    @property
    def norm(self) -> NormConfig | None:
        """`reward_normalization` as a rule."""
        return norm_of(self.reward_normalization)

    @property
    def shaping(self) -> RewardShaping:
        """What is done to each reward before it is normalized."""
        return RewardShaping(
            bias=self.reward_bias,
            scaling=self.reward_scaling,
            clip=self.reward_clip,
            overlong_tokens=self.overlong_tokens,
            overlong_factor=self.overlong_penalty_factor,
            max_new_tokens=self.max_new_tokens,
        )

    @property
    def capacity(self) -> int:
        """``(max_staleness + 1) * batches_per_version * batch_size`` groups."""
        return (self.max_staleness + 1) * self.batches_per_version * self.batch_size

    def max_failed_share(self, kind: FailureKind) -> float:
        """The share of recent slots with failures of `kind` past which the run stops."""
        return float(getattr(self, f"max_failed_share_{kind.value}"))

    def attempts(self, kind: FailureKind) -> int:
        """Attempts that a slot has when it keeps failing with `kind`."""
        return int(getattr(self, f"attempts_{kind.value}"))


class EngineSettings(_Base):
    """How a worker, or a trainer that updates weights, talks to inference servers."""

    model_config = SettingsConfigDict(env_prefix="FOREBAY_ENGINE_", frozen=True, extra="forbid", allow_inf_nan=False)

    backend: Literal["sglang"] = "sglang"
    connect_timeout_s: float = Field(5.0, gt=0)
    request_timeout_s: float = Field(600.0, gt=0)
    """One generate call, headers to last byte."""
    no_server_timeout_s: float = Field(60.0, gt=0)
    """How long a request waits for any healthy server before it fails with kind infra."""
    health_interval_s: float = Field(1.0, gt=0)
    pause_poll_s: float = Field(0.05, gt=0)
    """First wait while a server is paused or keeps aborting without progress; doubles up to one second."""
    max_connections_per_server: int = Field(1024, ge=1)
    affinity_entries: int = Field(65536, ge=1)
    """Bound on remembered rid -> server pairs."""
    pause_mode: Literal["retract", "abort", "in_place"] = "retract"
    update_timeout_s: float = Field(300.0, gt=0)
    api_key: SecretStr | None = None
    """What the servers ask for (``--api-key`` of SGLang), sent as ``Authorization: Bearer KEY``. Never logged, and it
    does not travel: each process has its own from its environment."""
    max_answer_bytes: int = Field(256 * 2**20, ge=1024)
    """Of one answer of a server, unpacked; a longer one is not read to its end, and fails the slot."""

    @field_validator("api_key", mode="after")
    @classmethod
    def _empty_is_unset(cls, value: SecretStr | None) -> SecretStr | None:
        return value if value is not None and value.get_secret_value() else None


_OTHERS = ("LOG_LEVEL", "LOG_JSON", "DEBUG", "HTTP_TOKEN")
_OTHER_PREFIXES = ("WORKER_", "COLLECTOR_", "TEST_")


def unknown_variables(environment: Mapping[str, str]) -> list[tuple[str, str | None]]:
    """The variables that begin with ``FOREBAY_`` and are no setting, each with the setting that may be meant."""
    known = {f"FOREBAY_{name.upper()}" for kind in (Settings, RunSettings) for name in kind.model_fields}
    known |= {f"FOREBAY_ENGINE_{name.upper()}" for name in EngineSettings.model_fields}
    known |= {f"FOREBAY_{name}" for name in _OTHERS}
    unknown = sorted(
        name
        for name in environment
        if name.startswith("FOREBAY_")
        and name not in known
        and not name.removeprefix("FOREBAY_").startswith(_OTHER_PREFIXES)
    )
    return [(name, next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.8)), None)) for name in unknown]


def load(kind: type[S], /, **values: Any) -> S:
    """Build settings from the environment and `values`.

    Raises:
        SettingsError: one line for each bad setting, with its name, its value and what is allowed.
    """
    try:
        return kind(**values)
    except ValidationError as error:
        prefix = str(kind.model_config.get("env_prefix", ""))
        lines = []
        for item in error.errors(include_url=False, include_context=False):
            name = ".".join(str(part) for part in item["loc"])
            shown = f"{prefix}{name}".upper() if name else "settings"
            # A URL may hold a password, a whole model holds one, and a misspelt name may stand for one.
            holds = is_secret(name) or "redis" in name.lower() or name.startswith("servers") or not name
            secret = holds or item["type"] == "extra_forbidden"
            value = "" if secret else without_userinfo(f"={item['input']!r}")
            lines.append(f"{shown}{value}: {item['msg'].removeprefix('Value error, ')}")
        raise SettingsError("; ".join(lines)) from None
