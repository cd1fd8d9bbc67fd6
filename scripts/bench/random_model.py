"""A random Llama of a chosen size, in Hugging Face layout, for when only its speed matters."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file


def write_random_model(
    folder: Path,
    *,
    num_layers: int = 8,
    hidden_size: int = 768,
    intermediate_size: int = 2048,
    num_heads: int = 12,
    num_kv_heads: int = 4,
    vocab_size: int = 4096,
    max_position_embeddings: int = 2048,
    seed: int = 0,
) -> Path:
    """Write it into ``folder``, which is made, in float32 and without a tokenizer; about 107 MB in bfloat16 as it is."""
    draw = np.random.Generator(np.random.Philox(seed))
    head_size = hidden_size // num_heads

    def normal(*shape: int) -> NDArray[np.float32]:
        return draw.standard_normal(shape, dtype=np.float32) * np.float32(0.02)

    tensors = {
        "model.embed_tokens.weight": normal(vocab_size, hidden_size),
        "model.norm.weight": np.ones(hidden_size, np.float32),
    }
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}self_attn.q_proj.weight": normal(num_heads * head_size, hidden_size),
            f"{prefix}self_attn.k_proj.weight": normal(num_kv_heads * head_size, hidden_size),
            f"{prefix}self_attn.v_proj.weight": normal(num_kv_heads * head_size, hidden_size),
            f"{prefix}self_attn.o_proj.weight": normal(hidden_size, num_heads * head_size),
            f"{prefix}mlp.gate_proj.weight": normal(intermediate_size, hidden_size),
            f"{prefix}mlp.up_proj.weight": normal(intermediate_size, hidden_size),
            f"{prefix}mlp.down_proj.weight": normal(hidden_size, intermediate_size),
            f"{prefix}input_layernorm.weight": np.ones(hidden_size, np.float32),
            f"{prefix}post_attention_layernorm.weight": np.ones(hidden_size, np.float32),
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size,
        "hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "hidden_act": "silu",
        "max_position_embeddings": max_position_embeddings, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
        "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder
