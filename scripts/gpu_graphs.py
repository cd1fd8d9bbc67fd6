"""What do graphs save in a decode step? Run by gpu_check.sh; prints a table.

    python -m scripts.gpu_graphs [--rounds 30] [--device cpu]

One stage of Llama 3 8B's shape with random weights in bfloat16, 512 tokens of context for each request. The same steps are
computed eagerly, with graphs of the segments, and with graphs of the whole; each step from its plan to its tokens on the
host. Results are compared: the same log probabilities within what the order of sums makes in bfloat16.

A step's time is the median of single steps. The device's is that of steps launched behind each other without a look at
results; the rest is what launching and waiting cost. Bandwidth is that of weights and cache, read once a step, over a step's
time, as a share of what a large copy reaches.

Exit code 0 when all agree and batch 1 with whole graphs reaches 85 % of the copy's bandwidth; 1 otherwise; 2 without a GPU.
With --device cpu a tiny model runs on the CPU, where graphs are replayed by computing, to try this script itself.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
from torch import Tensor

from ipc.messages import CachedRequestData, NewRequestData, SchedulerOutput
from ipc.params import SamplingParams
from worker.attention import AttentionBackend, AttentionNeeds, select_backend
from worker.graphs.dispatcher import shapes_to_capture
from worker.graphs.graph import make_pool
from worker.graphs.modes import CudagraphMode, lowered
from worker.kv_groups import StageCaches
from worker.model_config import ModelConfig, read_model_config
from worker.model_runner import ModelRunner
from worker.models import StageModel, build_stage
from worker.profile_stage import fill_with_noise

BATCHES = (1, 8, 64)
CONTEXT, BLOCK_SIZE = 512, 16
WANTED_SHARE = 0.85
MAX_GAP = 2e-2
"""Largest difference of two logits, relative to the largest logit."""

MODES = (CudagraphMode.NONE, CudagraphMode.PIECEWISE, CudagraphMode.FULL_DECODE_ONLY)

LLAMA_3_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "rope_theta": 10000.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of decode steps of one batch in one mode."""

    mode: CudagraphMode
    batch: int
    step_ms: float
    launch_ms: float
    """That the host is busy with one forward pass."""

    device_ms: float
    bandwidth: float
    """Bytes per second."""

    gap: float
    """From the eager logits."""

    @property
    def overhead_ms(self) -> float:
        """Of a step, beside the device's work."""
        return max(0.0, self.step_ms - self.device_ms)


def model_config(shape: dict[str, float]) -> ModelConfig:
    """A Llama of these sizes."""
    description = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    } | shape  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(description), encoding="utf-8")
        return read_model_config(folder)


class Bench:
    """A stage that is the whole model, and its decode steps."""

    def __init__(self, config: ModelConfig, device: torch.device, *, max_batch: int, rounds: int) -> None:
        self.device, self._rounds, self._config = device, rounds, config
        self._max_batch = max_batch
        self._max_model_len = CONTEXT + 4 * rounds + 16
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._backend: AttentionBackend = select_backend(
            "auto", AttentionNeeds.of(config, device=device, dtype=dtype, block_size=BLOCK_SIZE)
        )
        layers = range(config.num_layers)
        self._model: StageModel = fill_with_noise(
            build_stage(config, layers, is_first=True, is_last=True, dtype=dtype, device=device, backend=self._backend),
            torch.Generator().manual_seed(0),
        )
        self._dtype = dtype
        self._blocks_each = -(-self._max_model_len // BLOCK_SIZE)
        cache_shape = self._backend.cache_shape(
            1 + max_batch * self._blocks_each, BLOCK_SIZE, config.num_kv_heads, config.head_size
        )
        self._caches = StageCaches(
            windows=(None,),
            group_of_layer=(0,) * len(layers),
            tensors=tuple(torch.zeros(cache_shape, dtype=dtype, device=device) for _ in layers),
        )

    def num_bytes(self, batch: int) -> int:
        """That a step reads at least: all weights but the embedding's, and the keys and values of its sequences."""
        config = self._config
        embedding = config.vocab_size * config.hidden_size * self._dtype.itemsize
        per_token = 2 * config.num_layers * config.num_kv_heads * config.head_size * self._dtype.itemsize
        return self._model.weight_bytes() - embedding + batch * CONTEXT * per_token

    def run(self, mode: CudagraphMode, batches: Sequence[int], eager: dict[int, Tensor]) -> list[Figures]:
        """``eager``: last logits of each batch without graphs, filled in mode NONE, compared with otherwise."""
        runner = self._runner(mode)
        figures, num_rows = [], 0
        for batch in batches:
            figures.append(self._measure(runner, mode, batch, num_rows, eager))
            num_rows = batch
        return figures

    def _runner(self, mode: CudagraphMode) -> ModelRunner:
        runner = ModelRunner(
            self._model, self._backend, self._caches, config=self._config, is_first=True, is_last=True, device=self.device,
            dtype=self._dtype, num_rows=self._max_batch, max_model_len=self._max_model_len, block_size=BLOCK_SIZE,
        )  # fmt: skip
        self._step_id = 0
        mode = lowered(mode, self._backend.capabilities.graphs)
        shapes = shapes_to_capture(mode, sorted(BATCHES), max_num_seqs=self._max_batch)
        if shapes:
            runner.capture_graphs(
                shapes, receive_buffers=(), pool=make_pool(self.device), progress=lambda done, total: None
            )
        return runner

    def _measure(
        self, runner: ModelRunner, mode: CudagraphMode, batch: int, num_rows: int, eager: dict[int, Tensor]
    ) -> Figures:
        for cache in self._caches.tensors:
            cache.fill_(0.01)
        steps, launches = [], []
        freed, new = list(range(num_rows)), self._requests(batch)
        for _ in range(self._rounds):
            started = time.perf_counter()
            prepared = runner.prepare(self._plan(batch, freed, new))
            launched = time.perf_counter()
            result = runner.execute_model(prepared, None)
            launches.append(time.perf_counter() - launched)
            output = runner.sample_tokens(prepared, result)
            runner.accept_tokens(output.step_id, output.rows, [2] * batch)
            self._synchronize()
            steps.append(time.perf_counter() - started)
            freed, new = [], ()
        assert result.logits is not None
        logits = eager.setdefault(batch, result.logits.clone())
        gap = float((result.logits - logits).abs().max() / logits.abs().max())
        step_s = statistics.median(steps)
        return Figures(
            mode=mode,
            batch=batch,
            step_ms=1e3 * step_s,
            launch_ms=1e3 * statistics.median(launches),
            device_ms=1e3 * self._device_s(runner, batch),
            bandwidth=self.num_bytes(batch) / step_s,
            gap=gap,
        )

    def _device_s(self, runner: ModelRunner, batch: int) -> float:
        """Seconds a step when each is launched while others are computed. Tokens are made up."""
        self._synchronize()
        started = time.perf_counter()
        for _ in range(self._rounds):
            prepared = runner.prepare(self._plan(batch, [], ()))
            runner.execute_model(prepared, None)
            runner.accept_tokens(prepared.plan.step_id, list(range(batch)), [2] * batch)
        self._synchronize()
        return (time.perf_counter() - started) / self._rounds

    def _requests(self, batch: int) -> tuple[NewRequestData, ...]:
        return tuple(
            NewRequestData(
                row=row,
                request_id="measured",
                token_ids=np.full(CONTEXT, 2 + row % 7, np.int32),
                num_prompt_tokens=CONTEXT,
                num_computed_tokens=CONTEXT - 1,
                block_ids=(list(range(1 + row * self._blocks_each, 1 + (row + 1) * self._blocks_each)),),
                params=SamplingParams(temperature=0.0, seed=0),
            )
            for row in range(batch)
        )

    def _plan(self, batch: int, freed: list[int], new: tuple[NewRequestData, ...]) -> SchedulerOutput:
        self._step_id += 1
        return SchedulerOutput(
            core_id=0, epoch=0, step_id=self._step_id, freed_rows=freed, new_requests=new,
            cached_requests=CachedRequestData(), rows=list(range(batch)), num_scheduled_tokens=[1] * batch,
            needs_tokens_of_step=self._step_id - 1,
        )  # fmt: skip

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def copy_bandwidth(device: torch.device, num_bytes: int, rounds: int) -> float:
    """Bytes read and written per second by the fastest of some copies."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    least = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        least = min(least, time.perf_counter() - started)
    return 2 * num_bytes / least


def table(figures: Sequence[Figures], copy_rate: float) -> list[str]:
    """One line for each, below a heading."""
    lines = ["mode              batch  step ms  launch ms  device ms  overhead ms  bandwidth  gap from eager"]
    for one in figures:
        lines.append(
            f"{one.mode.value:<17} {one.batch:>5}  {one.step_ms:>7.3f}  {one.launch_ms:>9.3f}  {one.device_ms:>9.3f}  "
            f"{one.overhead_ms:>11.3f}  {one.bandwidth / copy_rate:>9.1%}  {one.gap:.1e}"
        )
    return lines


def complaints(figures: Sequence[Figures], copy_rate: float, *, wanted_share: float) -> list[str]:
    """What is not as it should be. ``wanted_share``: of the copy's bandwidth, at batch 1 with whole graphs."""
    said = [
        f"{one.mode.value}, batch {one.batch}: logits differ by {one.gap:.1e}, at most {MAX_GAP:.0e} is rounding"
        for one in figures
        if not one.gap <= MAX_GAP
    ]
    for one in figures:
        share = one.bandwidth / copy_rate
        if one.mode is MODES[-1] and one.batch == 1 and share < wanted_share:
            said.append(f"batch 1 with whole graphs reaches {share:.0%} of a copy's bandwidth, wanted {wanted_share:.0%}")
    return said


@click.command()
@click.option("--rounds", type=click.IntRange(2), default=30, show_default=True)
@click.option("--device", "device_type", type=click.Choice(["cuda", "cpu"]), default="cuda")
def main(rounds: int, device_type: str) -> None:
    """Measure decode steps with and without graphs."""
    if device_type == "cuda" and not torch.cuda.is_available():
        click.echo("gpu_graphs: this machine has no GPU that torch can use; nothing was measured", err=True)
        sys.exit(2)
    device = torch.device(device_type)
    is_gpu = device_type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else "the CPU, to try the script"
    click.echo(f"torch {torch.__version__} on {name}: decode steps of a random Llama, {CONTEXT} tokens of context")
    copy_rate = copy_bandwidth(device, 1 << (30 if is_gpu else 22), rounds)
    bench = Bench(model_config(LLAMA_3_8B if is_gpu else TINY), device, max_batch=max(BATCHES), rounds=rounds)
    eager: dict[int, Tensor] = {}
    figures = [one for mode in MODES for one in bench.run(mode, BATCHES, eager)]
    for line in table(figures, copy_rate):
        click.echo(line)
    said = complaints(figures, copy_rate, wanted_share=WANTED_SHARE if is_gpu else 0.0)
    for line in said:
        click.echo(line)
    sys.exit(1 if said else 0)


if __name__ == "__main__":
    main()
