"""How do Gemma 2 and 3 compute? Windowed and full layers alternate, and what a layer adds is normalised as well.

Gemma 2 caps its scores and logits; Gemma 3 normalises queries and keys, and turns them faster in windowed layers.
"""

from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from kernels.gelu_mul import gelu_mul
from worker.layers.attention import Attention, attention_name, layer_name
from worker.layers.gated_mlp import GatedMLP
from worker.layers.norm import RMSNorm
from worker.model_config import ModelConfig
from worker.models.decoder import DecoderStage, LayerPlace


class GemmaLayer(nn.Module):
    """Norms on both sides of attention and MLP."""

    def __init__(
        self,
        *,
        attention: Attention,
        before_attention: RMSNorm,
        after_attention: RMSNorm,
        mlp: GatedMLP,
        before_mlp: RMSNorm,
        after_mlp: RMSNorm,
    ) -> None:
        super().__init__()
        self.before_attention, self.attention, self.after_attention = before_attention, attention, after_attention
        self.before_mlp, self.mlp, self.after_mlp = before_mlp, mlp, after_mlp

    def forward(
        self, hidden: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, cache: Tensor, metadata: Any
    ) -> tuple[Tensor, Tensor]:
        """The residual sum and what is still to be added to it: the next norm adds and normalises in one pass."""
        if delta is None:
            normed = self.before_attention(hidden)
        else:
            hidden, normed = self.before_attention.after_adding(hidden, delta)
        delta = self.after_attention(self.attention(normed, cos, sin, cache, metadata))
        hidden, normed = self.before_mlp.after_adding(hidden, delta)
        return hidden, self.after_mlp(self.mlp(normed))


class GemmaStage(DecoderStage):
    norm_offset = 1.0
    has_qk_norm: ClassVar[bool]

    @classmethod
    def make_layer(cls, config: ModelConfig, layer: int, place: LayerPlace) -> nn.Module:
        name, width, device = layer_name(layer), config.hidden_size, place.device
        norm = partial(cls.make_norm, config, device=device)
        attention = Attention(
            config, layer, qkv_bias=config.attention_bias, out_bias=config.attention_bias,
            q_norm=norm(f"{attention_name(layer)}.q_norm", config.head_size) if cls.has_qk_norm else None,
            k_norm=norm(f"{attention_name(layer)}.k_norm", config.head_size) if cls.has_qk_norm else None,
            backend=place.backend, dtype=place.dtype, device=device,
        )  # fmt: skip
        gate = partial(gelu_mul, approximate="tanh")
        return GemmaLayer(
            before_attention=norm(f"{name}.input_layernorm", width),
            attention=attention,
            after_attention=norm(f"{name}.post_attention_layernorm", width),
            before_mlp=norm(f"{name}.pre_feedforward_layernorm", width),
            mlp=GatedMLP(f"{name}.mlp", width, config.intermediate_size, gate, dtype=place.dtype, device=device),
            after_mlp=norm(f"{name}.post_feedforward_layernorm", width),
        )


class Gemma2Stage(GemmaStage):
    has_qk_norm = False


class Gemma3Stage(GemmaStage):
    has_qk_norm = True
