"""An engine that replays graphs: its flags, its answers, and what it tells about its steps."""

import pytest

from tests.conftest import Checkpoints
from tests.e2e.compare import check_against
from tests.e2e.conftest import TinyOracle
from tests.e2e.harness import serve
from tests.native import INSTRUCTION_SETS
from tests.oracle import Excused

pytestmark = pytest.mark.e2e

FLAGS = ("--num-kv-blocks", "256", "--max-num-seqs", "16", "--max-num-batched-tokens", "64")


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="no compiler when this was installed")
def test_graphs_of_given_sizes(checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]) -> None:
    flags = (*FLAGS, "--cudagraph-mode", "FULL_AND_PIECEWISE", "--cudagraph-capture-sizes", "12,3,3,96")
    with serve(checkpoints.fx_r, flags=flags) as engine:
        said = "--cudagraph-capture-sizes: sorted, each size once; 96 left out, above --max-num-batched-tokens 64"
        assert sum(said in line for line in engine.output.lines) == 1, engine.output.tail()
        excused += check_against(engine.raw, tiny_oracle.expect(6, [3, 9, 20, 40, 5], 24), concurrency=5)
        engine.settle()
        stats = engine.raw.wait_for_stats(
            lambda stats: all(stats.get(f"stage_{rank}_full_graph_steps", 0) > 20 for rank in (0, 1)), 10
        )
        for rank in (0, 1):
            assert 0 < stats[f"stage_{rank}_padding_share"] < 0.6
            assert stats[f"stage_{rank}_full_graph_share"] > 0.5
            assert stats[f"stage_{rank}_tokens"] > 5 * 24
            assert 0 <= stats[f"stage_{rank}_piecewise_graph_share"] <= 1 - stats[f"stage_{rank}_full_graph_share"]
