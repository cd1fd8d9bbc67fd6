"""How does a layer's MLP compute, when nothing gates it?"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from worker.layers.linear import Linear


class MLP(nn.Module):
    def __init__(
        self,
        name: str,
        width: int,
        inner_width: int,
        activation: Callable[[Tensor], Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = Linear(width, {f"{name}.fc1": inner_width}, bias=True, dtype=dtype, device=device)
        self.down = Linear(inner_width, {f"{name}.fc2": width}, bias=True, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[T, C] -> [T, C]"""
        return self.down(self.activation(self.up(x)))
