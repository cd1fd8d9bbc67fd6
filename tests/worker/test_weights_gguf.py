"""Are GGUF tensors dequantized, named and ordered as a Llama needs them?"""

from pathlib import Path
from time import process_time
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ipc.errors import ConfigError
from tests.conftest import Checkpoints
from tests.worker.stages import Pipeline, load_stage
from worker.gguf_file import read_gguf_file
from worker.model_config import read_model_config
from worker.weights import Checkpoint, open_checkpoint

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, VOCAB = 256, 4, 2, 64, 64
SHAPES = {
    "token_embd": (VOCAB, HIDDEN),
    "output_norm": (HIDDEN,),
    "blk.0.attn_norm": (HIDDEN,),
    "blk.0.attn_q": (HEADS * HEAD_SIZE, HIDDEN),
    "blk.0.attn_k": (KV_HEADS * HEAD_SIZE, HIDDEN),
    "blk.0.attn_v": (KV_HEADS * HEAD_SIZE, HIDDEN),
    "blk.0.attn_output": (HIDDEN, HEADS * HEAD_SIZE),
    "blk.0.ffn_norm": (HIDDEN,),
    "blk.0.ffn_gate": (256, HIDDEN),
    "blk.0.ffn_up": (256, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, 256),
}
QUANTIZED = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.BF16, Kind.F16]
BLOCKS_ONLY = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS]
"""Types that gguf can dequantize and not make."""


def write_model(path: Path, kind: Kind, *, extra: dict[str, Any] | None = None, biases: bool = False) -> dict[str, Any]:
    """A random model with matrices of this type; its tensors dequantized, by their GGUF names."""
    draw = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(256)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    dense = {}
    shapes = dict(SHAPES)
    if biases:
        shapes |= {
            f"blk.0.{name}.bias": SHAPES[f"blk.0.{name}"][:1] for name in ("attn_q", "attn_k", "attn_v", "attn_output")
        }
    for stem, shape in shapes.items():
        name = stem if stem.endswith(".bias") else f"{stem}.weight"
        values = draw.standard_normal(shape, dtype=np.float32) * np.float32(0.1)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        elif kind in BLOCKS_ONLY:
            block, size = gguf.GGML_QUANT_SIZES[kind]
            raw = draw.integers(0, 60, (shape[0], shape[1] // block * size), dtype=np.uint8)
            writer.add_tensor(name, raw, raw_dtype=kind)
            values = gguf.dequantize(raw, kind)
        else:
            raw = gguf.quantize(values, kind)
            writer.add_tensor(name, raw, raw_dtype=kind)
            values = gguf.dequantize(raw, kind)
        dense[name] = values.reshape(shape)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dense


def open_at(path: Path) -> Checkpoint:
    return open_checkpoint(str(path), read_model_config(str(path)))


def halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Row 2 i of a head goes to i, row 2 i + 1 to i + D / 2, told row by row."""
    out = np.empty_like(values)
    for head in range(num_heads):
        for i in range(HEAD_SIZE // 2):
            start = head * HEAD_SIZE
            out[start + i] = values[start + 2 * i]
            out[start + i + HEAD_SIZE // 2] = values[start + 2 * i + 1]
    return out


@pytest.mark.parametrize("kind", QUANTIZED + BLOCKS_ONLY)
def test_every_type_as_gguf_dequantizes_it(tmp_path: Path, kind: Kind) -> None:
    dense = write_model(tmp_path / "m.gguf", kind)
    checkpoint = open_at(tmp_path / "m.gguf")
    assert len(checkpoint.names()) == len(dense)
    layer = "model.layers.0."
    expected = {
        "model.embed_tokens.weight": dense["token_embd.weight"],
        "model.norm.weight": dense["output_norm.weight"],
        layer + "self_attn.q_proj.weight": halves(dense["blk.0.attn_q.weight"], HEADS),
        layer + "self_attn.k_proj.weight": halves(dense["blk.0.attn_k.weight"], KV_HEADS),
        layer + "self_attn.v_proj.weight": dense["blk.0.attn_v.weight"],
        layer + "self_attn.o_proj.weight": dense["blk.0.attn_output.weight"],
        layer + "mlp.gate_proj.weight": dense["blk.0.ffn_gate.weight"],
        layer + "mlp.up_proj.weight": dense["blk.0.ffn_up.weight"],
        layer + "mlp.down_proj.weight": dense["blk.0.ffn_down.weight"],
        layer + "input_layernorm.weight": dense["blk.0.attn_norm.weight"],
        layer + "post_attention_layernorm.weight": dense["blk.0.ffn_norm.weight"],
    }
    assert checkpoint.names() == set(expected)
    for name, values in expected.items():
        assert checkpoint.describe(name) == values.shape
        loaded = checkpoint.load(name).float()
        assert torch.equal(loaded.nan_to_num(), torch.from_numpy(values).nan_to_num()), name


def test_biases_are_reordered_too(tmp_path: Path) -> None:
    dense = write_model(tmp_path / "m.gguf", Kind.F16, biases=True)
    assert read_model_config(str(tmp_path / "m.gguf")).attention_bias
    checkpoint = open_at(tmp_path / "m.gguf")
    for letter, num_heads in (("q", HEADS), ("k", KV_HEADS)):
        loaded = checkpoint.load(f"model.layers.0.self_attn.{letter}_proj.bias")
        assert torch.equal(loaded, torch.from_numpy(halves(dense[f"blk.0.attn_{letter}.bias"], num_heads)))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_same_logits_from_folder_and_gguf(checkpoints: Checkpoints, num_stages: int) -> None:
    tokens = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    folder = Pipeline(checkpoints.fx_r, num_stages).step({0: tokens})[0]
    file = Pipeline(checkpoints.fx_r_gguf, num_stages).step({0: tokens})[0]
    assert (folder - file).abs().max() < 1e-4  # the file's rms_norm_eps has float32's precision


def test_rope_factors_do_what_llama3_scaling_does(tmp_path: Path) -> None:
    """Llama 3 files carry the scaling as one divisor a frequency."""
    scaling = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    config = LlamaConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, vocab_size=VOCAB,
        num_hidden_layers=1, intermediate_size=256, rms_norm_eps=1e-5, tie_word_embeddings=True,
        max_position_embeddings=128, rope_parameters=scaling, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    plain = 1.0 / (10000.0 ** (np.arange(0, HEAD_SIZE, 2, dtype=np.float32) / HEAD_SIZE))
    factors = plain / model.model.rotary_emb.inv_freq.numpy()
    assert factors.max() > 7
    write_model(tmp_path / "m.gguf", Kind.F16, extra={"rope_freqs.weight": factors.astype(np.float32)})
    checkpoint = open_at(tmp_path / "m.gguf")
    state = {name: checkpoint.load(name).float() for name in checkpoint.names()}
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    tokens = torch.randint(0, VOCAB, (100,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected: Tensor = model(tokens[None]).logits[0]
    assert (Pipeline(tmp_path / "m.gguf").step({0: tokens.tolist()})[0] - expected).abs().max() < 1e-4


def test_unknown_type_names_tensor_and_type(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", Kind.Q8_0, extra={"blk.0.extra.weight": np.zeros((4, 32), np.int32)})
    checkpoint = open_at(tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match="blk.0.extra.weight in .*m.gguf is of ggml type I32"):
        checkpoint.load("blk.0.extra.weight")
    with pytest.raises(ConfigError, match="holds tensor blk.0.extra.weight, for which"):
        Pipeline(tmp_path / "m.gguf")


def test_type_from_the_future(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, Kind.Q8_0)
    content = path.read_bytes()
    name = b"blk.0.attn_v.weight"
    at = content.index(name) + len(name) + 4 + 16
    assert int.from_bytes(content[at : at + 4], "little") == Kind.Q8_0
    path.write_bytes(content[:at] + (999).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(ConfigError, match="self_attn.v_proj.weight in .*m.gguf is of ggml type 999"):
        open_at(path)


def test_cut_off_data_names_file_and_tensor(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, Kind.Q8_0)
    content = path.read_bytes()
    for missing in (1, 100, 50_000):
        path.write_bytes(content[:-missing])
        with pytest.raises(ConfigError, match=r"m.gguf is (cut off inside tensor|damaged)"):
            open_at(path)


def test_shapes_that_do_not_fit_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, Kind.Q8_0)
    content = bytearray(path.read_bytes())
    key = b"llama.attention.head_count_kv"
    at = content.index(key) + len(key) + 4
    content[at] = 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"k_proj.weight in .* has shape \[128, 256\].*asks for \[64, 256\]"):
        Pipeline(path)


def test_only_own_bytes_are_touched(tmp_path: Path) -> None:
    """The data of other tensors may be garbage; they are mapped, not read."""
    path = tmp_path / "m.gguf"
    dense = write_model(path, Kind.F16)
    tensor = read_gguf_file(str(path)).tensors["blk.0.ffn_up.weight"]
    content = bytearray(path.read_bytes())
    kept = content[tensor.offset : tensor.offset + 2 * 256 * 256]
    content[min(t.offset for t in read_gguf_file(str(path)).tensors.values()) :] = b"\xff" * (
        len(content) - min(t.offset for t in read_gguf_file(str(path)).tensors.values())
    )
    content[tensor.offset : tensor.offset + len(kept)] = kept
    path.write_bytes(content)
    loaded = open_at(path).load("model.layers.0.mlp.up_proj.weight")
    assert torch.equal(loaded.float(), torch.from_numpy(dense["blk.0.ffn_up.weight"]))


@pytest.mark.alone
def test_demo_model_loads_half_of_itself_fast(demo_model: Path) -> None:
    """15 layers and the embedding, in bfloat16: processor time, since the machine may be busy otherwise."""
    start = process_time()
    load_stage(demo_model, range(0, 15), is_first=True, is_last=False, dtype=torch.bfloat16)
    assert process_time() - start < 2
