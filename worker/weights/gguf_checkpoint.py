"""How are tensors read from a GGUF file?"""

import math
import re

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from ipc.errors import ConfigError
from worker.gguf_file import GGUFTensor, read_gguf_file
from worker.model_config import ModelConfig
from worker.weights.checkpoint import Checkpoint, StoredTensor
from worker.weights.mapping import map_bytes

FIELD = "MODEL"

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_CONFIG = "rope_freqs.weight"
"""A tensor that is part of the configuration, not of the weights."""

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_QUERY_OR_KEY = re.compile(r"blk\.\d+\.attn_([qk])\.")


class GGUFCheckpoint(Checkpoint):
    """Every type that the gguf package dequantizes; tensors come out dense, and float32 if they were quantized."""

    def __init__(self, path: str, config: ModelConfig) -> None:
        try:
            file = read_gguf_file(path)
        except OSError as error:
            raise ConfigError(FIELD, f"cannot read {path}: {error.strerror}") from None
        self.path = path
        self.config = config
        self.tensors = {_hf_name(name): tensor for name, tensor in file.tensors.items() if name != _IN_CONFIG}
        for name, tensor in self.tensors.items():
            if tensor.offset + self._size_bytes(name) > file.size_bytes:
                raise ConfigError(FIELD, f"{path} is cut off inside tensor {tensor.name} ({name}); fetch it again")

    def names(self) -> set[str]:
        return set(self.tensors)

    def describe(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def stored(self, name: str) -> StoredTensor:
        kind = GGMLQuantizationType(self.tensors[name].type_id)
        return StoredTensor(type_name=kind.name, size_bytes=self._size_bytes(name))

    def where(self, name: str) -> str:
        return self.path

    def load(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        dense = self._dense(map_bytes(self.path, tensor.offset, self._size_bytes(name)), tensor, name).reshape(tensor.shape)
        match = _QUERY_OR_KEY.match(tensor.name)
        if match:
            return _rotary_halves(dense, self.config.num_heads if match[1] == "q" else self.config.num_kv_heads)
        return dense

    def _dense(self, raw: Tensor, tensor: GGUFTensor, name: str) -> Tensor:
        kind = GGMLQuantizationType(tensor.type_id)
        unquantized = {
            GGMLQuantizationType.F32: torch.float32,
            GGMLQuantizationType.F16: torch.float16,
            GGMLQuantizationType.BF16: torch.bfloat16,
        }
        if kind in unquantized:
            return raw.view(unquantized[kind])
        try:
            return torch.from_numpy(dequantize(raw.numpy().reshape(*tensor.shape[:-1], -1), kind))
        except NotImplementedError:
            raise self._unknown_type(name, kind.name) from None

    def _size_bytes(self, name: str) -> int:
        tensor = self.tensors[name]
        try:
            block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type_id)]
        except (ValueError, KeyError):
            raise self._unknown_type(name, str(tensor.type_id)) from None
        row_size = tensor.shape[-1] if tensor.shape else 1
        if row_size % block_size:
            raise ConfigError(
                FIELD, f"{self.path}: rows of tensor {name} have {row_size} elements, not a multiple of {block_size}"
            )
        return math.prod(tensor.shape) // block_size * block_bytes

    def _unknown_type(self, name: str, kind: str) -> ConfigError:
        return ConfigError(
            FIELD, f"tensor {name} in {self.path} is of ggml type {kind}, which can't be dequantized; use another file"
        )


def _hf_name(name: str) -> str:
    """Unknown names stay as they are, to be reported as left over."""
    layer = _LAYER.fullmatch(name)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name


def _rotary_halves(dense: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's order of a head's rows.

    There the two elements that rotary embedding turns together are neighbours; here they are half a head apart.
    """
    if dense.shape[0] % (2 * num_heads):
        return dense  # of a shape that is refused by whoever compares it with the configuration
    return dense.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
