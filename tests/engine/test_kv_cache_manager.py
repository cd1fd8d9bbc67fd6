"""Do tables grow by exactly what tokens need, share what is known, and give back what nobody reads?"""

from typing import Any

import pytest

from engine.kv_cache_manager import NO_BLOCKS, KVCacheManager
from engine.kv_spec import ABSENT, FullAttention, KVSpec, SlidingWindow
from engine.request import NEVER, Request
from ipc.errors import ConfigError
from ipc.params import SamplingParams

FULL = FullAttention()
COUNT = iter(range(10**6))


def make_request(
    num_tokens: int = 40, *, first: int = 0, parts: tuple[tuple[int, bytes], ...] = (), **params: Any
) -> Request:
    return Request(
        request_id="r", internal_id=next(COUNT), client=b"", prompt_token_ids=list(range(first, first + num_tokens)),
        params=SamplingParams(**({"seed": 1} | params)), cache_key_parts=parts,
    )  # fmt: skip


def opened(manager: KVCacheManager, request: Request | None = None) -> Request:
    request = request or make_request()
    assert manager.admit(request, 1)
    return request


def compute(manager: KVCacheManager, request: Request, num_tokens: int, *, returned: bool = True) -> None:
    """A step up to that many tokens of the sequence, and its output."""
    assert manager.allocate(request, num_tokens) is not None
    request.num_scheduled_tokens = num_tokens
    if returned:
        apply(manager, request)


def apply(manager: KVCacheManager, request: Request) -> None:
    request.num_computed_tokens = request.num_scheduled_tokens
    if request.num_computed_tokens >= request.next_block_edge:
        manager.advance(request)


def finished(manager: KVCacheManager, num_tokens: int, **options: Any) -> Request:
    """One that computed its prompt and left."""
    request = opened(manager, make_request(num_tokens, **options))
    compute(manager, request, num_tokens)
    manager.free(request)
    return request


def test_a_table_grows_at_block_edges_only() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    request = opened(manager)
    assert manager.allocate(request, 1) == ([0],)
    assert manager.allocate(request, 4) == NO_BLOCKS
    assert manager.allocate(request, 5) == ([1],)
    assert manager.allocate(request, 13) == ([2, 3],)
    assert request.block_ids == ([0, 1, 2, 3],)


def test_too_few_blocks_change_nothing() -> None:
    manager = KVCacheManager(num_blocks=2, block_size=4)
    request = opened(manager)
    compute(manager, request, 4)
    assert manager.allocate(request, 12) is None
    assert request.block_ids == ([0],) and manager.pool.num_free == 1
    manager.check_books([request])


def test_freed_blocks_go_back_once_and_the_warm_ones_are_reused_in_order() -> None:
    manager = KVCacheManager(num_blocks=4, block_size=2)
    request = opened(manager)
    manager.allocate(request, 6)
    manager.free(request)
    manager.free(request)
    manager.check_books([])
    assert manager.allocate(opened(manager), 6) == ([0, 1, 2],)


def test_needs_are_counted_over_all_groups() -> None:
    manager = KVCacheManager(num_blocks=6, block_size=4, groups=(FULL, FULL))
    request = opened(manager)
    assert manager.num_blocks_for(9) == 6
    assert manager.allocate(request, 5) == ([0, 1], [2, 3])
    assert manager.allocate(request, 13) is None
    assert manager.allocate(request, 9) == ([4], [5])


def test_block_size_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="block_size: must be at least 1, got 0"):
        KVCacheManager(num_blocks=1, block_size=0)


# ------------------------------------------------------------------------------------------------------- prefixes


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(8, 4), (9, 8), (12, 8), (13, 12), (16, 12), (4, 0), (3, 0)])
def test_full_blocks_are_found_and_one_token_is_always_left(num_tokens: int, num_cached: int) -> None:
    """c10: also when the prompt is a multiple of the block size and all of it is cached."""
    manager = KVCacheManager(num_blocks=20, block_size=4)
    finished(manager, 15)
    request = opened(manager, make_request(num_tokens))
    assert request.num_computed_tokens == request.num_scheduled_tokens == request.num_cached_tokens == num_cached
    assert len(request.block_ids[0]) == num_cached // 4
    assert (manager.stats.query_tokens, manager.stats.hit_tokens) == (15 + num_tokens, num_cached)
    manager.check_books([request])


def test_blocks_are_shared_while_their_first_owner_runs_but_not_before_their_output_was_applied() -> None:
    """k14."""
    manager = KVCacheManager(num_blocks=20, block_size=4)
    first = opened(manager, make_request(12))
    compute(manager, first, 8, returned=False)
    early = opened(manager, make_request(12))
    assert early.num_computed_tokens == 0
    apply(manager, first)
    second = opened(manager, make_request(12))
    assert second.num_computed_tokens == 8 and second.block_ids[0] == first.block_ids[0][:2]
    assert [manager.num_blocks_held_alone(request) for request in (first, early, second)] == [0, 0, 0]
    compute(manager, first, 12)
    assert manager.num_blocks_held_alone(first) == 1
    manager.free(first)
    assert manager.num_blocks_held_alone(second) == 2
    manager.check_books([early, second])


def test_generated_tokens_are_shared_like_prompts() -> None:
    manager = KVCacheManager(num_blocks=20, block_size=4)
    request = opened(manager, make_request(6))
    compute(manager, request, 6)
    for token_id in (6, 7, 8):
        request.output_token_ids.append(token_id)
        compute(manager, request, request.num_tokens)
    manager.free(request)
    assert opened(manager, make_request(12)).num_computed_tokens == 8
    assert opened(manager, make_request(9)).num_computed_tokens == 8


def test_a_block_whose_tokens_are_not_all_known_is_not_shared() -> None:
    """A placeholder's slot may be computed before the core knows the token."""
    manager = KVCacheManager(num_blocks=20, block_size=4)
    request = opened(manager, make_request(7))
    compute(manager, request, 8)
    assert manager.pool.num_free_kept == 0
    manager.free(request)
    assert manager.pool.num_free_kept == 1


def test_the_salt_and_other_parts_of_the_key_separate_requests() -> None:
    manager = KVCacheManager(num_blocks=40, block_size=4)
    finished(manager, 12, parts=((0, b"a"),))
    finished(manager, 12, parts=((4, b"image"),))
    assert opened(manager, make_request(12, parts=((0, b"a"),))).num_cached_tokens == 8
    assert opened(manager, make_request(12, parts=((0, b"b"),))).num_cached_tokens == 0
    assert opened(manager, make_request(12, parts=((5, b"image"),))).num_cached_tokens == 4, "another place"
    assert opened(manager, make_request(12, parts=((4, b"image"), (8, b"x")))).num_cached_tokens == 8
    assert opened(manager, make_request(12)).num_cached_tokens == 4, "before the image all is the same"


def test_who_opts_out_neither_looks_nor_leaves() -> None:
    manager = KVCacheManager(num_blocks=40, block_size=4)
    request = finished(manager, 12, prefix_caching=False)
    assert request.next_block_edge == NEVER and manager.pool.num_free_kept == 0
    finished(manager, 12)
    assert manager.pool.num_free_kept == 3
    assert opened(manager, make_request(12, prefix_caching=False)).num_cached_tokens == 0
    assert manager.stats.query_tokens == 12


def test_without_prefix_caching_nothing_is_kept() -> None:
    manager = KVCacheManager(num_blocks=40, block_size=4, prefix_caching=False)
    finished(manager, 12)
    assert manager.pool.num_free_kept == 0
    assert opened(manager, make_request(12)).num_cached_tokens == manager.stats.query_tokens == 0


def test_prompt_logprobs_that_are_owed_are_computed() -> None:
    manager = KVCacheManager(num_blocks=60, block_size=4)
    finished(manager, 16)
    request = make_request(16, prompt_logprobs=0)
    assert opened(manager, request).num_computed_tokens == 0
    manager.free(request)
    request.end_life()
    request.num_prompt_logprobs_told = 9  # positions 1 to 8: the next one comes from computing token 8
    assert opened(manager, request).num_computed_tokens == 8
    manager.free(request)
    request.end_life()
    request.num_prompt_logprobs_told = 16
    assert opened(manager, request).num_computed_tokens == 12


def test_a_preempted_request_finds_its_own_blocks_and_counts_once() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=4)
    request = opened(manager, make_request(10))
    request.has_started = True
    compute(manager, request, 10)
    manager.free(request)
    request.end_life()
    assert opened(manager, request).num_computed_tokens == 8
    assert request.num_cached_tokens == manager.stats.hit_tokens == 0
    manager.check_books([request])


def test_cached_blocks_count_as_free_and_shared_ones_are_not_needed_again() -> None:
    manager = KVCacheManager(num_blocks=6, block_size=4)
    finished(manager, 12)
    assert manager.pool.num_free == 6
    first = make_request(13)
    assert not manager.admit(first, 14, spare=3), "cached blocks that it takes are free no more"
    assert first.block_ids == () and first.num_computed_tokens == 0
    manager.check_books([])
    assert manager.admit(first, 14, spare=2)
    compute(manager, first, 14)
    second = make_request(13)
    assert manager.admit(second, 14, spare=1), "three of its four blocks are there and held"
    manager.check_books([first, second])


def test_a_request_that_did_not_fit_is_not_looked_up_again_before_enough_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = KVCacheManager(num_blocks=6, block_size=4)
    holder = opened(manager, make_request(16, first=100))
    compute(manager, holder, 16)
    searches = []
    find = manager._cache.longest_prefix
    monkeypatch.setattr(manager._cache, "longest_prefix", lambda *args: (searches.append(1), find(*args))[1])
    request = make_request(12)
    assert not any(manager.admit(request, 13) for _ in range(5)) and len(searches) == 1
    manager.free(holder)
    assert manager.admit(request, 13) and len(searches) == 2


def test_reset_forgets_and_running_requests_keep_theirs_to_themselves() -> None:
    manager = KVCacheManager(num_blocks=12, block_size=4)
    finished(manager, 8, first=100)
    request = opened(manager, make_request(16))
    compute(manager, request, 8)
    manager.reset()
    manager.check_books([request])
    assert manager.pool.num_free_kept == 0
    compute(manager, request, 16)
    assert opened(manager, make_request(16)).num_cached_tokens == 0
    manager.free(request)
    assert manager.pool.num_free_kept == 0, "computed before the reset, or behind what was"
    assert opened(manager, make_request(9, first=100)).num_cached_tokens == 0


# -------------------------------------------------------------------------------------------------------- windows


def windowed(groups: tuple[KVSpec, ...] = (SlidingWindow(4),), **options: Any) -> KVCacheManager:
    return KVCacheManager(**({"num_blocks": 20, "block_size": 2, "groups": groups, "max_chunk": 4} | options))


def test_blocks_that_left_the_window_are_given_back_when_output_was_applied() -> None:
    manager = windowed()
    request = opened(manager)
    for end in range(4, 20, 4):
        compute(manager, request, end)
    assert request.block_ids[0] == [ABSENT] * 6 + request.block_ids[0][6:] and ABSENT not in request.block_ids[0][6:]
    assert manager.pool.num_free == 18
    compute(manager, request, 20, returned=False)
    assert manager.pool.num_free == 16, "output still to come: its blocks may yet be shared"
    manager.check_books([request])


def test_a_short_pool_takes_back_at_once_what_sent_steps_read_last() -> None:
    manager = windowed(num_blocks=4)
    request = opened(manager)
    assert manager.num_blocks_for(1000) == 4
    for end in range(4, 40, 4):
        compute(manager, request, end, returned=False)
        manager.check_books([request])
    apply(manager, request)
    assert manager.pool.num_free == 4 - 2


def test_other_requests_give_back_before_anyone_is_refused() -> None:
    manager = windowed(num_blocks=8)
    first = opened(manager, make_request(40))
    for end in (4, 8, 12):
        compute(manager, first, end, returned=False)
    second = opened(manager, make_request(40, first=100))
    assert manager.pool.num_free == 2
    assert manager.allocate(second, 8) is not None
    assert first.block_ids[0].count(ABSENT) == 4
    second.num_scheduled_tokens = 8
    manager.check_books([first, second])


def test_admission_counts_what_a_windowed_group_holds_at_once() -> None:
    manager = windowed(num_blocks=10)
    assert manager.admit(make_request(500), 500, spare=6)
    assert not manager.admit(make_request(500), 500, spare=7)


def test_a_hit_in_a_windowed_group_takes_the_window_only() -> None:
    manager = windowed((FULL, SlidingWindow(4)), num_blocks=40)
    first = opened(manager, make_request(16))
    for end in range(4, 20, 4):
        compute(manager, first, end)
    second = opened(manager, make_request(15))
    assert second.num_computed_tokens == 14
    full, window = second.block_ids
    assert full == first.block_ids[0][:7] and window[:5] == [ABSENT] * 5
    assert window[6] == first.block_ids[1][6] and manager.pool.num_holders(window[6]) == 2
    assert first.block_ids[1][5] == ABSENT and manager.pool.num_holders(window[5]) == 1, "one that was kept is held again"
    manager.check_books([first, second])
    compute(manager, second, 15)
    manager.free(first)
    manager.free(second)
    manager.check_books([])


def test_a_windowed_group_without_its_last_blocks_shortens_the_hit_of_all() -> None:
    manager = windowed((FULL, SlidingWindow(4)), num_blocks=40)
    first = opened(manager, make_request(16))
    compute(manager, first, 8)
    compute(manager, first, 12, returned=False)
    manager._give_back_all_left_behind()
    compute(manager, first, 16, returned=False)
    manager._give_back_all_left_behind()
    apply(manager, first)
    assert [block_id == ABSENT for block_id in first.block_ids[1]] == [True] * 6 + [False] * 2
    # Of the window's blocks 4 and 5 were taken back before their output came; 6 and 7 are there, 2 and 3 are kept.
    assert opened(manager, make_request(40)).num_computed_tokens == 16
    assert opened(manager, make_request(15)).num_computed_tokens == 8
