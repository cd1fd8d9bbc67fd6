"""How does a layer attend in both directions, without a cache?"""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from worker.layers.linear import Linear


class BidirectionalAttention(nn.Module):
    def __init__(self, name: str, width: int, num_heads: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = Linear(
            width,
            {f"{name}.{part}_proj": width for part in "qkv"},
            bias=True,
            dtype=dtype,
            device=device,
        )
        self.out = Linear(width, {f"{name}.out_proj": width}, bias=True, dtype=dtype, device=device)

    def forward(self, x: Tensor, sees: Tensor) -> Tensor:
        """[T, C] -> [T, C]. ``sees``: [T, T] bool, which tokens (columns) each token attends to; at least one."""
        qkv = self.qkv(x).view(x.shape[0], 3, self.num_heads, -1)  # [T, 3, H, D]
        q, k, v = qkv.permute(1, 2, 0, 3)[:, None]  # [1, H, T, D] each
        attended = scaled_dot_product_attention(q, k, v, attn_mask=sees)
        return self.out(attended[0].transpose(0, 1).flatten(1))
