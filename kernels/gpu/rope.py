"""How does a GPU turn queries and keys? One program for some heads of a token; every scaling is in the angles."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import Launch, next_power_of_2

_ELEMENTS = 2048


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """As ``kernels.rope``."""
    rope_launch(x, cos, sin).run()


def rope_launch(x: Tensor, cos: Tensor, sin: Tensor) -> Launch:
    num_tokens, num_heads, head_size = x.shape
    width = next_power_of_2(head_size // 2)
    heads = min(next_power_of_2(num_heads), max(1, _ELEMENTS // (2 * width)))
    return Launch(
        kernel=rope_kernel,
        grid=(num_tokens, -(-num_heads // heads)),
        arguments={
            "x": x, "cos": cos, "sin": sin, "token_stride": x.stride(0), "head_stride": x.stride(1),
            "stride": x.stride(2), "cos_stride": cos.stride(0), "sin_stride": sin.stride(0),
            "NUM_HEADS": num_heads, "HALF": head_size // 2, "HEADS": heads, "WIDTH": width,
        },
        num_warps=min(4, max(1, heads * width // 256)),
    )  # fmt: skip


@triton.jit
def rope_kernel(
    x, cos, sin, token_stride, head_stride, stride, cos_stride, sin_stride,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, WIDTH)
    is_column = columns < HALF
    mask = (heads < NUM_HEADS) & is_column[None, :]
    cosines = tl.load(cos + token * cos_stride + columns, mask=is_column, other=0.0)[None, :]
    sines = tl.load(sin + token * sin_stride + columns, mask=is_column, other=0.0)[None, :]
    firsts = x + token * token_stride + heads * head_stride + columns[None, :] * stride
    first = tl.load(firsts, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(firsts + HALF * stride, mask=mask, other=0.0).to(tl.float32)
    tl.store(firsts, (first * cosines - second * sines).to(x.dtype.element_ty), mask=mask)
    tl.store(firsts + HALF * stride, (second * cosines + first * sines).to(x.dtype.element_ty), mask=mask)
