"""Built-in workflows (contract, section 10)."""

from forebay_workers.workflows.images import encode_image
from forebay_workers.workflows.multi_turn import MultiTurnWorkflow
from forebay_workers.workflows.rlvr import RLVRWorkflow
from forebay_workers.workflows.vision import VisionRLVRWorkflow

__all__ = ["MultiTurnWorkflow", "RLVRWorkflow", "VisionRLVRWorkflow", "encode_image"]
