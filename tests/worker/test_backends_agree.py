"""Do all attention backends give the same tokens to the same engine steps?"""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import Golden
from tests.interpreter import use_interpreter
from tests.native import INSTRUCTION_SETS
from tests.oracle import GAP
from tests.worker.fake_graphs import FakePool
from tests.worker.pipeline import Pipeline, Plans, tokens_of
from tests.worker.scheduled import Engine
from worker.attention.triton_backend import TritonBackend


def generate(pipeline: Pipeline, num_steps: int = 40) -> dict[int, list[int]]:
    """Prompts that come at different times and in chunks, beside decodes that cross block edges."""
    plans = Plans()
    got: dict[int, list[int]] = {}
    waiting = {row: random.Random(row).choices(range(3, 512), k=length) for row, length in enumerate((1, 15, 33, 50))}
    left = {row: len(prompt) for row, prompt in waiting.items()}
    for step in range(num_steps):
        if step % 3 == 0 and waiting:
            row, prompt = waiting.popitem()
            plans.add(row, prompt)
            got[row] = []
        counts = {row: min(left[row], 20) or 1 for row in got}
        for row, count in counts.items():
            left[row] = max(0, left[row] - count)
        for row, token_id in tokens_of(pipeline.run(plans.step(counts))).items():
            got[row].append(token_id)
    return got


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="no compiler when this was installed")
@pytest.mark.parametrize("num_stages", [1, 2])
def test_ids_are_equal(checkpoints, num_stages: int) -> None:
    results = {
        backend: generate(Pipeline(checkpoints.fx_r, num_stages, attention_backend=backend))
        for backend in ("torch", "cpu")
    }
    assert results["cpu"] == results["torch"]
    assert min(len(tokens) for tokens in results["cpu"].values()) > 20


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="no compiler when this was installed")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_ids_of_the_demo_model_are_transformers(demo_model: Path, golden: Golden, backend: str) -> None:
    """In float32, prompts of 1 to 689 tokens side by side and in chunks. No decision was closer than 0.009."""
    entries = [golden.prompts[i] for i in (0, 1, 7, 9, 11, 17, 19, 24)]
    assert min(gap for entry in entries for gap in entry["gaps"][:32]) > 10 * GAP
    engine = Engine(
        demo_model, max_num_seqs=8, budget=64, num_blocks=256, max_model_len=1024, attention_backend=backend
    )
    results = engine.run([entry["prompt"] for entry in entries], 32)
    assert [ids for ids, _ in results] == [entry["token_ids"][:32] for entry in entries]


@pytest.mark.parametrize(
    ("checkpoint", "num_steps"), [("one_layer", 6), pytest.param("fx_r", 12, marks=pytest.mark.slow)]
)
def test_a_whole_model_in_triton(checkpoints, checkpoint: str, num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, turns, gates, cache writes, attention and draws, each as plain torch has them."""
    folder = getattr(checkpoints, checkpoint)
    expected = generate(Pipeline(folder, 1, attention_backend="torch"), num_steps)
    use_interpreter(monkeypatch)
    here = replace(TritonBackend.capabilities, device_types=frozenset({"cpu", "cuda"}))
    monkeypatch.setattr(TritonBackend, "capabilities", here)
    assert generate(Pipeline(folder, 1, attention_backend="triton"), num_steps) == expected
    assert sum(map(len, expected.values())) > num_steps / 2


@pytest.mark.slow
def test_a_whole_model_in_triton_from_graphs(checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention included: decodes by the kernel for single queries, other steps by the one for any."""
    expected = generate(Pipeline(checkpoints.one_layer, 1, attention_backend="torch"), 9)
    use_interpreter(monkeypatch)
    here = replace(TritonBackend.capabilities, device_types=frozenset({"cpu", "cuda"}))
    monkeypatch.setattr(TritonBackend, "capabilities", here)
    pool = FakePool()
    pipeline = Pipeline(
        checkpoints.one_layer, 1, attention_backend="triton", cudagraph_mode="full", cudagraph_capture_sizes=(4, 24, 72),
        pool=pool,
    )  # fmt: skip
    assert generate(pipeline, 9) == expected
    assert len(pool.replayed) == 9
