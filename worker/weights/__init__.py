"""Checkpoints: named tensors on disk, whatever the file format."""

from worker.weights.checkpoint import Checkpoint, StoredTensor
from worker.weights.opening import open_checkpoint

__all__ = ["Checkpoint", "StoredTensor", "open_checkpoint"]
