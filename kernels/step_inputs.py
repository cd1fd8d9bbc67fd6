"""A step's token ids, positions, slots and lengths, from the rows that it schedules."""

import torch
from torch import Tensor

from kernels.gpu.dispatch import triton_for


def step_inputs(
    rows: Tensor,
    query_starts: Tensor,
    num_computed: Tensor,
    token_ids: Tensor,
    block_tables: Tensor,
    block_size: int,
    num_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a step computes: of each row the tokens that follow the computed ones, as many as its queries.

    Shapes:
        rows:         [S] int64       which row of the state each sequence is in
        query_starts: [S + 1] int32   tokens of sequence s: query_starts[s] up to query_starts[s + 1]
        num_computed: [S] int32       tokens of it that are in the cache already
        token_ids:    [R, L] int32    of every row's sequence
        block_tables: [R, W] int32    of every row
        returns       ids, positions, slots [T] int64 and seq_lens [S] int32, with T = ``num_tokens``

    Tokens from query_starts[S] on are padding: id and position 0, slot -1.

    Bytes: ids, positions and slots written, ids and a table entry for each read.
    """
    num_seqs = rows.shape[0]
    if query_starts.shape != (num_seqs + 1,) or num_computed.shape != (num_seqs,):
        raise ValueError(f"{query_starts.numel()} starts and {num_computed.numel()} counts for {num_seqs} rows")
    gpu = triton_for(rows, query_starts, num_computed, token_ids, block_tables)
    if gpu is not None:
        return gpu.step_inputs(rows, query_starts, num_computed, token_ids, block_tables, block_size, num_tokens)
    return step_inputs_definition(rows, query_starts, num_computed, token_ids, block_tables, block_size, num_tokens)


def step_inputs_definition(
    rows: Tensor,
    query_starts: Tensor,
    num_computed: Tensor,
    token_ids: Tensor,
    block_tables: Tensor,
    block_size: int,
    num_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_queries = query_starts.diff()
    owners = torch.repeat_interleave(num_queries)  # [T]: which sequence each token is of
    padding = (0, num_tokens - owners.shape[0])
    positions = torch.arange(owners.shape[0], device=rows.device) - query_starts[owners] + num_computed[owners]
    blocks = block_tables[rows[owners], positions // block_size].long()
    slots = blocks * block_size + positions % block_size
    ids = token_ids[rows[owners], positions].long()
    ids, positions = torch.nn.functional.pad(ids, padding), torch.nn.functional.pad(positions, padding)
    return ids, positions, torch.nn.functional.pad(slots, padding, value=-1), num_computed + num_queries
