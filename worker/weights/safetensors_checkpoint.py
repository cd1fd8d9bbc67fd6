"""How are tensors read from a Hugging Face folder?"""

from pathlib import Path

from torch import Tensor

from worker.weights.checkpoint import Checkpoint


class SafetensorsCheckpoint(Checkpoint):
    def __init__(self, folder: Path) -> None:
        raise NotImplementedError

    def names(self) -> set[str]:
        raise NotImplementedError

    def describe(self, name: str) -> tuple[int, ...]:
        raise NotImplementedError

    def where(self, name: str) -> str:
        raise NotImplementedError

    def load(self, name: str) -> Tensor:
        raise NotImplementedError
