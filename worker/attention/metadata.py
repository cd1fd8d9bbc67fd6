"""What does every attention backend need to know about a step?"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonAttentionMetadata:
    """One step's sequences and where their keys and values lie. All tensors are on the CPU, and nobody changes them."""

    query_starts: Tensor
    """[S + 1] int32: tokens of sequence s are query_starts[s] up to query_starts[s + 1]."""

    seq_lens: Tensor
    """[S] int32: tokens in the cache once this step's are written."""

    block_table: Tensor
    """[S, at least the blocks of the longest sequence] int32; what lies beyond a sequence's blocks is ignored."""

    slots: Tensor
    """[T] int64: slot of each token; -1 marks padding."""

    num_decodes: int
    """Leading sequences with exactly one query token."""

    max_seq_len: int

    def __post_init__(self) -> None:
        num_seqs = self.seq_lens.shape[0]
        assert self.query_starts.shape == (num_seqs + 1,)
        assert self.block_table.shape[0] == num_seqs
        assert 0 <= self.num_decodes <= num_seqs

    def has_padding(self) -> bool:
        """Whether some tokens belong to no sequence, or to one that has nothing in the cache."""
        lengths, num_tokens = self.seq_lens.numpy(), self.slots.shape[0]
        if self.num_decodes == len(lengths) == num_tokens:
            return not lengths.all()
        num_queries = np.diff(self.query_starts.numpy())
        return int(num_queries[lengths > 0].sum()) < num_tokens
