"""How does a layer compute that normalises before attention and before its MLP?"""

from typing import Any

from torch import Tensor, nn

from worker.layers.attention import Attention
from worker.layers.gated_mlp import GatedMLP
from worker.layers.norm import RMSNorm


class PreNormLayer(nn.Module):
    def __init__(self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: GatedMLP) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def forward(
        self, hidden: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, cache: Tensor, metadata: Any
    ) -> tuple[Tensor, Tensor]:
        """The residual sum and what is still to be added to it: the next norm adds and normalises in one pass."""
        if delta is None:
            normed = self.attention_norm(hidden)
        else:
            hidden, normed = self.attention_norm.after_adding(hidden, delta)
        delta = self.attention(normed, cos, sin, cache, metadata)
        hidden, normed = self.mlp_norm.after_adding(hidden, delta)
        return hidden, self.mlp(normed)
