"""What does an engine cost when idle, and does each stage hold only what is its own? (F4 F5, number 6)"""

import statistics
import time
from pathlib import Path

import pytest

from tests import tiny
from tests.conftest import Checkpoints
from tests.e2e.harness import Engine, EnginePool, cpu_seconds, serve, wait_for_end
from tests.e2e.test_parity import FLAGS

pytestmark = pytest.mark.e2e

IDLE_SHARE = 0.03
WAKE_SLACK_S = 0.02


def time_to_first_token(engine: Engine) -> float:
    stream = engine.raw.submit([5, 6, 7, 8], max_tokens=1, temperature=0)
    begin = time.monotonic()
    engine.raw.wait([stream], 10)
    return stream.times[0] - begin


@pytest.mark.parametrize("idle_s", [5, pytest.param(30, marks=pytest.mark.slow)])
def test_f4_idle_costs_nothing(idle_s: int, engines: EnginePool, checkpoints: Checkpoints) -> None:
    engine = engines.get(checkpoints.fx_r, flags=FLAGS)
    engine.raw.greedy([5, 6, 7, 8], 32)
    warm = statistics.median(time_to_first_token(engine) for _ in range(9))
    processes = engine.tree().all
    assert len(processes) >= 5
    before, begin = cpu_seconds(processes), time.monotonic()
    assert not wait_for_end(engine.pids()[:1], idle_s), "the engine ended while idle"
    share = (cpu_seconds(processes) - before) / (time.monotonic() - begin)
    assert share < IDLE_SHARE, f"{share:.2%} of a core"
    assert time_to_first_token(engine) < 1.5 * warm + WAKE_SLACK_S


def test_f5_head_on_the_last_stage_embedding_on_the_first(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Against the same model with a small vocabulary, each rank grows by one of the two matrices."""
    small = tiny.random_llama(
        tmp_path / "small", num_layers=2, hidden_size=512, intermediate_size=64, vocab_size=512, tied=False, std=0.05
    )
    flags = ("--num-kv-blocks", "64", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
    sizes = {}
    for name, model in (("small", small), ("large", checkpoints.large_vocabulary)):
        with serve(model, flags=flags) as engine:
            engine.raw.greedy([5, 6, 7, 8], 8)
            ranks = engine.tree().ranks
            sizes[name] = [ranks[i].memory_info().rss for i in (0, 1)]
            if name == "large":
                before = [cpu_seconds([ranks[i]]) for i in (0, 1)]
                engine.raw.greedy([5, 6, 7, 8], 150)
                first, last = (cpu_seconds([ranks[i]]) - b for i, b in zip((0, 1), before, strict=True))
    matrix = (50_000 - 512) * 512 * 4
    for rank in (0, 1):
        assert sizes["large"][rank] - sizes["small"][rank] == pytest.approx(matrix, rel=0.15), f"rank {rank}"
    assert first < 0.6 * last, f"rank 0 took {first:.2f} s of CPU, rank 1, which has the head, {last:.2f} s"
