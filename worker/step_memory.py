"""How much memory do steps and their graphs take beside weights and cache? On a GPU that is measured, by running the
largest steps and capturing a few.

The pool then gets what is left. On the CPU the pool takes a share of free memory that leaves room for any step.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from ipc.messages import KVCacheConfig, SchedulerOutput
from ipc.params import SamplingParams
from worker.graphs.dispatcher import Dispatch
from worker.graphs.graph import make_pool
from worker.links.link import NUM_DEVICE_BUFFERS
from worker.memory import free_memory, memory_for
from worker.model_runner import ModelRunner
from worker.settings import WorkerSettings
from worker.startup import LoadedStage, make_caches
from worker.topology import Topology
from worker.warm_up import made_up_plan

CONTEXT_TOKENS = 1 << 16
"""Over all sequences of the decodes measured: as many as an attention backend gathers at once."""

PARAMS = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
"""The filter that takes the most memory."""


class MemoryMeter(Protocol):
    """Tells what is taken between two moments."""

    def start(self) -> None: ...

    def peak(self) -> int:
        """Most bytes taken at once since ``start``, beyond what was taken then."""

    def free(self) -> int:
        """Bytes that nobody holds."""


class CudaMeter:
    """Counts what torch took from the device, its allocator's gaps included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def start(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        taken = torch.cuda.max_memory_reserved(self._device) - self._before
        torch.cuda.empty_cache()
        return taken

    def free(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return free_memory(self._device)


def measure_step_bytes(settings: WorkerSettings, topology: Topology, stage: LoadedStage) -> int:
    """Bytes of the device that the largest steps and all graphs take; 0 on the CPU.

    Raises ConfigError when there is no memory for the steps.
    """
    if stage.device.type != "cuda":
        return 0
    return run_largest_steps(settings, topology, stage, CudaMeter(stage.device))


def run_largest_steps(
    settings: WorkerSettings, topology: Topology, stage: LoadedStage, meter: MemoryMeter
) -> int:
    """Run a step of prompts and one of decodes, as large as the flags allow; returns the meter's peak, and what graphs add."""
    config = settings.config
    max_model_len = settings.max_model_len or config.max_position_embeddings
    with memory_for("--max-num-batched-tokens", f"a step of {settings.max_num_batched_tokens} tokens", "give fewer"):
        meter.start()
        runner = ModelRunner(
            stage.model,
            stage.backend,
            make_caches(settings, stage, KVCacheConfig(
                core_id=0, epoch=0, num_blocks=1, block_size=settings.block_size, max_model_len=max_model_len,
                groups=stage.kv_groups,
            )),
            config=config,
            is_first=topology.is_first,
            is_last=topology.is_last,
            device=stage.device,
            dtype=stage.dtype,
            num_rows=settings.max_num_seqs,
            max_model_len=max_model_len,
            block_size=settings.block_size,
        )  # fmt: skip
        for plan in largest_plans(settings, min(max_model_len, CONTEXT_TOKENS), num_groups=len(stage.kv_groups)):
            runner.rehearse(plan)
        return meter.peak() + graph_bytes(runner, topology, stage, meter)


def graph_bytes(runner: ModelRunner, topology: Topology, stage: LoadedStage, meter: MemoryMeter) -> int:
    """What all of the stage's graphs will take, about.

    The largest of a kind takes what is computed inside, which the others find again in the pool that they share; each of
    these takes as much as the second.
    """
    return sum(_bytes_of_kind(runner, topology, stage, meter, shapes) for shapes in _kinds(stage.graph_shapes))


def _kinds(shapes: Sequence[Dispatch]) -> list[list[Dispatch]]:
    kinds: dict[tuple[object, bool], list[Dispatch]] = {}
    for shape in shapes:
        kinds.setdefault((shape.mode, shape.descriptor.is_uniform_decode), []).append(shape)
    return list(kinds.values())


def _bytes_of_kind(
    runner: ModelRunner, topology: Topology, stage: LoadedStage, meter: MemoryMeter, shapes: Sequence[Dispatch]
) -> int:
    buffers: list[Tensor] = []
    if not topology.is_first:
        (part, *_) = stage.model.boundary()
        largest = shapes[0].descriptor.num_tokens
        buffers = [
            torch.zeros(largest, part.width, dtype=part.dtype, device=stage.device) for _ in range(NUM_DEVICE_BUFFERS)
        ]
    left = [meter.free()]
    runner.capture_graphs(
        shapes[:2],
        receive_buffers=buffers,
        pool=make_pool(stage.device),
        progress=lambda done, total: left.append(meter.free()),
    )
    taken = [max(0, before - after) for before, after in pairwise(left)]
    return taken[0] + taken[-1] * (len(shapes) - 1)


def largest_plans(
    settings: WorkerSettings, max_model_len: int, *, num_groups: int = 1
) -> Iterator[SchedulerOutput]:
    """The most tokens of prompts, in many sequences and in few; then the most decodes, at the end of long contexts.

    All lie in block 0: nobody reads what they write.
    """
    num_tokens = min(settings.max_num_batched_tokens, settings.max_num_seqs * max_model_len)
    num_seqs = min(settings.max_num_seqs, num_tokens)
    many = [num_tokens // num_seqs + (i < num_tokens % num_seqs) for i in range(num_seqs)]
    few = [min(max_model_len, num_tokens - start) for start in range(0, num_tokens, max_model_len)]
    context = min(max_model_len, max(2, CONTEXT_TOKENS // num_seqs))
    block_size, freed = settings.block_size, 0
    for step_id, (lengths, scheduled) in enumerate(((many, many), (few, few), ([context] * num_seqs, [1] * num_seqs))):
        yield made_up_plan(
            lengths, scheduled, step_id=step_id, freed_rows=list(range(freed)), block_size=block_size,
            num_groups=num_groups, params=PARAMS,
        )  # fmt: skip
        freed = len(lengths)
