"""Which KV blocks does each row own? The worker's mirror of the core's ledger."""

import numpy as np
from numpy.typing import NDArray

from ipc.errors import ProtocolError

IntArray = NDArray[np.int32]


class BlockTable:
    """Block ids of every row, in sequence order."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self._max_blocks = -(-max_model_len // block_size)
        self._ids = np.zeros((num_rows, self._max_blocks), np.int32)
        self._num_blocks = np.zeros(num_rows, np.int32)

    def set_row(self, row: int, block_ids: list[int]) -> None:
        """Make these the row's only blocks: nothing of an earlier owner stays, also behind them."""
        if len(block_ids) > self._max_blocks:
            raise ProtocolError("block_ids", f"row {row} gets {len(block_ids)} blocks, its table has {self._max_blocks}")
        self._ids[row] = 0
        self._ids[row, : len(block_ids)] = block_ids
        self._num_blocks[row] = len(block_ids)

    def append(self, rows: NDArray[np.int64], num_new: NDArray[np.int64], block_ids: IntArray) -> None:
        """Give ``rows[i]`` its ``num_new[i]`` next entries of ``block_ids``. A row appears once."""
        if int(num_new.sum()) != len(block_ids):
            raise ProtocolError("cached_requests", f"{len(block_ids)} block ids for {int(num_new.sum())} places")
        held = self._num_blocks[rows]
        if len(rows) and int((held + num_new).max()) > self._max_blocks:
            raise ProtocolError("cached_requests", f"a row gets more than the {self._max_blocks} blocks of its table")
        owners = np.repeat(rows, num_new)
        places = np.repeat(held, num_new) + offsets_within(num_new)
        self._ids[owners, places] = block_ids
        self._num_blocks[rows] = held + num_new

    def gather(self, rows: NDArray[np.int64], seq_lens: IntArray) -> IntArray:
        """``[S, max_blocks]``: tables of these rows, as wide as the longest of them needs; a copy.

        Raises ProtocolError when a row has fewer blocks than its tokens need.
        """
        needed = -(-seq_lens // self.block_size)
        short = np.flatnonzero(needed > self._num_blocks[rows])
        if len(short):
            i = int(short[0])
            raise ProtocolError(
                "block_ids", f"row {rows[i]} has {self._num_blocks[rows[i]]} blocks, {seq_lens[i]} tokens need {needed[i]}"
            )
        width = int(needed.max()) if len(rows) else 0
        return self._ids[rows, :width]


def offsets_within(counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """0, 1, … counts[0] - 1, 0, 1, … counts[1] - 1, and so on."""
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) - np.repeat(ends - counts, counts)
