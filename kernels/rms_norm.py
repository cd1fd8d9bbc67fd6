"""Root-mean-square normalisation of each row, alone or of a sum that is kept as well."""

import torch
from torch import Tensor

from kernels.cpu.native import DTYPES, native_for
from kernels.gpu.dispatch import triton_for


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row divided by its root mean square, times ``weight``; computed in float32, rounded once.

    Shapes:
        x:      [T, C] float; not changed
        weight: [C]

    Bytes: x read and written once.
    """
    if x.shape[-1:] != weight.shape:
        raise ValueError(f"weight of shape {tuple(weight.shape)} for rows of {x.shape[-1]}")
    gpu = triton_for(x, weight)
    if gpu is not None:
        return gpu.rms_norm(x, weight, eps)
    native = native_for(x)
    if native is None or not _is_plain(x, weight):
        return rms_norm_definition(x, weight, eps)
    out = torch.empty_like(x)
    native.rms_norm(
        out.data_ptr(), None, x.data_ptr(), None, weight.data_ptr(),
        x.numel() // x.shape[-1], x.shape[-1], eps, DTYPES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of ``x`` and ``delta``, rounded to their type, and the norm of that sum.

    Shapes:
        x, delta: [T, C] float, of one type; not changed
        weight:   [C]
        returns   [T, C] twice

    Bytes: x and delta read, both results written, once.
    """
    if x.shape != delta.shape or x.dtype != delta.dtype or x.shape[-1:] != weight.shape:
        raise ValueError(f"x {tuple(x.shape)}, delta {tuple(delta.shape)}, weight {tuple(weight.shape)} do not fit")
    gpu = triton_for(x, delta, weight)
    if gpu is not None:
        return gpu.add_rms_norm(x, delta, weight, eps)
    native = native_for(x, delta)
    if native is None or not _is_plain(x, weight) or not delta.is_contiguous():
        return add_rms_norm_definition(x, delta, weight, eps)
    out, total = torch.empty_like(x), torch.empty_like(x)
    native.rms_norm(
        out.data_ptr(), total.data_ptr(), x.data_ptr(), delta.data_ptr(), weight.data_ptr(),
        x.numel() // x.shape[-1], x.shape[-1], eps, DTYPES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return total, out


def rms_norm_definition(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm_definition(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + delta
    return total, rms_norm_definition(total, weight, eps)


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    return x.is_contiguous() and weight.is_contiguous() and weight.dtype == torch.float32
