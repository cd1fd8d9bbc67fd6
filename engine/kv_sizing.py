"""How many KV blocks the pool gets, from what the stages measured and what the flags say."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.config import CoreConfig
from ipc.errors import ConfigError
from ipc.messages import KVCacheGroup, WorkerLoaded


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlan:
    """The pool that every stage makes room for."""

    num_blocks: int
    max_model_len: int
    groups: tuple[KVCacheGroup, ...]
    notes: tuple[str, ...]
    """Lines for the log: what each stage could hold and what limited the pool."""


def plan_kv_cache(config: CoreConfig, stages: Sequence[WorkerLoaded], hosts: Mapping[int, str]) -> KVPlan:
    """The pool is the minimum over the stages: one ledger of block ids serves them all.

    Ranks on one host split the free memory measured last there (the smallest figure: by then all weights were loaded)
    so that each can hold the same number of blocks.

    Args:
        stages: one report per rank, in rank order.
        hosts: rank -> host.

    Raises:
        ConfigError: when the pool can't hold one request of the longest context asked for.
    """
    affordable = _affordable_blocks(config, stages, hosts)
    wanted = config.max_num_seqs * _blocks(config.max_model_len or config.model_max_len, config.block_size)
    if config.num_kv_blocks is not None:
        num_blocks, limit = config.num_kv_blocks, "--num-kv-blocks"
    else:
        num_blocks, limit = min(affordable.values()), "memory"
        if wanted < num_blocks:
            num_blocks, limit = wanted, "max_num_seqs x max_model_len"
    max_model_len, note = _longest_context(config, num_blocks)
    notes = [
        f"stage {stage.rank}: weights {stage.weight_bytes / 1e6:.1f} MB, KV {stage.bytes_per_block} bytes per block, "
        f"room for {affordable[stage.rank]} blocks"
        for stage in stages
    ]
    notes.append(f"KV pool: {num_blocks} blocks of {config.block_size} tokens (limited by {limit})")
    return KVPlan(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        groups=_merge_groups(stages),
        notes=(*notes, *note),
    )


def _affordable_blocks(
    config: CoreConfig, stages: Sequence[WorkerLoaded], hosts: Mapping[int, str]
) -> dict[int, int]:
    if config.kv_cache_memory is not None:
        return {stage.rank: config.kv_cache_memory // stage.bytes_per_block for stage in stages}
    sharing: dict[tuple[str, str], list[WorkerLoaded]] = defaultdict(list)
    for stage in stages:
        sharing[hosts[stage.rank], stage.device].append(stage)
    blocks = {}
    for together in sharing.values():
        budget = config.kv_memory_share * min(stage.free_bytes for stage in together)
        each = int(budget) // sum(stage.bytes_per_block for stage in together)
        blocks.update({stage.rank: each for stage in together})
    return blocks


def _longest_context(config: CoreConfig, num_blocks: int) -> tuple[int, tuple[str, ...]]:
    tokens = num_blocks * config.block_size
    wanted = config.max_model_len or config.model_max_len
    if tokens >= wanted:
        return wanted, ()
    if config.max_model_len is not None or tokens < 2:
        raise ConfigError(
            "--max-model-len",
            f"one request of {wanted} tokens needs {_blocks(wanted, config.block_size)} KV blocks of {config.block_size}, "
            f"the pool has {num_blocks}; lower --max-model-len to {max(tokens, 2)} or give the cache more memory "
            "(--kv-cache-memory, --num-kv-blocks)",
        )
    return tokens, (f"max_model_len lowered from {wanted} to {tokens}, which is what the KV pool holds",)


def _merge_groups(stages: Sequence[WorkerLoaded]) -> tuple[KVCacheGroup, ...]:
    layers: dict[tuple[str, int], list[int]] = defaultdict(list)
    for stage in stages:
        for group in stage.groups:
            layers[group.kind, group.window].extend(group.layers)
    return tuple(
        KVCacheGroup(kind=kind, window=window, layers=sorted(numbers))
        for (kind, window), numbers in sorted(layers.items())
    )


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
