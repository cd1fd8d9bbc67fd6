"""Do tables grow by exactly what tokens need, and not at all when the pool is too small?"""

import pytest

from engine.kv_cache_manager import NO_BLOCKS, KVCacheManager
from engine.request import Request
from ipc.errors import ConfigError
from ipc.params import SamplingParams


def make_request() -> Request:
    return Request(request_id="r", internal_id=1, client=b"", prompt_token_ids=[1, 2, 3], params=SamplingParams(seed=1))


def opened(manager: KVCacheManager) -> Request:
    request = make_request()
    manager.open_tables(request)
    return request


def test_a_table_grows_at_block_edges_only() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    request = opened(manager)
    assert manager.allocate(request, 1) == ([0],)
    assert manager.allocate(request, 4) == NO_BLOCKS
    assert manager.allocate(request, 5) == ([1],)
    assert manager.allocate(request, 13) == ([2, 3],)
    assert request.block_ids == ([0, 1, 2, 3],)
    manager.check_books([request])


def test_too_few_blocks_change_nothing() -> None:
    manager = KVCacheManager(num_blocks=2, block_size=4)
    request = opened(manager)
    manager.allocate(request, 4)
    assert manager.allocate(request, 12) is None
    assert request.block_ids == ([0],) and manager.pool.num_free == 1
    manager.check_books([request])


def test_freed_blocks_go_back_tail_first_and_once() -> None:
    manager = KVCacheManager(num_blocks=3, block_size=2)
    request = opened(manager)
    manager.allocate(request, 6)
    manager.free(request)
    manager.free(request)
    manager.check_books([])
    other = opened(manager)
    assert manager.allocate(other, 6) == ([2, 1, 0],)


def test_needs_are_counted_over_all_groups() -> None:
    manager = KVCacheManager(num_blocks=6, block_size=4, num_groups=2)
    request = opened(manager)
    assert manager.num_blocks_for(9) == 6
    assert manager.allocate(request, 5) == ([0, 1], [2, 3])
    assert manager.allocate(request, 13) is None
    assert manager.allocate(request, 9) == ([4], [5])
    manager.check_books([request])


def test_block_size_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="block_size: must be at least 1, got 0"):
        KVCacheManager(num_blocks=1, block_size=0)
