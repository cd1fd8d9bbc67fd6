"""What is a stage of a model, seen from outside?"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from worker.layers.weight_slot import WeightSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryTensor:
    """One tensor that travels between stages: [T, width]."""

    name: str
    width: int
    """Elements per token."""
    dtype: torch.dtype


class StageModel(nn.Module, ABC):
    """Some consecutive layers of a model, with the embedding on the first stage and the head on the last."""

    @abstractmethod
    def boundary(self) -> tuple[BoundaryTensor, ...]:
        """What travels between stages."""

    @abstractmethod
    def embed(self, token_ids: Tensor) -> Tensor:
        """First stage only. [T] -> [T, C]."""

    @abstractmethod
    def forward(
        self, hidden: Tensor, positions: Tensor, caches: Sequence[Tensor], metadata: Sequence[Any]
    ) -> Tensor:
        """This stage's layers. [T, C] -> [T, C]; residual sums are complete, so that one tensor travels.

        ``positions``: [T] int64. ``caches`` and ``metadata``: one for each layer of this stage; the former written in
        place, the latter from the attention backend's builder for the layer's window. ``hidden`` is not changed.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Last stage only: final norm and head. [N, C] -> [N, V] float32."""

    @abstractmethod
    def weight_slots(self) -> dict[str, WeightSlot]:
        """Every tensor that this stage needs, by its checkpoint name."""

    @abstractmethod
    def owns(self, name: str) -> bool:
        """Whether a checkpoint tensor of this name, used or not, lies in this stage's share."""

    @abstractmethod
    def ignores(self, name: str) -> bool:
        """Whether a tensor of this name may lie in a checkpoint without being used."""

    @abstractmethod
    def prepare(self) -> None:
        """Bring loaded weights into the form that computing wants; called once after loading."""

    @abstractmethod
    def weight_bytes(self) -> int:
        """Memory that the weights take."""
