"""Does the pool give each block to one holder at a time, keep what may be wanted again, and notice wrong books?"""

import pytest

from engine.block_pool import BlockPool
from ipc.errors import ConfigError


def test_the_block_that_was_freed_last_is_taken_first() -> None:
    pool = BlockPool(4)
    first = pool.take(3)
    assert first == [0, 1, 2] and pool.num_free == 1
    pool.give_back([2, 0])
    assert pool.take(3) == [0, 2, 3]
    pool.check_books([0, 1, 2, 3])


def test_kept_blocks_are_free_and_go_last_the_least_recently_used_first() -> None:
    evicted: list[int] = []
    pool = BlockPool(5, on_evict=evicted.append)
    assert pool.take(4) == [0, 1, 2, 3]
    for block_id in (0, 1, 2):
        pool.keep(block_id)
    pool.give_back([1, 0, 2, 3])
    assert (pool.num_free, pool.num_free_kept) == (5, 3)
    assert pool.take(2) == [3, 4] and not evicted, "blank ones come first"
    pool.share([1])
    pool.give_back([1])
    assert pool.take(2) == [2, 0], "1 was used since"
    assert evicted == [0, 2]
    pool.check_books([3, 4, 2, 0])


def test_a_kept_block_has_several_holders_and_is_free_behind_the_last() -> None:
    pool = BlockPool(2)
    pool.take(1)
    pool.keep(0)
    pool.share([0])
    assert pool.num_holders(0) == 2
    pool.give_back([0])
    assert pool.num_free == 1
    pool.give_back([0])
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="block 1 is shared but its content is not known"):
        pool.share([1])


def test_what_is_dropped_is_blank() -> None:
    pool = BlockPool(3)
    pool.take(3)
    for block_id in range(3):
        pool.keep(block_id)
    pool.give_back([0, 1])
    for block_id in (1, 2):
        pool.drop(block_id)
    assert (pool.num_free, pool.num_free_kept) == (2, 1)
    assert pool.take(1) == [1]
    pool.give_back([2])
    pool.check_books([1])


def test_a_block_that_nobody_holds_is_not_taken_back() -> None:
    pool = BlockPool(2)
    pool.give_back(pool.take(1))
    with pytest.raises(AssertionError, match="block 0 is given back by nobody"):
        pool.give_back([0])


def test_books_notice_a_lost_and_a_doubled_holder() -> None:
    pool = BlockPool(3)
    held = pool.take(2)
    pool.check_books(held)
    with pytest.raises(AssertionError, match="holder counts"):
        pool.check_books(held[:1])
    with pytest.raises(AssertionError, match="holder counts"):
        pool.check_books([*held, held[0]])


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks: must be at least 1, got 0"):
        BlockPool(0)
