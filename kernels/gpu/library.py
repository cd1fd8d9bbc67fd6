"""All that a GPU computes with Triton; who imports this imports triton."""

from kernels.gpu.gate_mul import gate_mul
from kernels.gpu.kv_cache import append_kv
from kernels.gpu.paged_attention import paged_attention
from kernels.gpu.rms_norm import add_rms_norm, rms_norm
from kernels.gpu.rope import apply_rope

__all__ = ["add_rms_norm", "append_kv", "apply_rope", "gate_mul", "paged_attention", "rms_norm"]
