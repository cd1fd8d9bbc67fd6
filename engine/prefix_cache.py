"""Which blocks hold the keys and values of a known beginning of a sequence?

A node stands for one full block of tokens behind one given beginning: its parent node, and so on up to the root. Nodes
are found by a chained hash, but never believed for it: a match has the same parent node, the same tokens and the same
extra key, so two beginnings that differ anywhere never share a node, whatever the hash does.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

from engine.block_pool import BlockPool
from engine.kv_spec import KVSpec

ROOT = -1
"""The parent of first blocks."""
NO_BLOCK = -1
NO_NODE = -1

DIGEST_BYTES = 16
"""With a secret key nobody can aim for a collision, and one by chance would only cost the comparison."""

HashFunction = Callable[[bytes, bytes, bytes], bytes]
"""From the parent's digest, the block's tokens and its extra key to DIGEST_BYTES bytes."""

BlockKey = tuple[bytes, bytes]
"""Tokens of one full block as little-endian int32, and what else decides its content; the latter mostly empty."""


def keyed_hash(salt: bytes) -> HashFunction:
    """A hash that only who knows the salt (at most 64 bytes) can predict."""
    keyed = blake2b(digest_size=DIGEST_BYTES, key=salt)

    def hash_block(parent_digest: bytes, tokens: bytes, extra: bytes) -> bytes:
        state = keyed.copy()
        state.update(parent_digest + tokens + extra)  # the first two have fixed lengths: nothing can be shifted
        return state.digest()

    return hash_block


class PrefixCache:
    """Nodes over the blocks of one pool, at most as many as the pool has blocks; arrays hold all there is to know of one.

    A node lives while a group has a block for it, while it has children, or while somebody pins it.
    """

    def __init__(self, *, num_blocks: int, block_size: int, num_groups: int, hash_block: HashFunction) -> None:
        self.pool = BlockPool(num_blocks, on_evict=self._forget)
        self._hash = hash_block
        self._num_groups = num_groups
        self._token_bytes = 4 * block_size
        num_buckets = 1 << (num_blocks - 1).bit_length()
        self._mask = num_buckets - 1
        self._buckets = _filled(num_buckets)
        self._next = _filled(num_blocks)
        """The following node in the same bucket, or the next unused node."""
        self._parents = _filled(num_blocks)
        self._num_uses = array("i", bytes(4 * num_blocks))
        self._digests = bytearray(DIGEST_BYTES * num_blocks)
        self._tokens = bytearray(self._token_bytes * num_blocks)
        self._extras: dict[int, bytes] = {}
        """Only where not empty."""
        self._blocks = tuple(_filled(num_blocks) for _ in range(num_groups))
        """Per group and node."""
        self._nodes = _filled(num_blocks)
        """Per block: the node that it belongs to."""
        self._unused = array("i", range(num_blocks - 1, -1, -1))

    @property
    def num_nodes(self) -> int:
        return self.pool.num_blocks - len(self._unused)

    def longest_prefix(self, keys: Iterator[BlockKey], specs: Sequence[KVSpec], block_size: int) -> list[int]:
        """The nodes of the longest beginning that every group can go on from, from the first block on."""
        nodes: list[int] = []
        length = 0
        run_starts = [0] * len(specs)
        """Per group: the index behind the last node without a block."""
        parent = ROOT
        for tokens, extra in keys:
            parent, _ = self._find(parent, tokens, extra)
            if parent == NO_NODE:
                break
            nodes.append(parent)
            count = len(nodes)
            is_usable = True
            for group, spec in enumerate(specs):
                if self._blocks[group][parent] == NO_BLOCK:
                    run_starts[group] = count
                if run_starts[group] > spec.first_read(count * block_size) // block_size:
                    is_usable = False
            if is_usable:
                length = count
        return nodes[:length]

    def block(self, group: int, node: int) -> int:
        """The block that holds this node's tokens for a group; NO_BLOCK when there is none."""
        return self._blocks[group][node]

    def extend(self, parent: int, tokens: bytes, extra: bytes) -> int:
        """The node behind a pinned parent (or ROOT), made if need be, with one pin for the caller.

        Returns NO_NODE when all nodes are in use by what is held or pinned.
        """
        node, digest = self._find(parent, tokens, extra)
        if node == NO_NODE:
            while not self._unused:
                if not self.pool.evict_oldest():
                    return NO_NODE
            node = self._unused.pop()
            self._fill(node, parent, tokens, extra, digest)
        self._num_uses[node] += 1
        return node

    def pin(self, node: int) -> None:
        """Let a node outlive its blocks until it is unpinned."""
        if node != ROOT:
            self._num_uses[node] += 1

    def unpin(self, node: int) -> None:
        """The inverse; a node without any use is gone, and its parent loses a child."""
        while node != ROOT:
            self._num_uses[node] -= 1
            if self._num_uses[node]:
                return
            parent = self._parents[node]
            self._remove(node)
            node = parent

    def attach(self, group: int, node: int, block_id: int) -> None:
        """From now on this held block may be shared as the node's, unless the node has one or the block another node."""
        if self._blocks[group][node] == NO_BLOCK and self._nodes[block_id] == NO_NODE:
            self._blocks[group][node] = block_id
            self._nodes[block_id] = node
            self._num_uses[node] += 1
            self.pool.keep(block_id)

    def clear(self) -> None:
        """Forget all content: free blocks are blank, held ones stay with their holders. All pins are void. O(num_blocks)."""
        for block_id, node in enumerate(self._nodes):
            if node != NO_NODE:
                self.pool.drop(block_id)
        num_blocks = self.pool.num_blocks
        self._buckets = _filled(self._mask + 1)
        self._num_uses = array("i", bytes(4 * num_blocks))
        self._blocks = tuple(_filled(num_blocks) for _ in range(self._num_groups))
        self._nodes = _filled(num_blocks)
        self._extras.clear()
        self._unused = array("i", range(num_blocks - 1, -1, -1))

    def _forget(self, block_id: int) -> None:
        node = self._nodes[block_id]
        self._nodes[block_id] = NO_NODE
        for blocks in self._blocks:
            if blocks[node] == block_id:
                blocks[node] = NO_BLOCK
        self.unpin(node)

    def _find(self, parent: int, tokens: bytes, extra: bytes) -> tuple[int, bytes]:
        digest = self._hash(bytes(DIGEST_BYTES) if parent == ROOT else self._digest(parent), tokens, extra)
        node = self._buckets[self._bucket(digest)]
        while node != NO_NODE and not (
            self._parents[node] == parent
            and self._digest(node) == digest
            and self._tokens[node * self._token_bytes : (node + 1) * self._token_bytes] == tokens
            and self._extras.get(node, b"") == extra
        ):
            node = self._next[node]
        return node, digest

    def _fill(self, node: int, parent: int, tokens: bytes, extra: bytes, digest: bytes) -> None:
        self._digests[node * DIGEST_BYTES : (node + 1) * DIGEST_BYTES] = digest
        self._tokens[node * self._token_bytes : (node + 1) * self._token_bytes] = tokens
        if extra:
            self._extras[node] = extra
        self._parents[node] = parent
        self.pin(parent)
        bucket = self._bucket(digest)
        self._next[node] = self._buckets[bucket]
        self._buckets[bucket] = node

    def _remove(self, node: int) -> None:
        bucket = self._bucket(self._digest(node))
        if self._buckets[bucket] == node:
            self._buckets[bucket] = self._next[node]
        else:
            before = self._buckets[bucket]
            while self._next[before] != node:
                before = self._next[before]
            self._next[before] = self._next[node]
        self._extras.pop(node, None)
        self._unused.append(node)

    def _digest(self, node: int) -> bytes:
        return bytes(self._digests[node * DIGEST_BYTES : (node + 1) * DIGEST_BYTES])

    def _bucket(self, digest: bytes) -> int:
        return int.from_bytes(digest[:8], "little") & self._mask

    def check_books(self, pinned: Sequence[int]) -> None:
        """Assert that uses, blocks and buckets agree, ``pinned`` naming each node once per pin. O(num_blocks)."""
        num_blocks = self.pool.num_blocks
        unused = set(self._unused)
        assert len(unused) == len(self._unused), "a node is unused twice"
        live = [node for node in range(num_blocks) if node not in unused]
        expected = [0] * num_blocks
        for node in [*pinned, *(self._parents[node] for node in live)]:
            if node != ROOT:
                expected[node] += 1
        for group_blocks in self._blocks:
            for node in range(num_blocks):
                if group_blocks[node] != NO_BLOCK:
                    assert self._nodes[group_blocks[node]] == node, "a node's block belongs to another node"
                    expected[node] += 1
        assert sum(node != NO_NODE for node in self._nodes) == sum(
            block_id != NO_BLOCK for blocks in self._blocks for block_id in blocks
        ), "a block belongs to a node that does not have it"
        assert expected == self._num_uses.tolist(), "uses of nodes differ from blocks, children and pins"
        assert all(expected[node] for node in live), "a node lives without any use"
        reachable = set()
        for node in self._buckets:
            while node != NO_NODE:
                reachable.add(node)
                node = self._next[node]
        assert reachable == set(live), "buckets hold other nodes than those that live"


def _filled(count: int) -> "array[int]":
    return array("i", [-1]) * count
