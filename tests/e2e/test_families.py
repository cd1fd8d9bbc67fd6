"""Do models with windows run in the whole engine: several KV groups on every rank, and pools that windows leave room in?"""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.compare import check_against
from tests.e2e.conftest import random_prompt
from tests.e2e.harness import Failure, fail_to_start, serve
from tests.families import WINDOW, random_family
from tests.oracle import Excused, Greedy, Oracle

pytestmark = pytest.mark.e2e

BLOCK_SIZE = 16


def expect(model: Path, lengths: Sequence[int], num_tokens: int, *, seed: int = 1) -> list[Greedy]:
    draw, oracle = random.Random(seed), Oracle.of(model)
    return [oracle.greedy(random_prompt(draw, length), num_tokens) for length in lengths]


def test_c4_gemma_3_has_two_groups_on_both_stages(tmp_path: Path, excused: list[Excused]) -> None:
    """Windowed and full layers alternate; the second stage begins in the middle. Prompts cold, then from the cache."""
    model = random_family(tmp_path / "gemma3", "gemma3", num_layers=6, config={"sliding_window_pattern": 2})
    lengths = (5, WINDOW - 2, WINDOW, WINDOW + 1, 60, 200)
    expected = expect(model, lengths, 32)
    with serve(model, flags=["--num-kv-blocks", "256", "--max-num-batched-tokens", "64"]) as engine:
        excused += check_against(engine.raw, expected, concurrency=len(lengths))
        assert engine.settle()["kv_blocks_total"] == 256
        before = engine.raw.stats()["prefix_cache_hit_tokens_total"]
        excused += check_against(engine.raw, expected, concurrency=2)
        hits = engine.raw.stats()["prefix_cache_hit_tokens_total"] - before
        assert hits >= sum((length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in lengths)
        engine.settle()


def test_a_pool_holds_what_windows_leave(tmp_path: Path, excused: list[Excused]) -> None:
    """Contexts of up to 500 tokens, four at once, in 16 blocks: without windows a single one would need 32."""
    model = random_family(tmp_path / "mistral", "mistral")
    expected = expect(model, (400, 300, 200, 100), 96)
    flags = ["--num-kv-blocks", "16", "--max-model-len", "500", "--max-num-seqs", "4", "--max-num-batched-tokens", "32"]
    with serve(model, flags=flags) as engine:
        excused += check_against(engine.raw, expected, concurrency=4)
        stats = engine.settle()
        assert (stats["kv_blocks_total"], stats["preemptions_total"]) == (16, 0)
    full = random_family(tmp_path / "full", "mistral", config={"sliding_window": 1024})
    check_failure(fail_to_start(full, flags=flags, within_s=90.0), "--max-model-len", "needs 32 KV blocks", "the pool has 16")


def test_a_backend_that_does_not_fit_ends_the_start(tmp_path: Path) -> None:
    model = random_family(tmp_path / "odd", "qwen3", config={"head_dim": 24})
    failure = fail_to_start(model, flags=["--attention-backend", "triton", "--device", "cpu"], within_s=90.0)
    check_failure(failure, "--attention-backend: triton cannot be used, it lacks device cpu")
    unknown = fail_to_start(model, flags=["--attention-backend", "flash"], within_s=90.0)
    check_failure(unknown, "'flash' is unknown; give auto or one of", "torch")


def check_failure(failure: Failure, *words: str) -> None:
    assert all(code != 0 for code in failure.exit_codes), failure.text
    assert "Traceback" not in failure.text
    assert any(all(word in line for word in words) for line in failure.lines), failure.text
