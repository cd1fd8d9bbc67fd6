"""What does a step look like with padding, so that it has the shape of a graph?

A padded token has slot -1, so that nothing is written for it, and is of a sequence that holds nothing, or of none: it sees
no key, and its row comes out of attention as zeros. No other row looks at it.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from worker.attention import CommonAttentionMetadata
from worker.graphs.dispatcher import BatchDescriptor


def padded_inputs(common: CommonAttentionMetadata, shape: BatchDescriptor) -> CommonAttentionMetadata:
    """The step with padding behind its tokens and, unless the shape takes any number of them, behind its sequences."""
    slots = _padded(common.slots, shape.num_tokens, -1)
    num_seqs = common.seq_lens.shape[0] if shape.num_requests is None else shape.num_requests
    if shape.is_uniform_decode:
        query_starts = torch.arange(num_seqs + 1, dtype=common.query_starts.dtype)
    else:
        query_starts = _padded(common.query_starts, num_seqs + 1, common.query_starts[-1].item())
    block_table = common.block_table
    return CommonAttentionMetadata(
        query_starts=query_starts,
        seq_lens=_padded(common.seq_lens, num_seqs, 0),
        block_table=pad(block_table, (0, 0, 0, num_seqs - block_table.shape[0])),
        slots=slots,
        num_decodes=num_seqs if shape.is_uniform_decode else common.num_decodes,
        max_seq_len=common.max_seq_len,
    )


def padding_alone(shape: BatchDescriptor) -> CommonAttentionMetadata:
    """A step of this shape that computes nothing for anybody."""
    nothing = torch.zeros(0, dtype=torch.int32)
    no_step = CommonAttentionMetadata(
        query_starts=torch.zeros(1, dtype=torch.int32),
        seq_lens=nothing,
        block_table=nothing.view(0, 0),
        slots=nothing.to(torch.int64),
        num_decodes=0,
        max_seq_len=0,
    )
    return padded_inputs(no_step, shape)


def _padded(values: Tensor, length: int, value: float) -> Tensor:
    """[N] -> [length]"""
    return pad(values, (0, length - values.shape[0]), value=value)
