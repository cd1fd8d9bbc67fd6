"""Do specs answer for their kind, and is the registry open for more?"""

import pytest

from engine.kv_spec import SPECS, FullAttention, KVSpec, SlidingWindow, most_blocks, register_spec, spec_of
from ipc.errors import ConfigError
from ipc.messages import KVCacheGroup


def test_groups_get_the_spec_of_their_kind() -> None:
    assert spec_of(KVCacheGroup(kind="full", layers=[0])) == FullAttention()
    assert spec_of(KVCacheGroup(kind="window", layers=[1], window=7)) == SlidingWindow(7)


def test_what_is_unknown_or_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"KVCacheGroup.kind: 'state' is not one of full, window"):
        spec_of(KVCacheGroup(kind="state", layers=[0]))
    with pytest.raises(ConfigError, match=r"KVCacheGroup.window: must be at least 1, got 0"):
        spec_of(KVCacheGroup(kind="window", layers=[0]))


def test_another_kind_can_register_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(SPECS, "chunked", raising=False)

    @register_spec("chunked")
    def chunked(group: KVCacheGroup) -> KVSpec:
        return SlidingWindow(group.window)

    assert spec_of(KVCacheGroup(kind="chunked", layers=[0], window=2)) == SlidingWindow(2)
    with pytest.raises(ValueError, match="'chunked' is registered already"):
        register_spec("chunked")(chunked)
    del SPECS["chunked"]


@pytest.mark.parametrize(("window", "position", "first"), [(1, 9, 9), (4, 9, 6), (4, 3, 0), (4, 2, 0), (100, 9, 0)])
def test_a_window_reads_itself_and_what_is_before_it(window: int, position: int, first: int) -> None:
    assert SlidingWindow(window).first_read(position) == first
    assert FullAttention().first_read(position) == 0


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("max_chunk", [1, 2, 5])
def test_most_blocks_is_the_least_bound(window: int, block_size: int, max_chunk: int) -> None:
    """Against counting: every chunk at every place of a long sequence."""
    spec = SlidingWindow(window)
    for num_tokens in range(1, 40):
        held = [
            len({position // block_size for position in range(spec.first_read(start), min(start + max_chunk, num_tokens))})
            for start in range(num_tokens)
        ]
        assert max(held) <= spec.most_blocks(num_tokens, block_size, max_chunk)
    assert max(held) == spec.most_blocks(num_tokens, block_size, max_chunk)
    assert most_blocks((spec, FullAttention()), 39, block_size, max_chunk) == max(held) + -(-39 // block_size)
