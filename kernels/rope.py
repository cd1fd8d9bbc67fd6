"""Rotary position embedding: pairs of a head's elements are turned by angles that grow with the position."""

import torch
from torch import Tensor

from kernels.cpu.native import DTYPES, native_for
from kernels.gpu.dispatch import triton_for


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn element i of each head together with element i + D / 2; computed in float32, rounded once.

    Shapes:
        x:        [T, N, D] for any number N of heads
        cos, sin: [T, D / 2] float32

    Mutates ``x``, which may be part of a wider tensor.

    Bytes: x read and written once.
    """
    half = x.shape[-1] // 2
    if x.shape[-1] % 2 or cos.shape != (x.shape[0], half) or sin.shape != cos.shape:
        raise ValueError(f"angles {tuple(cos.shape)} and {tuple(sin.shape)} do not fit x of shape {tuple(x.shape)}")
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise TypeError(f"angles must be float32, got {cos.dtype} and {sin.dtype}")
    gpu = triton_for(x, cos, sin)
    if gpu is not None:
        gpu.apply_rope(x, cos, sin)
        return
    native = native_for(x)
    is_plain = x.stride()[1:] == (x.shape[2], 1) and cos.is_contiguous() and sin.is_contiguous()
    if native is None or not is_plain:
        x.copy_(apply_rope_definition(x, cos, sin))
    else:
        native.rope(
            x.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            x.shape[0], x.stride(0), x.shape[1], x.shape[2], DTYPES[x.dtype], torch.get_num_threads(),
        )  # fmt: skip


def apply_rope_definition(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
