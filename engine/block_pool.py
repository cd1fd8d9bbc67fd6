"""Which KV blocks are free, how many hold each of the others, and which free one is taken next?"""

from array import array
from collections.abc import Callable, Iterable

from ipc.errors import ConfigError


class BlockPool:
    """Blocks 0 to ``num_blocks - 1``. All operations are O(1) per block, and arrays hold all there is to know of one.

    A block is held, or free and blank, or free and *kept*: nobody holds it, but its content may be wanted again. Blank
    ones are taken first, the one that was freed last before all others: its memory is warm, and a worker's cache
    touches no more memory than it must. Then kept ones go, the least recently used first.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None) -> None:
        """``on_evict`` hears of each kept block that is about to become a blank one."""
        if num_blocks < 1:
            raise ConfigError("num_blocks", f"must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._num_holders = array("i", bytes(4 * num_blocks))
        self._blank = array("i", range(num_blocks - 1, -1, -1))
        self._is_kept = bytearray(num_blocks)
        """Also set while the block is held: it says where the block goes when its last holder leaves."""
        # A ring of free kept blocks, oldest first, through a sentinel at index num_blocks.
        self._newer = array("i", bytes(4 * (num_blocks + 1)))
        self._older = array("i", bytes(4 * (num_blocks + 1)))
        self._newer[num_blocks] = self._older[num_blocks] = num_blocks
        self._num_free_kept = 0

    @property
    def num_free(self) -> int:
        """Blocks that may be taken, kept ones included."""
        return len(self._blank) + self._num_free_kept

    @property
    def num_free_kept(self) -> int:
        """Free blocks whose content is still known."""
        return self._num_free_kept

    def num_holders(self, block_id: int) -> int:
        return self._num_holders[block_id]

    def take(self, count: int) -> list[int]:
        """Blocks with one holder each. The caller has made sure that ``num_free`` allows it."""
        blank, holders = self._blank, self._num_holders
        while len(blank) < count:
            evicted = self.evict_oldest()
            assert evicted, f"{count} blocks are taken, {self.num_free} are free"
        block_ids = [blank.pop() for _ in range(count)]
        for block_id in block_ids:
            holders[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """One holder more for each of these kept blocks, free or not."""
        holders = self._num_holders
        for block_id in block_ids:
            assert self._is_kept[block_id], f"block {block_id} is shared but its content is not known"
            if not holders[block_id]:
                self._unlink(block_id)
            holders[block_id] += 1

    def give_back(self, block_ids: Iterable[int]) -> None:
        """One holder fewer for each, in this order of age; without holders a block is free."""
        holders = self._num_holders
        for block_id in block_ids:
            assert holders[block_id] > 0, f"block {block_id} is given back by nobody who holds it"
            holders[block_id] -= 1
            if not holders[block_id]:
                if self._is_kept[block_id]:
                    self._link_newest(block_id)
                else:
                    self._blank.append(block_id)

    def keep(self, block_id: int) -> None:
        """A held block's content is worth keeping when nobody holds it any more."""
        assert self._num_holders[block_id] > 0 and not self._is_kept[block_id]
        self._is_kept[block_id] = 1

    def drop(self, block_id: int) -> None:
        """A kept block's content is not: if it is free, it is blank from now on."""
        assert self._is_kept[block_id]
        self._is_kept[block_id] = 0
        if not self._num_holders[block_id]:
            self._unlink(block_id)
            self._blank.append(block_id)

    def evict_oldest(self) -> bool:
        """Make the least recently used kept block a blank one; False when there is none."""
        oldest = self._newer[self.num_blocks]
        if oldest == self.num_blocks:
            return False
        if self._on_evict is not None:
            self._on_evict(oldest)
        self.drop(oldest)
        return True

    def _link_newest(self, block_id: int) -> None:
        end = self.num_blocks
        newest = self._older[end]
        self._older[block_id], self._newer[block_id] = newest, end
        self._newer[newest] = self._older[end] = block_id
        self._num_free_kept += 1

    def _unlink(self, block_id: int) -> None:
        older, newer = self._older[block_id], self._newer[block_id]
        self._newer[older], self._older[newer] = newer, older
        self._num_free_kept -= 1

    def check_books(self, held: Iterable[int]) -> None:
        """Assert that blank, kept and held blocks are all blocks, ``held`` naming each once per holder. O(num_blocks)."""
        expected = [0] * self.num_blocks
        for block_id in held:
            expected[block_id] += 1
        assert expected == self._num_holders.tolist(), "holder counts differ from the tables of the requests"
        kept: list[int] = []
        block_id = self._newer[self.num_blocks]
        while block_id != self.num_blocks and len(kept) <= self.num_blocks:
            kept.append(block_id)
            assert self._is_kept[block_id] and self._older[self._newer[block_id]] == block_id
            block_id = self._newer[block_id]
        assert len(kept) == self._num_free_kept, "the ring of kept blocks is broken"
        free = {*self._blank, *kept}
        assert len(free) == self.num_free, "a block is free twice"
        assert not any(self._is_kept[block_id] for block_id in self._blank), "a kept block counts as blank"
        assert free == {block_id for block_id, count in enumerate(expected) if not count}, "free + held + kept is not all"
