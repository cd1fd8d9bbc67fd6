"""What is a stage of a model, seen from outside?"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from worker.layers.attention import Heads
from worker.layers.weight_slot import WeightSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryTensor:
    """One tensor that travels between stages: [T, width]."""

    name: str
    width: int
    """Elements per token."""
    dtype: torch.dtype


Turns = tuple[Tensor, Tensor]
"""Cosines and sines of the step's positions, [T, D / 2] float32 each."""


class Flow(NamedTuple):
    """What one segment hands to the next."""

    hidden: Tensor
    """[T, C]: the residual sum, complete."""
    turns: tuple[Turns, Turns]
    """Of full and of windowed layers."""
    heads: Heads | None
    """What the attention between the two works on; None behind the last segment."""


class StageModel(nn.Module, ABC):
    """Some consecutive layers of a model, with the embedding on the first stage and the head on the last.

    The layers are computed in segments with an attention between each and the next: ``begin``, then for each layer in turn
    ``attend`` and ``resume``. Segments depend on shapes alone, attention on which sequences the step has.
    """

    @abstractmethod
    def boundary(self) -> tuple[BoundaryTensor, ...]:
        """What travels between stages."""

    @abstractmethod
    def embed(self, token_ids: Tensor) -> Tensor:
        """First stage only. [T] -> [T, C]."""

    @abstractmethod
    def begin(self, hidden: Tensor, positions: Tensor) -> Flow:
        """The first segment. [T, C], which is not changed, and [T] int64."""

    @abstractmethod
    def attend(self, index: int, flow: Flow, cache: Tensor, metadata: Any) -> None:
        """Attention of this stage's layer number ``index``; fills ``flow.heads.attended``.

        The cache is written in place; the metadata is from the attention backend's builder for the layer's window.
        """

    @abstractmethod
    def resume(self, index: int, flow: Flow) -> Flow:
        """The segment behind that attention."""

    def forward(
        self, hidden: Tensor, positions: Tensor, caches: Sequence[Tensor], metadata: Sequence[Any]
    ) -> Tensor:
        """All segments and attentions. [T, C] -> [T, C]; residual sums are complete, so that one tensor travels.

        ``caches`` and ``metadata``: one for each layer of this stage.
        """
        flow = self.begin(hidden, positions)
        for index, (cache, of_layer) in enumerate(zip(caches, metadata, strict=True)):
            self.attend(index, flow, cache, of_layer)
            flow = self.resume(index, flow)
        return flow.hidden

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
