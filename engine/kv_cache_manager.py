"""Which blocks does a request hold, which of them can it share, and can it get those that its next tokens need?"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.kv_spec import ABSENT, FullAttention, KVSpec, most_blocks
from engine.prefix_cache import NO_NODE, ROOT, BlockKey, HashFunction, PrefixCache, keyed_hash
from engine.request import NEVER, NO_CACHE_NODE, Request
from ipc.errors import ConfigError

NO_BLOCKS: tuple[list[int], ...] = ()
"""The answer when the tables are long enough already."""


@dataclass(slots=True)
class PrefixStats:
    """How much of what was asked for was there already; a request counts once, when it first runs."""

    query_tokens: int = 0
    """Tokens of requests that looked for a prefix."""
    hit_tokens: int = 0
    """Those of them that were not computed again."""


class KVCacheManager:
    """Tables of blocks per request and KV group, over one pool of blocks of equal size.

    Every table has one place for each block of the sequence. In a group with a window the leading places become ABSENT
    when the output of the step after which nobody reads them was applied, or as soon as that step was sent if the pool
    is short; workers are not told, they never read there again.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        groups: Sequence[KVSpec] = (FullAttention(),),
        max_chunk: int = 1 << 30,
        prefix_caching: bool = True,
        hash_block: HashFunction | None = None,
    ) -> None:
        """
        Args:
            max_chunk: most tokens of one request in a step.
            hash_block: for tests; by default a hash with a secret salt drawn here.
        """
        if block_size < 1:
            raise ConfigError("block_size", f"must be at least 1, got {block_size}")
        self.block_size = block_size
        self.groups = tuple(groups)
        self.stats = PrefixStats()
        self._max_chunk = max_chunk
        self._prefix_caching = prefix_caching
        self._has_windows = any(not isinstance(spec, FullAttention) for spec in groups)
        self._cache = PrefixCache(
            num_blocks=num_blocks,
            block_size=block_size,
            num_groups=len(self.groups),
            hash_block=hash_block or keyed_hash(os.urandom(32)),
        )
        self._open: dict[int, Request] = {}
        """Requests with tables, by internal id."""

    @property
    def pool(self) -> BlockPool:
        return self._cache.pool

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Most blocks that a sequence of this length holds at once, over all groups."""
        return most_blocks(self.groups, num_tokens, self.block_size, self._max_chunk)

    def num_blocks_held_alone(self, request: Request) -> int:
        """Blocks that become free when this request gives back its own. O(length of its tables)."""
        num_holders = self.pool.num_holders
        return sum(
            block_id != ABSENT and num_holders(block_id) == 1 for table in request.block_ids for block_id in table
        )

    # --------------------------------------------------------------------------------------------- one life

    def admit(self, request: Request, num_tokens: int, spare: int = 0) -> bool:
        """Begin a life if there is room for ``num_tokens`` tokens and ``spare`` blocks remain free.

        Then the tables hold the blocks of the longest known beginning, and ``num_scheduled_tokens`` and
        ``num_computed_tokens`` are its length, which leaves at least one token to compute. Otherwise nothing changes.
        """
        num_needed = self.num_blocks_for(num_tokens)
        num_free = self.pool.num_free
        if request.num_blocks_wanted + spare > num_free:
            return False
        nodes = self._find_prefix(request)
        num_cached = len(nodes) * self.block_size
        tables = tuple([self._table(group, nodes) for group in range(len(self.groups))])
        shared = [block_id for table in tables for block_id in table if block_id != ABSENT]
        num_wanted = num_needed - sum(self.pool.num_holders(block_id) > 0 for block_id in shared)
        if num_wanted + spare > num_free:
            # Until that many are free it is not worth looking again: searching costs time for every block found.
            request.num_blocks_wanted = num_wanted
            return False
        self.pool.share(shared)
        request.block_ids = tables
        request.num_scheduled_tokens = request.num_computed_tokens = num_cached
        request.num_blocks_wanted = 0
        if self._uses_cache(request):
            request.cache_node = nodes[-1] if nodes else ROOT
            self._cache.pin(request.cache_node)
            if not request.has_started:
                request.num_cached_tokens = min(num_cached, request.num_prompt_tokens)
                self.stats.query_tokens += request.num_tokens
                self.stats.hit_tokens += num_cached
        request.next_block_edge = self._edge_behind(request, len(nodes))
        self._open[request.internal_id] = request
        return True

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
            if self._has_windows:
                self._give_back_all_left_behind()
            if missing * len(tables) > self.pool.num_free:
                return None
        gained = tuple([self.pool.take(missing) for _ in tables])
        for table, block_ids in zip(tables, gained, strict=True):
            table.extend(block_ids)
        return gained

    def advance(self, request: Request) -> None:
        """Take note of applied output; due whenever ``num_computed_tokens`` has reached ``next_block_edge``.

        Blocks that are full become shareable: their last step has returned, the request holds them, and their tokens
        are known. Blocks that left the window are given back.
        """
        num_full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        if request.cache_node != NO_CACHE_NODE:
            self._publish(request, range(request.next_block_edge // self.block_size - 1, num_full))
        if self._has_windows:
            self._give_back_left_behind(request, request.num_computed_tokens)
        request.next_block_edge = self._edge_behind(request, num_full)

    def free(self, request: Request) -> None:
        """Take every block from the request. Steps in flight may still write to them: a new owner's steps come later."""
        for table in request.block_ids:
            # Tail first: a beginning without its end is worth more than an end without its beginning.
            self.pool.give_back([block_id for block_id in reversed(table) if block_id != ABSENT])
        request.block_ids = ()
        self._detach(request)
        self._open.pop(request.internal_id, None)

    def reset(self) -> None:
        """Forget all cached content. Requests keep the blocks that they hold, and share none for the rest of their life."""
        for request in self._open.values():
            request.cache_node = NO_CACHE_NODE
            request.next_block_edge = self._edge_behind(request, request.num_computed_tokens // self.block_size)
        self._cache.clear()

    # ---------------------------------------------------------------------------------------------- prefixes

    def _uses_cache(self, request: Request) -> bool:
        return self._prefix_caching and request.params.prefix_caching

    def _find_prefix(self, request: Request) -> list[int]:
        if not self._uses_cache(request):
            return []
        most_tokens = request.num_tokens - 1
        if request.params.prompt_logprobs is not None and request.num_prompt_logprobs_told < request.num_prompt_tokens:
            # The first position still owed comes from computing the token before it.
            most_tokens = request.num_prompt_logprobs_told - 1
        keys = self._block_keys(request, most_tokens // self.block_size)
        return self._cache.longest_prefix(keys, self.groups, self.block_size)

    def _block_keys(self, request: Request, num_blocks: int) -> Iterator[BlockKey]:
        for index in range(num_blocks):
            yield self._block_key(request, index)

    def _block_key(self, request: Request, index: int) -> BlockKey:
        start = index * self.block_size
        end = start + self.block_size
        return request.token_bytes(start, end), request.extra_key(start, end)

    def _table(self, group: int, nodes: list[int]) -> list[int]:
        """The part of a table that known blocks fill, for a sequence that goes on behind them."""
        first = self.groups[group].first_read(len(nodes) * self.block_size) // self.block_size
        return [ABSENT] * first + [self._cache.block(group, node) for node in nodes[first:]]

    def _publish(self, request: Request, indices: range) -> None:
        for index in indices:
            node = self._cache.extend(request.cache_node, *self._block_key(request, index))
            if node == NO_NODE:
                self._detach(request)
                return
            for group, table in enumerate(request.block_ids):
                if table[index] != ABSENT:
                    self._cache.attach(group, node, table[index])
            self._cache.unpin(request.cache_node)
            request.cache_node = node

    def _detach(self, request: Request) -> None:
        if request.cache_node != NO_CACHE_NODE:
            self._cache.unpin(request.cache_node)
            request.cache_node = NO_CACHE_NODE

    def _edge_behind(self, request: Request, num_full_blocks: int) -> int:
        if request.cache_node == NO_CACHE_NODE and not self._has_windows:
            return NEVER
        return (num_full_blocks + 1) * self.block_size

    # ----------------------------------------------------------------------------------------------- windows

    def _give_back_left_behind(self, request: Request, next_position: int) -> None:
        """Blocks that no token from ``next_position`` on reads."""
        for spec, table in zip(self.groups, request.block_ids, strict=True):
            index = min(spec.first_read(next_position) // self.block_size, len(table)) - 1
            left = []
            while index >= 0 and table[index] != ABSENT:
                left.append(table[index])
                table[index] = ABSENT
                index -= 1
            self.pool.give_back(left)

    def _give_back_all_left_behind(self) -> None:
        """Steps that read or write them were sent already; what those write will not be shared."""
        for request in self._open.values():
            self._give_back_left_behind(request, request.num_scheduled_tokens)

    # ------------------------------------------------------------------------------------------------- books

    def check_books(self, holders: Iterable[Request]) -> None:
        """Assert that the tables of these requests account for every block that is not free, and their pins for every pin."""
        holders = list(holders)
        assert {request.internal_id for request in holders} == set(self._open), "tables are open for other requests"
        self.pool.check_books(
            block_id for request in holders for table in request.block_ids for block_id in table if block_id != ABSENT
        )
        self._cache.check_books([request.cache_node for request in holders if request.cache_node != NO_CACHE_NODE])
        for request in holders:
            self._check_tables(request)

    def _check_tables(self, request: Request) -> None:
        num_places = -(-request.num_scheduled_tokens // self.block_size)
        for spec, table in zip(self.groups, request.block_ids, strict=True):
            assert len(table) == num_places, f"{request.request_id} has {len(table)} places for {num_places} blocks"
            first = spec.first_read(request.num_scheduled_tokens) // self.block_size
            assert all(block_id != ABSENT for block_id in table[first:]), f"{request.request_id} lacks a block it reads"
            num_absent = table.count(ABSENT)
            assert all(block_id == ABSENT for block_id in table[:num_absent]), "a block stands before an absent one"
