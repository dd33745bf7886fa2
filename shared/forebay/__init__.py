"""forebay: the rollout layer of LLM reinforcement learning as a message-queue pipeline.

What users import. Light: no torch, no arq, no web server is imported from here.
"""

from forebay import workflow_context
from forebay.agents import AgentWorkflow
from forebay.batches import AsyncBatch, AsyncBatchStream, CollectedRollouts, Rollouts
from forebay.blocking import Batch, BatchStream, Client
from forebay.client import AsyncClient
from forebay.errors import ForebayError
from forebay.generation import GenerationHyperparameters, InferenceEngine, ModelRequest, ModelResponse, StopReason
from forebay.interactions import Interaction, InteractionWithTokenLogpReward
from forebay.notices import ForebayWarning
from forebay.options import GroupOptions
from forebay.outcomes import FailureKind, GroupState, RejectReason, SlotOutcome
from forebay.reconciling import Reconciliation
from forebay.reward_rules import NormConfig
from forebay.rewards import AsyncRewardWrapper
from forebay.settings import EngineSettings, RunSettings, Settings, load
from forebay.shares import ShareOf
from forebay.tracing import session_context, trace_session
from forebay.trajectories import TrajBatchMeta, concat_padded_tensors
from forebay.wire.tensors import RolloutGroup
from forebay.workflow import RolloutWorkflow, WorkflowLike

__version__ = "0.1.0"

__all__ = [
    "AgentWorkflow",
    "AsyncBatch",
    "AsyncBatchStream",
    "AsyncClient",
    "AsyncRewardWrapper",
    "Batch",
    "BatchStream",
    "Client",
    "CollectedRollouts",
    "EngineSettings",
    "FailureKind",
    "ForebayError",
    "ForebayWarning",
    "GenerationHyperparameters",
    "GroupOptions",
    "GroupState",
    "InferenceEngine",
    "Interaction",
    "InteractionWithTokenLogpReward",
    "ModelRequest",
    "ModelResponse",
    "NormConfig",
    "Reconciliation",
    "RejectReason",
    "RolloutGroup",
    "RolloutWorkflow",
    "Rollouts",
    "RunSettings",
    "Settings",
    "ShareOf",
    "SlotOutcome",
    "StopReason",
    "TrajBatchMeta",
    "WorkflowLike",
    "__version__",
    "concat_padded_tensors",
    "load",
    "session_context",
    "trace_session",
    "workflow_context",
]
