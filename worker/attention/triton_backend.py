"""How do Triton kernels attend on a GPU? They read the cache in place; a step's metadata is one copy of its tables."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gpu import dispatch
from kernels.kv_cache import append_kv
from kernels.paged_attention import paged_attention
from worker.attention.backend import AttentionBackend, AttentionMetadataBuilder, Capabilities
from worker.attention.metadata import CommonAttentionMetadata
from worker.attention.registry import register
from worker.transfer import to_device

_ALIGNMENT = 4
"""In elements of 4 bytes. A kernel is compiled once for addresses that are multiples of 16, and once more for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonMetadata:
    """All tensors are on the device."""

    slots: Tensor
    """[T] int64, -1 for padding."""
    query_starts: Tensor
    """[S + 1] int32"""
    seq_lens: Tensor
    """[S] int32"""
    block_table: Tensor
    """[S, blocks of the longest sequence] int32"""
    num_decodes: int
    max_seq_len: int
    has_padding: bool
    """Some tokens belong to no sequence."""
    window: int | None


@register
class TritonBackend(AttentionBackend):
    name = "triton"
    capabilities = Capabilities(
        device_types=frozenset({"cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        compute_capability=dispatch.LOWEST_CAPABILITY,
        # Parts of 16 bytes in every type.
        head_sizes=frozenset(range(16, 257, 8)),
        # The query heads of a key head are rows of one matrix.
        group_ratios=frozenset(range(1, 129)),
        windowed=True,
        soft_capped=True,
        sinks=True,
    )
    preference = 100

    @staticmethod
    def missing() -> str | None:
        return None if dispatch.is_installed() else "triton (pip install triton)"

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
    ) -> "TritonMetadataBuilder":
        return TritonMetadataBuilder(block_size, device, window)

    def write(self, cache: Tensor, k: Tensor, v: Tensor, metadata: TritonMetadata) -> None:
        append_kv(cache, k, v, metadata.slots)

    def attend(
        self,
        q: Tensor,
        cache: Tensor,
        metadata: TritonMetadata,
        scale: float,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        assert window == metadata.window, "a layer's metadata is that of its KV group"
        return paged_attention(
            q, cache, metadata.query_starts, metadata.seq_lens, metadata.block_table, scale,
            window=window, soft_cap=soft_cap, sinks=sinks, num_decodes=metadata.num_decodes,
            max_seq_len=metadata.max_seq_len, has_padding=metadata.has_padding, out=out,
        )  # fmt: skip


class TritonMetadataBuilder(AttentionMetadataBuilder):
    def __init__(self, block_size: int, device: torch.device, window: int | None) -> None:
        self.block_size = block_size
        self.device = device
        self.window = window

    def build(self, common: CommonAttentionMetadata) -> TritonMetadata:
        num_blocks = -(-common.max_seq_len // self.block_size)
        slots, query_starts, seq_lens, block_table = _moved(
            [common.slots, common.query_starts, common.seq_lens, common.block_table[:, :num_blocks]], self.device
        )
        num_queries = common.query_starts.diff()
        return TritonMetadata(
            slots=slots,
            query_starts=query_starts,
            seq_lens=seq_lens,
            block_table=block_table,
            num_decodes=common.num_decodes,
            max_seq_len=common.max_seq_len,
            # Sequences of length 0 are padding too, but those a kernel fills with zeros by itself.
            has_padding=int(num_queries.sum()) < common.slots.shape[0],
            window=self.window,
        )


def _moved(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of the tensors, of int32 or int64, on the device, in one transfer."""
    num_words = [tensor.numel() * (tensor.element_size() // 4) for tensor in tensors]
    places = [-(-words // _ALIGNMENT) * _ALIGNMENT for words in num_words]
    host = torch.empty(sum(places), dtype=torch.int32)
    for tensor, part, words in zip(tensors, host.split(places), num_words, strict=True):
        part[:words].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return [
        part[:words].view(tensor.dtype).view(tensor.shape)
        for tensor, part, words in zip(tensors, to_device(host, device).split(places), num_words, strict=True)
    ]
