"""Tokens that a grammar does not allow get no probability."""

import torch
from torch import Tensor

from kernels.cpu.native import native_for
from kernels.gpu.dispatch import triton_for
from kernels.penalties import unpack_bits


def apply_token_mask(logits: Tensor, allowed: Tensor, rows: Tensor) -> None:
    """Make the logits of tokens that are not allowed -inf.

    Shapes:
        logits:  [S, V] float32
        allowed: [N, V / 32] int32  bit i of word w: token 32 w + i is allowed; rounded up
        rows:    [N] int64          whose logits each mask is for; a row appears once

    Mutates those rows of ``logits``.

    Bytes: masks read; of words with a forbidden token, logits written.
    """
    num_words = -(-logits.shape[1] // 32)
    if logits.dtype != torch.float32 or allowed.dtype != torch.int32:
        raise TypeError(f"logits must be float32 and masks int32, got {logits.dtype} and {allowed.dtype}")
    if allowed.shape != (rows.shape[0], num_words):
        raise ValueError(f"masks {tuple(allowed.shape)} for {rows.shape[0]} rows of {logits.shape[1]} tokens")
    gpu = triton_for(logits, allowed, rows)
    if gpu is not None:
        gpu.apply_token_mask(logits, allowed, rows)
        return
    library = native_for(logits)
    if library is None or not all(tensor.is_contiguous() for tensor in (logits, allowed, rows)):
        logits[rows] = apply_token_mask_definition(logits[rows], allowed)
    else:
        pointers = (logits.data_ptr(), allowed.data_ptr(), rows.data_ptr())
        library.token_mask(*pointers, rows.shape[0], logits.shape[1], torch.get_num_threads())


def apply_token_mask_definition(logits: Tensor, allowed: Tensor) -> Tensor:
    return logits.masked_fill(~unpack_bits(allowed, logits.shape[1]), -torch.inf)
