"""Tiny random checkpoints of every family, written as ``tests.tiny`` writes its Llamas: from fixed seeds, without torch.

Sizes and rules are chosen so that leaving one out shows: heads whose size is not the width divided by their number, a
query scalar that is not the head size, caps that bend, norms and biases that are not ones and zeros, and a window of 16.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests import tiny

WINDOW = 16

_GEMMA = {
    "head_dim": 48, "query_pre_attn_scalar": 24, "hidden_activation": "gelu_pytorch_tanh", "hidden_act": None,
    "tie_word_embeddings": True, "sliding_window": WINDOW,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW, "head_dim": 48},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True,
        "sliding_window": WINDOW, "max_window_layers": 3,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 48},
    "gemma2": _GEMMA | {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attn_logit_softcapping": 6.0,
        "final_logit_softcapping": 12.0,
    },
    "gemma3": _GEMMA | {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window_pattern": 3,
        "rope_theta": 50_000.0, "rope_local_base_freq": 2_000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
}  # fmt: skip
"""Entries of config.json beside the sizes. With five layers: Mistral has a window in all, Qwen 2 in the last two, Qwen 3
in none, Gemma 2 in every other one from the first on, Gemma 3 in all but the third."""


def random_family(
    folder: Path,
    family: str,
    *,
    num_layers: int = 5,
    hidden_size: int = 128,
    intermediate_size: int = 112,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vocab_size: int = 512,
    max_position_embeddings: int = 1024,
    std: float = 0.2,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A random model of one of ``FAMILIES`` in float32, with ``random_llama``'s tokenizer. ``config``: entries that win."""
    extra = FAMILIES[family] | dict(config or {})
    tied = bool(extra.get("tie_word_embeddings", False))
    tiny.write_config(
        folder, num_layers=num_layers, hidden_size=hidden_size, intermediate_size=intermediate_size,
        num_heads=num_heads, num_kv_heads=num_kv_heads, vocab_size=vocab_size, tied=tied,
        max_position_embeddings=max_position_embeddings, extra=extra,
    )  # fmt: skip
    draw = np.random.Generator(np.random.Philox(seed))
    head_size = extra.get("head_dim") or hidden_size // num_heads
    shapes = {"model.embed_tokens.weight": (vocab_size, hidden_size), "model.norm.weight": (hidden_size,)}
    for layer in range(num_layers):
        of_layer = _layer_shapes(family, hidden_size, intermediate_size, num_heads, num_kv_heads, head_size)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    if not tied:
        shapes["lm_head.weight"] = (vocab_size, hidden_size)
    norm_mean = 0.0 if family.startswith("gemma") else 1.0

    def drawn(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        values = draw.standard_normal(shape, dtype=np.float32) * np.float32(std)
        return values + np.float32(norm_mean) if "norm" in name else values

    tiny.write_tensors(folder, {name: drawn(name, shape) for name, shape in shapes.items()}, 1)
    tiny.write_tokenizer(
        folder, tiny.byte_vocabulary(vocab_size), merges=[tiny.MERGED], bos="<s>", eos="</s>", pad="<pad>"
    )
    return folder


def _layer_shapes(
    family: str, width: int, inner: int, num_heads: int, num_kv_heads: int, head_size: int
) -> dict[str, tuple[int, ...]]:
    q, kv = num_heads * head_size, num_kv_heads * head_size
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, width), "self_attn.k_proj.weight": (kv, width),
        "self_attn.v_proj.weight": (kv, width), "self_attn.o_proj.weight": (width, q),
        "mlp.gate_proj.weight": (inner, width), "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner), "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }  # fmt: skip
    if family.startswith("gemma"):
        shapes |= {"pre_feedforward_layernorm.weight": (width,), "post_feedforward_layernorm.weight": (width,)}
    if family in ("qwen3", "gemma3"):
        shapes |= {"self_attn.q_norm.weight": (head_size,), "self_attn.k_norm.weight": (head_size,)}
    if family == "qwen2":
        shapes |= {
            "self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,),
        }  # fmt: skip
    return shapes
