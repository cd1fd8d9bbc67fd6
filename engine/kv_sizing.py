"""How many KV blocks the pool gets, from what the stages measured and what the flags say."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.config import CoreConfig
from engine.kv_spec import most_blocks, spec_of
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

    Ranks on one host, or on one GPU of it, split the free memory measured last there (the smallest figure: by then all
    weights were loaded) so that each can hold the same number of blocks. What the ranks' largest steps take is left free.

    Args:
        stages: one report per rank, in rank order.
        hosts: rank -> host.

    Raises:
        ConfigError: when the pool can't hold one request of the longest context asked for.
    """
    affordable = _affordable_blocks(config, stages, hosts)
    groups = _merge_groups(stages)
    wanted = config.max_num_seqs * _blocks_of_longest(config, groups)
    if config.num_kv_blocks is not None:
        num_blocks, limit = config.num_kv_blocks, "--num-kv-blocks"
    else:
        num_blocks, limit = min(affordable.values()), "memory"
        if wanted < num_blocks:
            num_blocks, limit = wanted, "max_num_seqs x max_model_len"
    max_model_len, note = _longest_context(config, groups, num_blocks)
    notes = [
        f"stage {stage.rank}: weights {stage.weight_bytes / 1e6:.1f} MB, KV {stage.bytes_per_block} bytes per block, "
        f"room for {affordable[stage.rank]} blocks"
        for stage in stages
    ]
    notes.append(f"KV pool: {num_blocks} blocks of {config.block_size} tokens (limited by {limit})")
    return KVPlan(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        groups=groups,
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
        is_measured = all(stage.step_bytes for stage in together)
        share = config.kv_gpu_memory_share if is_measured else config.kv_memory_share
        free = min(stage.free_bytes for stage in together) - sum(stage.step_bytes for stage in together)
        budget = share * max(0, free)
        each = int(budget) // sum(stage.bytes_per_block for stage in together)
        blocks.update({stage.rank: each for stage in together})
    return blocks


def _longest_context(
    config: CoreConfig, groups: tuple[KVCacheGroup, ...], num_blocks: int
) -> tuple[int, tuple[str, ...]]:
    wanted = config.max_model_len or config.model_max_len
    needed = _blocks_of_longest(config, groups)
    if num_blocks >= needed:
        return wanted, ()
    # Blocks never fall as tokens rise, so the longest context that the pool holds is found by bisection.
    tokens = bisect_right(range(wanted), num_blocks, key=lambda count: _blocks(config, groups, count)) - 1
    if config.max_model_len is not None or tokens < 2:
        raise ConfigError(
            "--max-model-len",
            f"one request of {wanted} tokens needs {needed} KV blocks of {config.block_size}, "
            f"the pool has {num_blocks}; lower --max-model-len to {max(tokens, 2)} or give the cache more memory "
            "(--kv-cache-memory, --num-kv-blocks)",
        )
    return tokens, (f"max_model_len lowered from {wanted} to {tokens}, which is what the KV pool holds",)


def _merge_groups(stages: Sequence[WorkerLoaded]) -> tuple[KVCacheGroup, ...]:
    """The groups of the whole model. A stage may have several of one kind, so that all of its groups have equally many
    layers and one pool serves them: the n-th of a kind on each stage belongs together.

    Raises:
        ConfigError: a stage reports a kind that the ledger does not know.
    """
    layers: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for stage in stages:
        count: Counter[tuple[str, int]] = Counter()
        for group in stage.groups:
            spec_of(group)
            key = group.kind, group.window
            layers[*key, count[key]].extend(group.layers)
            count[key] += 1
    return tuple(
        KVCacheGroup(kind=kind, window=window, layers=sorted(numbers))
        for (kind, window, _), numbers in sorted(layers.items())
    )


def _blocks_of_longest(config: CoreConfig, groups: tuple[KVCacheGroup, ...]) -> int:
    return _blocks(config, groups, config.max_model_len or config.model_max_len)


def _blocks(config: CoreConfig, groups: tuple[KVCacheGroup, ...], num_tokens: int) -> int:
    return most_blocks(map(spec_of, groups), num_tokens, config.block_size, config.max_num_batched_tokens)
