"""How does native code attend on the CPU? It reads the cache in place, so a step's metadata is little more than its tables."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu import native
from kernels.panel_attention import HEAD_SIZES, append_panels, panel_attention, panel_cache_shape
from worker.attention.backend import AttentionBackend, AttentionMetadataBuilder, Capabilities
from worker.attention.metadata import CommonAttentionMetadata
from worker.attention.registry import register
from worker.attention.tables import StaticTables
from worker.graphs.modes import GraphSupport

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuMetadata:
    slots: Tensor
    """[T] int64, -1 for padding."""
    query_starts: Tensor
    """[S + 1] int32"""
    seq_lens: Tensor
    """[S] int32"""
    block_table: Tensor
    """[S, blocks of the longest sequence] int32"""
    has_padding: bool
    """Some tokens belong to no sequence."""
    window: int | None


@register
class CpuBackend(AttentionBackend):
    name = "cpu"
    preference = 100
    capabilities = Capabilities(
        device_types=frozenset({"cpu"}),
        dtypes=frozenset(native.DTYPES),
        head_sizes=HEAD_SIZES,
        block_sizes=frozenset(1 << bits for bits in range(4, 13)),
        windowed=True,
        soft_capped=True,
        sinks=True,
        graphs=GraphSupport.ALWAYS,
    )

    @staticmethod
    def missing() -> str | None:
        return "native code (no compiler when Brigade was installed?)" if native.native_library() is None else None

    @staticmethod
    def cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return panel_cache_shape(num_blocks, block_size, num_kv_heads, head_size)

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
    ) -> "CpuMetadataBuilder":
        return CpuMetadataBuilder(block_size, window)

    def write(self, cache: Tensor, k: Tensor, v: Tensor, metadata: CpuMetadata) -> None:
        append_panels(cache, k, v, metadata.slots)

    def attend(
        self,
        q: Tensor,
        cache: Tensor,
        metadata: CpuMetadata,
        scale: float,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        assert window == metadata.window, "a layer's metadata is that of its KV group"
        return panel_attention(
            q,
            cache,
            metadata.query_starts,
            metadata.seq_lens,
            metadata.block_table,
            scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            has_padding=metadata.has_padding,
            out=out,
        )


class CpuMetadataBuilder(AttentionMetadataBuilder):
    def __init__(self, block_size: int, window: int | None) -> None:
        self.block_size = block_size
        self.window = window
        self._static: StaticTables | None = None

    def build(self, common: CommonAttentionMetadata) -> CpuMetadata:
        num_blocks = -(-common.max_seq_len // self.block_size)
        table = common.block_table
        return CpuMetadata(
            slots=common.slots,
            query_starts=common.query_starts,
            seq_lens=common.seq_lens,
            block_table=table if table.shape[1] == num_blocks else table[:, :num_blocks].contiguous(),
            has_padding=common.has_padding(),
            window=self.window,
        )

    def reserve(self, *, max_tokens: int, max_seqs: int, max_seq_len: int) -> None:
        self._static = StaticTables(
            max_tokens=max_tokens, max_seqs=max_seqs, num_blocks=-(-max_seq_len // self.block_size), device=CPU
        )

    def build_in_place(self, common: CommonAttentionMetadata) -> CpuMetadata:
        assert self._static is not None, "reserved before it is built in"
        tables = self._static.write(common)
        return CpuMetadata(
            slots=tables.slots,
            query_starts=tables.query_starts,
            seq_lens=tables.seq_lens,
            block_table=tables.block_table,
            has_padding=True,
            window=self.window,
        )
