"""How does a GPU apply the gate of an MLP: silu or gelu of a row's left half times its right half?"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import Launch, next_power_of_2

_ELEMENTS = 1024
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_TWO_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)


def gate_mul(gate_up: Tensor, activation: str) -> Tensor:
    """As ``kernels.silu_mul`` and ``kernels.gelu_mul``; activation: silu, gelu or gelu_tanh."""
    gate_up = gate_up.contiguous()
    out = torch.empty(
        *gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=gate_up.dtype, device=gate_up.device
    )  # fmt: skip
    gate_mul_launch(out, gate_up, activation).run()
    return out


def gate_mul_launch(out: Tensor, gate_up: Tensor, activation: str) -> Launch:
    """Of contiguous tensors."""
    num_columns = out.shape[-1]
    width = min(_ELEMENTS, next_power_of_2(num_columns))
    return Launch(
        kernel=gate_mul_kernel,
        grid=(out.numel() // max(num_columns, 1), -(-num_columns // width)),
        arguments={
            "out": out, "gate_up": gate_up, "NUM_COLUMNS": num_columns, "WIDTH": width, "ACTIVATION": activation,
        },
        num_warps=min(4, max(1, width // 256)),
    )  # fmt: skip


@triton.jit
def gate_mul_kernel(
    out, gate_up, NUM_COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = columns < NUM_COLUMNS
    places = gate_up + row * (2 * NUM_COLUMNS) + columns
    gate = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(places + NUM_COLUMNS, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        share = 1.0 / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        share = 0.5 * (1.0 + tl.erf(gate * _SQRT_HALF))
    else:
        # (1 + tanh y) / 2 is the logistic function of 2 y.
        bent = gate + 0.044715 * gate * gate * gate
        share = 1.0 / (1.0 + tl.exp(-bent * _TWO_SQRT_2_OVER_PI))
    tl.store(out + row * NUM_COLUMNS + columns, (gate * share * up).to(out.dtype.element_ty), mask=mask)
