"""Is a model's description read right, and does a wrong one say what is wrong?"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ipc.errors import ConfigError
from tests import tiny
from tests.conftest import Checkpoints
from worker.gguf_file import read_gguf_file
from worker.model_config import read_model_config
from worker.rope_config import RopeConfig


def write(folder: Path, changes: dict[str, Any], *, name: str = "config.json") -> str:
    """A good configuration with some fields changed; None leaves one out."""
    content = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
    } | changes
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return str(folder)


def refusal(path: str | Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_model_config(str(path))
    assert caught.value.field == "MODEL"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tiny_folder_and_its_gguf_agree(checkpoints: Checkpoints) -> None:
    folder = read_model_config(str(checkpoints.fx_r))
    assert (folder.num_layers, folder.num_heads, folder.num_kv_heads, folder.head_size) == (5, 4, 2, 16)
    assert folder.tie_word_embeddings
    assert folder.dtype == "float32"
    assert folder.eos_token_ids == (tiny.EOS,)
    assert folder.bos_token_id == tiny.BOS
    from_gguf = read_model_config(str(checkpoints.fx_r_gguf))
    for name in ("architecture", "hidden_size", "intermediate_size", "vocab_size", "rope", "tie_word_embeddings",
                 "attention_bias", "mlp_bias", "dtype", "eos_token_ids", "bos_token_id", "num_layers", "num_heads",
                 "num_kv_heads", "head_size", "max_position_embeddings"):  # fmt: skip
        assert getattr(from_gguf, name) == getattr(folder, name), name
    assert from_gguf.rms_norm_eps == pytest.approx(folder.rms_norm_eps, rel=1e-6)


def test_defaults_of_optional_fields(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, {}))
    assert config.num_kv_heads == 4
    assert config.head_size == 16
    assert config.rope == RopeConfig(theta=10000.0)
    assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias)
    assert config.eos_token_ids == ()
    assert config.bos_token_id is None


def test_end_tokens_of_both_files(tmp_path: Path) -> None:
    write(tmp_path, {"eos_token_id": 7, "bos_token_id": 1})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7, -1]}))
    assert read_model_config(str(tmp_path)).eos_token_ids == (7, 9)


def test_rope_in_both_spellings(tmp_path: Path) -> None:
    llama3 = {"factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    expected = RopeConfig(
        theta=5e5, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
    )
    new = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000, **llama3}}
    old = {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **llama3}}
    assert read_model_config(write(tmp_path, new)).rope == expected
    assert read_model_config(write(tmp_path, old)).rope == expected
    oldest = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert read_model_config(write(tmp_path, oldest)).rope == RopeConfig(theta=10000.0, kind="linear", factor=2.0)


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("Mistral", {}, (1023,) * 5),
        ("Mistral", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 5}, (8,) * 5),
        ("Mistral", {"sliding_window": "null"}, (None,) * 5),
        ("Mistral", {"sliding_window": 1024}, (None,) * 5),
        ("Qwen2", {"sliding_window": 8, "max_window_layers": 2}, (None,) * 5),
        ("Qwen2", {"sliding_window": 8, "max_window_layers": 2, "use_sliding_window": True}, (None, None, 8, 8, 8)),
        ("Qwen3", {"sliding_window": 8, "use_sliding_window": True}, (None,) * 5),
        ("Qwen3", {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["full_attention"] * 5}, (None,) * 5),
        ("Gemma2", {"sliding_window": 8}, (8, None, 8, None, 8)),
        ("Gemma3", {"sliding_window": 8}, (8, 8, 8, 8, 8)),
        ("Gemma3", {"sliding_window": 8, "sliding_window_pattern": 2}, (8, None, 8, None, 8)),
        ("Gemma3", {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]},
         (None, 8, None, 8, None)),
    ],
)  # fmt: skip
def test_windows_of_layers(tmp_path: Path, architecture: str, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    path = write(tmp_path, {"architectures": [f"{architecture}ForCausalLM"], "sliding_window": 1023} | changes)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"null"', "null"))
    assert read_model_config(path).windows == windows


def test_what_gemmas_take_for_granted(tmp_path: Path) -> None:
    gemma2 = read_model_config(write(tmp_path, {"architectures": ["Gemma2ForCausalLM"]}))
    assert (gemma2.head_size, gemma2.tie_word_embeddings) == (256, True)
    assert (gemma2.attention_soft_cap, gemma2.logit_soft_cap, gemma2.attention_scale) == (50.0, 30.0, 1 / 16)
    assert gemma2.embedding_scale == 8.0
    gemma3 = read_model_config(write(tmp_path, {"architectures": ["Gemma3ForCausalLM"]}))
    assert (gemma3.attention_soft_cap, gemma3.logit_soft_cap) == (None, None)
    assert (gemma3.rope, gemma3.local_rope) == (RopeConfig(theta=1e6), RopeConfig(theta=1e4))


def test_gemma3_ropes_in_both_spellings(tmp_path: Path) -> None:
    expected = RopeConfig(theta=5e5, kind="linear", factor=8.0), RopeConfig(theta=2e4)
    old = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }}  # fmt: skip
    for changes in (old, new):
        config = read_model_config(write(tmp_path, {"architectures": ["Gemma3ForCausalLM"]} | changes))
        assert (config.rope, config.local_rope) == expected


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("Mistral", {"sliding_window": 0}, ["sliding_window=0", "at least 1"]),
        ("Mistral", {"sliding_window": 8.5}, ["sliding_window=8.5", "int"]),
        ("Mistral", {"layer_types": ["full_attention"] * 5}, ["layer_types", "contradicts sliding_window=4096"]),
        ("Mistral", {"attention_bias": True}, ["attention_bias=True", "only False"]),
        ("Qwen2", {"layer_types": ["sliding_attention"] * 5}, ["layer_types", "there is no window"]),
        ("Qwen3", {"layer_types": ["full_attention"] * 4}, ["layer_types has 4 entries", "5 layers"]),
        ("Qwen3", {"layer_types": ["chunked_attention"] * 5}, ["'chunked_attention'", "sliding_attention"]),
        ("Qwen3", {"layer_types": [7] * 5}, ["layer_types has 7"]),
        ("Qwen2", {"hidden_act": "gelu"}, ["hidden_act='gelu'", "only 'silu'"]),
        ("Gemma2", {"hidden_activation": "silu"}, ["hidden_activation='silu'", "gelu_pytorch_tanh"]),
        ("Gemma2", {"attn_logit_softcapping": -1.0}, ["attention_soft_cap=-1.0", "above 0"]),
        ("Gemma2", {"query_pre_attn_scalar": 0}, ["query_scalar=0.0", "above 0"]),
        ("Gemma3", {"use_bidirectional_attention": True}, ["use_bidirectional_attention=True"]),
        ("Gemma3", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping=50.0", "only None"]),
        ("Gemma3", {"sliding_window_pattern": 0}, ["sliding_window_pattern=0", "at least 1"]),
        ("Gemma3", {"rope_parameters": {"rope_type": "default"}}, ["'rope_type'", "full_attention"]),
        ("Gemma3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["'yarn'", "linear"]),
    ],
)
def test_refused_rules_of_families(
    tmp_path: Path, architecture: str, changes: dict[str, Any], words: list[str]
) -> None:
    text = refusal(write(tmp_path, {"architectures": [f"{architecture}ForCausalLM"]} | changes))
    assert all(word in text for word in words), text
    assert str(tmp_path / "config.json") in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, ["MixtralForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": None, "model_type": "bert"}, ["bert", "LlamaForCausalLM"]),
        ({"hidden_size": None}, ["hidden_size", "no field"]),
        ({"rms_norm_eps": None}, ["rms_norm_eps", "no field"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'", "int"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "int"]),
        ({"num_hidden_layers": 0}, ["num_layers=0", "at least 1"]),
        ({"vocab_size": -5}, ["vocab_size=-5"]),
        ({"vocab_size": 10**12}, ["vocab_size=1000000000000", "at most"]),
        ({"vocab_size": (1 << 24) + 1}, ["vocab_size=16777217", "at most"]),
        ({"num_hidden_layers": 4097}, ["num_layers=4097", "at most 4096"]),
        ({"head_dim": 4098}, ["head_size=4098", "at most 4096"]),
        ({"hidden_size": 1 << 21}, ["hidden_size=2097152", "at most"]),
        ({"intermediate_size": 1 << 25}, ["intermediate_size=", "at most"]),
        ({"max_position_embeddings": 1}, ["max_position_embeddings=1", "at least 2"]),
        ({"hidden_size": 10**4000 + 1}, ["hidden_size=1000", "num_attention_heads"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps=1000", "float"]),
        ({"architectures": ["LlamaForConditionalGeneration2"]}, ["'LlamaForConditionalGeneration2'"]),
        ({"architectures": [["x"]]}, ["architectures=[['x']]", "list of texts"]),
        ({"architectures": [None, "LlamaForCausalLM"]}, ["architectures", "list of texts"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures", "list"]),
        ({"architectures": {"LlamaForCausalLM": 1}}, ["architectures", "list"]),
        ({"hidden_act": {"x": ["y"]}}, ["hidden_act", "silu"]),
        ({"eos_token_id": 512}, ["eos_token_id=512", "vocab_size=512"]),
        ({"eos_token_id": [7, -2]}, ["eos_token_id=-2", "at least 0"]),
        ({"eos_token_id": [[7]]}, ["eos_token_id=[[7]]", "token id"]),
        ({"bos_token_id": 1 << 40}, ["bos_token_id=1099511627776", "vocab_size=512"]),
        ({"rope_scaling": {"rope_type": ["linear"], "factor": 2.0}}, ["rope_type", "str"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps=nan"]),
        ({"hidden_size": 66}, ["hidden_size=66", "num_attention_heads=4"]),
        ({"num_attention_heads": 0}, ["num_attention_heads=0"]),
        ({"num_key_value_heads": 3}, ["num_kv_heads=3", "must divide"]),
        ({"head_dim": 15}, ["head_size=15", "even"]),
        ({"rms_norm_eps": 0.0}, ["rms_norm_eps"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "bool"]),
        ({"torch_dtype": "int8"}, ["dtype", "int8", "bfloat16"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "token id"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["yarn", "not supported", "llama3"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, ["dynamic", "not supported"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope scaling", "factor"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, ["rope factor"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
         ["high_freq_factor", "above"]),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling", "dict"]),
        ({"rope_theta": -1.0}, ["rope_theta"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
    ],
)  # fmt: skip
def test_refused_configurations(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    text = refusal(write(tmp_path, changes))
    for word in [str(tmp_path / "config.json"), *words]:
        assert word in text
    assert len(text) < 600


WRONG_VALUES = (None, True, 0, -1, 2**70, 0.5, float("inf"), "x", "", [], [1], {}, {"a": 1}, [[["deep"]]])


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3"])
def test_a_value_of_any_type_in_any_field_is_refused_or_harmless(tmp_path: Path, architecture: str) -> None:
    names = ("architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta",
             "rope_scaling", "rope_parameters", "tie_word_embeddings", "attention_bias", "mlp_bias", "dtype",
             "torch_dtype", "bos_token_id", "eos_token_id", "hidden_act", "partial_rotary_factor", "model_type",
             "quantization_config", "sliding_window", "layer_types", "use_sliding_window", "max_window_layers",
             "sliding_window_pattern", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
             "hidden_activation", "rope_local_base_freq", "use_bidirectional_attention")  # fmt: skip
    num_refused = 0
    for name in names:
        for value in WRONG_VALUES:
            try:
                read_model_config(write(tmp_path, {"architectures": [f"{architecture}ForCausalLM"], name: value}))
            except ConfigError as error:
                num_refused += 1
                assert "config.json" in str(error) and "\n" not in str(error)
    assert num_refused > 200


def test_end_tokens_outside_the_vocabulary_name_the_second_file(tmp_path: Path) -> None:
    write(tmp_path, {})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 512]}))
    assert f"{tmp_path / 'generation_config.json'}: eos_token_id=512 must be" in refusal(tmp_path)


@pytest.mark.parametrize("depth", [300, 900, 980, 5000])
def test_deep_values_are_refused_or_harmless(tmp_path: Path, depth: int) -> None:
    for name in ("architectures", "model_type", "hidden_act", "hidden_size", "quantization_config"):
        text = (tmp_path / write(tmp_path, {name: "@"}) / "config.json").read_text()
        (tmp_path / "config.json").write_text(text.replace('"@"', "[" * depth + "]" * depth))
        try:
            read_model_config(str(tmp_path))
        except ConfigError as error:
            assert "config.json" in str(error)


@pytest.mark.parametrize("name", ["", "config.json", "generation_config.json", "model.gguf"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    write(tmp_path, {})
    pipe = tmp_path / (name or "pipe")
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    path = tmp_path if name.endswith(".json") else pipe
    assert f"{pipe} is not a regular file" in refusal(path)


def test_a_device_is_refused() -> None:
    assert "/dev/zero is not a regular file" in refusal("/dev/zero")


def test_a_path_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"m\xff")
    write(folder, {})
    link = tmp_path / "link"
    link.symlink_to(folder)
    for path in (folder, link):
        assert "is not valid UTF-8" in refusal(path)


def test_refused_paths(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nothing")
    assert "config.json" in refusal(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"")
    assert f"give the file itself: {tmp_path / 'model.gguf'}" in refusal(tmp_path)
    assert "empty" in refusal(tmp_path / "model.gguf")
    (tmp_path / "model.bin").write_bytes(b"x")
    assert "not a folder" in refusal(tmp_path / "model.bin")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_unreadable_json_names_its_file(tmp_path: Path, name: str, content: bytes) -> None:
    write(tmp_path, {})
    (tmp_path / name).write_bytes(content)
    assert str(tmp_path / name) in refusal(tmp_path)


def test_pickle_only_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {})
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "safetensors" in refusal(path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    read_model_config(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path: Path) -> None:
    path = write(tmp_path, {})
    (tmp_path / "config.json").chmod(0)
    assert "Permission denied" in refusal(path)


def test_no_permission_for_root_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, {})

    def refuse(self: Path, **_: Any) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", refuse)
    assert f"cannot read {tmp_path / 'config.json'}: Permission denied" in refusal(path)


def write_gguf(path: Path, *, architecture: str = "llama", **changes: Any) -> Path:
    """A model of one layer without weights worth the name; a change of None leaves an entry out."""
    entries: dict[str, Any] = {
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in entries.items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
    if "token_embd.weight" not in entries:
        writer.add_tensor("token_embd.weight", np.zeros((32, 64), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_metadata(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        llama__rope__freq_base=5e5,
        llama__rope__scaling__type="linear",
        llama__rope__scaling__factor=4.0,
        tokenizer__ggml__tokens=["a", "bb", "ccc"],
        tokenizer__ggml__scores=[0.5, 1.5],
        tokenizer__ggml__eos_token_id=2,
        tokenizer__ggml__eot_token_id=5,
        **{"output.weight": np.zeros((32, 64), np.float32), "blk.0.attn_q.bias": np.zeros(64, np.float32)},
    )
    config = read_model_config(str(path))
    assert config.rope == RopeConfig(theta=5e5, kind="linear", factor=4.0)
    assert config.eos_token_ids == (2, 5)
    assert config.bos_token_id is None
    assert config.vocab_size == 32
    assert config.num_kv_heads == 4
    assert not config.tie_word_embeddings
    assert config.attention_bias
    assert not config.mlp_bias
    assert config.dtype == "float16"


def test_gguf_rope_factors_are_part_of_the_configuration(tmp_path: Path) -> None:
    factors = np.array([1, 1, 2, 3, 5, 8, 8, 8], np.float32)
    path = write_gguf(tmp_path / "m.gguf", **{"rope_freqs.weight": factors})
    assert read_model_config(str(path)).rope == RopeConfig(
        theta=10000.0, kind="factors", factors=tuple(factors.tolist())
    )
    path = write_gguf(tmp_path / "short.gguf", **{"rope_freqs.weight": factors[:3]})
    assert "rope factors" in refusal(path)


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("qwen2", {}, ["qwen2", "llama"]),
        ("llama", {"llama__block_count": None}, ["llama.block_count"]),
        ("llama", {"llama__attention__head_count": [4, 4]}, ["llama.attention.head_count"]),
        ("llama", {"llama__context_length": "long"}, ["llama.context_length", "int"]),
        ("llama", {"llama__rope__scaling__type": "yarn"}, ["yarn", "linear"]),
        ("llama", {"llama__rope__dimension_count": 8}, ["rope.dimension_count", "16"]),
        ("llama", {"llama__expert_count": 8}, ["experts"]),
        ("llama", {"split__count": 3}, ["split"]),
        ("llama", {"token_embd.weight": None}, ["token_embd.weight"]),
        ("llama", {"token_embd.weight": np.zeros(64, np.float16)}, ["token_embd.weight", "[64]", "two dimensions"]),
        ("llama", {"llama__block_count": 5000}, ["num_layers=5000", "at most 4096"]),
        ("llama", {"tokenizer__ggml__eos_token_id": 32}, ["tokenizer.ggml.eos_token_id=32", "vocab_size=32"]),
        ("llama", {"tokenizer__ggml__bos_token_id": 99}, ["tokenizer.ggml.bos_token_id=99", "vocab_size=32"]),
    ],
)
def test_refused_gguf(tmp_path: Path, architecture: str, changes: dict[str, Any], words: list[str]) -> None:
    text = refusal(write_gguf(tmp_path / "m.gguf", architecture=architecture, **changes))
    for word in [str(tmp_path / "m.gguf"), *words]:
        assert word in text


def test_a_gguf_tensor_without_dimensions_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", **{"token_embd.weight": np.zeros((1, 1), np.float32)})
    name = b"token_embd.weight"
    front, behind = path.read_bytes().split(name)
    path.write_bytes(front + name + b"\0\0\0\0" + behind[4 + 2 * 8 :] + bytes(64))
    text = refusal(path)
    assert "token_embd.weight has shape []" in text


def test_a_gguf_may_say_that_there_is_no_such_token(tmp_path: Path) -> None:
    changes = {"tokenizer__ggml__bos_token_id": (1 << 32) - 1, "tokenizer__ggml__eot_token_id": (1 << 32) - 1}
    config = read_model_config(str(write_gguf(tmp_path / "m.gguf", **changes)))
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


def test_damaged_gguf_is_a_config_error_wherever_it_is_cut(checkpoints: Checkpoints, tmp_path: Path) -> None:
    whole = checkpoints.fx_r_gguf.read_bytes()
    data_start = min(tensor.offset for tensor in read_gguf_file(str(checkpoints.fx_r_gguf)).tensors.values())
    path = tmp_path / "m.gguf"
    for cut in [1, 3, 4, 7, 8, 20, 24, *range(31, data_start, 97)]:
        path.write_bytes(whole[:cut])
        assert str(path) in refusal(path)


def test_noise_in_a_gguf_header_is_a_config_error_or_harmless(checkpoints: Checkpoints, tmp_path: Path) -> None:
    whole = checkpoints.fx_r_gguf.read_bytes()
    draw = np.random.default_rng(0)
    path = tmp_path / "m.gguf"
    num_refused = 0
    for _ in range(150):
        noisy = bytearray(whole[:20_000])
        for at in draw.integers(0, 1500 if draw.random() < 0.5 else len(noisy), 4):
            noisy[at] = draw.choice([0, 0xFF, int(draw.integers(256))])
        path.write_bytes(noisy)
        try:
            read_model_config(str(path))
        except ConfigError:
            num_refused += 1
    assert num_refused > 50


def test_gguf_versions(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    for version, is_read in ((1, False), (2, True), (3, True), (4, False), (3 << 24, False)):
        (tmp_path / "m.gguf").write_bytes(whole[:4] + version.to_bytes(4, "little") + whole[8:])
        if is_read:
            read_model_config(str(tmp_path / "m.gguf"))
        else:
            assert f"version {version}" in refusal(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" + whole[4:])
    assert "not a GGUF file" in refusal(tmp_path / "m.gguf")


def test_reading_needs_no_torch() -> None:
    code = (
        "import sys, worker.model_config, worker.partition; assert not {'torch', 'gguf', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_demo_model(demo_model: Path) -> None:
    config = read_model_config(str(demo_model))
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.vocab_size) == (30, 9, 3, 49152)
    assert config.tie_word_embeddings
    assert config.dtype == "bfloat16"
    assert config.eos_token_ids == (2,)
