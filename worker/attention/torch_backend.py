"""How does plain torch attend over a paged cache? By gathering keys and values, then SDPA; on any device."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.kv_cache import append_kv
from worker.attention.metadata import CommonAttentionMetadata
from worker.attention.registry import AttentionBackend, AttentionMetadataBuilder, Capabilities, register
from worker.transfer import to_device

_SHORTEST_BUCKET = 128
"""Decodes whose lengths round up to the same power of two, but at least this, are padded to their longest."""

_MAX_PADDED_TOKENS = 1 << 16
"""Tokens gathered at once for decodes, padding included: bounds the memory of a step."""

_QUERIES_AT_ONCE = 512
"""Queries of one prefill in one SDPA: bounds its mask, and skips most of what the mask would hide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decodes:
    """Some sequences with one query token each, padded to a common length N."""

    tokens: Tensor
    """[R] int64: their query tokens in the step."""
    slots: Tensor
    """[R * N] int64; padding repeats the sequence's first slot, which is sure to hold finite numbers."""
    mask: Tensor
    """[R, 1, 1, N]: 0, or -inf for padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prefill:
    """One sequence with any number of query tokens."""

    start: int
    end: int
    """Its tokens in the step."""
    slots: Tensor
    """[L] int64"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchMetadata:
    slots: Tensor
    """[T] int64, -1 for padding."""
    decodes: tuple[_Decodes, ...]
    prefills: tuple[_Prefill, ...]
    causal_mask: Tensor | None
    """[Q, N]: the mask of the last Q queries of a sequence of N tokens; all prefills use corners of it."""
    has_padding: bool
    """Some tokens belong to no sequence."""


@register
class TorchBackend(AttentionBackend):
    name = "torch"
    capabilities = Capabilities(
        device_types=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    )

    @staticmethod
    def cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    def make_builder(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "TorchMetadataBuilder":
        return TorchMetadataBuilder(block_size, dtype, device)

    def write(self, cache: Tensor, k: Tensor, v: Tensor, metadata: TorchMetadata) -> None:
        append_kv(cache, k, v, metadata.slots)

    def attend(self, q: Tensor, cache: Tensor, metadata: TorchMetadata, scale: float) -> Tensor:
        out = torch.zeros_like(q) if metadata.has_padding else torch.empty_like(q)
        slots_of_cache = cache.flatten(1, 2)  # [2, B * K, G, D]
        for decodes in metadata.decodes:
            out.index_copy_(0, decodes.tokens, _attend_decodes(q, slots_of_cache, decodes, scale))
        for prefill in metadata.prefills:
            assert metadata.causal_mask is not None
            _attend_prefill(q, slots_of_cache, prefill, metadata.causal_mask, scale, out)
        return out


class TorchMetadataBuilder(AttentionMetadataBuilder):
    def __init__(self, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.block_size = block_size
        self.dtype = dtype
        self.device = device

    def build(self, common: CommonAttentionMetadata) -> TorchMetadata:
        lengths, starts = common.seq_lens.tolist(), common.query_starts.tolist()
        prefills = tuple(
            _Prefill(
                start=starts[s],
                end=starts[s + 1],
                slots=to_device(self._slots(common, [s], lengths[s])[0], self.device),
            )
            for s in range(common.num_decodes, len(lengths))
            if starts[s + 1] > starts[s]
        )
        batches = _batch_decodes(lengths[: common.num_decodes])
        num_served = sum(map(len, batches)) + sum(prefill.end - prefill.start for prefill in prefills)
        return TorchMetadata(
            slots=to_device(common.slots.clone(), self.device),
            decodes=tuple(self._decodes(common, sequences, lengths) for sequences in batches),
            prefills=prefills,
            causal_mask=self._causal_mask(prefills),
            has_padding=num_served < common.slots.shape[0],
        )

    def _decodes(self, common: CommonAttentionMetadata, sequences: list[int], lengths: list[int]) -> _Decodes:
        longest = max(lengths[s] for s in sequences)
        is_padding = torch.arange(longest) >= common.seq_lens[sequences, None]
        mask = torch.zeros(is_padding.shape, dtype=self.dtype).masked_fill_(is_padding, -torch.inf)
        return _Decodes(
            tokens=to_device(common.query_starts[sequences].to(torch.int64), self.device),
            slots=to_device(self._slots(common, sequences, longest).flatten(), self.device),
            mask=to_device(mask[:, None, None], self.device),
        )

    def _slots(self, common: CommonAttentionMetadata, sequences: list[int], longest: int) -> Tensor:
        """[R, longest]: the slot of each token of these sequences; past the end of one, its first slot."""
        positions = torch.arange(longest).expand(len(sequences), longest)
        positions = torch.where(positions < common.seq_lens[sequences, None], positions, 0)
        blocks = common.block_table[sequences].long().gather(1, positions // self.block_size)
        return blocks * self.block_size + positions % self.block_size

    def _causal_mask(self, prefills: tuple[_Prefill, ...]) -> Tensor | None:
        if not prefills:
            return None
        num_keys = max(len(prefill.slots) for prefill in prefills)
        num_queries = min(_QUERIES_AT_ONCE, max(prefill.end - prefill.start for prefill in prefills))
        is_future = torch.ones(num_queries, num_keys, dtype=torch.bool, device=self.device)
        is_future.triu_(num_keys - num_queries + 1)
        mask = torch.zeros(num_queries, num_keys, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(is_future, -torch.inf)


def _batch_decodes(lengths: list[int]) -> list[list[int]]:
    """Sequences of similar length together, as many at a time as the padded tokens allow.

    One long sequence must not make a thousand short ones as long as itself. Those of length 0 are padding.
    """
    buckets: dict[int, list[int]] = {}
    for s, length in enumerate(lengths):
        if length > 0:
            buckets.setdefault(max(length - 1, _SHORTEST_BUCKET - 1).bit_length(), []).append(s)
    batches = []
    for sequences in buckets.values():
        size = max(1, _MAX_PADDED_TOKENS // max(lengths[s] for s in sequences))
        batches += [sequences[i : i + size] for i in range(0, len(sequences), size)]
    return batches


def _attend_decodes(q: Tensor, slots_of_cache: Tensor, decodes: _Decodes, scale: float) -> Tensor:
    """The H / G query heads that share a key head stand where queries stand, so keys are not repeated."""
    num_rows, num_kv_heads, head_size = len(decodes.tokens), slots_of_cache.shape[2], q.shape[2]
    k, v = (
        part.index_select(0, decodes.slots).view(num_rows, -1, num_kv_heads, head_size).transpose(1, 2)
        for part in slots_of_cache
    )  # [R, G, N, D] each
    queries = q.index_select(0, decodes.tokens).view(num_rows, num_kv_heads, -1, head_size)
    out = scaled_dot_product_attention(queries, k, v, attn_mask=decodes.mask, scale=scale)
    return out.reshape(num_rows, q.shape[1], head_size)


def _attend_prefill(
    q: Tensor, slots_of_cache: Tensor, prefill: _Prefill, causal_mask: Tensor, scale: float, out: Tensor
) -> None:
    num_kv_heads = slots_of_cache.shape[2]
    k, v = (part.index_select(0, prefill.slots).transpose(0, 1)[:, None] for part in slots_of_cache)  # [G, 1, L, D]
    history = len(prefill.slots) - (prefill.end - prefill.start)
    for start in range(prefill.start, prefill.end, _QUERIES_AT_ONCE):
        end = min(start + _QUERIES_AT_ONCE, prefill.end)
        num_keys = history + end - prefill.start
        queries = q[start:end].unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [G, H / G, queries, D]
        shape = (*queries.shape[:2], num_keys, q.shape[2])
        mask = causal_mask[causal_mask.shape[0] - (end - start) :, causal_mask.shape[1] - num_keys :]
        attended = scaled_dot_product_attention(
            queries, k[:, :, :num_keys].expand(shape), v[:, :, :num_keys].expand(shape), attn_mask=mask, scale=scale
        )
        out[start:end] = attended.permute(2, 0, 1, 3).flatten(1, 2)
