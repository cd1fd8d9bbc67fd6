"""Root-mean-square normalisation of each row."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row divided by its root mean square, times ``weight``; computed in float32, rounded once.

    Shapes:
        x:      [T, C] float; not changed
        weight: [C]

    Bytes: x read and written once.
    """
    if x.shape[-1:] != weight.shape:
        raise ValueError(f"weight of shape {tuple(weight.shape)} for rows of {x.shape[-1]}")
    return rms_norm_definition(x, weight, eps)


def rms_norm_definition(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)
