"""Model families, one a file; this one builds a stage of whichever the configuration names, and fills it."""

from worker.models.building import build_stage
from worker.models.loading import check_weights, load_weights
from worker.models.stage import BoundaryTensor, Flow, StageModel

__all__ = ["BoundaryTensor", "Flow", "StageModel", "build_stage", "check_weights", "load_weights"]
