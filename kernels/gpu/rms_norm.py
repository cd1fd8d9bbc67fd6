"""How does a GPU normalise rows? A program holds one long row, or several short ones, and adds first if asked to."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import Launch, next_power_of_2, rows_of, warps_for

_ELEMENTS = 1024
"""Of short rows, such as heads, a program takes as many as hold this."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As ``kernels.rms_norm``."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rms_norm_launch(out, None, x, None, weight, eps).run()
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As ``kernels.rms_norm``."""
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    rms_norm_launch(out, total, x, delta, weight, eps).run()
    return total, out


def rms_norm_launch(
    out: Tensor, total: Tensor | None, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> Launch:
    """``out`` and ``total`` are contiguous; x and delta may be parts of wider tensors."""
    num_columns = x.shape[-1]
    num_rows, num_heads, token_stride, head_stride = rows_of(x)
    delta_token_stride, delta_head_stride = (0, 0) if delta is None else rows_of(delta)[2:]
    if delta is not None and rows_of(delta)[1] != num_heads:
        # One of them is regular only with its heads taken one by one.
        return rms_norm_launch(out, total, x.contiguous(), delta.contiguous(), weight, eps)
    width = next_power_of_2(num_columns)
    rows = max(1, _ELEMENTS // width)
    return Launch(
        kernel=rms_norm_kernel,
        grid=(-(-num_rows // rows),),
        arguments={
            "out": out, "total": total, "x": x, "delta": delta, "weight": weight, "num_rows": num_rows, "eps": eps,
            "token_stride": token_stride, "head_stride": head_stride,
            "delta_token_stride": delta_token_stride, "delta_head_stride": delta_head_stride,
            "NUM_HEADS": num_heads, "NUM_COLUMNS": num_columns, "ROWS": rows, "WIDTH": width, "ADDS": delta is not None,
        },
        num_warps=warps_for(rows * width),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    out, total, x, delta, weight, num_rows, eps, token_stride, head_stride, delta_token_stride, delta_head_stride,
    NUM_HEADS: tl.constexpr, NUM_COLUMNS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    is_column = columns < NUM_COLUMNS
    mask = (rows < num_rows)[:, None] & is_column[None, :]
    tokens, heads = rows // NUM_HEADS, rows % NUM_HEADS
    starts = tokens * token_stride + heads * head_stride
    wide = tl.load(x + starts[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        starts = tokens * delta_token_stride + heads * delta_head_stride
        wide += tl.load(delta + starts[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        rounded = wide.to(total.dtype.element_ty)
        tl.store(total + rows[:, None] * NUM_COLUMNS + columns[None, :], rounded, mask=mask)
        wide = rounded.to(tl.float32)
    scales = tl.rsqrt(tl.sum(wide * wide, 1) / NUM_COLUMNS + eps)
    weights = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    normed = wide * scales[:, None] * weights[None, :]
    tl.store(out + rows[:, None] * NUM_COLUMNS + columns[None, :], normed.to(out.dtype.element_ty), mask=mask)
