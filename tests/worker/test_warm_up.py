"""Is what requests will need there when a stage is ready, and is nothing left of what made it so?"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ipc.params import SamplingParams
from tests.conftest import Checkpoints
from tests.families import random_family
from tests.interpreter import use_interpreter
from tests.worker.pipeline import Pipeline
from worker.attention import triton_backend
from worker.warm_up import LONG, made_up_plan

PARAMS = (
    SamplingParams(temperature=0.0, seed=0),
    SamplingParams(temperature=0.7, top_p=0.5, seed=3, logprobs=2),
    SamplingParams(temperature=1.0, top_k=7, seed=4),
    SamplingParams(temperature=1.0, seed=5),
)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Every kernel that ran, with what it would be compiled for. On the CPU, in triton's interpreter."""
    use_interpreter(monkeypatch)
    launch = pytest.importorskip("kernels.gpu.launch")
    serves_cpu = replace(triton_backend.TritonBackend.capabilities, device_types=frozenset({"cpu", "cuda"}))
    monkeypatch.setattr(triton_backend.TritonBackend, "capabilities", serves_cpu)
    seen: set[str] = set()
    run = launch.Launch.run

    def record(self) -> None:
        kinds = {
            name: value.dtype if isinstance(value, torch.Tensor) else None if value is None else "number"
            for name, value in self.arguments.items()
        }
        constants = {name: value for name, value in self.arguments.items() if name.isupper()}
        if all(self.grid):
            seen.add(f"{self.kernel.__name__} {kinds | constants} {self.num_warps} {self.num_stages}")
        run(self)

    monkeypatch.setattr(launch.Launch, "run", record)
    yield seen


def test_requests_launch_no_kernel_for_the_first_time(launched: set[str], tmp_path: Path) -> None:
    """Gemma 2 has layers with windows and without; parts are 512 tokens."""
    model = random_family(tmp_path / "gemma2", "gemma2", num_layers=2, config={"sliding_window": 700})
    pipeline = Pipeline(model, attention_backend="triton", max_model_len=1100, num_blocks=80)
    warm = set(launched)
    assert {name.split()[0] for name in warm} >= {"decode_kernel", "merge_kernel", "ragged_kernel", "draw_kernel"}
    steps = (([6, 9], [6, 9]), ([6, 40], [1, 1]), ([600, 30], [1, 1]), ([600, 30], [1, 20]))
    for (lengths, num_scheduled), params in zip(steps, PARAMS, strict=True):
        pipeline.runners[0].rehearse(made_up_plan(lengths, num_scheduled, block_size=16, num_groups=2, params=params))
    assert launched - warm == set()


def test_long_contexts_are_longer_than_a_part() -> None:
    paged_attention = pytest.importorskip("kernels.gpu.paged_attention")
    assert LONG > 2 * paged_attention.PART


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize(
    ("max_model_len", "max_num_seqs", "max_tokens"), [(2, 1, 1), (3, 1, 8), (512, 4, 4), (4096, 1, 512)]
)
def test_any_limits_can_be_warmed_with(
    checkpoints: Checkpoints, num_stages: int, max_model_len: int, max_num_seqs: int, max_tokens: int
) -> None:
    Pipeline(
        checkpoints.fx_r, num_stages, num_blocks=-(-max_model_len // 16), max_model_len=max_model_len,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens,
    )  # fmt: skip
