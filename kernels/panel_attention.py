"""Attention over a cache that lies in panels, the layout that native code on the CPU reads in place.

A block of one head holds its keys, then its values, each in panels of 16 tokens; E elements are 32 bits. Keys of a panel lie
as [D / E, 16, E], so that a vector holds one part of 16 keys; values as [16 / E, D, E], so that it holds one part of a value
of E tokens. A product of a row with such a vector needs no sum across it.
"""

import torch
from torch import Tensor

from kernels.cpu import native
from kernels.cpu.native import DTYPES, NativeError, NativeLibrary
from kernels.paged_attention import paged_attention_definition

PANEL = 16
HEAD_SIZES = frozenset(range(16, 257, 16))

_LONGEST_WINDOW = (1 << 31) - 1
"""No sequence is longer: native code counts its tokens in 32 bits."""


def panel_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, int, int, int]:
    """[B, G, 2, K * D]; K is a multiple of 16."""
    return (num_blocks, num_kv_heads, 2, block_size * head_size)


def append_panels(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write this step's keys and values into their slots of one layer's cache.

    Shapes:
        cache: [B, G, 2, K * D]  in panels, contiguous
        k, v:  [T, G, D]         each token's heads contiguous
        slots: [T] int64         slot = block_id * K + offset; -1 marks padding

    Mutates ``cache``. Slots of different tokens never coincide. Raises IndexError for a slot that isn't there, and
    NativeError without native code.

    Bytes: k and v read and written once.
    """
    block_size = _block_size(cache, k)
    if k.shape != v.shape or k.dtype != cache.dtype or v.dtype != cache.dtype or slots.shape != k.shape[:1]:
        raise ValueError(f"k {tuple(k.shape)}, v {tuple(v.shape)} and {slots.numel()} slots do not fit each other")
    if slots.dtype != torch.int64 or not slots.is_contiguous():
        raise TypeError(f"slots must be contiguous int64, got {slots.dtype}")
    is_done = _required().append_kv(
        cache.data_ptr(), k.data_ptr(), v.data_ptr(), slots.data_ptr(),
        cache.shape[0], k.shape[0], _token_stride(k), _token_stride(v), k.shape[1], block_size, k.shape[2],
        DTYPES[cache.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if not is_done:
        raise IndexError(f"a slot lies behind the {cache.shape[0]} blocks of the cache")


def panel_attention(
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
    has_padding: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """As ``paged_attention``, over panels.

    Shapes:
        q:            [T, H, D]         each token's heads contiguous
        cache:        [B, G, 2, K * D]  in panels, contiguous
        query_starts: [S + 1] int32     non-decreasing, within 0 to T
        seq_lens:     [S] int32         0 for padding
        block_table:  [S, max blocks] int32; only the blocks that hold tokens are looked at, and those exist
        sinks:        [H] float32
        out:          [T, H, D] contiguous, where the result goes; without it a new tensor
        returns       [T, H, D], zeros for tokens of no sequence

    Without ``has_padding`` every token belongs to a sequence. Raises IndexError when starts, lengths or tables point
    outside of what there is, and NativeError without native code.

    Bytes: the keys and values of every sequence, once (prefills: once for every 48 rows).
    """
    block_size = _block_size(cache, q)
    num_tokens, num_heads, head_size = q.shape
    num_blocks, num_kv_heads = cache.shape[:2]
    num_seqs, table_width = block_table.shape
    if num_heads % num_kv_heads or query_starts.shape != (num_seqs + 1,) or seq_lens.shape != (num_seqs,):
        raise ValueError(
            f"{num_heads} heads over {num_kv_heads}, {query_starts.numel()} query starts, "
            f"{num_seqs} tables for {seq_lens.numel()} sequences"
        )
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} tokens, must be at least 1")
    for tensor in (query_starts, seq_lens, block_table):
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise TypeError(f"starts, lengths and tables must be contiguous int32, got {tensor.dtype}")
    if sinks is not None and (sinks.shape != (num_heads,) or sinks.dtype != torch.float32 or not sinks.is_contiguous()):
        raise ValueError(f"sinks must be {num_heads} float32, got {sinks.dtype} {tuple(sinks.shape)}")
    if out is None:
        out = torch.empty(num_tokens, num_heads, head_size, dtype=q.dtype)
    elif out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out must be a contiguous {q.dtype} {tuple(q.shape)}, got {out.dtype} {tuple(out.shape)}")
    if has_padding:
        out.zero_()
    is_done = _required().attention(
        out.data_ptr(), q.data_ptr(), cache.data_ptr(),
        query_starts.data_ptr(), seq_lens.data_ptr(), block_table.data_ptr(), None if sinks is None else sinks.data_ptr(),
        num_tokens, num_blocks, table_width, num_seqs, block_table.stride(0),
        _token_stride(q), num_heads, num_kv_heads, block_size, head_size,
        min(window or 0, _LONGEST_WINDOW), scale, soft_cap or 0.0, DTYPES[q.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if not is_done:
        raise IndexError(f"starts, lengths or tables point outside of {num_tokens} tokens and {num_blocks} blocks")
    return out


def panel_attention_definition(
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
    return paged_attention_definition(
        q, tokens_of_panels(cache, q.shape[2]), query_starts, seq_lens, block_table, scale,
        window=window, soft_cap=soft_cap, sinks=sinks,
    )  # fmt: skip


def tokens_of_panels(cache: Tensor, head_size: int) -> Tensor:
    """[B, G, 2, K * D] in panels -> [2, B, K, G, D], a copy. This is the layout's definition."""
    per_step = 4 // cache.element_size()
    num_blocks, num_kv_heads = cache.shape[:2]
    panels = cache.view(num_blocks, num_kv_heads, 2, -1, PANEL * head_size)  # [B, G, 2, K / 16, 16 * D]
    keys = panels[:, :, 0].unflatten(-1, (head_size // per_step, PANEL, per_step)).transpose(-3, -2)
    values = panels[:, :, 1].unflatten(-1, (PANEL // per_step, head_size, per_step)).transpose(-2, -1)
    return torch.stack(
        [part.reshape(num_blocks, num_kv_heads, -1, head_size).transpose(1, 2) for part in (keys, values)]
    )


def _block_size(cache: Tensor, heads: Tensor) -> int:
    """What ``cache`` must be for tokens of [heads, D] each."""
    head_size, shape = heads.shape[-1], cache.shape
    if len(shape) != 4 or shape[2] != 2 or not cache.is_contiguous() or not cache.is_cpu:
        raise ValueError(f"cache must be a contiguous [B, G, 2, K * D] on the CPU, got {tuple(shape)}")
    if head_size not in HEAD_SIZES or shape[3] % (PANEL * head_size):
        raise ValueError(f"heads of {head_size} elements do not fit a cache of {tuple(shape)}")
    if heads.dtype != cache.dtype or cache.dtype not in DTYPES:
        raise TypeError(f"{heads.dtype} does not fit a cache of {cache.dtype}")
    return shape[3] // head_size


def _token_stride(x: Tensor) -> int:
    """Elements from one token to the next of [T, heads, D]."""
    to_token, to_head, to_element = x.stride()
    if to_element != 1 or (to_head != x.shape[2] and x.shape[1] > 1):
        raise ValueError(f"each token's heads must lie together, got strides {x.stride()}")
    return to_token


def _required() -> NativeLibrary:
    library = native.native_library()
    if library is None:
        raise NativeError("panels need native code, which is not there")
    return library
