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
from worker.attention.tables import StaticTables, StepTables, moved_tables
from worker.graphs.modes import GraphSupport


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
        graphs=GraphSupport.ALWAYS,
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

        self._static: StaticTables | None = None
        self._max_seq_len = 0

    def build(self, common: CommonAttentionMetadata) -> TritonMetadata:
        num_blocks = -(-common.max_seq_len // self.block_size)
        # Sequences of length 0 are padding too, but those a kernel fills with zeros by itself.
        has_padding = int(common.query_starts[-1]) < common.slots.shape[0]
        tables = moved_tables(common, num_blocks, self.device)
        return self._metadata(tables, common.num_decodes, common.max_seq_len, has_padding)

    def reserve(self, *, max_tokens: int, max_seqs: int, max_seq_len: int) -> None:
        self._max_seq_len = max_seq_len
        self._static = StaticTables(
            max_tokens=max_tokens, max_seqs=max_seqs, num_blocks=-(-max_seq_len // self.block_size), device=self.device
        )

    def build_in_place(self, common: CommonAttentionMetadata) -> TritonMetadata:
        assert self._static is not None, "reserved before it is built in"
        is_uniform = common.num_decodes == common.slots.shape[0]
        # How many decodes lead a mixed step changes, so there they are computed as any other queries.
        num_decodes = common.num_decodes if is_uniform else 0
        return self._metadata(self._static.write(common), num_decodes, self._max_seq_len, has_padding=not is_uniform)

    def _metadata(
        self, tables: StepTables, num_decodes: int, max_seq_len: int, has_padding: bool
    ) -> TritonMetadata:
        return TritonMetadata(
            slots=tables.slots,
            query_starts=tables.query_starts,
            seq_lens=tables.seq_lens,
            block_table=tables.block_table,
            num_decodes=num_decodes,
            max_seq_len=max_seq_len,
            has_padding=has_padding,
            window=self.window,
        )
