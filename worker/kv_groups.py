"""Which layers share block tables, and which of a stage's layers share a cache tensor?

Layers whose cache grows by the same rule are a *KV group*: one table of blocks per sequence serves them. A block of the
pool belongs to one group at a time, so layers of different groups may keep it in the same tensor, and a stage needs as
many tensors as its largest group has layers. Where one kind of layer is more frequent than another, it is cut into
several groups, so that the groups are about equally large and no tensor lies idle.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ipc.errors import ConfigError
from ipc.messages import KVCacheGroup
from worker.model_config import ModelConfig

Made = TypeVar("Made")

MOST_OF_A_KIND = 8
"""Groups of one kind. Each costs every step a table of its own."""


def kv_groups(config: ModelConfig, layers: range) -> tuple[KVCacheGroup, ...]:
    """All groups of the model, each with those of these layers that belong to it, perhaps none.

    How many there are, and in which order, does not depend on ``layers``: every rank says the same.
    """
    counts = Counter(config.windows)
    least = min(counts.values())
    groups: list[KVCacheGroup] = []
    for window in sorted(counts, key=lambda window: window or 0):
        num_groups = max(1, min(MOST_OF_A_KIND, round(counts[window] / least)))
        members = [layer for layer in layers if config.windows[layer] == window]
        kind = "full" if window is None else "window"
        groups += [
            KVCacheGroup(kind=kind, layers=members[i::num_groups], window=window or 0) for i in range(num_groups)
        ]
    return tuple(groups)


def num_cache_tensors(groups: Sequence[KVCacheGroup]) -> int:
    """That a stage needs whose layers these are."""
    return max(len(group.layers) for group in groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCaches:
    """Where a stage keeps its keys and values."""

    windows: tuple[int | None, ...]
    """Of each group of the model."""

    group_of_layer: tuple[int, ...]
    """Of each layer of the stage."""

    tensors: tuple[Tensor, ...]
    """Of each layer of the stage; layers of different groups may have the same."""

    def for_layers(self, make: Callable[[int], Made]) -> tuple[Made, ...]:
        """For each layer of the stage what is made of its group, once for each group."""
        of_group = {group: make(group) for group in set(self.group_of_layer)}
        return tuple(of_group[group] for group in self.group_of_layer)


def place_layers(
    groups: Sequence[KVCacheGroup], config: ModelConfig, layers: range
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For each of these layers its group and its tensor, by number.

    Raises:
        ConfigError: other groups than ``kv_groups`` has for these layers.
    """
    wanted = kv_groups(config, layers)
    own = [[layer for layer in group.layers if layer in layers] for group in groups]
    known = [(group.kind, group.window, sorted(numbers)) for group, numbers in zip(groups, own, strict=True)]
    if known != [(group.kind, group.window, group.layers) for group in wanted]:
        raise ConfigError(
            "KVCacheConfig.groups",
            f"layers {layers.start} to {layers.stop - 1} must be in {len(wanted)} groups, as they were reported; "
            f"got {[(group.kind, group.window, group.layers) for group in groups]}",
        )
    places = {layer: (g, i) for g, group in enumerate(wanted) for i, layer in enumerate(group.layers)}
    return tuple(places[layer][0] for layer in layers), tuple(places[layer][1] for layer in layers)


def block_bytes(groups: Sequence[KVCacheGroup], cache_shape_of_block: tuple[int, ...], dtype: torch.dtype) -> int:
    """What one block of the pool costs a stage whose layers these are."""
    return num_cache_tensors(groups) * torch.Size(cache_shape_of_block).numel() * dtype.itemsize
