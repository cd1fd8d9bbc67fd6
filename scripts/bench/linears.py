"""What does packing the weights of a model's linears save? ``python -m scripts.bench.linears --help``

Every matrix of a kind is used once a round, so that weights come from memory as they do in a step; the ways to multiply
take turns, and medians over the rounds are compared.
"""

import json
import statistics
import time
from pathlib import Path

import click
import torch
from torch import Tensor
from torch.nn.functional import linear

from worker.device import DTYPES
from worker.layers.weight_format import PackedFormat
from worker.model_config import ModelConfig, read_model_config

HEAD_COPIES = 2
"""One head after the other would find itself in the cache."""


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """Name to outputs, inputs and number of matrices."""
    q_width, kv_width = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    width, inner, layers = config.hidden_size, config.intermediate_size, config.num_layers
    return {
        "qkv": (q_width + 2 * kv_width, width, layers),
        "out": (width, q_width, layers),
        "gate_up": (2 * inner, width, layers),
        "down": (width, inner, layers),
        "head": (config.vocab_size, width, HEAD_COPIES),
    }


class Matrices:
    """All matrices of one kind, plain and packed."""

    def __init__(self, num_outputs: int, num_inputs: int, count: int, dtype: torch.dtype) -> None:
        self.plain = [torch.randn(num_outputs, num_inputs).to(dtype) for _ in range(count)]
        self.packed = [PackedFormat(weight) for weight in self.plain]
        for form in self.packed:
            form.prepare()

    def measure(self, x: Tensor, num_rounds: int) -> dict[str, float]:
        """Median milliseconds per product of each way."""
        times: dict[str, list[float]] = {"plain": [], "packed": []}
        for _ in range(num_rounds + 1):
            started = time.perf_counter()
            for weight in self.plain:
                linear(x, weight)
            between = time.perf_counter()
            for form in self.packed:
                form.apply(x, None)
            times["plain"].append(between - started)
            times["packed"].append(time.perf_counter() - between)
        # The first round makes the library's kernels.
        return {way: 1e3 * statistics.median(found[1:]) / len(self.plain) for way, found in times.items()}


@click.command()
@click.argument("model", type=click.Path(exists=True))
@click.option("--rows", default="1,4,8,16,32,64,128,512", show_default=True, help="Tokens in a step, with commas.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1))
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(["bfloat16", "float32"]))
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(1))
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here too.")
def command(model: str, rows: str, threads: int, dtype: str, rounds: int, json_file: Path | None) -> None:
    """Compare plain and packed products for the shapes of MODEL; milliseconds per matrix, and per step over all."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    shapes = shapes_of(read_model_config(model))
    figures = []
    totals: dict[int, dict[str, float]] = {}
    for name, (num_outputs, num_inputs, count) in shapes.items():
        matrices = Matrices(num_outputs, num_inputs, count, DTYPES[dtype])
        for num_rows in (int(word) for word in rows.split(",")):
            found = matrices.measure(torch.randn(num_rows, num_inputs).to(DTYPES[dtype]), rounds)
            figures.append({"matrix": name, "rows": num_rows, **found})
            _show(name, num_rows, found)
            total = totals.setdefault(num_rows, dict.fromkeys(found, 0.0))
            for way, milliseconds in found.items():
                total[way] += milliseconds * (1 if name == "head" else count)
    for num_rows, total in totals.items():
        figures.append({"matrix": "step", "rows": num_rows, **total})
        _show("step", num_rows, total)
    if json_file is not None:
        settings = {"model": model, "threads": threads, "dtype": dtype, "rounds": rounds, "torch": torch.__version__}
        json_file.write_text(json.dumps({**settings, "milliseconds": figures}, indent=1) + "\n")


def _show(name: str, num_rows: int, found: dict[str, float]) -> None:
    ratio = found["plain"] / found["packed"]
    click.echo(f"{name:8} {num_rows:5} rows  plain {found['plain']:8.3f} ms  packed {found['packed']:8.3f} ms  {ratio:5.2f}×")


if __name__ == "__main__":
    command()
