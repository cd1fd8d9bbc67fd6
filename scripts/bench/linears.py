"""What does rearranging the weights of a model's linears save? ``python -m scripts.bench.linears --help``

Every matrix of a kind is used once a round, so that weights come from memory as they do in a step; the ways to multiply
take turns, and medians over the rounds are compared.
"""

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import click
import torch
from torch import Tensor

from worker.device import DTYPES
from worker.layers.weight_format import (
    PACKED_DTYPES,
    PackedFormat,
    PanelFormat,
    PlainFormat,
    WeightFormat,
    can_pack,
)
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
    """All matrices of one kind, in each form: ``plain``, ``packed`` by the library, in ``panels`` of our own kernel."""

    def __init__(self, num_outputs: int, num_inputs: int, count: int, dtype: torch.dtype, is_head: bool) -> None:
        self.dtype = torch.float32 if is_head else dtype
        weights = [torch.randn(num_outputs, num_inputs).to(dtype) for _ in range(count)]
        self.forms: dict[str, Sequence[WeightFormat]] = {"plain": [PlainFormat(weight) for weight in weights]}
        if can_pack(dtype):
            self.forms["packed"] = [PackedFormat(weight) for weight in weights]
        if dtype in PACKED_DTYPES:
            self.forms["panels"] = [PanelFormat(weight) for weight in weights]
        for forms in self.forms.values():
            for form in forms:
                form.prepare()

    def measure(self, x: Tensor, num_rounds: int) -> dict[str, float]:
        """Median milliseconds per product of each way."""
        times: dict[str, list[float]] = {way: [] for way in self.forms}
        for _ in range(num_rounds + 1):
            for way, forms in self.forms.items():
                started = time.perf_counter()
                for form in forms:
                    form.apply(x, None, self.dtype)
                times[way].append((time.perf_counter() - started) / len(forms))
        # The first round makes the library's kernels.
        return {way: 1e3 * statistics.median(found[1:]) for way, found in times.items()}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", type=click.Path(exists=True))
@click.option("--rows", default="1,4,8,16,32,64,128,512", show_default=True, help="Tokens in a step, with commas.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="Threads that compute.")
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(["bfloat16", "float32"]),
              help="Of rows and weights.")
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(1), help="Medians over so many count.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here too.")
def command(model: str, rows: str, threads: int, dtype: str, rounds: int, json_file: Path | None) -> None:
    """Compare ways to multiply for the shapes of MODEL: milliseconds per matrix, and per step over all.

    With each way what it computes (GFLOP/s) and what it reads of weights (GB/s). The head's results are float32.
    """
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    shapes = shapes_of(read_model_config(model))
    figures = []
    totals: dict[int, dict[str, float]] = {}
    weights_of_step = 0
    for name, (num_outputs, num_inputs, count) in shapes.items():
        matrices = Matrices(num_outputs, num_inputs, count, DTYPES[dtype], name == "head")
        times = 1 if name == "head" else count
        weights_of_step += times * num_outputs * num_inputs
        for num_rows in (int(word) for word in rows.split(",")):
            found = matrices.measure(torch.randn(num_rows, num_inputs).to(DTYPES[dtype]), rounds)
            figures.append({"matrix": name, "rows": num_rows, **found})
            _show(name, num_rows, found, num_outputs * num_inputs, DTYPES[dtype])
            total = totals.setdefault(num_rows, dict.fromkeys(found, 0.0))
            for way, milliseconds in found.items():
                total[way] += milliseconds * times
    for num_rows, total in totals.items():
        figures.append({"matrix": "step", "rows": num_rows, **total})
        _show("step", num_rows, total, weights_of_step, DTYPES[dtype])
    if json_file is not None:
        settings = {"model": model, "threads": threads, "dtype": dtype, "rounds": rounds, "torch": torch.__version__}
        json_file.write_text(json.dumps({**settings, "milliseconds": figures}, indent=1) + "\n")


def _show(name: str, num_rows: int, found: dict[str, float], num_weights: int, dtype: torch.dtype) -> None:
    ways = []
    for way, milliseconds in found.items():
        gflops, gigabytes = 2 * num_rows * num_weights / 1e6 / milliseconds, dtype.itemsize * num_weights / 1e6 / milliseconds
        ways.append(f"{way} {milliseconds:8.3f} ms {gflops:6.1f} GFLOP/s {gigabytes:5.1f} GB/s")
    click.echo(f"{name:8} {num_rows:5} rows  {'   '.join(ways)}  {found['plain'] / min(found.values()):5.2f}×")


if __name__ == "__main__":
    command()
