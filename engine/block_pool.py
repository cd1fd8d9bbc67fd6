"""Which KV blocks are free, and how many hold each of the others?"""

from array import array
from collections.abc import Iterable

from ipc.errors import ConfigError


class BlockPool:
    """Blocks 0 to ``num_blocks - 1``. All operations are O(1) per block.

    The block that was freed last is taken first: its memory is warm, and a worker's cache touches no more memory than
    the requests ever held at once.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError("num_blocks", f"must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_holders = array("i", bytes(4 * num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Blocks with one holder each. The caller has made sure that ``num_free`` allows it."""
        pop, holders = self._free.pop, self._num_holders
        block_ids = [pop() for _ in range(count)]
        for block_id in block_ids:
            holders[block_id] = 1
        return block_ids

    def give_back(self, block_ids: Iterable[int]) -> None:
        """One holder fewer for each; without holders a block is free, and the last given back is the first reused."""
        holders = self._num_holders
        for block_id in block_ids:
            assert holders[block_id] > 0, f"block {block_id} is given back by nobody who holds it"
            holders[block_id] -= 1
            if not holders[block_id]:
                self._free.append(block_id)

    def check_books(self, held: Iterable[int]) -> None:
        """Assert that free and held blocks are all blocks, ``held`` naming each block once per holder. O(num_blocks)."""
        expected = [0] * self.num_blocks
        for block_id in held:
            expected[block_id] += 1
        assert expected == self._num_holders.tolist(), "holder counts differ from the tables of the requests"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert free == {block_id for block_id, count in enumerate(expected) if not count}, "free + held is not all"
