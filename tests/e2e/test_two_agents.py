"""Does the pipeline work over two agents, which counts as two machines? (C14)"""

import os

import pytest

from tests.conftest import Checkpoints
from tests.e2e.compare import check_against, greedy_params
from tests.e2e.conftest import TinyOracle
from tests.e2e.harness import serve
from tests.oracle import Excused

pytestmark = pytest.mark.e2e

LENGTHS = [3 + 5 * i for i in range(50)]


def test_c14_two_agents_give_the_same_ids(
    checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    with serve(checkpoints.fx_r, launcher="torchrun", num_nodes=2) as engine:
        assert len(engine.tree().agents) == 2
        # Each agent believes that it has the whole machine; with all cores each, the two ranks would fight.
        share = max(1, len(os.sched_getaffinity(0)) // 2)
        assert sum(f", {share} thread" in line for line in engine.output.lines) == 2
        excused += check_against(engine.raw, tiny_oracle.expect(14, LENGTHS, 16), concurrency=8)
        engine.settle()


def test_c14_two_agents_in_bfloat16(checkpoints: Checkpoints, tiny_oracle: TinyOracle) -> None:
    with serve(checkpoints.fx_r, launcher="torchrun", num_nodes=2, flags=["--dtype", "bfloat16"]) as engine:
        requests = [(e.prompt, greedy_params(16)) for e in tiny_oracle.expect(14, LENGTHS, 16)]
        for stream in engine.raw.run(requests, concurrency=8, timeout_s=120):
            assert (stream.finish_reason, len(stream.token_ids)) == ("length", 16)
        engine.settle()


def test_plain_torchrun_on_one_host(
    checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    with serve(checkpoints.fx_r, launcher="torchrun") as engine:
        excused += check_against(engine.raw, tiny_oracle.expect(14, LENGTHS[:4], 16), concurrency=4)
