"""How do a step's tables get to where attention reads them? In one piece, whatever device that is on."""

from typing import NamedTuple

import torch
from torch import Tensor

from worker.attention.metadata import CommonAttentionMetadata
from worker.transfer import to_device

_ALIGNMENT = 4
"""In elements of 4 bytes. A kernel is compiled once for addresses that are multiples of 16, and once more for others."""


class StepTables(NamedTuple):
    """As CommonAttentionMetadata has them; all begin at multiples of 16 bytes."""

    slots: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    block_table: Tensor


def moved_tables(common: CommonAttentionMetadata, num_blocks: int, device: torch.device) -> StepTables:
    """Copies on the device, of the table its first columns, in one transfer."""
    layout = _Layout(common.slots.shape[0], common.seq_lens.shape[0], num_blocks)
    host = torch.empty(layout.num_words, dtype=torch.int32)
    layout.fill(host, common)
    return layout.views(to_device(host, device))


class StaticTables:
    """Memory on the device that one step after another is written to.

    Where each table lies follows from the numbers of tokens and sequences alone.
    """

    def __init__(self, *, max_tokens: int, max_seqs: int, num_blocks: int, device: torch.device) -> None:
        """``num_blocks``: columns of the table, of every step."""
        self._num_blocks = num_blocks
        self._memory = torch.zeros(
            _Layout(max_tokens, max_seqs, num_blocks).num_words, dtype=torch.int32, device=device
        )

    def write(self, common: CommonAttentionMetadata) -> StepTables:
        """The step's tables, until the next is written; on a device in the order of its current stream."""
        layout = _Layout(common.slots.shape[0], common.seq_lens.shape[0], self._num_blocks)
        target = self._memory[: layout.num_words]
        if target.device.type == "cpu":
            layout.fill(target, common)
        else:
            host = torch.empty(layout.num_words, dtype=torch.int32, pin_memory=True)
            layout.fill(host, common)
            target.copy_(host, non_blocking=True)
        return layout.views(target)


class _Layout:
    """Slots, query starts, lengths and block table behind each other, in elements of 4 bytes."""

    def __init__(self, num_tokens: int, num_seqs: int, num_blocks: int) -> None:
        self._parts = (
            (torch.int64, (num_tokens,)),
            (torch.int32, (num_seqs + 1,)),
            (torch.int32, (num_seqs,)),
            (torch.int32, (num_seqs, num_blocks)),
        )
        self._num_words = [torch.Size(shape).numel() * dtype.itemsize // 4 for dtype, shape in self._parts]
        self._places = [-(-words // _ALIGNMENT) * _ALIGNMENT for words in self._num_words]
        self.num_words = sum(self._places)

    def views(self, memory: Tensor) -> StepTables:
        return StepTables(*(
            piece[:words].view(dtype).view(shape)
            for piece, words, (dtype, shape) in zip(
                memory.split(self._places), self._num_words, self._parts, strict=True
            )
        ))

    def fill(self, memory: Tensor, common: CommonAttentionMetadata) -> None:
        tables = self.views(memory)
        tables.slots.copy_(common.slots)
        tables.query_starts.copy_(common.query_starts)
        tables.seq_lens.copy_(common.seq_lens)
        # Columns behind the longest sequence's blocks are never looked at.
        num_blocks = min(common.block_table.shape[1], tables.block_table.shape[1])
        tables.block_table[:, :num_blocks].copy_(common.block_table[:, :num_blocks])
