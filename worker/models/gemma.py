"""How do Gemma 2 and 3 compute? Windowed and full layers alternate, and what a layer adds is normalised as well.

Gemma 2 caps its scores and logits; Gemma 3 normalises queries and keys, and turns them faster in windowed layers.
"""

from functools import partial
from typing import ClassVar

from torch import Tensor

from kernels.gelu_mul import gelu_mul
from worker.layers.attention import Attention, Heads, attention_name, layer_name
from worker.layers.decoder_layer import DecoderLayer
from worker.layers.gated_mlp import GatedMLP
from worker.layers.norm import RMSNorm
from worker.model_config import ModelConfig
from worker.models.decoder import DecoderStage, LayerPlace


class GemmaLayer(DecoderLayer):
    """Norms on both sides of attention and MLP."""

    def __init__(
        self,
        *,
        attention: Attention,
        attention_norm: RMSNorm,
        attended_norm: RMSNorm,
        mlp: GatedMLP,
        mlp_norm: RMSNorm,
        added_norm: RMSNorm,
    ) -> None:
        """``attention_norm`` and ``mlp_norm`` stand before their parts, ``attended_norm`` and ``added_norm`` behind them."""
        super().__init__()
        self.attention_norm, self.attention, self.attended_norm = attention_norm, attention, attended_norm
        self.mlp_norm, self.mlp, self.added_norm = mlp_norm, mlp, added_norm

    def before_attention(
        self, hidden: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Heads]:
        if delta is None:
            normed = self.attention_norm(hidden)
        else:
            hidden, normed = self.attention_norm.after_adding(hidden, delta)
        return hidden, self.attention.project(normed, cos, sin)

    def after_attention(self, hidden: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        delta = self.attended_norm(self.attention.finish(attended))
        hidden, normed = self.mlp_norm.after_adding(hidden, delta)
        return hidden, self.added_norm(self.mlp(normed))


class GemmaStage(DecoderStage):
    norm_offset = 1.0
    has_qk_norm: ClassVar[bool]

    @classmethod
    def make_layer(cls, config: ModelConfig, layer: int, place: LayerPlace) -> GemmaLayer:
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
            attention_norm=norm(f"{name}.input_layernorm", width),
            attention=attention,
            attended_norm=norm(f"{name}.post_attention_layernorm", width),
            mlp_norm=norm(f"{name}.pre_feedforward_layernorm", width),
            mlp=GatedMLP(f"{name}.mlp", width, config.intermediate_size, gate, dtype=place.dtype, device=device),
            added_norm=norm(f"{name}.post_feedforward_layernorm", width),
        )


class Gemma2Stage(GemmaStage):
    has_qk_norm = False


class Gemma3Stage(GemmaStage):
    has_qk_norm = True
