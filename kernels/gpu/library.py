"""All that a GPU computes with Triton; who imports this imports triton."""

from kernels.gpu.gate_mul import gate_mul
from kernels.gpu.kv_cache import append_kv
from kernels.gpu.logits import apply_penalties, apply_token_mask
from kernels.gpu.noise import gumbel_noise
from kernels.gpu.paged_attention import Rule, decode_launches, paged_attention, ragged_launch
from kernels.gpu.rms_norm import add_rms_norm, rms_norm
from kernels.gpu.rope import apply_rope
from kernels.gpu.sampling import draw, most_likely
from kernels.gpu.step_inputs import step_inputs

__all__ = [
    "Rule",
    "add_rms_norm",
    "append_kv",
    "apply_penalties",
    "apply_rope",
    "apply_token_mask",
    "decode_launches",
    "draw",
    "gate_mul",
    "gumbel_noise",
    "most_likely",
    "paged_attention",
    "ragged_launch",
    "rms_norm",
    "step_inputs",
]
