"""Does the cache find exactly the beginnings that it was given, whatever the hash does, and forget what is evicted?"""

import tracemalloc

import pytest

from engine.kv_spec import FullAttention, SlidingWindow
from engine.prefix_cache import DIGEST_BYTES, NO_BLOCK, NO_NODE, ROOT, HashFunction, PrefixCache, keyed_hash

FULL = (FullAttention(),)


def constant(parent: bytes, tokens: bytes, extra: bytes) -> bytes:
    return bytes(DIGEST_BYTES)


def make_cache(num_blocks: int = 8, num_groups: int = 1, hash_block: HashFunction | None = None) -> PrefixCache:
    """Blocks of one token."""
    return PrefixCache(
        num_blocks=num_blocks, block_size=1, num_groups=num_groups, hash_block=hash_block or keyed_hash(b"salt")
    )


def token(number: int) -> bytes:
    return number.to_bytes(4, "little")


def publish(cache: PrefixCache, numbers: list[int], *, extras: dict[int, bytes] | None = None) -> list[int]:
    """Blocks for these tokens, computed, published, and held; the pin is on the last node."""
    block_ids = cache.pool.take(len(numbers))
    parent = ROOT
    for index, (number, block_id) in enumerate(zip(numbers, block_ids, strict=True)):
        node = cache.extend(parent, token(number), (extras or {}).get(index, b""))
        cache.attach(0, node, block_id)
        cache.unpin(parent)
        parent = node
    cache.unpin(parent)
    return block_ids


def found(cache: PrefixCache, numbers: list[int], *, extras: dict[int, bytes] | None = None) -> list[int]:
    keys = ((token(number), (extras or {}).get(index, b"")) for index, number in enumerate(numbers))
    return [cache.block(0, node) for node in cache.longest_prefix(keys, FULL, 1)]


@pytest.mark.parametrize("hash_block", [None, constant])
def test_x7_only_equal_beginnings_are_found(hash_block: HashFunction | None) -> None:
    """Also when every hash collides."""
    cache = make_cache(16, hash_block=hash_block)
    first = publish(cache, [1, 2, 3])
    second = publish(cache, [2, 2, 3])
    third = publish(cache, [1, 2, 3], extras={0: b"tenant"})
    assert found(cache, [1, 2, 3, 4]) == first
    assert found(cache, [1, 2, 4]) == first[:2]
    assert found(cache, [2, 2, 3]) == second
    assert found(cache, [3]) == [] and found(cache, [2, 3]) == second[:1]
    assert found(cache, [1, 2, 3], extras={0: b"tenant"}) == third
    assert found(cache, [1, 2, 3], extras={1: b"tenant"}) == first[:1]
    cache.check_books([])


def test_the_salt_and_every_part_of_the_key_change_the_hash() -> None:
    """And no bytes can move from one part to the next: the first two have fixed lengths."""
    parts = (bytes(16), token(1), b""), (bytes(15) + b"1", token(1), b""), (bytes(16), token(2), b""), (bytes(16), token(1), b"x")
    digests = {keyed_hash(salt)(*part) for salt in (b"a", b"b") for part in parts}
    assert len(digests) == 8 and {len(digest) for digest in digests} == {DIGEST_BYTES}


def test_the_first_block_of_equal_content_stays_and_the_second_is_private() -> None:
    cache = make_cache()
    first = publish(cache, [1, 2])
    second = publish(cache, [1, 2])
    assert found(cache, [1, 2]) == first
    cache.pool.give_back(reversed(second))
    assert cache.pool.num_free_kept == 0 and found(cache, [1, 2]) == first
    cache.check_books([])


def test_eviction_takes_the_end_of_a_beginning_first_and_frees_its_nodes() -> None:
    cache = make_cache(4)
    block_ids = publish(cache, [1, 2, 3])
    cache.pool.give_back(reversed(block_ids))
    cache.pool.take(2)
    assert found(cache, [1, 2, 3]) == block_ids[:2] and cache.num_nodes == 2
    cache.check_books([])
    cache.pool.take(2)
    assert found(cache, [1, 2, 3]) == [] and cache.num_nodes == 0
    cache.check_books([])


def test_a_beginning_that_lost_its_head_is_found_again_when_the_head_is_computed_again() -> None:
    cache = make_cache(6)
    head, tail = publish(cache, [1, 2])
    cache.pool.give_back([head])
    cache.pool.take(4)
    assert cache.pool.take(1) == [head]
    assert found(cache, [1, 2]) == []
    node = cache.extend(ROOT, token(1), b"")
    cache.attach(0, node, head)
    cache.unpin(node)
    assert found(cache, [1, 2]) == [head, tail]
    cache.check_books([])


def test_a_pinned_node_outlives_its_block() -> None:
    cache = make_cache(2)
    (block_id,) = cache.pool.take(1)
    node = cache.extend(ROOT, token(1), b"")
    cache.attach(0, node, block_id)
    cache.pool.give_back([block_id])
    cache.pool.take(2)
    assert cache.block(0, node) == NO_BLOCK
    cache.check_books([node])
    child = cache.extend(node, token(2), b"")
    cache.attach(0, child, block_id)
    cache.unpin(node)
    cache.unpin(child)
    assert cache.num_nodes == 2 and found(cache, [1, 2]) == []
    cache.check_books([])


def test_nodes_run_out_only_when_all_are_held() -> None:
    cache = make_cache(2, hash_block=constant)
    nodes = [cache.extend(ROOT, token(number), b"") for number in range(2)]
    assert cache.extend(ROOT, token(9), b"") == NO_NODE
    cache.check_books(nodes)
    (block_id,) = cache.pool.take(1)
    cache.attach(0, nodes[0], block_id)
    cache.unpin(nodes[0])
    cache.pool.give_back([block_id])
    assert cache.extend(ROOT, token(9), b"") == nodes[0], "what nobody holds makes room"


def test_windows_need_the_last_blocks_only_and_all_groups_must_agree() -> None:
    """Tokens are blocks here: behind n tokens, a window of 3 needs blocks n - 2 and n - 1."""
    numbers = [1, 2, 3, 4, 5]

    def length(blocks_of_full: int, blocks_of_window: list[int]) -> int:
        made = make_cache(16, num_groups=2)
        parent = ROOT
        for index, number in enumerate(numbers):
            parent = made.extend(parent, token(number), b"")
            for group, is_there in enumerate((index < blocks_of_full, index in blocks_of_window)):
                if is_there:
                    made.attach(group, parent, made.pool.take(1)[0])
        keys = ((token(number), b"") for number in [*numbers, 6])
        return len(made.longest_prefix(keys, (FullAttention(), SlidingWindow(3)), 1))

    assert length(5, [0, 1, 2, 3, 4]) == 5
    assert length(5, [3, 4]) == 5, "what left the window is not needed"
    assert length(5, [4]) == 0
    assert length(5, [0]) == 1, "behind one token the window holds one"
    assert length(5, [1, 2, 4]) == 3
    assert length(2, [0, 1, 2, 3, 4]) == 2
    assert length(4, [1, 2, 4]) == 3
    assert length(2, [1, 2]) == 0


def test_clear_forgets_all_and_leaves_holders_alone() -> None:
    cache = make_cache()
    held = publish(cache, [1, 2], extras={0: b"x"})
    cache.pool.give_back(publish(cache, [7]))
    cache.clear()
    assert cache.num_nodes == 0 and cache.pool.num_free_kept == 0
    assert found(cache, [7]) == [] and found(cache, [1], extras={0: b"x"}) == []
    cache.check_books([])
    cache.pool.give_back(held)
    cache.pool.check_books([])
    assert cache.pool.num_free == 8


def test_the_ledger_takes_less_than_200_bytes_per_block_with_all_blocks_cached() -> None:
    num_blocks, block_size = 200_000, 16
    tracemalloc.start()
    try:
        cache = PrefixCache(
            num_blocks=num_blocks, block_size=block_size, num_groups=1, hash_block=keyed_hash(b"salt")
        )
        for start in range(0, num_blocks, 100):
            block_ids = cache.pool.take(100)
            parent = ROOT
            for number, block_id in enumerate(block_ids, start):
                node = cache.extend(parent, token(number) * block_size, b"")
                cache.attach(0, node, block_id)
                cache.unpin(parent)
                parent = node
            cache.unpin(parent)
            cache.pool.give_back(reversed(block_ids))
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert cache.pool.num_free_kept == cache.num_nodes == num_blocks
    assert size / num_blocks < 200
