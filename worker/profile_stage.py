"""What does a step cost in each part of a model, here and now?

Measured through the classes that will serve, with weights made up: their values don't change the time. Their places do.
A single layer run again and again would stay in the processor's cache and look cheaper than it is among
others, and memory that was never written is one page of zeros, which is always in the cache. So there are as many
layers as a stage will hold (up to ``MOST_LAYER_BYTES``, which no cache holds), all of them written, and a round goes
through all parts in turn, as a step does. The first round warms up; of the others each part's least time counts, as
whatever disturbs can only add: beside four busy processes a core, medians led to one of two splits by chance, the least
times to the same one in eight of eight starts (SmolLM2-135M over two stages). Real weights would tell the same and would
have to be loaded twice.

One rank measures while the others wait. Side by side they would share memory bandwidth as they do later, but several
ranks on few cores take each other's time by chance, and a split needs ratios only.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from worker.attention import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata
from worker.memory import free_memory
from worker.model_config import ModelConfig
from worker.models import StageModel, build_stage
from worker.partition import Mix, ModelCosts, StepCosts
from worker.sampler import Filters, SamplingBatch, nan_rows, sample

MOST_LAYER_BYTES = 256 << 20
PREFILL_LAYERS = 4
"""Enough layers in prefill, which is bound by arithmetic."""

BUDGET_S = 0.4
"""For the rounds behind the first."""

LEAST_ROUNDS = 3
"""However long they take: of a single one, what was disturbed can't be told."""

MOST_ROUNDS = 9
_PARTS = ("embedding", "layer", "head", "sampler")
_SPREAD = 0.02
"""Standard deviation of made-up weights: activations stay finite in every dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartBytes:
    """Memory that the weights of each part take when they are loaded."""

    layer: int
    first: int
    """Besides its layers, on the first stage."""
    last: int


def part_bytes(config: ModelConfig, *, dtype: torch.dtype, backend: AttentionBackend) -> PartBytes:
    """Without memory for any of it."""

    def bytes_of(layers: range, *, is_first: bool = False, is_last: bool = False) -> int:
        return build_stage(
            config, layers, is_first=is_first, is_last=is_last, dtype=dtype, device=torch.device("meta"), backend=backend
        ).weight_bytes()

    layer = bytes_of(range(0, 1))
    return PartBytes(
        layer=layer,
        first=bytes_of(range(0, 1), is_first=True) - layer,
        last=bytes_of(range(0, 1), is_last=True) - layer,
    )


def measured_layers(config: ModelConfig, num_stages: int, sizes: PartBytes) -> int:
    """How many layers are measured together."""
    enough = -(-MOST_LAYER_BYTES // sizes.layer)
    return max(1, min(enough, -(-config.num_layers // num_stages)))


def bytes_to_measure(config: ModelConfig, num_stages: int, sizes: PartBytes) -> int:
    """What ``measure_costs`` takes for weights, one layer behind which the head stands included."""
    return (measured_layers(config, num_stages, sizes) + 1) * sizes.layer + sizes.first + sizes.last


def measure_costs(
    config: ModelConfig,
    *,
    num_stages: int,
    mix: Mix,
    device: torch.device,
    dtype: torch.dtype,
    backend: AttentionBackend,
    block_size: int,
) -> ModelCosts:
    """Time both kinds of step of the mix on this device, with the threads that torch is set to.

    Takes about a second for a small model, a few passes for a large one, and leaves no memory behind.

    Raises:
        MemoryError: what is measured takes more memory than can be spared.
    """
    sizes = part_bytes(config, dtype=dtype, backend=backend)
    needed, free = bytes_to_measure(config, num_stages, sizes), free_memory(device)
    if 2 * needed > free:  # twice: preparing may copy
        raise MemoryError(f"measuring takes {2 * needed / 1e6:.0f} MB, {free / 1e6:.0f} MB are free")
    bench = _Bench(
        config, measured_layers(config, num_stages, sizes), num_stages=num_stages, mix=mix, device=device, dtype=dtype,
        backend=backend, block_size=block_size,
    )  # fmt: skip
    times = bench.run()
    del bench
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return ModelCosts(
        decode=_step_costs(times, "decode", config.num_layers),
        prefill=_step_costs(times, "prefill", config.num_layers),
    )


def _step_costs(times: dict[tuple[str, str], float], kind: str, num_layers: int) -> StepCosts:
    return StepCosts(
        layers=(times[kind, "layer"],) * num_layers,
        embedding=times[kind, "embedding"],
        head=times[kind, "head"],
        sampler=times[kind, "sampler"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """Inputs of one kind of step."""

    kind: str
    token_ids: Tensor
    positions: Tensor
    metadata: tuple[Any, ...]
    """For each layer of the model."""

    last_tokens: Tensor
    """[S] int64: rows of the step that have logits."""

    samplings: tuple[SamplingBatch, ...]
    """Greedy rows and drawn rows apart, as many as the step has on average: time grows with rows."""


class _Bench:
    """A stage's worth of layers between embedding and head, and inputs for both kinds of step."""

    def __init__(
        self,
        config: ModelConfig,
        num_layers: int,
        *,
        num_stages: int,
        mix: Mix,
        device: torch.device,
        dtype: torch.dtype,
        backend: AttentionBackend,
        block_size: int,
    ) -> None:
        self._device = device
        self._random = torch.Generator().manual_seed(0)

        def build(layers: range, *, is_first: bool = False, is_last: bool = False) -> StageModel:
            stage = build_stage(
                config, layers, is_first=is_first, is_last=is_last, dtype=dtype, device=device, backend=backend
            )
            return fill_with_noise(stage, self._random)

        front = min(num_layers, PREFILL_LAYERS)
        self._first = build(range(0, front), is_first=True)
        self._bodies = [self._first, *([build(range(front, num_layers))] if num_layers > front else [])]
        self._last = build(range(config.num_layers - 1, config.num_layers), is_last=True)
        builders = {
            window: backend.make_builder(
                num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_size=config.head_size,
                block_size=block_size, dtype=dtype, device=device, window=window,
            )
            for window in set(config.windows)
        }  # fmt: skip
        rows, prompts = mix.decode_rows(num_stages), max(1, mix.prefill_tokens // mix.prompt_tokens)
        self._steps = [
            self._step("decode", config, builders, block_size, mix, num_seqs=rows, num_new=1, length=mix.context),
            self._step(
                "prefill", config, builders, block_size, mix,
                num_seqs=prompts, num_new=mix.prompt_tokens, length=mix.prompt_tokens,
            ),
        ]  # fmt: skip
        longest = max(rows * -(-mix.context // block_size), prompts * -(-mix.prompt_tokens // block_size))
        shape = backend.cache_shape(longest, block_size, config.num_kv_heads, config.head_size)
        self._caches = [
            [torch.full(shape, _SPREAD, dtype=dtype, device=device) for _ in range(count)]
            for count in (front, num_layers - front)
        ]

    @torch.inference_mode()
    def run(self) -> dict[tuple[str, str], float]:
        """Seconds by kind of step and part."""
        self._round({})
        samples: dict[tuple[str, str], list[float]] = {}
        started = time.monotonic()
        for num_rounds in range(1, MOST_ROUNDS + 1):
            self._round(samples)
            if num_rounds >= LEAST_ROUNDS and time.monotonic() - started > BUDGET_S:
                break
        return {key: min(values) for key, values in samples.items()}

    def _round(self, samples: dict[tuple[str, str], list[float]]) -> None:
        for step in self._steps:
            for part, seconds in zip(_PARTS, self._part_seconds(step), strict=True):
                samples.setdefault((step.kind, part), []).append(seconds)

    def _part_seconds(self, step: _Step) -> Iterator[float]:
        """One step, yielding the seconds of each of ``_PARTS``. Prefill goes through the first few layers only."""
        bodies = self._bodies if step.kind == "decode" else self._bodies[:1]
        started = self._now()
        hidden = self._first.embed(step.token_ids)
        yield (embedded := self._now()) - started
        first = 0
        for body, caches in zip(bodies, self._caches, strict=False):
            hidden = body(hidden, step.positions, caches, step.metadata[first : first + len(caches)])
            first += len(caches)
        yield ((computed := self._now()) - embedded) / sum(map(len, self._caches[: len(bodies)]))
        logits = self._last.logits(hidden[step.last_tokens])
        yield (projected := self._now()) - computed
        _sample(logits, step.samplings)
        yield self._now() - projected

    def _now(self) -> float:
        """Seconds, when the device has done all that it was given; on a CPU those that this thread computed.

        The others' threads are waited for inside a product, on the core. A time for which others had the core tells nothing.
        """
        if self._device.type == "cpu":
            return time.thread_time()
        torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _step(
        self,
        kind: str,
        config: ModelConfig,
        builders: dict[int | None, AttentionMetadataBuilder],
        block_size: int,
        mix: Mix,
        *,
        num_seqs: int,
        num_new: int,
        length: int,
    ) -> _Step:
        """Equal sequences of this length in blocks of their own, the last ``num_new`` tokens of each computed."""
        blocks_each = -(-length // block_size)
        table = torch.arange(num_seqs * blocks_each, dtype=torch.int32).view(num_seqs, blocks_each)
        positions = torch.arange(length - num_new, length).repeat(num_seqs)
        owners = torch.arange(num_seqs).repeat_interleave(num_new)
        slots = table[owners, positions // block_size].long() * block_size + positions % block_size
        common = CommonAttentionMetadata(
            query_starts=torch.arange(num_seqs + 1, dtype=torch.int32) * num_new,
            seq_lens=torch.full((num_seqs,), length, dtype=torch.int32),
            block_table=table,
            slots=slots,
            num_decodes=num_seqs if num_new == 1 else 0,
            max_seq_len=length,
        )
        of_window = {window: builder.build(common) for window, builder in builders.items()}
        token_ids = torch.randint(config.vocab_size, (num_seqs * num_new,), generator=self._random)
        num_drawn = round(mix.drawn_share * num_seqs)
        counts = ((num_seqs - num_drawn, 0.0), (num_drawn, 1.0))
        return _Step(
            kind=kind,
            token_ids=token_ids.to(self._device),
            positions=positions.to(self._device),
            metadata=tuple(of_window[window] for window in config.windows),
            last_tokens=(torch.arange(1, num_seqs + 1) * num_new - 1).to(self._device),
            samplings=tuple(_sampling(rows, heat, length, self._device) for rows, heat in counts if rows),
        )


def fill_with_noise(stage: StageModel, random: torch.Generator) -> StageModel:
    """Give it small weights, ready to compute; the same stage."""
    for slot in stage.weight_slots().values():
        # One row for all: drawing millions of numbers takes longer than what is to be measured.
        row = torch.randn(slot.shape[-1], generator=random) * _SPREAD
        slot.load((row if len(slot.shape) > 1 else torch.ones_like(row)).expand(slot.shape))
    stage.prepare()
    return stage


def _sampling(num_rows: int, temperature: float, position: int, device: torch.device) -> SamplingBatch:
    return SamplingBatch(
        filters=Filters(
            temperature=torch.full((num_rows,), temperature, device=device),
            top_k=torch.zeros(num_rows, dtype=torch.int64, device=device),
            top_p=torch.ones(num_rows, dtype=torch.float64, device=device),
            min_p=torch.zeros(num_rows, dtype=torch.float64, device=device),
        ),
        seed=torch.arange(num_rows, device=device),
        position=torch.full((num_rows,), position, device=device),
        is_greedy=temperature == 0,
    )


def _sample(logits: Tensor, samplings: tuple[SamplingBatch, ...]) -> None:
    """As the last stage does it, tokens brought to the host."""
    nan_rows(logits).cpu()
    start = 0
    for sampling in samplings:
        num_rows = len(sampling.seed)
        sample(logits[start : start + num_rows], sampling).tolist()
        start += num_rows
