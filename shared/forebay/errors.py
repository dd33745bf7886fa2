"""Every error that forebay raises on purpose, in one tree.

Each says what happened, to what, and what to do about it. Each also inherits the standard class it refines, so that
code which knows nothing of forebay can catch it, and each survives a trip through another process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "BatchGoneError",
    "CollectorUnavailableError",
    "ConnectionLostError",
    "ConsumerError",
    "ContractError",
    "EpisodeTimeoutError",
    "FencedError",
    "ForebayError",
    "FrameError",
    "GenerationError",
    "GroupNotDeliveredError",
    "ImportNotAllowedError",
    "ModelFolderError",
    "PortInUseError",
    "QueueFullError",
    "RedisRefusedError",
    "RewardTimeoutError",
    "RolledBackError",
    "RowsMissingError",
    "RunNotReadyError",
    "RunStoppedError",
    "ServerUnavailableError",
    "SettingsError",
    "SlotDataError",
    "StallError",
    "StoreFullError",
    "SubmitError",
    "VersionError",
    "WeightUpdateError",
    "WorkflowContractError",
    "WorkflowError",
    "WorkflowTypeError",
]


class ForebayError(Exception):
    """Base of every error of forebay. ``str(error)`` is one clear line with the remedy."""


class SettingsError(ForebayError, ValueError):
    """A setting is missing, malformed, or contradicts another. Names the setting, its value and the remedy."""


class PortInUseError(ForebayError, OSError):
    """A server could not bind its port."""


class ModelFolderError(ForebayError, FileNotFoundError):
    """A model folder does not exist or holds no model."""


class ConnectionLostError(ForebayError, ConnectionError):
    """Redis could not be reached within the allowed time."""


class RedisRefusedError(ForebayError, PermissionError):
    """Redis refuses this process for good: its credentials, its certificate, or a command that its user may not run.

    Trying again would change nothing; whoever administers the server, or REDIS_URL, has to.
    """


class RunNotReadyError(ForebayError, LookupError):
    """Nobody has published the settings of this run: no collector has been started for it."""


class CollectorUnavailableError(ForebayError, TimeoutError):
    """No live collector serves the run, so no batch can arrive. Reading goes on by itself once one is back."""


class StallError(ForebayError, TimeoutError):
    """The trainer waits for something that cannot come by itself; the text says what must happen first."""


class SubmitError(ForebayError, ValueError):
    """A prompt group was refused at submit; nothing of it was enqueued."""


class QueueFullError(ForebayError, BlockingIOError):
    """The prompt queue is at ``max_queued_groups`` or ``max_queued_bytes``: back-pressure. Submit again later."""


class StoreFullError(QueueFullError):
    """Redis has no memory left (``maxmemory``): back-pressure. Nothing was written; try again later.

    Attributes:
        used: bytes that the server uses; 0 where it does not say.
        maximum: its ``maxmemory`` in bytes; likewise.
    """

    def __init__(self, message: str, used: int = 0, maximum: int = 0) -> None:
        super().__init__(message)
        self.used = used
        self.maximum = maximum


class WorkflowError(SubmitError):
    """A workflow cannot be named, imported or rebuilt on a worker."""


class WorkflowTypeError(WorkflowError, TypeError):
    """What was submitted as a workflow is none: neither a RolloutWorkflow nor an agent with a coroutine ``run``."""


class ImportNotAllowedError(WorkflowError):
    """A module lies outside the run's import allowlist."""


class ContractError(ForebayError, ValueError):
    """A result breaks the rollout contract (wrong format, mixed kinds, inconsistent rewards)."""


class WorkflowContractError(ContractError):
    """A workflow returned something that the contract forbids. The slot, or its group, is not trained on."""


class SlotDataError(ForebayError, ValueError):
    """A value of one slot is unusable (NaN, infinite, too short); that slot fails with kind ``data``."""


class GenerationError(ForebayError, RuntimeError):
    """The inference server refused a request for good (a permanent 4xx). Carries the server's own text."""


class ServerUnavailableError(ForebayError, ConnectionError):
    """No inference server could take the request within the allowed time."""


class EpisodeTimeoutError(ForebayError, TimeoutError):
    """An episode took longer than ``episode_timeout_s``."""


class RewardTimeoutError(ForebayError, TimeoutError):
    """A reward function ran into its time limit; its process was killed and replaced."""


class FrameError(ForebayError, ValueError):
    """A frame from the wire is truncated, of an unknown version, or larger than it may be."""


class RowsMissingError(ForebayError, LookupError):
    """The rows of a slot that a batch counts are gone from Redis."""


class ConsumerError(ForebayError, ValueError):
    """A reader of batches that cannot be: a bad name, rank or world size, or a second one that drives the version."""


class BatchGoneError(ForebayError, LookupError):
    """A trainer cannot go on after the batch that its checkpoint names: a later one is not kept, or none is known."""


class FencedError(ForebayError, RuntimeError):
    """This collector lost a lease, of a partition or of the lead, and may change nothing under it any more."""


class RunStoppedError(ForebayError, RuntimeError):
    """The run has stopped itself: too many failures of one kind. The text has the first cause, and how to resume."""


class RolledBackError(RunStoppedError):
    """Redis has gone back in time: it has less of the run than it had. The text says of what, and what to do."""


class GroupNotDeliveredError(ForebayError, LookupError):
    """A group that was waited for by its task id ended without a result, or is delivered elsewhere."""


class VersionError(ForebayError, ValueError):
    """The policy version would move backwards."""


class WeightUpdateError(ForebayError, RuntimeError):
    """No inference server holds the new weights.

    Attributes:
        results: the ``ServerUpdate`` of each server, by its URL; empty where none was asked.
    """

    def __init__(self, message: str, results: Mapping[str, Any] | None = None) -> None:
        super().__init__(message, dict(results or {}))
        self.results: dict[str, Any] = dict(results or {})

    def __str__(self) -> str:
        return str(self.args[0])
