"""How does a rank get its weights and its cache?"""

import logging
import math
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ipc.messages import KVCacheConfig, KVCacheGroup
from kernels.cpu.huge_pages import ask_for_huge_pages
from worker.attention import AttentionBackend, AttentionNeeds, select_backend
from worker.auto_partition import agree_on_split
from worker.device import choose_num_threads, resolve_device, resolve_dtype, sharing_note
from worker.epoch_store import EpochStore
from worker.graphs.choice import choose_shapes
from worker.graphs.dispatcher import Dispatch
from worker.kv_groups import StageCaches, block_bytes, kv_groups, num_cache_tensors, place_layers
from worker.logits_processors import LogitsProcessor, load_processors
from worker.memory import memory_for
from worker.models import StageModel, build_stage, check_weights, load_weights
from worker.progress import Progress
from worker.settings import WorkerSettings
from worker.topology import Topology
from worker.weights import open_checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedStage:
    """This rank's share of the model, with weights, and what it computes on."""

    model: StageModel
    backend: AttentionBackend
    layers: range
    device: torch.device
    dtype: torch.dtype
    cache_shape_of_block: tuple[int, ...]
    """Of one layer's cache with a single block."""

    kv_groups: tuple[KVCacheGroup, ...]
    """Of the whole model, each with its layers on this stage."""

    weight_bytes: int
    load_s: float
    num_threads: int
    processors: dict[str, LogitsProcessor]
    """Of the last stage: what changes logits, by the names that requests use."""
    graph_shapes: tuple[Dispatch, ...]
    """Steps to be captured, largest first."""

    @property
    def bytes_per_block(self) -> int:
        """What one KV block costs over all layers of this stage."""
        return block_bytes(self.kv_groups, self.cache_shape_of_block, self.dtype)


def load_stage(
    settings: WorkerSettings, topology: Topology, *, store: EpochStore | None = None, ranks_on_host: int = 1
) -> LoadedStage:
    """Build this rank's layers and read their weights.

    ``store``: where the ranks agree on a split that has to be measured; without one it is even.

    Raises:
        ConfigError: for all that no restart can cure.
        PeerLost: the other ranks did not take part in time.
    """
    config = settings.config
    processors = load_processors(settings.logits_processors) if topology.is_last else {}
    device = resolve_device(settings.device, settings.local_rank)
    dtype = resolve_dtype(settings.dtype, config.dtype, device)
    num_threads = choose_num_threads(settings.num_threads, max(ranks_on_host, settings.local_world_size))
    torch.set_num_threads(num_threads)
    backend = select_backend(
        settings.attention_backend,
        AttentionNeeds.of(config, device=device, dtype=dtype, block_size=settings.block_size),
    )
    told = logging.INFO if topology.is_first else logging.DEBUG
    graph_shapes = choose_shapes(settings, backend, device.type, level=told)
    layers = agree_on_split(settings, store, device=device, dtype=dtype, backend=backend)[topology.stage]
    started = time.monotonic()
    with memory_for("MODEL", "the weights of this stage", "use more stages, a smaller --dtype or a smaller model"):
        checkpoint = open_checkpoint(settings.model, config)
        build = partial(
            build_stage,
            config,
            layers,
            is_first=topology.is_first,
            is_last=topology.is_last,
            dtype=dtype,
            backend=backend,
        )
        # Without memory first: a configuration of another model may ask for any amount.
        check_weights(build(device=torch.device("meta")), checkpoint)
        model = build(device=device)
        progress = Progress(f"rank {settings.rank}: loading", draws=settings.local_rank == 0)
        weight_bytes = load_weights(model, checkpoint, progress)
    load_s = time.monotonic() - started
    logger.info(
        "stage %d of %d: layers %d to %d on %s%s in %s, %d thread%s, weights %.1f MB loaded in %.1f s",
        topology.stage, topology.num_stages, layers[0], layers[-1], device, sharing_note(settings.local_rank, device), str(dtype).removeprefix("torch."),
        num_threads, "" if num_threads == 1 else "s", weight_bytes / 1e6, load_s,
    )  # fmt: skip
    return LoadedStage(
        model=model,
        backend=backend,
        layers=layers,
        device=device,
        dtype=dtype,
        cache_shape_of_block=backend.cache_shape(1, settings.block_size, config.num_kv_heads, config.head_size),
        kv_groups=kv_groups(config, layers),
        weight_bytes=weight_bytes,
        load_s=load_s,
        num_threads=num_threads,
        processors=processors,
        graph_shapes=graph_shapes,
    )


def make_caches(settings: WorkerSettings, stage: LoadedStage, kv: KVCacheConfig) -> StageCaches:
    """Zeroed cache tensors. Raises ConfigError when they don't fit, or when the config isn't for this stage.

    Zeroed, because a NaN in memory that attention masks out would still spoil what it is multiplied into.
    """
    config = settings.config
    group_of_layer, tensor_of_layer = place_layers(kv.groups, config, stage.layers)
    shape = stage.backend.cache_shape(kv.num_blocks, kv.block_size, config.num_kv_heads, config.head_size)
    with memory_for("--num-kv-blocks", f"{kv.num_blocks} KV blocks", "give fewer, or a smaller --kv-cache-memory"):
        tensors = [_zeros(shape, stage.dtype, stage.device) for _ in range(num_cache_tensors(stage.kv_groups))]
    return StageCaches(
        windows=tuple(group.window or None for group in kv.groups),
        group_of_layer=group_of_layer,
        tensors=tuple(tensors[i] for i in tensor_of_layer),
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # The system hands out zeroed pages as they are first used: touching gigabytes at start took 10 s on a small virtual
    # machine, and the ledger reuses warm blocks first. The pool takes a share of free memory that leaves room for them.
    memory = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
    # Attention reads it in pieces of a block from all over: in small pages that is a miss in the translation for each.
    ask_for_huge_pages(memory)
    return memory.view(dtype).view(shape)
