"""The gate of a Llama MLP: silu(gate) * up."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from kernels.cpu.native import DTYPES, native_for
from kernels.gpu.dispatch import triton_for


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu of the left half of each row times its right half; computed in float32, rounded once.

    Shapes:
        gate_up: [T, 2 * I]; not changed
        returns  [T, I]

    Bytes: gate_up read, half of it written.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"rows of {gate_up.shape[-1]} elements have no two halves")
    gpu = triton_for(gate_up)
    if gpu is not None:
        return gpu.gate_mul(gate_up, "silu")
    native = native_for(gate_up)
    if native is None or not gate_up.is_contiguous():
        return silu_mul_definition(gate_up)
    width = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype)
    native.silu_mul(
        out.data_ptr(),
        gate_up.data_ptr(),
        out.numel() // max(width, 1),
        width,
        DTYPES[out.dtype],
        torch.get_num_threads(),
    )
    return out


def silu_mul_definition(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (silu(gate.float()) * up.float()).to(gate_up.dtype)
