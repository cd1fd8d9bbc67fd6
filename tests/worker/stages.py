"""Runs the stages of a model in one process, over caches whose blocks are shuffled and full of NaN."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from worker.attention import AttentionNeeds, CommonAttentionMetadata, select_backend
from worker.model_config import read_model_config
from worker.models import StageModel, build_stage, load_weights
from worker.partition import split_layers
from worker.weights import open_checkpoint

CPU = torch.device("cpu")


def empty_stage(path: Path, layers: range, *, is_first: bool, is_last: bool, dtype: torch.dtype) -> StageModel:
    config = read_model_config(str(path))
    backend = select_backend("torch", AttentionNeeds(device=CPU, dtype=dtype, head_size=config.head_size, block_size=4))
    return build_stage(config, layers, is_first=is_first, is_last=is_last, dtype=dtype, device=CPU, backend=backend)


def load_stage(path: Path, layers: range, *, is_first: bool, is_last: bool, dtype: torch.dtype) -> StageModel:
    stage = empty_stage(path, layers, is_first=is_first, is_last=is_last, dtype=dtype)
    load_weights(stage, open_checkpoint(str(path), read_model_config(str(path))), lambda done, total: None)
    return stage


class Pipeline:
    """All stages of a model, and the sequences in its cache, named by numbers."""

    def __init__(
        self,
        path: Path,
        num_stages: int = 1,
        *,
        dtype: torch.dtype = torch.float32,
        partition: str = "even",
        block_size: int = 4,
        num_blocks: int = 64,
        seed: int = 0,
    ) -> None:
        config = read_model_config(str(path))
        ranges = split_layers(config.num_layers, num_stages, partition)
        self.stages = [
            load_stage(path, layers, is_first=i == 0, is_last=i == num_stages - 1, dtype=dtype)
            for i, layers in enumerate(ranges)
        ]
        backend = select_backend("torch", AttentionNeeds(device=CPU, dtype=dtype, head_size=config.head_size, block_size=block_size))
        self.builder = backend.make_builder(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            block_size=block_size,
            dtype=dtype,
            device=CPU,
        )
        shape = backend.cache_shape(num_blocks, block_size, config.num_kv_heads, config.head_size)
        self.caches = [[torch.full(shape, torch.nan, dtype=dtype) for _ in layers] for layers in ranges]
        self.block_size = block_size
        self.free_blocks = list(range(num_blocks))
        random.Random(seed).shuffle(self.free_blocks)
        self.blocks: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def step(self, batch: Mapping[int, Sequence[int]], *, padding: int = 0) -> dict[int, Tensor]:
        """The next tokens of some sequences, single ones first; logits [number of tokens, V] of each."""
        batch = dict(sorted(batch.items(), key=lambda item: len(item[1]) != 1))
        positions, slots = [], []
        for sequence, tokens in batch.items():
            start = self.lengths.get(sequence, 0)
            self.lengths[sequence] = start + len(tokens)
            blocks = self.blocks.setdefault(sequence, [])
            while len(blocks) * self.block_size < start + len(tokens):
                blocks.append(self.free_blocks.pop())
            for position in range(start, start + len(tokens)):
                positions.append(position)
                slots.append(blocks[position // self.block_size] * self.block_size + position % self.block_size)
        ids = [token for tokens in batch.values() for token in tokens]
        metadata = self.builder.build(self._common(batch, slots + [-1] * padding))
        with torch.inference_mode():
            hidden = self.stages[0].embed(torch.tensor(ids + [0] * padding))
            for stage, caches in zip(self.stages, self.caches, strict=True):
                hidden = stage(hidden, torch.tensor(positions + [0] * padding), caches, [metadata] * len(caches))
            logits = self.stages[-1].logits(hidden)[: len(ids)]
        sizes = [len(tokens) for tokens in batch.values()]
        return dict(zip(batch, logits.split(sizes), strict=True))

    def _common(self, batch: Mapping[int, Sequence[int]], slots: list[int]) -> CommonAttentionMetadata:
        lengths = [self.lengths[sequence] for sequence in batch]
        widest = max(len(self.blocks[sequence]) for sequence in batch) + 2
        sizes = torch.tensor([0] + [len(tokens) for tokens in batch.values()])
        return CommonAttentionMetadata(
            query_starts=sizes.cumsum(0).to(torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_table=torch.tensor(
                [self.blocks[s] + [-1] * (widest - len(self.blocks[s])) for s in batch], dtype=torch.int32
            ),
            slots=torch.tensor(slots),
            num_decodes=sum(len(tokens) == 1 for tokens in batch.values()),
            max_seq_len=max(lengths),
        )
