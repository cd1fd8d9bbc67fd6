"""How does a layer attend? Projections, norms and turns around what the backend does."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernels.rope import apply_rope
from worker.attention import AttentionBackend
from worker.layers.linear import Linear
from worker.layers.norm import RMSNorm
from worker.model_config import ModelConfig


class Heads(NamedTuple):
    """What a layer attends with, and where the result goes."""

    q: Tensor
    """[T, H, D]"""
    k: Tensor
    """[T, G, D]"""
    v: Tensor
    """[T, G, D]"""
    attended: Tensor
    """[T, H, D], to be filled."""


class Attention(nn.Module):
    """Attention of one layer of a model; families differ in what they pass here."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            layer: global number, by which the model says whether this layer has a window.
            q_norm, k_norm: over the elements of each head, before positions turn them; both or none.
        """
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size = config.num_heads, config.num_kv_heads, config.head_size
        self.scale = config.attention_scale
        self.window = config.windows[layer]
        self.soft_cap = config.attention_soft_cap
        self.backend = backend
        self.q_norm, self.k_norm = q_norm, k_norm
        name = attention_name(layer)
        q_width, kv_width = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        self.qkv = Linear(
            config.hidden_size,
            {f"{name}.q_proj": q_width, f"{name}.k_proj": kv_width, f"{name}.v_proj": kv_width},
            bias=qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.out = Linear(q_width, {f"{name}.o_proj": config.hidden_size}, bias=out_bias, dtype=dtype, device=device)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> Heads:
        """[T, C] -> what is attended with; ``attended`` is not filled yet."""
        heads = self.qkv(x).view(x.shape[0], -1, self.head_size)  # [T, H + 2 * G, D]
        qk, v = heads.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        q, k = self._turned(qk, cos, sin)
        return Heads(q, k, v, torch.empty_like(q, memory_format=torch.contiguous_format))

    def attend(self, heads: Heads, cache: Tensor, metadata: Any) -> None:
        """Write keys and values to the cache and fill ``attended``."""
        q, k, v, attended = heads
        self.backend.write(cache, k, v, metadata)
        self.backend.attend(
            q, cache, metadata, self.scale, window=self.window, soft_cap=self.soft_cap, out=attended
        )

    def finish(self, attended: Tensor) -> Tensor:
        """[T, H, D] -> [T, C]"""
        return self.out(attended.flatten(1))

    def _turned(self, qk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, H, D] and keys [T, G, D], with their positions."""
        q, k = qk.split((self.num_heads, self.num_kv_heads), dim=1)
        if self.q_norm is None or self.k_norm is None:
            apply_rope(qk, cos, sin)
            return q, k
        # Copied, as the norm's native code wants rows that lie behind each other.
        q, k = self.q_norm(q.contiguous()), self.k_norm(k.contiguous())
        apply_rope(q, cos, sin)
        apply_rope(k, cos, sin)
        return q, k


def layer_name(layer: int) -> str:
    """As checkpoints call it."""
    return f"model.layers.{layer}"


def attention_name(layer: int) -> str:
    return f"{layer_name(layer)}.self_attn"
