"""How does plain torch attend over a paged cache? By gathering keys and values, then SDPA; on any device."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.kv_cache import append_kv
from worker.attention.backend import AttentionBackend, AttentionMetadataBuilder, Capabilities
from worker.attention.metadata import CommonAttentionMetadata
from worker.attention.registry import register
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
    """[R * N] int64; padding repeats the first slot that is seen, which is sure to hold finite numbers."""
    mask: Tensor
    """[R, 1, 1, N]: 0, or -inf for padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prefill:
    """One sequence with any number of query tokens."""

    start: int
    end: int
    """Its tokens in the step."""
    slots: Tensor
    """[L] int64: of its tokens and of those before them that they see."""


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
    window: int | None


@register
class TorchBackend(AttentionBackend):
    name = "torch"
    capabilities = Capabilities(
        device_types=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        windowed=True,
        soft_capped=True,
        sinks=True,
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
        window: int | None = None,
    ) -> "TorchMetadataBuilder":
        return TorchMetadataBuilder(block_size, dtype, device, window)

    def write(self, cache: Tensor, k: Tensor, v: Tensor, metadata: TorchMetadata) -> None:
        append_kv(cache, k, v, metadata.slots)

    def attend(
        self,
        q: Tensor,
        cache: Tensor,
        metadata: TorchMetadata,
        scale: float,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        assert window == metadata.window, "a layer's metadata is that of its KV group"
        scores = _Scores(scale=scale, soft_cap=soft_cap, sinks=sinks)
        out = torch.empty_like(q) if out is None else out
        if metadata.has_padding:
            out.zero_()
        slots_of_cache = cache.flatten(1, 2)  # [2, B * K, G, D]
        for decodes in metadata.decodes:
            out.index_copy_(0, decodes.tokens, _attend_decodes(q, slots_of_cache, decodes, scores))
        for prefill in metadata.prefills:
            _attend_prefill(q, slots_of_cache, prefill, metadata, scores, out)
        return out


class TorchMetadataBuilder(AttentionMetadataBuilder):
    def __init__(self, block_size: int, dtype: torch.dtype, device: torch.device, window: int | None) -> None:
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.window = window

    def build(self, common: CommonAttentionMetadata) -> TorchMetadata:
        lengths, starts = common.seq_lens.tolist(), common.query_starts.tolist()
        first_seen = [
            self._first_seen(length - (end - start))
            for length, start, end in zip(lengths, starts, starts[1:], strict=False)
        ]
        prefills = tuple(
            _Prefill(
                start=starts[s],
                end=starts[s + 1],
                slots=to_device(self._slots(common, [s], [first_seen[s]], lengths[s] - first_seen[s])[0], self.device),
            )
            for s in range(common.num_decodes, len(lengths))
            if starts[s + 1] > starts[s]
        )
        num_seen = [length - first for length, first in zip(lengths, first_seen, strict=True)]
        batches = _batch_decodes(num_seen[: common.num_decodes])
        num_served = sum(map(len, batches)) + sum(prefill.end - prefill.start for prefill in prefills)
        return TorchMetadata(
            slots=to_device(common.slots, self.device),
            decodes=tuple(self._decodes(common, sequences, first_seen, num_seen) for sequences in batches),
            prefills=prefills,
            causal_mask=self._causal_mask(prefills),
            has_padding=num_served < common.slots.shape[0],
            window=self.window,
        )

    def _first_seen(self, position: int) -> int:
        """The oldest position that a query at this one sees; 0 for a padding row, whose position would be -1."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def _decodes(
        self, common: CommonAttentionMetadata, sequences: list[int], first_seen: list[int], num_seen: list[int]
    ) -> _Decodes:
        most_seen = max(num_seen[s] for s in sequences)
        is_padding = torch.arange(most_seen) >= torch.tensor([num_seen[s] for s in sequences])[:, None]
        mask = torch.zeros(is_padding.shape, dtype=self.dtype).masked_fill_(is_padding, -torch.inf)
        slots = self._slots(common, sequences, [first_seen[s] for s in sequences], most_seen)
        return _Decodes(
            tokens=to_device(common.query_starts[sequences].to(torch.int64), self.device),
            slots=to_device(slots.flatten(), self.device),
            mask=to_device(mask[:, None, None], self.device),
        )

    def _slots(self, common: CommonAttentionMetadata, sequences: list[int], first: list[int], most: int) -> Tensor:
        """[R, most]: slots of these sequences' tokens from their ``first`` on; past the end of one, that of its first."""
        starts = torch.tensor(first)[:, None]
        positions = starts + torch.arange(most)
        positions = torch.where(positions < common.seq_lens[sequences, None], positions, starts)
        blocks = common.block_table[sequences].long().gather(1, positions // self.block_size)
        return blocks * self.block_size + positions % self.block_size

    def _causal_mask(self, prefills: tuple[_Prefill, ...]) -> Tensor | None:
        if not prefills:
            return None
        num_keys = max(len(prefill.slots) for prefill in prefills)
        num_queries = min(_QUERIES_AT_ONCE, max(prefill.end - prefill.start for prefill in prefills))
        own = num_keys - num_queries  # of the first query: the diagonal on which its key lies
        hidden = torch.ones(num_queries, num_keys, dtype=torch.bool, device=self.device).triu_(own + 1)
        if self.window is not None:
            hidden |= torch.ones_like(hidden).tril_(own - self.window)
        mask = torch.zeros(num_queries, num_keys, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(hidden, -torch.inf)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scores:
    """What a layer makes of the products of queries and keys."""

    scale: float
    soft_cap: float | None
    sinks: Tensor | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks_shape: tuple[int, ...]) -> Tensor:
        """q [*, *, queries, D], k and v [*, *, N, D], of which one serves all where a size is 1; [*, *, queries, D].

        ``sinks_shape``: that in which the heads' sinks fit [*, *, queries, 1].
        """
        if self.soft_cap is None and self.sinks is None:
            keys, values = (part.expand(*q.shape[:2], *part.shape[2:]) for part in (k, v))
            return scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=self.scale)
        # In 16 bits a score of 16 would be off by 0.06, and its weight by as much; one of 70,000 would be infinite.
        scores = q.float() @ k.float().transpose(-2, -1) * self.scale
        if self.soft_cap is not None:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        scores = scores + mask
        if self.sinks is not None:
            per_row = self.sinks.view(sinks_shape).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, per_row), dim=-1)
        return scores.softmax(-1)[..., : k.shape[-2]].to(v.dtype) @ v


def _attend_decodes(q: Tensor, slots_of_cache: Tensor, decodes: _Decodes, scores: _Scores) -> Tensor:
    """The H / G query heads that share a key head stand where queries stand, so keys are not repeated."""
    num_rows, num_kv_heads, head_size = len(decodes.tokens), slots_of_cache.shape[2], q.shape[2]
    k, v = (
        part.index_select(0, decodes.slots).view(num_rows, -1, num_kv_heads, head_size).transpose(1, 2)
        for part in slots_of_cache
    )  # [R, G, N, D] each
    queries = q.index_select(0, decodes.tokens).view(num_rows, num_kv_heads, -1, head_size)
    out = scores.attend(queries, k, v, decodes.mask, (num_kv_heads, -1, 1))
    return out.reshape(num_rows, q.shape[1], head_size)


def _attend_prefill(
    q: Tensor, slots_of_cache: Tensor, prefill: _Prefill, metadata: TorchMetadata, scores: _Scores, out: Tensor
) -> None:
    num_kv_heads, mask = slots_of_cache.shape[2], metadata.causal_mask
    assert mask is not None
    k, v = (part.index_select(0, prefill.slots).transpose(0, 1)[:, None] for part in slots_of_cache)  # [G, 1, L, D]
    history = len(prefill.slots) - (prefill.end - prefill.start)
    for start in range(prefill.start, prefill.end, _QUERIES_AT_ONCE):
        end = min(start + _QUERIES_AT_ONCE, prefill.end)
        last_key = history + end - prefill.start
        first_key = 0 if metadata.window is None else max(0, history + start - prefill.start - metadata.window + 1)
        queries = q[start:end].unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [G, H / G, queries, D]
        corner = mask[mask.shape[0] - (end - start) :, mask.shape[1] - (last_key - first_key) :]
        seen = slice(first_key, last_key)
        attended = scores.attend(queries, k[:, :, seen], v[:, :, seen], corner, (num_kv_heads, -1, 1, 1))
        out[start:end] = attended.permute(2, 0, 1, 3).flatten(1, 2)
