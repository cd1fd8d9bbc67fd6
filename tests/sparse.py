"""Checkpoints larger than memory that take a few kilobytes of disk: sparse files, whole heads, no data."""

import json
from pathlib import Path

import gguf
import numpy as np

from tests import tiny


def machine_memory_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        return 1024 * int(meminfo.readline().split()[1])


def shapes_of(config: dict[str, int]) -> dict[str, list[int]]:
    """A Llama's tensors by their Hugging Face names; its head is tied."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    kv_width = width // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], width], "model.norm.weight": [width]}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": [width, width],
            f"{prefix}self_attn.k_proj.weight": [kv_width, width],
            f"{prefix}self_attn.v_proj.weight": [kv_width, width],
            f"{prefix}self_attn.o_proj.weight": [width, width],
            f"{prefix}mlp.gate_proj.weight": [inner, width],
            f"{prefix}mlp.up_proj.weight": [inner, width],
            f"{prefix}mlp.down_proj.weight": [width, inner],
            f"{prefix}input_layernorm.weight": [width],
            f"{prefix}post_attention_layernorm.weight": [width],
        }
    return shapes


def large_folder(folder: Path) -> Path:
    """A Llama in bfloat16 whose single file exceeds this machine's memory; layers of 0.9 GB."""
    width, inner = 4096, 32768
    num_layers = machine_memory_bytes() // (2 * width * (2 * width + width // 2 + 3 * inner)) + 2
    tiny.random_llama(folder, config={
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": num_layers, "num_attention_heads": 32,
        "num_key_value_heads": 8, "torch_dtype": "bfloat16",
    })  # fmt: skip
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "model.safetensors").unlink()
    write_sparse(folder / "model.safetensors", shapes_of(config))
    return folder


def write_sparse(file: Path, shapes: dict[str, list[int]]) -> None:
    """A safetensors file of zeros in bfloat16 that were never written."""
    head: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        head[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as sink:
        sink.write(len(text).to_bytes(8, "little") + text)
        sink.truncate(8 + len(text) + end)


def large_gguf(folder: Path, file: Path) -> Path:
    """The model of ``large_folder`` as a GGUF file in bfloat16."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(file, "llama")
    tiny.describe(writer, folder, "gpt2")
    size = 0
    for name, shape in shapes_of(config).items():
        num_bytes = 2 * int(np.prod(shape))
        writer.add_tensor_info(
            tiny.gguf_name(name), shape, np.dtype(np.uint16), num_bytes, raw_dtype=gguf.GGMLQuantizationType.BF16
        )
        size += -(-num_bytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with file.open("r+b") as sink:
        sink.truncate(-(-file.stat().st_size // 32) * 32 + size)
    return file
