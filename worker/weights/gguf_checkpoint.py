"""How are tensors read from a GGUF file?"""

from torch import Tensor

from worker.model_config import ModelConfig
from worker.weights.checkpoint import Checkpoint


class GGUFCheckpoint(Checkpoint):
    def __init__(self, path: str, config: ModelConfig) -> None:
        raise NotImplementedError

    def names(self) -> set[str]:
        raise NotImplementedError

    def describe(self, name: str) -> tuple[int, ...]:
        raise NotImplementedError

    def where(self, name: str) -> str:
        raise NotImplementedError

    def load(self, name: str) -> Tensor:
        raise NotImplementedError
