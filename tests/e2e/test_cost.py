"""What does an engine cost when idle, and does each stage hold only what is its own? (F4 F5, number 6)"""

import statistics
import time

import pytest

from tests.conftest import Checkpoints
from tests.e2e.harness import Engine, EnginePool, cpu_seconds, serve, wait_for_end
from tests.e2e.test_parity import FLAGS

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

IDLE_SHARE = 0.03
WAKE_SLACK_S = 0.02


def time_to_first_token(engine: Engine) -> float:
    stream = engine.raw.submit([5, 6, 7, 8], max_tokens=1, temperature=0)
    begin = time.monotonic()
    engine.raw.wait([stream], 10)
    return stream.times[0] - begin


@pytest.mark.parametrize("idle_s", [5, pytest.param(30, marks=pytest.mark.slow)])
def test_f4_idle_costs_nothing(idle_s: int, engines: EnginePool, checkpoints: Checkpoints) -> None:
    """The best of a few times counts: what else runs on the machine makes every wake-up dearer."""
    engine = engines.get(checkpoints.fx_r, flags=FLAGS)
    engine.raw.greedy([5, 6, 7, 8], 32)
    warm = statistics.median(time_to_first_token(engine) for _ in range(9))
    processes = engine.tree().all
    assert len(processes) >= 5
    most = 1.5 * warm + WAKE_SLACK_S
    shares: list[float] = []
    first_tokens: list[float] = []
    while len(shares) < 4 and not (shares and min(shares) < IDLE_SHARE and min(first_tokens) < most):
        before, begin = cpu_seconds(processes), time.monotonic()
        assert not wait_for_end(engine.pids()[:1], idle_s), "the engine ended while idle"
        shares.append((cpu_seconds(processes) - before) / (time.monotonic() - begin))
        first_tokens.append(time_to_first_token(engine))
    assert min(shares) < IDLE_SHARE, f"shares of a core: {shares}"
    assert min(first_tokens) < most, f"first tokens after {first_tokens} s, {warm} s without a pause"


def test_f5_head_on_the_last_stage_embedding_on_the_first(engines: EnginePool, checkpoints: Checkpoints) -> None:
    """Each rank is larger than the same rank of a tiny model by what the stage's own tensors take, and no more."""
    tiny_ranks = engines.get(checkpoints.fx_r, flags=FLAGS).tree().ranks
    baseline = [tiny_ranks[i].memory_info().rss for i in (0, 1)]
    flags = ("--num-kv-blocks", "64", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
    with serve(checkpoints.large_vocabulary, flags=flags) as engine:
        engine.raw.greedy([5, 6, 7, 8], 8)
        ranks = engine.tree().ranks
        grown = [ranks[i].memory_info().rss - baseline[i] for i in (0, 1)]
        before = [cpu_seconds([ranks[i]]) for i in (0, 1)]
        engine.raw.greedy([5, 6, 7, 8], 150)
        first, last = (cpu_seconds([ranks[i]]) - b for i, b in zip((0, 1), before, strict=True))
    layer = 3 * 512 * 512 + 3 * 512 * 64
    for rank in (0, 1):
        assert grown[rank] == pytest.approx(4 * (50_000 * 512 + layer), rel=0.15), f"rank {rank}: {grown}"
    assert first < 0.6 * last, f"rank 0 took {first:.2f} s of CPU, rank 1, which has the head, {last:.2f} s"
