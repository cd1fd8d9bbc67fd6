"""How do token ids become rows of numbers?"""

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from worker.layers.weight_slot import WeightSlot


class Embedding(nn.Module):
    def __init__(
        self,
        name: str,
        vocab_size: int,
        width: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        scale: float | None = None,
    ) -> None:
        """``scale``: what rows are multiplied by, rounded to ``dtype`` as it was in training."""
        super().__init__()
        self.name = name
        self.scale = None if scale is None else torch.tensor(scale, dtype=dtype, device=device)
        self.weight = torch.empty(vocab_size, width, dtype=dtype, device=device)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, C]"""
        rows = embedding(token_ids, self.weight)
        return rows if self.scale is None else rows * self.scale

    def weight_slots(self) -> dict[str, WeightSlot]:
        return {f"{self.name}.weight": WeightSlot(shape=tuple(self.weight.shape), load=self.weight.copy_)}

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes
