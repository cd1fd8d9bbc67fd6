"""Where does the time of a decode step go? ``python -m scripts.bench.step_table MODEL``

One stage with all layers, alone in this process, decodes batches of sequences. Every moment of a step counts for one part,
the innermost that it lies in. Beside each part stands the least that this machine could take for it: the bytes that the
part must read at the bandwidth of a sum over a large array, or its operations at the rate of a large product, whichever
takes longer; both measured in the same run with the same threads. What has no such bound is small, and stays in the caches.

Links and the core are no part of this: ``brigade timeline`` shows the former, ``scripts/bench/core_work.py`` measures the latter.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
import numpy as np
import torch

from ipc.errors import EngineError
from ipc.messages import CachedRequestData, NewRequestData, SchedulerOutput
from ipc.params import SamplingParams
from scripts.bench.kernels import read_bandwidth
from scripts.bench.replay import StageJob
from scripts.bench.replay_stage import LoneStage
from scripts.bench.results import fail, finish, markdown, say
from worker.device import DTYPES
from worker.kv_groups import kv_groups
from worker.layers.attention import Attention
from worker.layers.gated_mlp import GatedMLP
from worker.layers.linear import Linear
from worker.layers.norm import RMSNorm
from worker.layers.rotary import RotaryAngles
from worker.layers.weight_format import empty_format
from worker.model_config import ModelConfig, read_model_config
from worker.model_runner import ModelRunner

BLOCK_SIZE = 16
PARTS = (
    "inputs", "embedding", "norms", "linears", "turns", "cache write", "attention", "gates", "head", "sampling", "rest",
)  # fmt: skip
"""Norms include the one before the head. What lies between the others is the rest."""

GREEDY = SamplingParams(temperature=0.0, seed=0)
WARM_STEPS = 3
PRODUCT_ROWS, PRODUCT_WIDTH = 512, 2048


class Stopwatch:
    """Knows for which part time counts now, on the clock and on a processor."""

    def __init__(
        self, wall: Callable[[], float] = time.perf_counter, thread: Callable[[], float] = time.thread_time
    ) -> None:
        self._clocks = (wall, thread)
        self._part = "rest"
        self._since = tuple(clock() for clock in self._clocks)
        self._totals: dict[str, list[float]] = {}

    def switch(self, part: str) -> str:
        """Time counts for this part from now on; returns the one before."""
        now = tuple(clock() for clock in self._clocks)
        total = self._totals.setdefault(self._part, [0.0, 0.0])
        for i, (start, end) in enumerate(zip(self._since, now, strict=True)):
            total[i] += end - start
        self._since, before, self._part = now, self._part, part
        return before

    def take(self) -> dict[str, tuple[float, float]]:
        """Seconds on the clock and on a processor of every part since the last call."""
        self.switch(self._part)
        taken = {part: (wall, thread) for part, (wall, thread) in self._totals.items()}
        self._totals = {}
        return taken

    def watch(self, owner: object, name: str, part: str) -> None:
        """From now on calls of ``owner``'s function of this name count for the part."""
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            before = self.switch(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.switch(before)

        setattr(owner, name, timed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a part has to do in one step, at least."""

    num_bytes: int = 0
    """Read from memory."""
    num_operations: int = 0

    def seconds(self, machine: "Machine") -> float:
        return max(self.num_bytes / machine.bytes_per_s, self.num_operations / machine.operations_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What it gives with some number of threads."""

    bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One part of a step; milliseconds."""

    wall_ms: float
    thread_ms: float
    """Of the thread that runs the step; what others do for it is waited for, or not in it."""
    limit_ms: float | None


@dataclass(slots=True)
class Bench:
    """A stage that is watched, and steps for it."""

    stage: LoneStage
    config: ModelConfig
    context: int
    num_steps: int
    watch: Stopwatch = field(default_factory=Stopwatch)

    def __post_init__(self) -> None:
        model, watch = self.stage.loaded.model, self.watch
        for module in model.modules():
            if isinstance(module, RMSNorm):
                watch.watch(module, "forward", "norms")
                watch.watch(module, "after_adding", "norms")
            elif isinstance(module, RotaryAngles):
                watch.watch(module, "forward", "turns")
            elif isinstance(module, Attention):
                watch.watch(module, "_turned", "turns")
            elif isinstance(module, GatedMLP):
                watch.watch(module, "gate", "gates")
        for linear in self._linears():
            watch.watch(linear, "forward", "linears")
        watch.watch(model, "embed", "embedding")
        watch.watch(model, "logits", "head")
        watch.watch(self.stage.loaded.backend, "write", "cache write")
        watch.watch(self.stage.loaded.backend, "attend", "attention")

    @torch.inference_mode()
    def run(self, num_seqs: int) -> dict[str, tuple[float, float]]:
        """Medians over the steps of the seconds of every part, and of whole steps as ``step``."""
        runner = self.stage.runner()
        for name, part in (("prepare", "inputs"), ("sample_tokens", "sampling"), ("accept_tokens", "sampling")):
            self.watch.watch(runner, name, part)
        samples: dict[str, list[tuple[float, float]]] = {}
        for number, plan in enumerate(self._plans(num_seqs)):
            self.watch.take()
            _run_step(runner, plan)
            taken = self.watch.take()
            taken["step"] = (sum(wall for wall, _ in taken.values()), sum(thread for _, thread in taken.values()))
            if number >= WARM_STEPS:
                for part, seconds in taken.items():
                    samples.setdefault(part, []).append(seconds)
        return {
            part: (statistics.median(wall for wall, _ in found), statistics.median(thread for _, thread in found))
            for part, found in samples.items()
        }

    def work(self, num_seqs: int) -> dict[str, Work]:
        """Of the parts that memory or arithmetic bounds."""
        config, dtype = self.config, self.stage.loaded.dtype
        linears = list(self._linears())
        seen = sum(min(self.context, window or self.context) for window in config.windows)
        kv_bytes = num_seqs * seen * 2 * config.num_kv_heads * config.head_size * dtype.itemsize
        head = config.vocab_size * config.hidden_size
        return {
            "linears": Work(
                num_bytes=sum(linear.size_bytes for linear in linears),
                num_operations=2 * num_seqs * sum(sum(linear.parts.values()) * linear.in_features for linear in linears),
            ),
            "attention": Work(num_bytes=kv_bytes),
            "head": Work(num_bytes=head * dtype.itemsize, num_operations=2 * num_seqs * head),
        }

    def _linears(self) -> Iterator[Linear]:
        """Of the layers, not the head."""
        layers = self.stage.loaded.model.get_submodule("layers")
        return (module for module in layers.modules() if isinstance(module, Linear))

    def _plans(self, num_seqs: int) -> Iterator[SchedulerOutput]:
        """Decodes whose contexts are ``context`` tokens long in the middle of the steps that count."""
        total = WARM_STEPS + self.num_steps
        start = max(1, self.context - WARM_STEPS - self.num_steps // 2)
        blocks_each = -(-(start + total) // BLOCK_SIZE)
        num_groups = len(self.stage.loaded.kv_groups)
        order = np.random.default_rng(0).permutation(num_seqs * num_groups * blocks_each)
        blocks = order.reshape(num_seqs, num_groups, blocks_each).tolist()
        requests = tuple(
            NewRequestData(
                row=row, request_id=str(row), token_ids=np.full(start, 5, np.int32), num_prompt_tokens=start,
                num_computed_tokens=start - 1, block_ids=tuple(blocks[row]), params=GREEDY,
            )
            for row in range(num_seqs)
        )  # fmt: skip
        for step_id in range(1, total + 1):
            yield SchedulerOutput(
                core_id=0, epoch=1, step_id=step_id, freed_rows=[], new_requests=requests if step_id == 1 else (),
                cached_requests=CachedRequestData(), rows=list(range(num_seqs)), num_scheduled_tokens=[1] * num_seqs,
                needs_tokens_of_step=step_id - 1,
            )  # fmt: skip


def _run_step(runner: ModelRunner, plan: SchedulerOutput) -> None:
    batch = runner.prepare(plan)
    output = runner.sample_tokens(batch, runner.execute_model(batch, None))
    runner.accept_tokens(output.step_id, output.rows, output.token_ids)


def measure_machine(dtype: torch.dtype) -> Machine:
    """With the threads that torch is set to."""
    weight = empty_format(PRODUCT_WIDTH, PRODUCT_WIDTH, dtype, torch.device("cpu"))
    weight.load(0, torch.randn(PRODUCT_WIDTH, PRODUCT_WIDTH))
    weight.prepare()
    x = torch.randn(PRODUCT_ROWS, PRODUCT_WIDTH).to(dtype)

    def seconds() -> float:
        started = time.perf_counter()
        weight.apply(x, None)
        return time.perf_counter() - started

    return Machine(
        bytes_per_s=read_bandwidth(),
        operations_per_s=2 * PRODUCT_ROWS * PRODUCT_WIDTH**2 / min(seconds() for _ in range(8)),
    )


def rows_of(seconds: dict[str, tuple[float, float]], work: dict[str, Work], machine: Machine) -> dict[str, Row]:
    """Of every part and of the step, whose limit is the sum of theirs."""
    limits: dict[str, float | None] = {part: one.seconds(machine) * 1e3 for part, one in work.items()}
    limits["step"] = sum(limit for limit in limits.values() if limit is not None)
    return {
        part: Row(wall_ms=seconds[part][0] * 1e3, thread_ms=seconds[part][1] * 1e3, limit_ms=limits.get(part))
        for part in (*PARTS, "step")
        if part in seconds
    }


def table_of(by_batch: dict[int, dict[str, Row]]) -> str:
    """Parts down, batches across."""
    columns = ["part", *(f"{size}: {what}" for size in by_batch for what in ("ms", "CPU ms", "limit"))]
    rows = [
        [part, *(cell for rows in by_batch.values() for cell in _cells(rows.get(part)))]
        for part in (*PARTS, "step")
    ]  # fmt: skip
    return markdown(columns, rows)


def _cells(row: Row | None) -> list[str]:
    if row is None:
        return ["-"] * 3
    return [f"{row.wall_ms:.2f}", f"{row.thread_ms:.2f}", "-" if row.limit_ms is None else f"{row.limit_ms:.2f}"]


class Numbers(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Positive whole numbers with commas between them."""

    name = "N,N"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Fails with a usage error."""
        if isinstance(value, tuple):
            return value
        words = str(value).split(",")
        if not all(word.isascii() and word.isdigit() and int(word) for word in words):
            self.fail(f"{value!r:.80} must be positive whole numbers, such as 1,16", param, ctx)
        return tuple(map(int, words))


def measure(
    model: str, dtype: str, threads: Sequence[int], batches: Sequence[int], context: int, num_steps: int
) -> tuple[dict[int, Machine], dict[int, dict[int, dict[str, Row]]]]:
    """By number of threads: what the machine gives, and for each batch the rows of the table."""
    config = read_model_config(model)
    most_tokens = context + WARM_STEPS + num_steps + 1
    num_tables = max(batches) * len(kv_groups(config, range(config.num_layers)))
    stage = LoneStage(StageJob(
        model=model, dtype=dtype, partition="even", stage=0, num_stages=1, num_threads=max(threads),
        max_num_seqs=max(batches), max_num_batched_tokens=max(batches), max_model_len=most_tokens,
        block_size=BLOCK_SIZE, num_blocks=num_tables * -(-most_tokens // BLOCK_SIZE),
    ))  # fmt: skip
    bench = Bench(stage, config, context, num_steps)
    machines: dict[int, Machine] = {}
    tables: dict[int, dict[int, dict[str, Row]]] = {}
    for count in threads:
        torch.set_num_threads(count)
        machines[count] = measure_machine(DTYPES[dtype])
        tables[count] = {}
        for size in batches:
            say(f"{count} thread{'s'[: count - 1]}, {size} sequences")
            tables[count][size] = rows_of(bench.run(size), bench.work(size), machines[count])
    return machines, tables


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("model")
@click.option("--dtype", type=click.Choice(sorted(DTYPES)), default="bfloat16")
@click.option("--threads", type=Numbers(), default="1,2", help="Numbers of threads.")
@click.option("--batch", "batches", type=Numbers(), default="1,16,64", help="Numbers of sequences that decode.")
@click.option("--context", type=click.IntRange(1), default=160, help="Tokens that each sequence holds.")
@click.option("--steps", "num_steps", type=click.IntRange(1), default=30, help="Medians over so many count.")
@click.option("--json", "json_path", metavar="FILE", help="Write the result as JSON; '-' prints it alone.")
def command(
    model: str, dtype: str, threads: tuple[int, ...], batches: tuple[int, ...], context: int, num_steps: int,
    json_path: str | None,
) -> None:  # fmt: skip
    """Print for each part of a decode step its time, its time on the processor, and the least that this machine allows.

    The time on the processor is that of the thread that runs the step; on a busy machine it is the one to be trusted.
    """
    try:
        machines, tables = measure(model, dtype, threads, batches, context, num_steps)
    except EngineError as error:
        fail(str(error))
    texts = [
        f"{count} thread{'s'[: count - 1]}: {machine.bytes_per_s / 1e9:.1f} GB/s read, "
        f"{machine.operations_per_s / 1e9:.0f} GFLOP/s; milliseconds of a step\n\n{table_of(tables[count])}"
        for count, machine in machines.items()
    ]
    result = {
        "model": model, "dtype": dtype, "context": context, "steps": num_steps,
        "threads": {
            str(count): {
                "bytes_per_s": machine.bytes_per_s, "operations_per_s": machine.operations_per_s,
                "batches": {
                    str(size): {
                        part: {"ms": row.wall_ms, "cpu_ms": row.thread_ms, "limit_ms": row.limit_ms}
                        for part, row in rows.items()
                    }
                    for size, rows in tables[count].items()
                },
            }
            for count, machine in machines.items()
        },
    }  # fmt: skip
    finish(result, "\n\n".join(texts), [], json_path=json_path, check=False)


if __name__ == "__main__":
    command()
