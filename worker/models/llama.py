"""How does a Llama compute? Also SmolLM2, TinyLlama and others that are Llamas by another name."""

from kernels.silu_mul import silu_mul
from worker.layers.attention import Attention, layer_name
from worker.layers.gated_mlp import GatedMLP
from worker.layers.pre_norm import PreNormLayer
from worker.model_config import ModelConfig
from worker.models.decoder import DecoderStage, LayerPlace


class LlamaStage(DecoderStage):
    @classmethod
    def make_layer(cls, config: ModelConfig, layer: int, place: LayerPlace) -> PreNormLayer:
        name, width, device = layer_name(layer), config.hidden_size, place.device
        return PreNormLayer(
            cls.make_norm(config, f"{name}.input_layernorm", width, device),
            Attention(
                config, layer, qkv_bias=config.attention_bias, out_bias=config.attention_bias, backend=place.backend,
                dtype=place.dtype, device=device,
            ),
            cls.make_norm(config, f"{name}.post_attention_layernorm", width, device),
            GatedMLP(
                f"{name}.mlp", width, config.intermediate_size, silu_mul, bias=config.mlp_bias, dtype=place.dtype,
                device=device,
            ),
        )  # fmt: skip
