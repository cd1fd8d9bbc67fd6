"""Causal attention of a step's queries to keys and values that lie scattered over the blocks of a cache."""

import torch
from torch import Tensor


def paged_attention(
    q: Tensor, cache: Tensor, query_starts: Tensor, seq_lens: Tensor, block_table: Tensor, scale: float
) -> Tensor:
    """Each query sees its own token's key and all earlier ones of its sequence, in the cache's blocks.

    Shapes:
        q:            [T, H, D]
        cache:        [2, B, K, G, D]   keys at [0], values at [1]; this step's are written already
        query_starts: [S + 1]           tokens of sequence s: query_starts[s] up to query_starts[s + 1]
        seq_lens:     [S]               tokens in the cache; the queries are the last of them
        block_table:  [S, max blocks]   only the blocks that hold tokens are looked at
        returns       [T, H, D], zeros for tokens of no sequence

    Head h reads key head h // (H / G). Slots past a sequence's length may hold anything, NaN included.

    Bytes: the keys and values of every sequence, once.
    """
    if q.dim() != 3 or cache.dim() != 5 or cache.shape[4] != q.shape[2] or q.shape[1] % cache.shape[3]:
        raise ValueError(f"queries {tuple(q.shape)} do not fit a cache of {tuple(cache.shape)}")
    if query_starts.shape[0] != seq_lens.shape[0] + 1 or block_table.shape[0] != seq_lens.shape[0]:
        raise ValueError(
            f"{query_starts.shape[0]} query starts and {block_table.shape[0]} tables for {seq_lens.shape[0]} sequences"
        )
    return paged_attention_definition(q, cache, query_starts, seq_lens, block_table, scale)


def paged_attention_definition(
    q: Tensor, cache: Tensor, query_starts: Tensor, seq_lens: Tensor, block_table: Tensor, scale: float
) -> Tensor:
    out = torch.zeros_like(q)
    block_size = cache.shape[2]
    group = q.shape[1] // cache.shape[3]
    for s, length in enumerate(seq_lens.tolist()):
        start, end = int(query_starts[s]), int(query_starts[s + 1])
        blocks = block_table[s, : -(-length // block_size)].long()
        k, v = cache[:, blocks].flatten(1, 2)[:, :length].float()  # [L, G, D] each
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("thd,lhd->htl", q[start:end].float(), k) * scale
        last_seen = torch.arange(length - (end - start), length, device=q.device)
        hidden = torch.arange(length, device=q.device)[None] > last_seen[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[start:end] = torch.einsum("htl,lhd->thd", weights, v).to(q.dtype)
    return out
