"""Does the pipeline work over two agents, which counts as two machines? (C14)"""

import os

import pytest

from tests.conftest import Checkpoints
from tests.e2e.compare import check_against, greedy_params
from tests.e2e.conftest import TinyOracle
from tests.e2e.harness import EnginePool, serve
from tests.oracle import GAP, Excused

pytestmark = [pytest.mark.e2e]

LENGTHS = [3 + 5 * i for i in range(50)]


def test_c14_two_agents_give_the_same_ids(
    checkpoints: Checkpoints, tiny_oracle: TinyOracle, engines: EnginePool, excused: list[Excused]
) -> None:
    """As the reference implementation, and as two stages on one host."""
    expected = tiny_oracle.expect(14, LENGTHS, 16)
    requests = [(e.prompt, greedy_params(16)) for e in expected]
    with serve(checkpoints.fx_r, launcher="torchrun", num_nodes=2) as engine:
        assert len(engine.tree().agents) == 2
        # Each agent believes that it has the whole machine; with all cores each, the two ranks would fight.
        share = max(1, len(os.sched_getaffinity(0)) // 2)
        assert sum(f", {share} thread" in line for line in engine.output.lines) == 2
        assert any("hops go by gloo: every rank computes on the CPU" in line for line in engine.output.lines)
        excused += check_against(engine.raw, expected, concurrency=8)
        over_two = engine.raw.run(requests, concurrency=8, timeout_s=120)
        engine.settle()
    on_one = engines.get(checkpoints.fx_r).raw.run(requests, concurrency=8, timeout_s=120)
    for e, one, two in zip(expected, on_one, over_two, strict=True):
        differs = [i for i, (a, b) in enumerate(zip(one.token_ids, two.token_ids, strict=True)) if a != b]
        assert not differs or e.gaps[differs[0]] < GAP, f"{one.token_ids} on one host, {two.token_ids} over two agents"


@pytest.mark.parametrize("transport", ["staged", pytest.param("auto", marks=pytest.mark.slow)])
def test_c14_two_agents_in_bfloat16(checkpoints: Checkpoints, tiny_oracle: TinyOracle, transport: str) -> None:
    flags = ["--dtype", "bfloat16", "--transport", transport]
    with serve(checkpoints.fx_r, launcher="torchrun", num_nodes=2, flags=flags) as engine:
        requests = [(e.prompt, greedy_params(16)) for e in tiny_oracle.expect(14, LENGTHS, 16)]
        for stream in engine.raw.run(requests, concurrency=8, timeout_s=120):
            assert (stream.finish_reason, len(stream.token_ids)) == ("length", 16)
        engine.settle()


def test_plain_torchrun_on_one_host(
    checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    with serve(checkpoints.fx_r, launcher="torchrun") as engine:
        excused += check_against(engine.raw, tiny_oracle.expect(14, LENGTHS[:4], 16), concurrency=4)
