"""What is a checkpoint to its readers?"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """How a tensor lies on disk."""

    type_name: str
    """In the file format's own words, such as BF16 or Q4_1."""
    size_bytes: int


class Checkpoint(ABC):
    """Named tensors on disk, by their Hugging Face names, such as ``model.layers.3.self_attn.q_proj.weight``.

    Nothing but descriptions is read before ``load``. Errors are ConfigErrors that name the file and the tensor.
    """

    @abstractmethod
    def names(self) -> set[str]:
        """Of all tensors, those of other stages too."""

    @abstractmethod
    def describe(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""

    @abstractmethod
    def stored(self, name: str) -> StoredTensor:
        """Of which type it is on disk, and how large."""

    @abstractmethod
    def where(self, name: str) -> str:
        """The file that holds it, for messages; the checkpoint's own path for a name that it does not hold."""

    @abstractmethod
    def load(self, name: str) -> Tensor:
        """One tensor, float of any width; only its own bytes are read.

        It may lie in memory that is mapped from the file: copy it, and don't change it.
        """
