"""Which blocks does a request hold, and can it get those that its next tokens need?"""

from collections.abc import Iterable

from engine.block_pool import BlockPool
from engine.request import Request
from ipc.errors import ConfigError

NO_BLOCKS: tuple[list[int], ...] = ()
"""The answer when the tables are long enough already."""


class KVCacheManager:
    """Tables of blocks per request and KV group, over one pool. Every group grows with the sequence (full attention)."""

    def __init__(self, *, num_blocks: int, block_size: int, num_groups: int = 1) -> None:
        if block_size < 1:
            raise ConfigError("block_size", f"must be at least 1, got {block_size}")
        self.block_size = block_size
        self.num_groups = num_groups
        self.pool = BlockPool(num_blocks)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of this length holds, over all groups."""
        return -(-num_tokens // self.block_size) * self.num_groups

    def open_tables(self, request: Request) -> None:
        """Begin a life: empty tables, one per group."""
        request.block_ids = tuple([] for _ in range(self.num_groups))

    def allocate(self, request: Request, num_tokens: int) -> tuple[list[int], ...] | None:
        """Give the first ``num_tokens`` tokens their slots.

        Returns:
            The block ids that each group's table gained (NO_BLOCKS when none), or None when the pool has too few;
            then nothing has changed.
        """
        tables = request.block_ids
        missing = -(-num_tokens // self.block_size) - len(tables[0])
        if missing <= 0:
            return NO_BLOCKS
        if missing * len(tables) > self.pool.num_free:
            return None
        gained = tuple([self.pool.take(missing) for _ in tables])
        for table, block_ids in zip(tables, gained, strict=True):
            table.extend(block_ids)
        return gained

    def free(self, request: Request) -> None:
        """Take every block from the request. Steps in flight may still write to them: a new owner's steps come later."""
        for table in request.block_ids:
            self.pool.give_back(table)
        request.block_ids = ()

    def check_books(self, holders: Iterable[Request]) -> None:
        """Assert that the tables of these requests account for every block that is not free."""
        self.pool.check_books(block_id for request in holders for table in request.block_ids for block_id in table)
