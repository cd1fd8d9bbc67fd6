"""How do a checkpoint's tensors get into a stage?"""

from collections.abc import Callable

from worker.models.stage import StageModel
from worker.weights import Checkpoint


def load_weights(stage: StageModel, checkpoint: Checkpoint, progress: Callable[[int, int], None]) -> int:
    """Fill the stage from the checkpoint; returns the bytes its parameters take.

    ``progress(done, total)`` is called after each tensor with counts of tensors.

    Raises:
        ConfigError: for a tensor that is missing, of another shape, or left over in this stage's share.
    """
    raise NotImplementedError
