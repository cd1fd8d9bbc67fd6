"""How many blocks the pool gets."""

import pytest

from engine.config import CoreConfig
from engine.kv_sizing import plan_kv_cache
from ipc.errors import ConfigError
from ipc.messages import KVCacheGroup, WorkerLoaded


def config(**changes: object) -> CoreConfig:
    return CoreConfig(**{
        "run_dir": "/r", "agent_pid": 1, "agent_start": 1, "key": "", "num_stages": 2, "model_name": "m", "vocab_size": 10,
        "model_max_len": 1024, "block_size": 16, "max_num_seqs": 8, "kv_memory_share": 0.5, **changes})


def stage(rank: int, *, layers: list[int], bytes_per_block: int, free_bytes: int, device: str = "cpu", step_bytes: int = 0) -> WorkerLoaded:
    return WorkerLoaded(core_id=1, epoch=1, rank=rank, groups=(KVCacheGroup(kind="full", layers=layers),),
                        bytes_per_block=bytes_per_block, free_bytes=free_bytes, device=device, weight_bytes=0, load_s=0.0,
                        num_threads=1, step_bytes=step_bytes)


def test_ranks_on_one_host_share_what_the_last_of_them_measured() -> None:
    stages = [stage(0, layers=[0, 1, 2], bytes_per_block=300, free_bytes=10**6),
              stage(1, layers=[3, 4], bytes_per_block=200, free_bytes=400_000)]
    together = plan_kv_cache(config(), stages, {0: "a", 1: "a"})
    assert together.num_blocks == 200_000 // 500
    apart = plan_kv_cache(config(), stages, {0: "a", 1: "b"})
    assert apart.num_blocks == 512, "8 sequences of 1024 tokens need no more"
    apart = plan_kv_cache(config(max_num_seqs=100), stages, {0: "a", 1: "b"})
    assert apart.num_blocks == min(500_000 // 300, 200_000 // 200)
    assert together.groups[0].layers == [0, 1, 2, 3, 4]


def test_ranks_that_share_a_gpu_divide_it_and_leave_room_for_their_largest_steps() -> None:
    sizes = {"bytes_per_block": 250, "step_bytes": 50_000}
    stages = [stage(0, layers=[0], free_bytes=10**6, device="cuda:a", **sizes),
              stage(1, layers=[1], free_bytes=600_000, device="cuda:a", **sizes)]
    chosen = config(max_num_seqs=100, kv_gpu_memory_share=0.8)
    assert plan_kv_cache(chosen, stages, {0: "x", 1: "x"}).num_blocks == 400_000 // 500
    # The same number on two hosts is two GPUs.
    assert plan_kv_cache(chosen, stages, {0: "x", 1: "y"}).num_blocks == 440_000 // 250
    own = [stages[0], stage(1, layers=[1], free_bytes=600_000, device="cuda:b", **sizes)]
    assert plan_kv_cache(chosen, own, {0: "x", 1: "x"}).num_blocks == 440_000 // 250


def test_a_gpu_that_its_largest_step_fills_has_no_room_for_a_pool() -> None:
    full = [stage(0, layers=[0], bytes_per_block=1, free_bytes=1000, device="cuda:a", step_bytes=2000)]
    with pytest.raises(ConfigError, match="the pool has 0"):
        plan_kv_cache(config(), full, {0: "x"})


def windowed_stage(rank: int, groups: list[tuple[str, int, list[int]]]) -> WorkerLoaded:
    return WorkerLoaded(
        core_id=1, epoch=1, rank=rank, bytes_per_block=100, free_bytes=0, device="cpu", weight_bytes=0, load_s=0.0,
        num_threads=1, groups=tuple(KVCacheGroup(kind=kind, window=window, layers=layers) for kind, window, layers in groups),
    )  # fmt: skip


def test_groups_of_one_kind_stay_apart_and_those_of_all_stages_belong_together_in_order() -> None:
    """A stage splits five windowed layers for each full one into groups of equal size: one pool serves them."""
    stages = [windowed_stage(0, [("full", 0, [5]), *(("window", 64, [layer]) for layer in range(5))]),
              windowed_stage(1, [*(("window", 64, [layer]) for layer in range(6, 11)), ("full", 0, [11])])]
    groups = plan_kv_cache(config(num_kv_blocks=400), stages, {0: "a", 1: "a"}).groups
    assert [(group.kind, group.window, group.layers) for group in groups] == [
        ("full", 0, [5, 11]), *(("window", 64, [layer, layer + 6]) for layer in range(5))]


def test_windowed_groups_count_what_they_hold() -> None:
    stages = [windowed_stage(rank, [("full", 0, [2 * rank]), ("window", 64, [2 * rank + 1])]) for rank in (0, 1)]
    changes = {"max_num_batched_tokens": 32}
    # A window of 64 and a chunk of 32 touch 95 tokens: at most 7 blocks of 16.
    assert plan_kv_cache(config(kv_cache_memory=10**9, **changes), stages, {0: "a", 1: "b"}).num_blocks == 8 * (64 + 7)
    plan = plan_kv_cache(config(num_kv_blocks=47, **changes), stages, {0: "a", 1: "b"})
    assert plan.max_model_len == 40 * 16
    with pytest.raises(ConfigError, match="1024 tokens needs 71 KV blocks of 16, the pool has 47; lower --max-model-len to 640"):
        plan_kv_cache(config(num_kv_blocks=47, max_model_len=1024, **changes), stages, {0: "a", 1: "b"})


def test_a_kind_of_group_that_the_ledger_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="'state' is not one of full, window"):
        plan_kv_cache(config(num_kv_blocks=9), [windowed_stage(0, [("state", 0, [0])])], {0: "a"})


def test_two_devices_of_one_host_do_not_share() -> None:
    stages = [stage(0, layers=[0], bytes_per_block=100, free_bytes=100_000, device="cuda:0"),
              stage(1, layers=[1], bytes_per_block=100, free_bytes=200_000, device="cuda:1")]
    assert plan_kv_cache(config(max_num_seqs=100), stages, {0: "a", 1: "a"}).num_blocks == 500


def test_flags_win_over_measurements() -> None:
    stages = [stage(0, layers=[0], bytes_per_block=300, free_bytes=0), stage(1, layers=[1], bytes_per_block=100, free_bytes=0)]
    assert plan_kv_cache(config(num_kv_blocks=99), stages, {0: "a", 1: "a"}).num_blocks == 99
    assert plan_kv_cache(config(kv_cache_memory=30_000), stages, {0: "a", 1: "a"}).num_blocks == 100


def test_a_small_pool_lowers_the_context_that_nobody_asked_for_and_refuses_one_that_somebody_did() -> None:
    stages = [stage(0, layers=[0], bytes_per_block=1, free_bytes=0), stage(1, layers=[1], bytes_per_block=1, free_bytes=0)]
    plan = plan_kv_cache(config(num_kv_blocks=12), stages, {0: "a", 1: "a"})
    assert plan.max_model_len == 192 and "lowered from 1024 to 192" in plan.notes[-1]
    with pytest.raises(ConfigError, match="--max-model-len.*1024 tokens needs 64 KV blocks of 16, the pool has 12"):
        plan_kv_cache(config(num_kv_blocks=12, max_model_len=1024), stages, {0: "a", 1: "a"})
    with pytest.raises(ConfigError, match="the pool has 0"):
        plan_kv_cache(config(), stages, {0: "a", 1: "a"})


@pytest.mark.parametrize("changes, words", [
    ({"block_size": 0}, "--block-size: 0 must be a power of two"),
    ({"block_size": 24}, "--block-size: 24"),
    ({"max_num_seqs": 0}, "--max-num-seqs: 0"),
    ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens: 0"),
    ({"max_model_len": 1}, "--max-model-len: 1 must be at least 2"),
    ({"max_model_len": 2048}, "--max-model-len: 2048 is above the 1024"),
    ({"num_kv_blocks": 0}, "--num-kv-blocks: 0"),
    ({"health_timeout_s": 0.5}, "--health-timeout: 0.5"),
])
def test_settings_that_cannot_work_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**changes)
