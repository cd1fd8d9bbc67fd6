"""Does the measurement of graphs compare and judge what it says? Without a GPU, on a tiny model."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from scripts import gpu_graphs
from scripts.gpu_graphs import LLAMA_3_8B, Bench, Figures, complaints, model_config, table
from tests.native import INSTRUCTION_SETS
from worker.graphs.modes import CudagraphMode

ROOT = Path(__file__).resolve().parents[1]


def figures(mode: CudagraphMode = CudagraphMode.FULL_DECODE_ONLY, **changes: float) -> Figures:
    values = {"batch": 1, "step_ms": 8.0, "launch_ms": 0.5, "device_ms": 7.5, "bandwidth": 9e11, "gap": 0.0} | changes
    return Figures(mode=mode, **values)  # type: ignore[arg-type]


def test_the_whole_of_it_on_the_cpu() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        done = CliRunner().invoke(gpu_graphs.main, ["--device", "cpu", "--rounds", "2"])
    finally:
        torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    heading, columns, *lines = done.output.splitlines()
    assert "to try the script" in heading and columns.startswith("mode")
    assert [line.split()[:2] for line in lines] == [
        [mode, batch] for mode in ("none", "piecewise", "full_decode_only") for batch in ("1", "8", "64")
    ]
    gaps = [float(line.split()[-1]) for line in lines]
    assert max(gaps) < 1e-4


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="no compiler when this was installed")
def test_graphs_are_compared_with_eager_steps() -> None:
    """A graph whose results are wrong is found out."""
    bench = Bench(model_config(gpu_graphs.TINY), torch.device("cpu"), max_batch=8, rounds=2)
    eager: dict[int, torch.Tensor] = {}
    bench.run(CudagraphMode.NONE, (8,), eager)
    (right,) = bench.run(CudagraphMode.FULL_DECODE_ONLY, (8,), eager)
    eager[8] = eager[8].roll(1, 0) + 0.1
    (wrong,) = bench.run(CudagraphMode.FULL_DECODE_ONLY, (8,), eager)
    assert complaints([right], 1.0, wanted_share=0.0) == []
    (said,) = complaints([wrong], 1.0, wanted_share=0.0)
    assert re.match(r"full_decode_only, batch 8: logits differ by .* at most 2e-02 is rounding", said)


def test_what_has_to_be_reached() -> None:
    assert complaints([figures()], 1e12, wanted_share=0.85) == []
    (said,) = complaints([figures(bandwidth=8e11)], 1e12, wanted_share=0.85)
    assert said == "batch 1 with whole graphs reaches 80% of a copy's bandwidth, wanted 85%"
    assert complaints([figures(batch=8, bandwidth=1e11)], 1e12, wanted_share=0.85) == []
    assert complaints([figures(CudagraphMode.NONE, bandwidth=1e11)], 1e12, wanted_share=0.85) == []
    assert len(complaints([figures(gap=float("nan"))], 1e12, wanted_share=0.85)) == 1


def test_what_is_shown() -> None:
    _, line = table([figures(gap=3e-3)], 1e12)
    assert line.split() == ["full_decode_only", "1", "8.000", "0.500", "7.500", "0.500", "90.0%", "3.0e-03"]


def test_the_shape_is_that_of_llama_3_8b() -> None:
    config = model_config(LLAMA_3_8B)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_size) == (32, 32, 8, 128)
    assert (config.vocab_size, config.tie_word_embeddings, config.dtype) == (128256, False, "bfloat16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.gpu_graphs"], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 2
    assert done.stderr == "gpu_graphs: this machine has no GPU that torch can use; nothing was measured\n"
