"""Does the pool give each block to one holder at a time, and notice wrong books?"""

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
