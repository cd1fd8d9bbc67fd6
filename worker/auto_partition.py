"""How do all ranks come to the same measured split, and what does the log say of it?

Every rank tells the epoch's store what memory it has. Rank 0 measures, reads what the others said, decides, and
publishes the split; the others read it. So noise in the measurement can make a split worse, never different ones.
"""

import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch

from ipc.endpoints import host_id
from ipc.errors import PeerLost
from worker.attention import AttentionBackend
from worker.device import device_identity
from worker.kv_groups import kv_groups, num_cache_tensors
from worker.memory import free_memory
from worker.model_config import ModelConfig
from worker.partition import MIX, Memory, Mix, ModelCosts, Split, StepCosts, choose_split, sizes_of, split_layers
from worker.profile_stage import PartBytes, measure_costs, part_bytes
from worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

TINY_BYTES = 8 << 20
"""A model whose weights take less is split evenly: its time is that of calls, and noise would decide."""

KV_MEMORY_SHARE = 0.25
"""Of what weights leave, as in engine.config."""

ENGINE_S = 1.5e-3
"""Processor time per step of the core and the threads of its sockets, between stages that stream weights through the same
caches: 1.1 to 1.6 ms were seen with 16 to 32 rows. A client on the same host comes on top."""

_SPLIT_KEY, _PLACE_KEY = "partition/split", "partition/place/"


class PlainStore(Protocol):
    """What is used of torch's stores; ``get`` and ``wait`` raise RuntimeError when nothing comes in time."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank has its weights and its cache; ranks with the same name share it."""

    name: str
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """What flags say about the KV pool; None where they say nothing."""

    block_size: int
    max_num_seqs: int
    max_model_len: int
    kv_cache_memory: int | None = None
    """Bytes on each stage."""

    num_kv_blocks: int | None = None


def agree_on_split(
    settings: WorkerSettings,
    store: PlainStore | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    backend: AttentionBackend,
) -> Split:
    """The layers of all stages; the same on every rank that has the same settings.

    Without a store, with nothing to choose and for tiny models ``auto`` is an even split.

    Raises:
        ConfigError: an impossible split.
        PeerLost: the other ranks did not do their part within the link timeout.
    """
    config, num_stages = settings.config, settings.world_size
    fixed = split_layers(config.num_layers, num_stages, settings.partition)
    if settings.partition != "auto" or store is None:
        return fixed
    sizes = part_bytes(config, dtype=dtype, backend=backend)
    if why_even(config, num_stages, sizes):
        return fixed
    place = Place(name=f"{host_id()}/{device_identity(device)}", free_bytes=free_memory(device))
    store.set(f"{_PLACE_KEY}{settings.rank}", json.dumps([place.name, place.free_bytes]))
    if settings.rank != 0:
        text = _await(store, _SPLIT_KEY, settings).decode()
        return split_layers(config.num_layers, num_stages, text)
    started = time.monotonic()
    split = _decide(settings, store, sizes, device=device, dtype=dtype, backend=backend) or fixed
    store.set(_SPLIT_KEY, sizes_of(split))
    logger.debug("pipeline partition: %.2f s", time.monotonic() - started)
    return split


def why_even(config: ModelConfig, num_stages: int, sizes: PartBytes) -> str | None:
    """Why ``auto`` need not measure; None if it has to."""
    if num_stages == 1:
        return "one stage has all layers"
    if num_stages == config.num_layers:
        return "a layer for each stage"
    if config.num_layers * sizes.layer + sizes.first + sizes.last < TINY_BYTES:
        return "evenly, as the model is too small to be measured"
    return None


def _decide(
    settings: WorkerSettings,
    store: PlainStore,
    sizes: PartBytes,
    *,
    device: torch.device,
    dtype: torch.dtype,
    backend: AttentionBackend,
) -> Split | None:
    """Measure, choose and say why. None when there is no memory to measure in."""
    config, num_stages = settings.config, settings.world_size
    started = time.monotonic()
    try:
        costs = measure_costs(
            config, num_stages=num_stages, mix=MIX, device=device, dtype=dtype, backend=backend,
            block_size=settings.block_size,
        )  # fmt: skip
    except MemoryError as error:
        logger.warning("pipeline partition: split evenly, as nothing can be measured (%s)", error)
        return None
    measured_s = time.monotonic() - started
    found = [_await(store, f"{_PLACE_KEY}{rank}", settings) for rank in range(num_stages)]
    places = [Place(name=name, free_bytes=free_bytes) for name, free_bytes in map(json.loads, found)]
    limits = PoolLimits(
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len or config.max_position_embeddings,
        kv_cache_memory=settings.kv_cache_memory,
        num_kv_blocks=settings.num_kv_blocks,
    )
    memory = memory_of(config, sizes, places, limits, dtype=dtype, backend=backend)
    costs = costs.beside_engine(engine_seconds(places, device, torch.get_num_threads()))
    split = choose_split(costs, config.num_layers, num_stages, MIX, memory)
    for line in explain(costs, split, MIX, memory):
        logger.info("%s", line)
    logger.info("pipeline partition %s (auto, measured in %.2f s)", sizes_of(split), measured_s)
    return split


def _await(store: PlainStore, key: str, settings: WorkerSettings) -> bytes:
    timeout_s = settings.link_timeout_s
    try:
        store.wait([key], timedelta(seconds=timeout_s))
        return store.get(key)
    except RuntimeError:
        who = "0" if key == _SPLIT_KEY else key.removeprefix(_PLACE_KEY)
        raise PeerLost(
            f"rank {settings.rank}: rank {who} said nothing about the pipeline partition within {timeout_s:g} s"
        ) from None


def memory_of(
    config: ModelConfig,
    sizes: PartBytes,
    places: Sequence[Place],
    limits: PoolLimits,
    *,
    dtype: torch.dtype,
    backend: AttentionBackend,
) -> Memory:
    """What pools a split leaves room for. ``places``: one for each stage."""
    groups = kv_groups(config, range(config.num_layers))
    # Layers of different groups share tensors: a layer's share of a block is less than its own cache would take.
    shared = bytes_per_block(config, limits.block_size, dtype=dtype, backend=backend) * num_cache_tensors(groups)
    block_bytes = -(-shared // config.num_layers)
    blocks_each = len(groups) * -(-limits.max_model_len // limits.block_size)
    most_blocks = limits.num_kv_blocks or limits.max_num_seqs * blocks_each
    num_layers, num_stages = config.num_layers, len(places)
    if limits.kv_cache_memory is not None:
        return Memory(
            layer_bytes=(0,) * num_layers, first_bytes=0, last_bytes=0, block_bytes=(block_bytes,) * num_layers,
            budgets=(limits.kv_cache_memory,) * num_stages, place_of_stage=tuple(range(num_stages)),
            most_blocks=most_blocks,
        )  # fmt: skip
    place_of_stage, budgets = _distinct(places)
    share = 1.0 if limits.num_kv_blocks else KV_MEMORY_SHARE
    return Memory(
        layer_bytes=(sizes.layer,) * num_layers,
        first_bytes=sizes.first,
        last_bytes=sizes.last,
        block_bytes=(round(block_bytes / share),) * num_layers,
        budgets=budgets,
        place_of_stage=place_of_stage,
        most_blocks=most_blocks,
    )


def engine_seconds(places: Sequence[Place], device: torch.device, num_threads: int) -> float:
    """What the engine's own work takes per step of the last stage's processor: nothing on a GPU, with a core to spare, or
    on another host than the first stage's, where the core is.

    ``num_threads``: of each stage.
    """
    stages_here = sum(place.name == places[0].name for place in places)
    has_spare_core = len(os.sched_getaffinity(0)) > stages_here * num_threads
    is_shared = device.type == "cpu" and places[-1].name == places[0].name and not has_spare_core
    return ENGINE_S if is_shared else 0.0


def bytes_per_block(
    config: ModelConfig, block_size: int, *, dtype: torch.dtype, backend: AttentionBackend
) -> int:
    """Of one layer's cache."""
    shape = backend.cache_shape(1, block_size, config.num_kv_heads, config.head_size)
    return torch.Size(shape).numel() * dtype.itemsize


def _distinct(places: Sequence[Place]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Number of each stage's place, and the least that a stage found free in each."""
    numbers: list[int] = []
    budgets: list[int] = []
    names: list[str] = []
    for place in places:
        # One that comes back after another place is taken for a new one: the search wants neighbours.
        if not names or names[-1] != place.name:
            names.append(place.name)
            budgets.append(place.free_bytes)
        budgets[-1] = min(budgets[-1], place.free_bytes)
        numbers.append(len(names) - 1)
    return tuple(numbers), tuple(budgets)


def explain(costs: ModelCosts, split: Split, mix: Mix, memory: Memory | None = None) -> list[str]:
    """Lines that say what was measured, what it predicts for this split, and what an even one would give."""
    num_layers, num_stages = len(costs.decode.layers), len(split)
    rows = mix.decode_rows(num_stages)
    lines = [
        f"decode step of {rows} rows, context {mix.context}: {_parts(costs.decode)}",
        f"prefill step of {mix.prefill_tokens} tokens: {_parts(costs.prefill)}",
        f"stages {sizes_of(split)} wait {_shares(costs.decode, split)} of a decode step, "
        f"{_shares(costs.prefill, split)} of a prefill step",
    ]
    price = costs.of_request(mix, num_stages)
    even = split_layers(num_layers, num_stages, "even")
    if split != even and min(price.of_stages(split)) > 0:
        gain = max(price.of_stages(even)) / max(price.of_stages(split)) - 1
        text = f"for {mix.prompt_tokens} tokens in and {mix.output_tokens} out {gain:.1%} faster than {sizes_of(even)}"
        if memory is not None:
            chosen, evenly = _num_blocks(memory, split), _num_blocks(memory, even)
            text += f"; KV pool {chosen} blocks " + ("either way" if chosen == evenly else f"instead of {evenly}")
        lines.append(text)
    return lines


def _num_blocks(memory: Memory, split: Split) -> int:
    return max(0, memory.num_blocks(split))


def _parts(step: StepCosts) -> str:
    layer = sum(step.layers) / len(step.layers)
    return (
        f"layer {layer * 1e3:.3f} ms, head {step.head * 1e3:.3f} ms, sampler {step.sampler * 1e3:.3f} ms, "
        f"embedding {step.embedding * 1e3:.3f} ms{f', engine beside it {step.engine * 1e3:.1f} ms' if step.engine else ''}"
    )


def _shares(step: StepCosts, split: Split) -> str:
    return " / ".join(f"{share:.0%}" for share in step.waiting(split))
