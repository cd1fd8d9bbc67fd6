"""How does a layer compute that normalises before attention and before its MLP?"""

from torch import Tensor

from worker.layers.attention import Attention, Heads
from worker.layers.decoder_layer import DecoderLayer
from worker.layers.gated_mlp import GatedMLP
from worker.layers.norm import RMSNorm


class PreNormLayer(DecoderLayer):
    def __init__(self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: GatedMLP) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def before_attention(
        self, hidden: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Heads]:
        if delta is None:
            normed = self.attention_norm(hidden)
        else:
            hidden, normed = self.attention_norm.after_adding(hidden, delta)
        return hidden, self.attention.project(normed, cos, sin)

    def after_attention(self, hidden: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        hidden, normed = self.mlp_norm.after_adding(hidden, self.attention.finish(attended))
        return hidden, self.mlp(normed)
