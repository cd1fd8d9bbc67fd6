"""How does a GPU prepare a step's inputs? In one launch: a program for each sequence's tokens, and one for padding."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import Launch

_WIDTH = 256


def step_inputs(
    rows: Tensor,
    query_starts: Tensor,
    num_computed: Tensor,
    token_ids: Tensor,
    block_tables: Tensor,
    block_size: int,
    num_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``kernels.step_inputs``."""
    ids, positions, slots = torch.empty(3, num_tokens, dtype=torch.int64, device=rows.device)
    seq_lens = torch.empty(rows.shape[0], dtype=torch.int32, device=rows.device)
    step_inputs_launch(
        (ids, positions, slots, seq_lens), rows, query_starts, num_computed, token_ids, block_tables, block_size
    ).run()
    return ids, positions, slots, seq_lens


def step_inputs_launch(
    out: tuple[Tensor, Tensor, Tensor, Tensor],
    rows: Tensor,
    query_starts: Tensor,
    num_computed: Tensor,
    token_ids: Tensor,
    block_tables: Tensor,
    block_size: int,
) -> Launch:
    """``out``: ids, positions, slots and sequence lengths."""
    ids, positions, slots, seq_lens = out
    return Launch(
        kernel=step_inputs_kernel,
        grid=(rows.shape[0] + 1,),
        arguments={
            "ids": ids, "positions": positions, "slots": slots, "seq_lens": seq_lens, "rows": rows,
            "query_starts": query_starts, "num_computed": num_computed, "token_ids": token_ids,
            "block_tables": block_tables, "num_seqs": rows.shape[0], "num_tokens": ids.shape[0],
            "row_stride": token_ids.stride(0), "table_stride": block_tables.stride(0), "BLOCK_SIZE": block_size,
            "WIDTH": _WIDTH,
        },
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"], do_not_specialize_on_alignment=["positions", "slots"])
def step_inputs_kernel(
    ids, positions, slots, seq_lens, rows, query_starts, num_computed, token_ids, block_tables, num_seqs, num_tokens,
    row_stride, table_stride, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    start = tl.load(query_starts + seq)
    if seq == num_seqs:
        for token in range(start, num_tokens, WIDTH):
            places = token + tl.arange(0, WIDTH)
            mask = places < num_tokens
            nothing = tl.zeros((WIDTH,), tl.int64)
            tl.store(ids + places, nothing, mask=mask)
            tl.store(positions + places, nothing, mask=mask)
            tl.store(slots + places, nothing - 1, mask=mask)
    else:
        end = tl.load(query_starts + seq + 1)
        row = tl.load(rows + seq)
        computed = tl.load(num_computed + seq)
        for token in range(start, end, WIDTH):
            places = token + tl.arange(0, WIDTH)
            mask = places < end
            position = computed + places - start
            block = tl.load(block_tables + row * table_stride + position // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
            token_id = tl.load(token_ids + row * row_stride + position, mask=mask, other=0)
            tl.store(ids + places, token_id.to(tl.int64), mask=mask)
            tl.store(positions + places, position.to(tl.int64), mask=mask)
            tl.store(slots + places, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=mask)
        tl.store(seq_lens + seq, computed + end - start)
