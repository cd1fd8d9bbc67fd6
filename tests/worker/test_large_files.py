"""Does a checkpoint larger than memory open, tell what it holds, and give single tensors?"""

import math
from pathlib import Path

import pytest
import torch

from tests import sparse
from tests.conftest import Checkpoints
from worker.model_config import read_model_config
from worker.weights import StoredTensor, open_checkpoint

NORM, GATE = "model.norm.weight", "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sparse.large_folder(tmp_path_factory.mktemp("large") / "model")


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_file_larger_than_memory_gives_its_tensors(folder: Path, tmp_path: Path, kind: str) -> None:
    is_folder = kind == "safetensors"
    file = folder / "model.safetensors" if is_folder else sparse.large_gguf(folder, tmp_path / "large.gguf")
    assert file.stat().st_size > sparse.machine_memory_bytes()
    assert file.stat().st_blocks * 512 < 1 << 20, "the test needs a file system with sparse files"
    path = folder if is_folder else file
    config = read_model_config(str(path))
    checkpoint = open_checkpoint(str(path), config)
    assert len(checkpoint.names()) == 9 * config.num_layers + 2
    assert checkpoint.stored(GATE) == StoredTensor(type_name="BF16", size_bytes=2 * 32768 * 4096)
    assert torch.equal(checkpoint.load(NORM), torch.zeros(4096, dtype=torch.bfloat16))


def test_tensors_are_stored_as_they_say(checkpoints: Checkpoints) -> None:
    for path in (checkpoints.fx_r, checkpoints.sharded, checkpoints.fx_r_gguf):
        checkpoint = open_checkpoint(str(path), read_model_config(str(path)))
        for name in checkpoint.names():
            stored = checkpoint.stored(name)
            assert (stored.type_name, stored.size_bytes) == ("F32", 4 * math.prod(checkpoint.describe(name)))
