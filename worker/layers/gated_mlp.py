"""How does a layer's MLP compute, when half of its inner width gates the other half?"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from worker.layers.linear import Linear


class GatedMLP(nn.Module):
    def __init__(
        self,
        name: str,
        width: int,
        inner_width: int,
        gate: Callable[[Tensor], Tensor],
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``gate``: from [T, 2 * I], the gates and what they let through, to [T, I]."""
        super().__init__()
        self.gate = gate
        self.gate_up = Linear(
            width,
            {f"{name}.gate_proj": inner_width, f"{name}.up_proj": inner_width},
            bias=bias,
            dtype=dtype,
            device=device,
        )
        self.down = Linear(inner_width, {f"{name}.down_proj": width}, bias=bias, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[T, C] -> [T, C]"""
        return self.down(self.gate(self.gate_up(x)))
