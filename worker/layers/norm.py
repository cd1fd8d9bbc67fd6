"""How are rows normalised?"""

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from kernels.rms_norm import add_rms_norm, rms_norm
from worker.layers.weight_slot import WeightSlot


class RMSNorm(nn.Module):
    """Its weights stay float32 in every dtype: they are few, and rounding them would cost accuracy for nothing."""

    def __init__(self, name: str, width: int, eps: float, *, device: torch.device, offset: float = 0.0) -> None:
        """``offset``: what is to be added to the checkpoint's weights."""
        super().__init__()
        self.name = name
        self.eps = eps
        self.offset = offset
        self.weight = torch.empty(width, dtype=torch.float32, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Of x's last dimension."""
        return rms_norm(x, self.weight, self.eps)

    def after_adding(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """x + delta, and the norm of that."""
        return add_rms_norm(x, delta, self.weight, self.eps)

    def weight_slots(self) -> dict[str, WeightSlot]:
        return {f"{self.name}.weight": WeightSlot(shape=tuple(self.weight.shape), load=self._load)}

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes

    def _load(self, weight: Tensor) -> None:
        self.weight.copy_(weight).add_(self.offset)


class LayerNorm(nn.Module):
    """With a mean that is taken off and a bias, as encoders have it."""

    def __init__(self, name: str, width: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.name = name
        self.eps = eps
        self.weight = torch.empty(width, dtype=dtype, device=device)
        self.bias = torch.empty(width, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Of x's last dimension."""
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def weight_slots(self) -> dict[str, WeightSlot]:
        return {
            f"{self.name}.{part}": WeightSlot(shape=tuple(tensor.shape), load=tensor.copy_)
            for part, tensor in (("weight", self.weight), ("bias", self.bias))
        }

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes + self.bias.nbytes
