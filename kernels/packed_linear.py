"""Products with a matrix that was rearranged once, so that a processor's vectors read it from begin to end."""

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from kernels.cpu.native import DTYPES, native_for

PANEL_OUTPUTS = 64
"""Rows of the matrix that lie interleaved, so that a vector holds one pair of inputs of several of them."""

OUT_DTYPES = (torch.bfloat16, torch.float32)


def packed_size(num_outputs: int, num_inputs: int) -> int:
    """Elements of a packed matrix: outputs are padded to whole panels, inputs to pairs."""
    return -(-num_outputs // PANEL_OUTPUTS) * PANEL_OUTPUTS * (num_inputs + num_inputs % 2)


def pack_linear(packed: Tensor, weight: Tensor) -> None:
    """Write ``weight`` into ``packed``.

    Shapes:
        packed: [packed_size] bfloat16
        weight: [outputs, inputs] bfloat16

    Mutates ``packed``.
    """
    num_outputs, num_inputs = weight.shape
    if packed.shape != (packed_size(num_outputs, num_inputs),) or packed.dtype != torch.bfloat16:
        raise ValueError(f"{tuple(packed.shape)} of {packed.dtype} do not hold a packed {tuple(weight.shape)} of bfloat16")
    native = native_for(weight, packed)
    if native is None or not packed.is_contiguous():
        pack_linear_definition(packed, weight)
        return
    weight = weight.contiguous()
    native.pack_linear(packed.data_ptr(), weight.data_ptr(), num_outputs, num_inputs, torch.get_num_threads())


def packed_linear(
    x: Tensor, packed: Tensor, num_outputs: int, bias: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """x W^T + bias, summed in float32 and rounded once. A row's result is the same bits beside any other rows.

    Shapes:
        x:      [T, inputs] bfloat16
        packed: as ``pack_linear`` wrote it
        bias:   [outputs] bfloat16
        returns [T, outputs] of ``dtype``, bfloat16 or float32

    Raises MemoryError when native code has no room for its copy of ``x``.

    Bytes: the matrix once, for every 192 rows or less (with AMX as many as 768 KiB hold); x and the result.
    """
    num_rows, num_inputs = x.shape
    if packed.shape != (packed_size(num_outputs, num_inputs),):
        raise ValueError(f"{tuple(packed.shape)} is no packed matrix of {num_outputs} outputs and {num_inputs} inputs")
    if dtype not in OUT_DTYPES or x.dtype != torch.bfloat16:
        raise ValueError(f"{x.dtype} to {dtype}: rows are bfloat16, and what comes out bfloat16 or float32")
    if bias is not None and bias.shape != (num_outputs,):
        raise ValueError(f"a bias of {tuple(bias.shape)} for {num_outputs} outputs")
    native = native_for(x, packed) if bias is None else native_for(x, packed, bias)
    if native is None or not packed.is_contiguous():
        return packed_linear_definition(x, packed, num_outputs, bias, dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    bias = None if bias is None else bias.contiguous()
    out = torch.empty(num_rows, num_outputs, dtype=dtype)
    failed = native.linear(
        out.data_ptr(),
        x.data_ptr(),
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        num_rows,
        x.stride(0),
        num_outputs,
        num_inputs,
        DTYPES[dtype],
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError(f"no room for {num_rows} rows of {num_inputs} inputs")
    return out


def pack_linear_definition(packed: Tensor, weight: Tensor) -> None:
    num_outputs, num_inputs = weight.shape
    padded = pad(weight, (0, num_inputs % 2, 0, -num_outputs % PANEL_OUTPUTS))
    panels = padded.view(-1, PANEL_OUTPUTS, padded.shape[1] // 2, 2)  # [panels, 64, pairs, 2]
    packed.copy_(panels.transpose(1, 2).flatten())


def packed_linear_definition(
    x: Tensor, packed: Tensor, num_outputs: int, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    num_inputs = x.shape[1]
    panels = packed.view(-1, (num_inputs + 1) // 2, PANEL_OUTPUTS, 2).transpose(1, 2)
    weight = panels.reshape(-1, num_inputs + num_inputs % 2)[:num_outputs, :num_inputs]
    return linear(x.float(), weight.float(), None if bias is None else bias.float()).to(dtype)
