"""Rotary position embedding: pairs of a head's elements are turned by angles that grow with the position."""

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn element i of each head together with element i + D / 2; computed in float32, rounded once.

    Shapes:
        x:        [T, N, D] for any number N of heads; not changed
        cos, sin: [T, D / 2] float32

    Bytes: x read and written once.
    """
    half = x.shape[-1] // 2
    if x.shape[-1] % 2 or cos.shape != (x.shape[0], half) or sin.shape != cos.shape:
        raise ValueError(f"angles {tuple(cos.shape)} and {tuple(sin.shape)} do not fit x of shape {tuple(x.shape)}")
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise TypeError(f"angles must be float32, got {cos.dtype} and {sin.dtype}")
    return apply_rope_definition(x, cos, sin)


def apply_rope_definition(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
