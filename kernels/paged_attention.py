"""Causal attention of a step's queries to keys and values that lie scattered over the blocks of a cache."""

import torch
from torch import Tensor

from kernels.gpu.dispatch import triton_for


def paged_attention(
    q: Tensor,
    cache: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    num_decodes: int = 0,
    max_seq_len: int | None = None,
    has_padding: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Each query sees its own token's key and all earlier ones of its sequence, in the cache's blocks.

    With a ``window`` it sees only the last so many tokens, its own included. A ``soft_cap`` c turns a scaled score x into
    c * tanh(x / c). ``sinks`` are scores, one per head, that take their share of the weight and bring no value.

    Shapes:
        q:            [T, H, D]
        cache:        [2, B, K, G, D]   keys at [0], values at [1]; this step's are written already
        query_starts: [S + 1]           tokens of sequence s: query_starts[s] up to query_starts[s + 1]
        seq_lens:     [S]               tokens in the cache; the queries are the last of them
        block_table:  [S, max blocks]   only the blocks that hold tokens are looked at
        sinks:        [H] float32
        out:          [T, H, D] contiguous, where the result goes; without it a new tensor
        returns       [T, H, D], zeros for tokens of no sequence

    What the caller knows of the batch saves work on a GPU: the first ``num_decodes`` sequences have one query each, the
    first tokens; no sequence is longer than ``max_seq_len``; without ``has_padding`` every token belongs to a sequence.

    Head h reads key head h // (H / G). Slots past a sequence's length may hold anything, NaN included.

    Bytes: the keys and values of every sequence, once.
    """
    if q.dim() != 3 or cache.dim() != 5 or cache.shape[4] != q.shape[2] or q.shape[1] % cache.shape[3]:
        raise ValueError(f"queries {tuple(q.shape)} do not fit a cache of {tuple(cache.shape)}")
    if query_starts.shape[0] != seq_lens.shape[0] + 1 or block_table.shape[0] != seq_lens.shape[0]:
        raise ValueError(
            f"{query_starts.shape[0]} query starts and {block_table.shape[0]} tables for {seq_lens.shape[0]} sequences"
        )
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} tokens, must be at least 1")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous()):
        raise ValueError(f"out must be a contiguous {q.dtype} {tuple(q.shape)}, got {out.dtype} {tuple(out.shape)}")
    gpu = triton_for(q, cache, query_starts, seq_lens, block_table)
    if gpu is not None:
        return gpu.paged_attention(
            q, cache, query_starts, seq_lens, block_table, scale, window=window, soft_cap=soft_cap, sinks=sinks,
            num_decodes=num_decodes, max_seq_len=max_seq_len, has_padding=has_padding, out=out,
        )  # fmt: skip
    attended = paged_attention_definition(
        q, cache, query_starts, seq_lens, block_table, scale, window=window, soft_cap=soft_cap, sinks=sinks
    )
    return attended if out is None else out.copy_(attended)


def paged_attention_definition(
    q: Tensor,
    cache: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
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
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        last_seen = torch.arange(length - (end - start), length, device=q.device)
        tokens = torch.arange(length, device=q.device)
        hidden = tokens > last_seen[:, None]
        if window is not None:
            hidden |= tokens <= last_seen[:, None] - window
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, end - start, 1)), dim=-1)
        weights = scores.softmax(-1)[..., :length]
        out[start:end] = torch.einsum("htl,lhd->thd", weights, v).to(q.dtype)
    return out
