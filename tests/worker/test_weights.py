"""Are tensors read as the checkpoint has them, each stage its own only, and does a wrong file name itself?"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch_file

from ipc.errors import ConfigError
from tests import tiny
from tests.conftest import Checkpoints
from tests.worker.stages import empty_stage, load_stage
from worker.model_config import read_model_config
from worker.models import StageModel, load_weights
from worker.weights import Checkpoint, open_checkpoint

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
K_PROJ = "model.layers.2.self_attn.k_proj.weight"


def open_at(path: Path) -> Checkpoint:
    return open_checkpoint(str(path), read_model_config(str(path)))


def load_all(path: Path) -> StageModel:
    layers = range(read_model_config(str(path)).num_layers)
    return load_stage(path, layers, is_first=True, is_last=True, dtype=torch.float32)


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_all(path)
    assert caught.value.field == "MODEL"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def copy_of(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def rewrite(folder: Path, **changes: np.ndarray | None) -> None:
    """Change tensors of a checkpoint with one file; None takes one away."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items() if tensor is not None}
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name.replace("__", ".")]
    (folder / "model.safetensors").unlink()  # it may be mapped
    save_file(tensors, folder / "model.safetensors")


def test_every_tensor_as_on_disk(checkpoints: Checkpoints) -> None:
    expected = load_file(checkpoints.fx_r / "model.safetensors")
    for path in (checkpoints.fx_r, checkpoints.sharded, checkpoints.fx_r_gguf):
        checkpoint = open_at(path)
        assert checkpoint.names() == set(expected)
        for name, tensor in expected.items():
            assert checkpoint.describe(name) == tensor.shape
            assert torch.equal(checkpoint.load(name), torch.from_numpy(tensor)), name


def test_types_of_tensors(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copy_of(checkpoints.fx_r, tmp_path / "m")
    values = torch.randn(512, 64)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        save_torch_file({EMBEDDING: values.to(dtype)}, folder / "model.safetensors")
        assert torch.equal(open_at(folder).load(EMBEDDING), values.to(dtype))
    save_torch_file({EMBEDDING: values.to(torch.int8)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{EMBEDDING}.*I8.*BF16"):
        open_at(folder).load(EMBEDDING)


def test_a_stage_needs_the_files_of_its_own_tensors_only(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copy_of(checkpoints.sharded, tmp_path / "m")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors = {
        name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }
    of_first = {name for name in tensors if name == EMBEDDING or ".layers.0." in name or ".layers.1." in name}
    for file in folder.glob("*.safetensors"):
        file.unlink()
    save_file({name: tensors[name] for name in of_first}, folder / "model-00001-of-00003.safetensors")
    index["weight_map"] = {name: f"model-0000{1 if name in of_first else 2}-of-00003.safetensors" for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    load_stage(folder, range(0, 2), is_first=True, is_last=False, dtype=torch.float32)
    with pytest.raises(ConfigError, match="model-00002-of-00003.safetensors is missing"):
        load_stage(folder, range(2, 5), is_first=False, is_last=True, dtype=torch.float32)


def test_c1_redundant_head_of_a_tied_model_is_ignored(checkpoints: Checkpoints) -> None:
    stage, plain = load_all(checkpoints.garbage_head), load_all(checkpoints.fx_r)
    hidden = torch.randn(3, 64)
    assert torch.equal(stage.logits(hidden), plain.logits(hidden))
    last = load_stage(checkpoints.garbage_head, range(4, 5), is_first=False, is_last=True, dtype=torch.float32)
    assert torch.equal(last.logits(hidden), plain.logits(hidden))


def test_tied_matrix_under_the_heads_name(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copy_of(checkpoints.fx_r, tmp_path / "m")
    matrix = load_file(folder / "model.safetensors")[EMBEDDING]
    rewrite(folder, lm_head__weight=matrix, model__embed_tokens__weight=None)
    hidden = torch.randn(3, 64)
    assert torch.equal(load_all(folder).logits(hidden), load_all(checkpoints.fx_r).logits(hidden))


def test_progress_and_bytes(checkpoints: Checkpoints) -> None:
    stage = empty_stage(checkpoints.fx_r, range(0, 2), is_first=True, is_last=False, dtype=torch.bfloat16)
    seen: list[tuple[int, int]] = []
    size = load_weights(stage, open_at(checkpoints.fx_r), lambda done, total: seen.append((done, total)))
    assert seen == [(i, 19) for i in range(1, 20)]
    matrices = 512 * 64 + 2 * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 160)
    assert size == 2 * matrices + 4 * (2 * 2 * 64)


def test_missing_tensor_is_named(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copy_of(checkpoints.fx_r, tmp_path / "m")
    rewrite(folder, **{K_PROJ.replace(".", "__"): None})
    text = refusal(folder)
    assert K_PROJ in text
    assert str(folder) in text
    assert "lacks" in text
    load_stage(folder, range(0, 2), is_first=True, is_last=False, dtype=torch.float32)


def test_many_missing_tensors_are_counted(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copy_of(checkpoints.fx_r, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 7}
    (folder / "config.json").write_text(json.dumps(config))
    text = refusal(folder)
    assert "model.layers.5." in text
    assert "13 more" in text


def test_wrong_shape_names_both(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copy_of(checkpoints.fx_r, tmp_path / "m")
    rewrite(folder, **{K_PROJ.replace(".", "__"): np.zeros((64, 64), np.float32)})
    text = refusal(folder)
    assert f"{K_PROJ} in {folder / 'model.safetensors'} has shape [64, 64]" in text
    assert "[32, 64]" in text


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.self_attn.q_proj.bias",
        "model.layers.2.mlp.router.weight",
        "model.layers.5.mlp.up_proj.weight",
        "vision.weight",
    ],
)
def test_left_over_tensor_is_named(checkpoints: Checkpoints, tmp_path: Path, name: str) -> None:
    folder = copy_of(checkpoints.fx_r, tmp_path / "m")
    rewrite(folder, **{name.replace(".", "__"): np.zeros(64, np.float32)})
    text = refusal(folder)
    assert f"holds tensor {name}, " in text
    assert "no use" in text
    if name.startswith("model.layers.2."):
        load_stage(folder, range(3, 5), is_first=False, is_last=True, dtype=torch.float32)


def test_untied_model_needs_its_head(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copy_of(checkpoints.fx_r, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    assert HEAD in refusal(folder)


def test_old_frequency_tables_are_ignored(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copy_of(checkpoints.fx_r, tmp_path / "m")
    rewrite(folder, model__layers__0__self_attn__rotary_emb__inv_freq=np.zeros(8, np.float32))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    assert name in tensors
    load_all(folder)


@pytest.mark.parametrize("size", [0, 5, 8, 100, 5000, -1, -100_000])
def test_cut_off_safetensors_names_its_file(checkpoints: Checkpoints, tmp_path: Path, size: int) -> None:
    folder = copy_of(checkpoints.fx_r, tmp_path / "m")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert str(file) in refusal(folder)


def test_noise_in_safetensors_names_its_file(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copy_of(checkpoints.fx_r, tmp_path / "m")
    file = folder / "model.safetensors"
    file.write_bytes(b"\xff" * 4096)
    assert str(file) in refusal(folder)


def test_folders_without_their_files(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copy_of(checkpoints.fx_r, tmp_path / "none")
    (folder / "model.safetensors").unlink()
    assert "no weights" in refusal(folder)
    folder = copy_of(checkpoints.sharded, tmp_path / "no-index")
    (folder / "model.safetensors.index.json").unlink()
    assert "3 safetensors files and no model.safetensors.index.json" in refusal(folder)
    folder = copy_of(checkpoints.fx_r, tmp_path / "other-name")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    load_all(folder)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{", "not readable JSON"),
        ("[]", "no 'weight_map'"),
        ('{"weight_map": {}}', "no 'weight_map'"),
        (json.dumps({"weight_map": {EMBEDDING: "../m.safetensors"}}), "plain file name"),
        (json.dumps({"weight_map": {EMBEDDING: "/etc/passwd"}}), "plain file name"),
        (json.dumps({"weight_map": {EMBEDDING: 3}}), "plain file name"),
    ],
)
def test_broken_index(checkpoints: Checkpoints, tmp_path: Path, index: str, words: str) -> None:
    folder = copy_of(checkpoints.sharded, tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(index)
    text = refusal(folder)
    assert words in text
    assert "model.safetensors.index.json" in text


def test_index_that_lies(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = copy_of(checkpoints.sharded, tmp_path / "m")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    index["weight_map"][EMBEDDING] = files[1 - files.index(index["weight_map"][EMBEDDING])]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    text = refusal(folder)
    assert f"has no tensor {EMBEDDING}" in text
    index["weight_map"][EMBEDDING] = "gone.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"{folder / 'gone.safetensors'} is missing" in refusal(folder)


def test_tiny_files_are_what_the_tests_think(checkpoints: Checkpoints) -> None:
    assert HEAD not in load_file(checkpoints.fx_r / "model.safetensors")
    assert HEAD in load_file(checkpoints.garbage_head / "model.safetensors")
    assert tiny.EOS == 1
