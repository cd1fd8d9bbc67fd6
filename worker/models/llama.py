"""How does a Llama compute? Also SmolLM2, TinyLlama and others that are Llamas by another name."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kernels.rope import apply_rope
from kernels.silu_mul import silu_mul
from worker.attention import AttentionBackend
from worker.layers.embedding import Embedding
from worker.layers.linear import Linear
from worker.layers.norm import RMSNorm
from worker.layers.rotary import RotaryAngles
from worker.layers.weight_format import borrowed_format
from worker.layers.weight_slot import WeightSlot
from worker.model_config import ModelConfig
from worker.models.stage import BoundaryTensor, StageModel

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.")


class LlamaAttention(nn.Module):
    def __init__(
        self, config: ModelConfig, name: str, backend: AttentionBackend, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size = config.num_heads, config.num_kv_heads, config.head_size
        self.scale = config.head_size**-0.5
        self.backend = backend
        q_width, kv_width = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        self.qkv = Linear(
            config.hidden_size,
            {f"{name}.q_proj": q_width, f"{name}.k_proj": kv_width, f"{name}.v_proj": kv_width},
            bias=config.attention_bias,
            dtype=dtype,
            device=device,
        )
        self.out = Linear(
            q_width, {f"{name}.o_proj": config.hidden_size}, bias=config.attention_bias, dtype=dtype, device=device
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, metadata: Any) -> Tensor:
        heads = self.qkv(x).view(x.shape[0], -1, self.head_size)  # [T, H + 2 * G, D]
        qk, v = heads.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        apply_rope(qk, cos, sin)
        q, k = qk.split((self.num_heads, self.num_kv_heads), dim=1)
        self.backend.write(cache, k, v, metadata)
        return self.out(self.backend.attend(q, cache, metadata, self.scale).flatten(1))


class LlamaMLP(nn.Module):
    def __init__(self, config: ModelConfig, name: str, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        width = config.intermediate_size
        self.gate_up = Linear(
            config.hidden_size,
            {f"{name}.gate_proj": width, f"{name}.up_proj": width},
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
        )
        self.down = Linear(
            width, {f"{name}.down_proj": config.hidden_size}, bias=config.mlp_bias, dtype=dtype, device=device
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu_mul(self.gate_up(x)))


class LlamaLayer(nn.Module):
    def __init__(
        self, config: ModelConfig, layer: int, backend: AttentionBackend, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        name = f"model.layers.{layer}"
        self.attention_norm = RMSNorm(f"{name}.input_layernorm", config.hidden_size, config.rms_norm_eps, device=device)
        self.attention = LlamaAttention(config, f"{name}.self_attn", backend, dtype, device)
        self.mlp_norm = RMSNorm(
            f"{name}.post_attention_layernorm", config.hidden_size, config.rms_norm_eps, device=device
        )
        self.mlp = LlamaMLP(config, f"{name}.mlp", dtype, device)

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


class LlamaStage(StageModel):
    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        *,
        is_first: bool,
        is_last: bool,
        dtype: torch.dtype,
        device: torch.device,
        backend: AttentionBackend,
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_range = layers
        self.is_first, self.is_last = is_first, is_last
        self.dtype = dtype
        self.angles = RotaryAngles(config.rope, config.head_size, device=device)
        self.embedding = (
            Embedding(EMBEDDING, config.vocab_size, config.hidden_size, dtype=dtype, device=device)
            if is_first
            else None
        )
        self.layers = nn.ModuleList(LlamaLayer(config, layer, backend, dtype, device) for layer in layers)
        self.norm = RMSNorm(FINAL_NORM, config.hidden_size, config.rms_norm_eps, device=device) if is_last else None
        self.head = self._make_head(device) if is_last else None

    def boundary(self) -> tuple[BoundaryTensor, ...]:
        return (BoundaryTensor(name="hidden", width=self.config.hidden_size, dtype=self.dtype),)

    def embed(self, token_ids: Tensor) -> Tensor:
        assert self.embedding is not None, "only the first stage embeds"
        return self.embedding(token_ids)

    def forward(
        self, hidden: Tensor, positions: Tensor, caches: Sequence[Tensor], metadata: Sequence[Any]
    ) -> Tensor:
        cos, sin = self.angles(positions)
        delta = None
        for layer, cache, of_layer in zip(self.layers, caches, metadata, strict=True):
            hidden, delta = layer(hidden, delta, cos, sin, cache, of_layer)
        return hidden if delta is None else hidden + delta

    def logits(self, hidden: Tensor) -> Tensor:
        assert self.norm is not None and self.head is not None, "only the last stage has a head"
        return self.head(self.norm(hidden)).float()

    def weight_slots(self) -> dict[str, WeightSlot]:
        slots: dict[str, WeightSlot] = {}
        for module in self._owners():
            slots |= module.weight_slots()
        shared = f"{EMBEDDING}.weight"
        if self.config.tie_word_embeddings and shared in slots:
            slots[shared] = replace(slots[shared], aliases=(f"{HEAD}.weight",))
        return slots

    def owns(self, name: str) -> bool:
        """Layers' tensors by their number; those of no layer of the model belong to everyone, so that one complains."""
        match = _LAYER_NAME.match(name)
        if match and int(match[1]) < self.config.num_layers:
            return int(match[1]) in self.layer_range
        if name == f"{EMBEDDING}.weight":
            return self.is_first
        if name in (f"{FINAL_NORM}.weight", f"{HEAD}.weight"):
            return self.is_last
        return True

    def ignores(self, name: str) -> bool:
        """A tied head's second copy, and tables that old checkpoints carry though they follow from the config."""
        is_copy = name == f"{HEAD}.weight" and self.config.tie_word_embeddings
        return is_copy or name.endswith(".rotary_emb.inv_freq")

    def prepare(self) -> None:
        for module in self._owners():
            if isinstance(module, Linear):
                module.prepare()

    def weight_bytes(self) -> int:
        return sum(module.size_bytes for module in self._owners())

    def _make_head(self, device: torch.device) -> Linear:
        """A tied head computes with the embedding's matrix: a copy with several stages, or where it is packed."""
        config = self.config
        return Linear(
            config.hidden_size,
            {EMBEDDING if config.tie_word_embeddings else HEAD: config.vocab_size},
            bias=False,
            dtype=self.dtype,
            device=device,
            weight=borrowed_format(self.embedding.weight) if config.tie_word_embeddings and self.embedding else None,
        )

    def _owners(self) -> Iterator[Embedding | Linear | RMSNorm]:
        return (module for module in self.modules() if isinstance(module, Embedding | Linear | RMSNorm))
