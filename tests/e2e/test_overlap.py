"""Steps that are planned before their tokens are known, and many stages: one token per position, always (K4, numbers 5, 7)."""

import pytest

from tests import tiny
from tests.conftest import Checkpoints, Golden
from tests.e2e.compare import check_against, greedy_params, stored
from tests.e2e.conftest import TinyOracle
from tests.e2e.harness import EnginePool, serve
from tests.e2e.test_parity import FLAGS, mixed_requests
from tests.e2e.test_real_model import FLOAT32, QUICK_PROMPTS
from tests.oracle import Excused

pytestmark = pytest.mark.e2e

SYNC = "--no-async-scheduling"
SCRIPT = list(range(1, len(tiny.SCRIPT) + 1))
SMALL_POOL = ("--block-size", "4", "--num-kv-blocks", "24", "--max-model-len", "64", "--max-num-seqs", "8", "--no-prefix-caching")
"""Eight streams of the script want some seventy blocks."""


@pytest.mark.parametrize("num_rounds", [5, pytest.param(30, marks=pytest.mark.slow)])
def test_k4_one_token_per_position_whatever_is_preempted(
    num_rounds: int, engines: EnginePool, checkpoints: Checkpoints
) -> None:
    """Every token of the script is unique: one that is doubled, skipped or a placeholder shows."""
    engine = engines.get(checkpoints.chain, flags=SMALL_POOL)
    before = engine.raw.stats()["preemptions_total"]
    for _ in range(num_rounds):
        streams = [engine.raw.submit([0], **greedy_params(len(SCRIPT))) for _ in range(8)]
        engine.raw.wait(streams, 60)
        for stream in streams:
            assert stream.token_ids == SCRIPT
            assert stream.finish_reason == "length"
    engine.settle()
    assert engine.raw.stats()["preemptions_total"] >= before + num_rounds, "the pool is too large to show anything"


@pytest.mark.parametrize("pp", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_number_5_ids_do_not_depend_on_when_the_next_step_is_planned(
    pp: int, engines: EnginePool, checkpoints: Checkpoints
) -> None:
    """Seeded and greedy requests."""
    requests = mixed_requests(5, 24)
    expected = [s.token_ids for s in engines.get(checkpoints.fx_r, flags=FLAGS).raw.run(requests, concurrency=8, timeout_s=60)]
    with serve(checkpoints.fx_r, pp=pp, flags=(*FLAGS, SYNC)) as engine:
        assert [s.token_ids for s in engine.raw.run(requests, concurrency=8, timeout_s=60)] == expected
        engine.settle()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("flag", ["--async-scheduling", SYNC])
@pytest.mark.parametrize("pp", [1, 2])
def test_number_5_ids_of_the_demo_model(
    pp: int, flag: str, engines: EnginePool, demo_model: str, golden: Golden, excused: list[Excused]
) -> None:
    client = engines.get(demo_model, pp=pp, flags=(*FLOAT32, flag)).raw
    expected = [stored(golden.prompts[i], 48) for i in QUICK_PROMPTS]
    excused += check_against(client, expected, concurrency=len(expected), timeout_s=600)


def test_number_7_five_stages(checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]) -> None:
    """More stages than cores, each with a layer of its own."""
    with serve(checkpoints.fx_r, pp=5, flags=FLAGS) as engine:
        excused += check_against(engine.raw, tiny_oracle.expect(2, [5, 16, 40, 77, 120], 32), concurrency=5)
        engine.settle()
