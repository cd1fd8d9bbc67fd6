"""How does a GPU attend over a paged cache? One kernel for any queries; one for single queries, cut along their keys.

Query heads that share a key head stand in one program as rows of one matrix, so keys and values are read once. Every
program walks over its keys in tiles that begin at multiples of the tile's size, with a running softmax in base 2.

A sequence's result depends on neither the other sequences nor how its prompt was cut into chunks: tiles and parts lie
at fixed positions.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import ELEMENT_SIZES, Launch, next_power_of_2

# Arguments that change from step to step are not specialised on: each variant would be compiled while requests wait.

PART = 512
"""Keys of one part of a decode: fixed, so that the same sums are formed in every batch. Partial results of a context of
4,096 are 1.6 % of what is read (heads of 128 in bfloat16, four of them for each key head)."""

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How scores are made, and which count; as ``kernels.paged_attention`` takes it."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a kernel is cut; all powers of two."""

    rows: int
    """Query tokens times query heads of one key head."""
    keys: int
    num_warps: int
    num_stages: int


def ragged_tiling(group: int, head_size: int, dtype: torch.dtype) -> Tiling:
    """For any number of queries."""
    width = next_power_of_2(head_size)
    if dtype == torch.float32:
        rows, keys, num_warps, num_stages = (32, 16, 8, 2) if width <= 128 else (16, 16, 4, 2)
    elif width <= 128:
        rows, keys, num_warps, num_stages = 128, 64, 8, 3
    else:
        rows, keys, num_warps, num_stages = 64, 32, 8, 3
    return Tiling(rows=max(rows, next_power_of_2(group)), keys=keys, num_warps=num_warps, num_stages=num_stages)


def decode_tiling(group: int, head_size: int, dtype: torch.dtype) -> Tiling:
    """For one query: tiles of 32 KiB of keys and values, half as much where registers would not suffice."""
    rows = max(16, next_power_of_2(group))
    tile_bytes = (16 << 10) if dtype == torch.float32 or rows > 32 else (32 << 10)
    keys = tile_bytes // (2 * next_power_of_2(head_size) * ELEMENT_SIZES[dtype])
    return Tiling(rows=rows, keys=min(128, max(16, keys)), num_warps=8 if rows > 32 else 4, num_stages=3)


def paged_attention(
    q: Tensor,
    cache: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    *,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    num_decodes: int,
    max_seq_len: int | None,
    has_padding: bool,
    out: Tensor | None = None,
) -> Tensor:
    """As ``kernels.paged_attention``; starts, lengths and tables are int32, tables have rows of adjacent ids."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if has_padding:
        out.zero_()
    rule = Rule(scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
    for launch in decode_launches(out, q, cache, seq_lens[:num_decodes], block_table, rule, max_seq_len=max_seq_len):
        launch.run()
    ragged_launch(out, q, cache, query_starts, seq_lens, block_table, rule, first_seq=num_decodes).run()
    return out


def ragged_launch(
    out: Tensor,
    q: Tensor,
    cache: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    rule: Rule,
    *,
    first_seq: int,
) -> Launch:
    """Sequences with any number of queries; each of those before ``first_seq`` has one query, and is left out."""
    num_kv_heads, head_size = cache.shape[3:]
    group = q.shape[1] // num_kv_heads
    tiling = ragged_tiling(group, head_size, q.dtype)
    tokens = tiling.rows // group
    num_seqs = seq_lens.shape[0] - first_seq
    # More than there can be: what is in the starts is known on the device alone.
    num_tiles = (q.shape[0] - first_seq) // tokens + num_seqs if num_seqs else 0
    return Launch(
        kernel=ragged_kernel,
        grid=(num_kv_heads, num_tiles),
        arguments={
            "out": out, "query_starts": query_starts, "first_seq": first_seq, "end_seq": seq_lens.shape[0],
            "TOKENS": tokens,
            **_common(q, cache, seq_lens, block_table, rule, tiling),
        },
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )  # fmt: skip


def decode_launches(
    out: Tensor,
    q: Tensor,
    cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    rule: Rule,
    *,
    max_seq_len: int | None,
) -> list[Launch]:
    """Sequences with one query each, whose tokens come first: attention to every part of the keys, and the merge of
    several. Without ``max_seq_len`` the tables' width bounds the lengths."""
    num_kv_heads, head_size = cache.shape[3:]
    num_seqs, num_heads, block_size = seq_lens.shape[0], q.shape[1], cache.shape[2]
    tiling = decode_tiling(num_heads // num_kv_heads, head_size, q.dtype)
    longest = block_table.shape[1] * block_size if max_seq_len is None else max_seq_len
    num_parts = max(1, -(-longest // PART))
    if rule.window is not None:
        num_parts = min(num_parts, -(-rule.window // PART) + 1)
    partial = sums = None
    if num_parts > 1:
        partial = torch.empty(num_seqs, num_heads, num_parts, head_size, dtype=torch.float32, device=q.device)
        sums = torch.empty(num_seqs, num_heads, num_parts, 2, dtype=torch.float32, device=q.device)
    common = _common(q, cache, seq_lens, block_table, rule, tiling)
    attend = Launch(
        kernel=decode_kernel,
        grid=(num_kv_heads, num_seqs, num_parts),
        arguments={"out": out, "partial": partial, "sums": sums, "PART": PART, "IS_PART": num_parts > 1, **common},
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if num_parts == 1:
        return [attend]
    merge = Launch(
        kernel=merge_kernel,
        grid=(num_heads, num_seqs),
        arguments={
            "out": out, "partial": partial, "sums": sums, "num_parts": num_parts, "PART": PART, "PARTS_AT_ONCE": 8,
            **{name: common[name] for name in (
                "seq_lens", "sinks", "window", "HEAD_SIZE", "WIDTH", "HAS_WINDOW", "HAS_SINKS",
            )},
        },
        num_warps=1,
    )  # fmt: skip
    return [attend, merge]


def _common(
    q: Tensor,
    cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    rule: Rule,
    tiling: Tiling,
) -> dict[str, object]:
    return {
        "q": q, "keys": cache[0], "values": cache[1], "seq_lens": seq_lens, "block_table": block_table, "sinks": rule.sinks,
        # Scores come out in base 2, unless a soft cap has to see them first.
        "scale": rule.scale * LOG2_E if rule.soft_cap is None else rule.scale / rule.soft_cap,
        "soft_cap": 0.0 if rule.soft_cap is None else rule.soft_cap * LOG2_E,
        "window": rule.window or 0,
        "q_token_stride": q.stride(0), "q_head_stride": q.stride(1), "table_stride": block_table.stride(0),
        "block_stride": cache.stride(1), "slot_stride": cache.stride(2),
        "GROUP": q.shape[1] // cache.shape[3], "HEAD_SIZE": q.shape[2], "WIDTH": max(16, next_power_of_2(q.shape[2])),
        "BLOCK_SIZE": cache.shape[2], "ROWS": tiling.rows, "KEYS": tiling.keys,
        "HAS_WINDOW": rule.window is not None, "HAS_SOFT_CAP": rule.soft_cap is not None,
        "HAS_SINKS": rule.sinks is not None,
    }  # fmt: skip


@triton.jit(do_not_specialize=["first_seq", "end_seq", "table_stride"])
def ragged_kernel(
    out, q, keys, values, query_starts, seq_lens, block_table, sinks, scale, soft_cap, window, first_seq, end_seq,
    q_token_stride, q_head_stride, table_stride, block_stride, slot_stride,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    seq, first_tile = _sequence_of(tile, query_starts, first_seq, end_seq, TOKENS)
    first_query, end = tl.load(query_starts + seq), tl.load(query_starts + seq + 1)
    start = first_query + (tile - first_tile) * TOKENS
    if start >= end:
        return
    seq_len = tl.load(seq_lens + seq)
    first_position = seq_len - (end - first_query) + (start - first_query)

    rows = tl.arange(0, ROWS)
    heads = kv_head * GROUP + rows % GROUP
    tokens = start + rows // GROUP
    is_row = (rows < TOKENS * GROUP) & (tokens < end)
    positions = first_position + rows // GROUP
    queries = _load_rows(q, tokens, heads, is_row, q_token_stride, q_head_stride, HEAD_SIZE, WIDTH)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    peak, total = _initial(sinks, heads, is_row, ROWS, HAS_SINKS)

    keys += kv_head * HEAD_SIZE
    values += kv_head * HEAD_SIZE
    table = block_table + seq.to(tl.int64) * table_stride
    high = tl.minimum(seq_len, first_position + TOKENS)
    low = 0
    clear = 0
    if HAS_WINDOW:
        low = tl.maximum(first_position - window + 1, 0)
    else:
        # Tiles that every query of this program sees whole need no masks.
        clear = tl.maximum(first_position + 1, 0) // KEYS * KEYS
        acc, peak, total = _attend(
            acc, peak, total, queries, positions, keys, values, table, 0, clear, 0, high, scale, soft_cap, window,
            block_stride, slot_stride, HEAD_SIZE, WIDTH, BLOCK_SIZE, KEYS, HAS_WINDOW, HAS_SOFT_CAP, False,
        )  # fmt: skip
    acc, peak, total = _attend(
        acc, peak, total, queries, positions, keys, values, table, tl.maximum(low // KEYS * KEYS, clear), high, low,
        high, scale, soft_cap, window, block_stride, slot_stride, HEAD_SIZE, WIDTH, BLOCK_SIZE, KEYS, HAS_WINDOW,
        HAS_SOFT_CAP, True,
    )  # fmt: skip
    num_heads = tl.num_programs(0) * GROUP
    _store_rows(out, _normalised(acc, total), tokens, heads, is_row, num_heads, HEAD_SIZE, WIDTH)


@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    out, partial, sums, q, keys, values, seq_lens, block_table, sinks, scale, soft_cap, window,
    q_token_stride, q_head_stride, table_stride, block_stride, slot_stride,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr, IS_PART: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    kv_head, seq, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(0) * GROUP
    seq_len = tl.load(seq_lens + seq)
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(seq_len - window, 0)
    start = low // KEYS * KEYS
    end = seq_len
    if IS_PART:
        part_start = (low // PART + part) * PART
        if part_start >= seq_len:
            return
        start = tl.maximum(start, part_start)
        end = tl.minimum(seq_len, part_start + PART)

    rows = tl.arange(0, ROWS)
    heads = kv_head * GROUP + rows
    is_row = rows < GROUP
    tokens = tl.zeros((ROWS,), tl.int32) + seq
    positions = tl.zeros((ROWS,), tl.int32) + seq_len - 1
    queries = _load_rows(q, tokens, heads, is_row, q_token_stride, q_head_stride, HEAD_SIZE, WIDTH)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    # What merges the parts brings in the sinks, once.
    peak, total = _initial(sinks, heads, is_row, ROWS, HAS_SINKS and not IS_PART)
    acc, peak, total = _attend(
        acc, peak, total, queries, positions, keys + kv_head * HEAD_SIZE, values + kv_head * HEAD_SIZE,
        block_table + seq.to(tl.int64) * table_stride, start, end, low, end, scale, soft_cap, window,
        block_stride, slot_stride, HEAD_SIZE, WIDTH, BLOCK_SIZE, KEYS, False, HAS_SOFT_CAP, True,
    )  # fmt: skip
    if IS_PART:
        places = (tokens.to(tl.int64) * num_heads + heads) * tl.num_programs(2) + part
        columns = tl.arange(0, WIDTH)
        mask = is_row[:, None] & (columns < HEAD_SIZE)[None, :]
        tl.store(partial + places[:, None] * HEAD_SIZE + columns[None, :], acc, mask=mask)
        tl.store(sums + places * 2, peak, mask=is_row)
        tl.store(sums + places * 2 + 1, total, mask=is_row)
    else:
        _store_rows(out, _normalised(acc, total), tokens, heads, is_row, num_heads, HEAD_SIZE, WIDTH)


@triton.jit(do_not_specialize=["num_parts"])
def merge_kernel(
    out, partial, sums, seq_lens, sinks, window, num_parts,
    HEAD_SIZE: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, PARTS_AT_ONCE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    head, seq = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens + seq)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(seq_len - window, 0) // PART
    num_used = tl.cdiv(seq_len, PART) - first

    place = seq.to(tl.int64) * tl.num_programs(0) + head
    columns = tl.arange(0, WIDTH)
    acc = tl.zeros((WIDTH,), tl.float32)
    peak = -float("inf")
    total = 0.0
    if HAS_SINKS:
        peak = tl.load(sinks + head) * _LOG2_E
        total = 1.0
    for start in range(0, num_used, PARTS_AT_ONCE):
        parts = start + tl.arange(0, PARTS_AT_ONCE)
        is_used = parts < num_used
        places = place * num_parts + parts
        peaks = tl.load(sums + places * 2, mask=is_used, other=-float("inf"))
        totals = tl.load(sums + places * 2 + 1, mask=is_used, other=0.0)
        mask = is_used[:, None] & (columns < HEAD_SIZE)[None, :]
        sums_of_values = tl.load(partial + places[:, None] * HEAD_SIZE + columns[None, :], mask=mask, other=0.0)
        higher = tl.maximum(peak, tl.max(peaks, 0))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        kept = tl.exp2(peak - base)
        weights = tl.exp2(peaks - base)
        acc = acc * kept + tl.sum(sums_of_values * weights[:, None], 0)
        total = total * kept + tl.sum(totals * weights, 0)
        peak = higher
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + place * HEAD_SIZE + columns, acc.to(out.dtype.element_ty), mask=columns < HEAD_SIZE)


@triton.jit
def _sequence_of(tile, query_starts, first_seq, end_seq, TOKENS: tl.constexpr):
    """The last sequence whose tiles begin at or before this one, and where they begin.

    Those of sequence s begin at s + (queries before it) // TOKENS, counted from the first sequence: room enough for each.
    """
    base = tl.load(query_starts + first_seq)
    low = first_seq
    high = end_seq
    while high - low > 1:
        middle = (low + high) // 2
        if (tl.load(query_starts + middle) - base) // TOKENS + middle - first_seq <= tile:
            low = middle
        else:
            high = middle
    return low, (tl.load(query_starts + low) - base) // TOKENS + low - first_seq


@triton.jit
def _attend(
    acc, peak, total, queries, positions, keys, values, table, start, end, low, high, scale, soft_cap, window,
    block_stride, slot_stride, HEAD_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Take in the keys from ``start``, a multiple of KEYS, up to ``end``; of masked tiles, nothing outside of ``low`` up
    to ``high`` is read: it may be NaN, or not the sequence's at all."""
    columns = tl.arange(0, WIDTH)
    is_column = columns < HEAD_SIZE
    for tile_start in range(start, end, KEYS):
        tokens = tile_start + tl.arange(0, KEYS)
        if IS_MASKED:
            is_key = (tokens >= low) & (tokens < high)
            blocks = tl.load(table + tokens // BLOCK_SIZE, mask=is_key, other=0)
        else:
            blocks = tl.load(table + tokens // BLOCK_SIZE)
        offsets = blocks.to(tl.int64) * block_stride + (tokens % BLOCK_SIZE) * slot_stride
        key_places = keys + offsets[None, :] + columns[:, None]
        value_places = values + offsets[:, None] + columns[None, :]
        if IS_MASKED:
            k = tl.load(key_places, mask=is_key[None, :] & is_column[:, None], other=0.0)
            v = tl.load(value_places, mask=is_key[:, None] & is_column[None, :], other=0.0)
        elif HEAD_SIZE < WIDTH:
            k = tl.load(key_places, mask=is_column[:, None], other=0.0)
            v = tl.load(value_places, mask=is_column[None, :], other=0.0)
        else:
            k = tl.load(key_places)
            v = tl.load(value_places)

        scores = tl.dot(queries, k, input_precision="ieee") * scale
        if HAS_SOFT_CAP:
            scores = _tanh(scores) * soft_cap
        if IS_MASKED:
            is_seen = is_key[None, :] & (tokens[None, :] <= positions[:, None])
            if HAS_WINDOW:
                is_seen = is_seen & (tokens[None, :] > positions[:, None] - window)
            scores = tl.where(is_seen, scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen nothing yet has no peak to subtract.
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(peak - base)
        total = total * kept + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * kept[:, None], input_precision="ieee")
        peak = higher
    return acc, peak, total


@triton.jit
def _tanh(x):
    """Its own series near zero, where the quotient loses what small scores differ by."""
    square = x * x
    near = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315))))
    return tl.where(square < 0.0625, near, 1.0 - 2.0 / (tl.exp2(x * (2 * _LOG2_E)) + 1.0))


@triton.jit
def _initial(sinks, heads, is_row, ROWS: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Peak and total of each row before any key."""
    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if HAS_SINKS:
        peak = tl.load(sinks + heads, mask=is_row, other=0.0) * _LOG2_E
        total += 1.0
    return peak, total


@triton.jit
def _normalised(acc, total):
    """Rows that saw no key are zeros."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _load_rows(
    q, tokens, heads, is_row, token_stride, head_stride, HEAD_SIZE: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    columns = tl.arange(0, WIDTH)
    places = tokens.to(tl.int64) * token_stride + heads * head_stride
    mask = is_row[:, None] & (columns < HEAD_SIZE)[None, :]
    return tl.load(q + places[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _store_rows(out, rows, tokens, heads, is_row, num_heads, HEAD_SIZE: tl.constexpr, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    places = (tokens.to(tl.int64) * num_heads + heads) * HEAD_SIZE
    mask = is_row[:, None] & (columns < HEAD_SIZE)[None, :]
    tl.store(out + places[:, None] + columns[None, :], rows.to(out.dtype.element_ty), mask=mask)
