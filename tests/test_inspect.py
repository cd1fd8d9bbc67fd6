"""Does `brigade inspect` tell what is in a checkpoint, how it would split, and what would fit; in text and in JSON?"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from scripts import checkpoint_report, inspect_model
from tests import sparse, tiny
from tests.conftest import Checkpoints
from tests.families import FAMILIES, random_family
from worker.partition import split_layers

GB = 10**9


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 GB free, whatever else runs."""
    monkeypatch.setattr(checkpoint_report, "free_memory", lambda device: 20 * GB)


def run(*words: object) -> Result:
    return CliRunner().invoke(inspect_model.command, list(map(str, words)))


def report_of(*words: object) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_what_is_in_a_folder_and_in_a_gguf_file(checkpoints: Checkpoints) -> None:
    folder, file = report_of(checkpoints.fx_r), report_of(checkpoints.fx_r_gguf)
    assert (folder["format"], file["format"]) == ("safetensors", "gguf")
    assert folder["tokenizer"] == {"kind": "BPE", "problem": None}
    assert file["tokenizer"] == {"kind": "BPE (GGUF gpt2, gpt-2)", "problem": None}
    for found in (folder, file):
        assert (found["architecture"], found["num_layers"], found["context_length"]) == ("llama", 5, 1024)
        layer = 64 * (2 * 64 + 2 * 32 + 3 * 160) + 2 * 64
        assert found["num_parameters"] == 5 * layer + 512 * 64 + 64
        assert found["stored"]["types"] == {"F32": {
            "tensors": 47, "parameters": found["num_parameters"], "bytes": 4 * found["num_parameters"]
        }}
        assert found["stored"]["least_layer_bytes"] == found["stored"]["most_layer_bytes"] == 4 * layer
        assert found["stored"]["other_bytes"] == 4 * (512 * 64 + 64)
        assert found["quantization"] is None
        assert found["compute"]["dtype"] == "float32"
        assert (found["compute"]["layer_bytes"], found["compute"]["embedding_bytes"]) == (4 * layer, 4 * 512 * 64)
    assert report_of(checkpoints.sharded)["num_files"] == 3


def test_a_quantized_file_says_so(demo_model: Path) -> None:
    found = report_of(demo_model, "--pp", 2, "--no-measure")
    assert found["quantization"] == "Q4_1"
    assert list(found["stored"]["types"]) == ["Q4_1", "Q8_0", "F32"]
    assert found["compute"]["dtype"] == "bfloat16"
    assert found["file_bytes"] == demo_model.stat().st_size
    assert sum(entry["bytes"] for entry in found["stored"]["types"].values()) < found["file_bytes"]
    assert found["partition"]["layers"] == [15, 15]
    assert "--no-measure" in found["partition"]["reason"]


def test_stages_and_pool(checkpoints: Checkpoints) -> None:
    found = report_of(checkpoints.fx_r, "--pp", 2, "--pipeline-partition", "4,1", "--kv-cache-memory", 1 << 20)
    assert found["partition"]["layers"] == [4, 1]
    assert found["partition"]["reason"] == "by hand"
    of_token = 2 * 2 * 16 * 4  # keys and values, heads, head size, bytes
    assert [stage["kv_bytes_per_token"] for stage in found["stages"]] == [4 * of_token, of_token]
    assert [stage["kv_bytes_per_block"] for stage in found["stages"]] == [64 * of_token, 16 * of_token]
    layer = found["compute"]["layer_bytes"]
    assert [stage["weight_bytes"] for stage in found["stages"]] == [
        4 * layer + found["compute"]["embedding_bytes"], layer + found["compute"]["head_bytes"]
    ]  # fmt: skip
    kv = found["kv"]
    assert (kv["bytes_per_token"], kv["bytes_per_block"]) == (5 * of_token, 80 * of_token)
    assert kv["num_blocks"] == (1 << 20) // (64 * of_token)
    assert (kv["max_model_len"], kv["max_sequences"]) == (1024, 1)
    short = report_of(
        checkpoints.fx_r, "--pp", 2, "--pipeline-partition", "4,1", "--kv-cache-memory", 1 << 20, "--max-model-len", 60,
        "--block-size", 8, "--dtype", "bfloat16",
    )  # fmt: skip
    assert short["kv"]["num_blocks"] == (1 << 20) // (4 * 8 * of_token // 2)
    assert short["kv"]["max_sequences"] == short["kv"]["num_blocks"] // 8


def test_layers_with_windows(tmp_path: Path) -> None:
    """Groups of layers share cache memory, so a block costs what one group has in a stage."""
    gemma = random_family(tmp_path / "gemma", "gemma3", num_layers=6)
    found = report_of(gemma, "--pp", 2, "--kv-cache-memory", 1 << 22, "--max-model-len", 1024)
    assert (found["architecture"], found["windows"]) == ("gemma3", {"16": 4})
    of_layer = 2 * 2 * 48 * 4 * 16
    assert [stage["kv_bytes_per_block"] for stage in found["stages"]] == [of_layer, of_layer]
    assert found["kv"]["num_blocks"] == (1 << 22) // of_layer
    text = run(gemma, "--pp", 2).stdout
    assert "1024 tokens, 4 layers with a window of 16" in text


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_of_every_family(tmp_path: Path, family: str) -> None:
    found = report_of(random_family(tmp_path / family, family), "--pp", 2, "--measure")
    assert found["partition"]["layers"] == [3, 2]
    compute = found["compute"]
    tied = compute["embedding_bytes"] if found["tied_embeddings"] else 0
    assert 5 * compute["layer_bytes"] + compute["embedding_bytes"] + compute["head_bytes"] == (
        4 * found["num_parameters"] + tied
    )


def test_the_pool_is_a_share_of_what_the_weights_leave(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_report, "free_memory", lambda device: GB)
    found = report_of(checkpoints.fx_r, "--pp", 2, "--device", "cpu")
    weights = sum(stage["weight_bytes"] for stage in found["stages"])
    assert found["kv"]["free_bytes"] == GB
    assert found["kv"]["weight_bytes"] == weights
    assert found["kv"]["num_blocks"] == int(0.25 * (GB - weights)) // found["kv"]["bytes_per_block"]


def test_auto_is_measured_where_that_makes_sense(checkpoints: Checkpoints, tmp_path: Path) -> None:
    assert report_of(checkpoints.fx_r, "--pp", 2)["partition"]["reason"].startswith("evenly, as the model is too small")
    assert report_of(checkpoints.fx_r)["partition"]["reason"] == "one stage has all layers"
    model = tiny.random_llama(tmp_path / "model", hidden_size=256, intermediate_size=512, vocab_size=24_000)
    found = report_of(model, "--pp", 2)
    partition = found["partition"]
    assert (partition["asked"], partition["reason"]) == ("auto", "measured")
    assert sum(partition["layers"]) == 5
    for kind in ("decode", "prefill"):
        assert set(partition["costs"][kind]) == {"layer", "embedding", "head", "sampler", "engine", "waiting"}
        assert min(partition["costs"][kind]["waiting"]) == 0
        assert len(partition["costs"][kind]["waiting"]) == 2
    text = run(model, "--pp", 2).stdout
    assert "(measured)" in text
    assert "of a decode step" in text


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_checkpoint_larger_than_memory(tmp_path: Path, kind: str) -> None:
    path = folder = sparse.large_folder(tmp_path / "large")
    if kind == "gguf":
        path = sparse.large_gguf(folder, tmp_path / "large.gguf")
    found = report_of(path, "--pp", 4)
    assert found["file_bytes"] > sparse.machine_memory_bytes()
    assert found["stored"]["types"]["BF16"]["bytes"] == 2 * found["num_parameters"]
    layers = split_layers(found["num_layers"], 4, "even")
    assert found["partition"]["layers"] == [len(stage) for stage in layers]
    assert "--measure does it" in found["partition"]["reason"]
    assert "GB are lacking" in found["kv"]["problem"]
    assert found["kv"]["num_blocks"] == 0
    assert found["kv"]["bytes_per_token"] == found["num_layers"] * 2 * 8 * 128 * 2
    assert "GB are lacking" in run(path, "--pp", 4).stdout


def test_the_text_names_everything(checkpoints: Checkpoints) -> None:
    lines = run(checkpoints.fx_r, "--pp", 2).stdout.splitlines()
    assert lines[0].startswith(f"{checkpoints.fx_r.name}: safetensors, ")
    text = "\n".join(lines)
    for part in (
        "llama, 5 layers, 248.5 thousand parameters", "4 heads of 16 (2 for keys and values), vocabulary 512, head tied",
        "1024 tokens", "BPE", "F32 994.0 kB (47 tensors)", "float32 on ", "2 stages: 3,2 (evenly", "stage 1       layers 3 to 4",
        "1280 bytes per token, 20480 per block of 16 tokens", "contexts of up to 1024 tokens, 256 such sequences at once",
    ):  # fmt: skip
        assert part in text, part


def test_a_tokenizer_that_cannot_be_used_is_told_and_the_rest_shown(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoints.fx_r, folder)
    (folder / "tokenizer.json").unlink()
    assert report_of(folder)["tokenizer"] == {"kind": None, "problem": None}
    assert "none, token ids only" in run(folder).stdout
    (folder / "tokenizer.model").write_bytes(b"x")
    assert "tokenizer.model only" in report_of(folder)["tokenizer"]["problem"]
    assert "not usable: " in run(folder).stdout


def damaged(checkpoints: Checkpoints, folder: Path, how: str) -> Path:
    target = folder / "damaged"
    if how == "cut":
        target = folder / "cut.gguf"
        target.write_bytes(checkpoints.fx_r_gguf.read_bytes()[:100_000])
        return target
    shutil.copytree(checkpoints.fx_r, target)
    if how == "no weights":
        (target / "model.safetensors").unlink()
    elif how == "other model":
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 6}))
    else:
        (target / "config.json").unlink()
    return target


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("cut", "is damaged or cut off"),
        ("no weights", "has no weights"),
        ("other model", "lacks tensors model.layers.5."),
        ("no config", "has no config.json"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_code_1(
    checkpoints: Checkpoints, tmp_path: Path, how: str, why: str
) -> None:
    result = run(damaged(checkpoints, tmp_path, how))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("brigade: MODEL: ")
    assert why in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["--pp", "6"], 1, "every rank needs at least one layer"),
        (["--pp", "2", "--pipeline-partition", "4,2"], 1, "adds up to 6 layers"),
        (["--block-size", "24"], 1, "must be a power of two"),
        (["--max-model-len", "5000"], 1, "above the 1024"),
        (["--max-model-len", "one"], 2, "is not a valid integer"),
        (["--nonsense"], 2, "No such option"),
        (["--kv-cache-memory", "much"], 2, "is not a number of bytes"),
    ],
)
def test_options_that_make_no_sense(checkpoints: Checkpoints, words: Sequence[str], code: int, why: str) -> None:
    result = run(checkpoints.fx_r, *words)
    assert (result.exit_code, result.stdout) == (code, "")
    assert why in result.stderr


def test_a_pool_that_holds_no_request_is_told(checkpoints: Checkpoints) -> None:
    found = report_of(checkpoints.fx_r, "--kv-cache-memory", 1000, "--max-model-len", 100)
    assert "one request of 100 tokens needs 7 KV blocks" in found["kv"]["problem"]


def test_missing_paths_and_help_are_told_without_torch(tmp_path: Path) -> None:
    result = run(tmp_path / "nothing")
    assert result.exit_code == 1
    assert "does not exist" in result.stderr
    help_text = run("--help").stdout
    assert all(word in help_text for word in ("--pp", "--json", "--measure", "larger than memory"))
