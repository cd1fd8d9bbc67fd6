"""Stages in one process: plans by hand, links in memory, the model runner and the stage loop as they are."""

import os
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ipc.messages import (
    CachedRequestData,
    GrammarOutput,
    KVCacheConfig,
    KVCacheGroup,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from ipc.params import SamplingParams
from worker.clock import StageClock
from worker.graphs.dispatcher import Dispatch
from worker.graphs.graph import GraphPool, make_pool
from worker.kv_groups import kv_groups
from worker.links.link import Boundary, HopBuffer
from worker.model_config import read_model_config
from worker.model_runner import ModelRunner
from worker.partition import split_layers
from worker.settings import WorkerSettings
from worker.stage import Stage
from worker.startup import load_stage, make_caches
from worker.topology import Topology

GREEDY = SamplingParams(temperature=0.0, seed=0)


class Plans:
    """Writes SchedulerOutputs as the core would; blocks are given out in random order."""

    def __init__(self, *, num_blocks: int = 64, block_size: int = 16, seed: int = 0) -> None:
        self.block_size = block_size
        self.free_blocks = list(range(num_blocks))
        random.Random(seed).shuffle(self.free_blocks)
        self.blocks: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.step_id = 0
        self._new: dict[int, NewRequestData] = {}
        self._freed: list[int] = []

    def add(self, row: int, token_ids: Sequence[int], params: SamplingParams = GREEDY, num_prompt: int | None = None) -> None:
        self.blocks[row], self.computed[row] = [], 0
        self._new[row] = NewRequestData(
            row=row, request_id=f"r{row}", token_ids=np.asarray(token_ids, np.int32),
            num_prompt_tokens=len(token_ids) if num_prompt is None else num_prompt, num_computed_tokens=0,
            block_ids=([],), params=params,
        )  # fmt: skip

    def free(self, row: int) -> None:
        self._freed.append(row)
        self.free_blocks.extend(self.blocks.pop(row))

    def step(self, counts: Mapping[int, int], needs: int | None = None) -> SchedulerOutput:
        """The next step computes so many tokens of these rows; it needs the tokens of the step before unless told."""
        self.step_id += 1
        rows = sorted(counts, key=lambda row: counts[row] != 1)
        new, indices, num_new, ids = [], [], [], []
        for index, row in enumerate(rows):
            self.computed[row] += counts[row]
            gained = [self.free_blocks.pop() for _ in range(-(-self.computed[row] // self.block_size) - len(self.blocks[row]))]
            self.blocks[row] += gained
            if row in self._new:
                waiting = self._new.pop(row)
                new.append(NewRequestData(
                    row=row, request_id=waiting.request_id, token_ids=waiting.token_ids,
                    num_prompt_tokens=waiting.num_prompt_tokens, num_computed_tokens=0, block_ids=(gained,),
                    params=waiting.params,
                ))  # fmt: skip
            elif gained:
                indices.append(index)
                num_new.append(len(gained))
                ids += gained
        freed, self._freed = self._freed, []
        return SchedulerOutput(
            core_id=7, epoch=3, step_id=self.step_id, freed_rows=freed, new_requests=tuple(new),
            cached_requests=CachedRequestData(
                indices=indices, num_new_blocks=(num_new,) if indices else (), new_block_ids=(ids,) if indices else ()
            ),
            rows=rows, num_scheduled_tokens=[counts[row] for row in rows],
            needs_tokens_of_step=self.step_id - 1 if needs is None else needs,
        )  # fmt: skip


class MemoryLink:
    """Sender and receiver of one hop; checks what a transport relies on."""

    def __init__(self, boundary: Boundary, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._buffers = deque(HopBuffer(boundary, max_tokens) for _ in range(3))
        for buffer in self._buffers:
            # Whatever a step doesn't overwrite must not matter.
            buffer.tensors(max_tokens)[0].fill_(torch.nan)
        self.sent: deque[tuple[int, list[Tensor]]] = deque()
        self.posted: deque[tuple[int, int]] = deque()
        self.num_ahead = 0
        """Most receives that were posted at once."""

    @property
    def has_room(self) -> bool:
        return len(self.posted) < 2

    def make_room(self) -> None:
        """There always is."""

    def send(self, step_id: int, tensors: Sequence[Tensor]) -> None:
        self.sent.append((step_id, [tensor.clone() for tensor in tensors]))

    def flush(self, timeout_s: float) -> None:
        assert timeout_s > 0

    def post(self, step_id: int, num_tokens: int) -> None:
        assert self.has_room
        self.posted.append((step_id, num_tokens))
        self.num_ahead = max(self.num_ahead, len(self.posted))

    def wait(self, step_id: int) -> list[Tensor]:
        sent_step, tensors = self.sent.popleft()
        assert (step_id, tensors[0].shape[0]) == self.posted.popleft()
        assert sent_step == step_id
        self._buffers.rotate()
        self._buffers[0].fill(tensors)
        return self._buffers[0].tensors(tensors[0].shape[0])

    def buffers(self) -> list[Tensor]:
        return [buffer.tensors(self._max_tokens)[0] for buffer in self._buffers]


class MemoryTokens:
    """Both ends of the token return."""

    def __init__(self) -> None:
        self.sent: deque[tuple[int, list[int], list[int], list[int]]] = deque()

    def send(self, step_id: int, rows: list[int], token_ids: list[int], counts: list[int], *, timeout_s: float) -> None:
        assert len(counts) == len(rows) and sum(counts) == len(token_ids)
        self.sent.append((step_id, rows, token_ids, counts))

    def take_until(self, step_id: int, accept, *, timeout_s: float, peer: int) -> None:
        while self.sent and self.sent[0][0] <= step_id:
            accept(*self.sent.popleft())


def settings_for(path: Path, *, rank: int = 0, world_size: int = 1, **changes) -> WorkerSettings:
    values = {
        "model": str(path), "config": read_model_config(str(path)), "partition": "even", "rank": rank,
        "world_size": world_size, "local_rank": rank, "local_world_size": world_size, "core_address": "", "key": "",
        "run_dir": "", "device": "cpu", "dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 512,
        "block_size": 16, "num_threads": torch.get_num_threads(), "parent_pid": os.getppid(), "signal_fd": 0,
        "link_timeout_s": 5.0,
    }  # fmt: skip
    return WorkerSettings(**(values | changes))


def merged_groups(settings: WorkerSettings) -> tuple[KVCacheGroup, ...]:
    """The groups of all stages, as the core puts them together."""
    split = split_layers(settings.config.num_layers, settings.world_size, settings.partition)
    of_stages = [kv_groups(settings.config, layers) for layers in split]
    return tuple(
        replace(parts[0], layers=[layer for part in parts for layer in part.layers])
        for parts in zip(*of_stages, strict=True)
    )


class Pipeline:
    """All stages of a model, each with its own rows and cache."""

    def __init__(self, path: Path, num_stages: int = 1, *, num_blocks: int = 64, max_model_len: int = 512,
                 pool: GraphPool | None = None, **changes) -> None:
        """``pool``: of graphs, on each stage; None: as on the CPU."""
        self.stages: list[Stage] = []
        self.shapes: list[tuple[Dispatch, ...]] = []
        self.runners: list[ModelRunner] = []
        self.links: list[MemoryLink] = []
        self.tokens = MemoryTokens()
        self.masks: dict[int, GrammarOutput] = {}
        """By step."""
        self.block_size = changes.get("block_size", 16)
        for rank in range(num_stages):
            self._add_stage(settings_for(path, rank=rank, world_size=num_stages, **changes), num_blocks, max_model_len)
        for stage in self.stages:
            stage.warm_up(max_model_len, self.block_size)
        for stage, shapes in zip(self.stages, self.shapes, strict=True):
            if shapes:
                stage.capture_graphs(shapes, pool or make_pool(torch.device("cpu")), lambda done, total: None)

    def _add_stage(self, settings: WorkerSettings, num_blocks: int, max_model_len: int) -> None:
        topology = Topology(rank=settings.rank, num_stages=settings.world_size)
        loaded = load_stage(settings, topology)
        kv = KVCacheConfig(
            core_id=7, epoch=3, num_blocks=num_blocks, block_size=settings.block_size, max_model_len=max_model_len,
            groups=merged_groups(settings),
        )  # fmt: skip
        runner = ModelRunner(
            loaded.model, loaded.backend, make_caches(settings, loaded, kv), config=settings.config,
            is_first=topology.is_first, is_last=topology.is_last, device=loaded.device, dtype=loaded.dtype,
            num_rows=2 * settings.max_num_seqs, max_model_len=max_model_len, block_size=settings.block_size,
        )  # fmt: skip
        self.shapes.append(loaded.graph_shapes)
        if not topology.is_last:
            self.links.append(MemoryLink(loaded.model.boundary(), settings.max_num_batched_tokens))
        rank, is_alone = settings.rank, settings.world_size == 1
        stage = Stage(
            topology, runner, StageClock(),
            receiver=None if topology.is_first else self.links[rank - 1],
            sender=None if topology.is_last else self.links[rank],
            token_inbox=self.tokens if topology.is_first and not is_alone else None,
            token_outbox=self.tokens if topology.is_last and not is_alone else None,
            max_tokens=settings.max_num_batched_tokens, timeout_s=1.0,
        )  # fmt: skip
        self.runners.append(runner)
        self.stages.append(stage)

    def run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """One step on all stages; the last one's output."""
        for stage in self.stages[:-1]:
            assert stage.run_step(plan) is None
        output = self.stages[-1].run_step(plan, take_masks=lambda step_id, timeout_s: self.masks.pop(step_id))
        assert output is not None
        return output


def tokens_of(output: ModelRunnerOutput) -> dict[int, int]:
    assert output.counts == [1] * len(output.rows)
    return dict(zip(output.rows, output.token_ids, strict=True))
