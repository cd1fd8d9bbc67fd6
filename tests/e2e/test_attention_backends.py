"""Does a backend that a package brings serve a whole engine, and do ours give the same tokens there?"""

from pathlib import Path

import pytest

from tests.conftest import Checkpoints, Golden
from tests.e2e.compare import check_against, stored
from tests.e2e.conftest import TinyOracle
from tests.e2e.harness import ROOT, serve
from tests.native import INSTRUCTION_SETS
from tests.oracle import Excused
from tests.plugins import write_package

pytestmark = pytest.mark.e2e

BACKENDS = [
    "torch",
    pytest.param("cpu", marks=pytest.mark.skipif(not INSTRUCTION_SETS, reason="no compiler when this was installed")),
]

PLUGIN = """
from worker.attention import torch_backend

class Foreign(torch_backend.TorchBackend):
    name = "foreign"
"""


def test_a_backend_of_another_package_serves(
    tmp_path: Path, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    write_package(tmp_path, "brigade_foreign", PLUGIN, "foreign = brigade_foreign:Foreign")
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    flags = ["--attention-backend", "foreign", "--num-kv-blocks", "64"]
    with serve(checkpoints.fx_r, flags=flags, env=environment) as engine:
        excused += check_against(engine.raw, tiny_oracle.expect(5, [5, 16, 40], 16), concurrency=3)
        told = [line for line in engine.output.lines if "attention backend foreign (asked for)" in line]
        assert len(told) == 2, "one line of each rank"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", BACKENDS)
def test_number_2_the_demo_model_on_each_backend(
    backend: str, demo_model: Path, golden: Golden, excused: list[Excused]
) -> None:
    flags = [
        "--dtype", "float32", "--max-model-len", "2048", "--num-kv-blocks", "800", "--attention-backend", backend,
        "--max-num-seqs", "16", "--health-timeout", "300",
    ]  # fmt: skip
    with serve(demo_model, flags=flags) as engine:
        expected = [stored(entry) for entry in golden.prompts]
        excused += check_against(engine.raw, expected, concurrency=16, timeout_s=1500)
