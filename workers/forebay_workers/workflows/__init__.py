"""Built-in workflows (contract, section 10)."""

from forebay_workers.workflows.rlvr import RLVRWorkflow

__all__ = ["RLVRWorkflow"]
