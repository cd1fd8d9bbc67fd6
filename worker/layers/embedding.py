"""How do token ids become rows of numbers?"""

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from worker.layers.weight_slot import WeightSlot


class Embedding(nn.Module):
    def __init__(self, name: str, vocab_size: int, width: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.name = name
        self.weight = torch.empty(vocab_size, width, dtype=dtype, device=device)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, C]"""
        return embedding(token_ids, self.weight)

    def weight_slots(self) -> dict[str, WeightSlot]:
        return {f"{self.name}.weight": WeightSlot(shape=tuple(self.weight.shape), load=self.weight.copy_)}

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes
