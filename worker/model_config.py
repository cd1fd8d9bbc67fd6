"""What model is this? Reads a checkpoint's own description, without torch."""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

from ipc.errors import ConfigError
from worker.config_fields import FIELD, Fields, check_regular, errors_name, known_tokens, read_json, refused, shown
from worker.families import MOST_LAYERS, family_of
from worker.gguf_file import GGUFFile, read_gguf_file
from worker.rope_config import RopeConfig

GGUF_ARCHITECTURES = {"llama": "llama"}
"""``general.architecture`` of a GGUF file to the families of worker/models."""

BOUNDS = {
    "num_layers": (1, MOST_LAYERS),
    "hidden_size": (1, 1 << 20),
    "intermediate_size": (1, 1 << 24),
    "num_heads": (1, 1 << 16),
    "num_kv_heads": (1, 1 << 16),
    "head_size": (1, 1 << 12),
    "vocab_size": (1, 1 << 24),
    "max_position_embeddings": (2, (1 << 31) - 1),
}
"""Least and most of each size. No model is larger; a damaged description may well be. A context holds a prompt's token
and an answer's."""

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and rules of a decoder-only model; nothing in it depends on how the model is run."""

    architecture: str
    """Key of the table of model classes, such as ``llama``."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    """The head uses the embedding's matrix."""

    attention_bias: bool
    """q, k, v and o projections have biases."""

    mlp_bias: bool
    dtype: str
    """Of the checkpoint; ``bfloat16`` for one that is quantized."""

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer, without repetition."""

    layer_windows: tuple[int | None, ...] = ()
    """Of each layer: tokens that it looks back on, the current one included, or None for all. Empty: None in every layer."""

    attention_soft_cap: float | None = None
    """Bounds the scores of attention: c * tanh(score / c)."""

    logit_soft_cap: float | None = None
    """Bounds logits in the same way."""

    query_scalar: float | None = None
    """Scores are divided by its square root; None: by that of the head size."""

    local_rope: RopeConfig | None = None
    """Of layers with a window; None: the same as of the others."""

    is_embedding_scaled: bool = False
    """Embeddings are multiplied by the square root of the width."""

    @property
    def attention_scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        return float((self.query_scalar or self.head_size) ** -0.5)

    @property
    def embedding_scale(self) -> float | None:
        return float(self.hidden_size**0.5) if self.is_embedding_scaled else None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """By global layer number."""
        return self.layer_windows or (None,) * self.num_layers

    def __post_init__(self) -> None:
        for name, (least, most) in BOUNDS.items():
            if not least <= getattr(self, name) <= most:
                raise refused(name, getattr(self, name), f"must be at least {least} and at most {most}")
        if self.num_heads % self.num_kv_heads:
            raise refused("num_kv_heads", self.num_kv_heads, f"must divide num_heads={self.num_heads}")
        if self.head_size % 2:
            raise refused("head_size", self.head_size, "must be even")
        if not (math.isfinite(self.rms_norm_eps) and self.rms_norm_eps > 0):
            raise refused("rms_norm_eps", self.rms_norm_eps, "must be above 0")
        for name in ("attention_soft_cap", "logit_soft_cap", "query_scalar"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise refused(name, value, "must be above 0")
        if self.rope.factors and len(self.rope.factors) != self.head_size // 2:
            raise refused("rope factors", len(self.rope.factors), f"must be {self.head_size // 2} numbers")
        if self.layer_windows and len(self.layer_windows) != self.num_layers:
            raise refused("layer_windows", len(self.layer_windows), f"must be one for each of {self.num_layers} layers")
        if any(window is not None and window < 1 for window in self.layer_windows):
            raise refused("layer_windows", self.layer_windows, "must be at least 1")
        if self.dtype not in DTYPES:
            raise refused("dtype", self.dtype, f"must be one of {', '.join(DTYPES)}")


def read_model_config(path: str) -> ModelConfig:
    """The description in a folder with ``config.json`` or in a ``.gguf`` file. Weights are not read.

    Raises:
        ConfigError: for a path that is missing or not readable, a broken file, a missing field, and for models that
            are not supported; it names the file, the field, the rule and the remedy.
    """
    _check_path(path)
    place = Path(path)
    try:
        if place.is_dir():
            return _from_folder(place)
        if not place.exists():
            raise ConfigError(FIELD, f"{path} does not exist; give a model folder or a .gguf file")
        check_regular(place)
        if place.suffix != ".gguf":
            raise ConfigError(FIELD, f"{path} is not a folder with config.json nor a .gguf file")
        return _from_gguf(read_gguf_file(path))
    except OSError as error:
        raise ConfigError(FIELD, f"cannot read {error.filename or path}: {error.strerror}") from None


def _check_path(path: str) -> None:
    """The path and the model's name, which is its last part, travel in messages and logs, as UTF-8."""
    try:
        path.encode()
        os.path.realpath(path).encode()
    except UnicodeEncodeError:
        raise ConfigError(FIELD, f"the path {os.fsencode(path)!r} is not valid UTF-8; rename it") from None


# ------------------------------------------------------------------------------------------------ folder


def _from_folder(folder: Path) -> ModelConfig:
    if not (folder / "config.json").exists():
        ggufs = sorted(folder.glob("*.gguf"))
        remedy = f"give the file itself: {ggufs[0]}" if ggufs else "give a model folder in Hugging Face layout"
        raise ConfigError(FIELD, f"{folder} has no config.json; {remedy}")
    fields = read_json(folder / "config.json")
    family = family_of(fields)
    _refuse_unsupported(fields)
    _refuse_pickle_only(folder)
    num_heads = fields.get("num_attention_heads", int)
    hidden_size = fields.get("hidden_size", int)
    vocab_size = fields.get("vocab_size", int)
    with errors_name(fields.where):
        own = family.read(fields)
        config = ModelConfig(
            architecture=family.name,
            num_layers=fields.get("num_hidden_layers", int),
            hidden_size=hidden_size,
            intermediate_size=fields.get("intermediate_size", int),
            num_heads=num_heads,
            num_kv_heads=fields.get("num_key_value_heads", int, num_heads),
            head_size=own.head_size or _divide(hidden_size, num_heads, fields.where),
            vocab_size=vocab_size,
            max_position_embeddings=fields.get("max_position_embeddings", int),
            rms_norm_eps=fields.get("rms_norm_eps", float),
            rope=own.rope,
            tie_word_embeddings=own.tie_word_embeddings,
            attention_bias=own.attention_bias,
            mlp_bias=own.mlp_bias,
            dtype=_read_dtype(fields),
            bos_token_id=None,
            eos_token_ids=(),
            layer_windows=own.layer_windows,
            attention_soft_cap=own.attention_soft_cap,
            logit_soft_cap=own.logit_soft_cap,
            query_scalar=own.query_scalar,
            local_rope=own.local_rope,
            is_embedding_scaled=own.is_embedding_scaled,
        )
    # After the sizes, since these are judged by one of them.
    eos_token_ids = fields.token_ids("eos_token_id", vocab_size)
    if (folder / "generation_config.json").exists():
        eos_token_ids += read_json(folder / "generation_config.json").token_ids("eos_token_id", vocab_size)
    return replace(
        config,
        bos_token_id=next(iter(fields.token_ids("bos_token_id", vocab_size)), None),
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
    )


def _refuse_unsupported(fields: Fields) -> None:
    quantization = fields.values.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ConfigError(
            FIELD,
            f"{fields.where}: quantization_config with quant_method {shown(method)} is not supported; "
            "use an unquantized checkpoint or a .gguf file",
        )
    fields.must_be("partial_rotary_factor", 1.0)


def _refuse_pickle_only(folder: Path) -> None:
    pickled = sorted(folder.glob("pytorch_model*.bin")) + sorted(folder.glob("*.pth")) + sorted(folder.glob("*.pt"))
    if pickled and not any(folder.glob("*.safetensors*")):
        raise ConfigError(
            FIELD, f"{pickled[0]} is a pickle, which can run code and is not read; convert the model to safetensors"
        )


def _divide(hidden_size: int, num_heads: int, where: str) -> int:
    if num_heads < 1 or hidden_size % num_heads:
        raise ConfigError(
            FIELD, f"{where}: hidden_size={shown(hidden_size)} is not a multiple of num_attention_heads={shown(num_heads)}"
        )
    return hidden_size // num_heads


def _read_dtype(fields: Fields) -> str:
    dtype = fields.get("dtype", str, fields.get("torch_dtype", str, "float32")).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(FIELD, f"{fields.where}: dtype={shown(dtype)} must be one of {', '.join(DTYPES)}")
    return dtype


# ------------------------------------------------------------------------------------------------ GGUF


def _from_gguf(file: GGUFFile) -> ModelConfig:
    architecture = file.get("general.architecture", str)
    if architecture not in GGUF_ARCHITECTURES:
        raise ConfigError(
            FIELD,
            f"{file.path}: unknown architecture {shown(architecture)}; known are {', '.join(GGUF_ARCHITECTURES)}",
        )
    _refuse_unsupported_gguf(file)
    num_heads = file.get("llama.attention.head_count", int)
    hidden_size = file.get("llama.embedding_length", int)
    head_size = file.get("llama.attention.key_length", int, 0) or _divide(hidden_size, num_heads, file.path)
    for name in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if file.get(name, int, head_size) != head_size:
            raise ConfigError(FIELD, f"{file.path}: {name}={file.get(name, int)} must equal the head size {head_size}")
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(FIELD, f"{file.path} has no tensor token_embd.weight")
    embedding_shape = file.tensors["token_embd.weight"].shape
    if len(embedding_shape) != 2:
        raise ConfigError(
            FIELD, f"{file.path}: tensor token_embd.weight has shape {list(embedding_shape)}, must have two dimensions"
        )
    with errors_name(file.path):
        config = ModelConfig(
            architecture=GGUF_ARCHITECTURES[architecture],
            num_layers=file.get("llama.block_count", int),
            hidden_size=hidden_size,
            intermediate_size=file.get("llama.feed_forward_length", int),
            num_heads=num_heads,
            num_kv_heads=file.get("llama.attention.head_count_kv", int, num_heads),
            head_size=head_size,
            vocab_size=embedding_shape[0],
            max_position_embeddings=file.get("llama.context_length", int),
            rms_norm_eps=file.get("llama.attention.layer_norm_rms_epsilon", float),
            rope=_read_gguf_rope(file),
            tie_word_embeddings="output.weight" not in file.tensors,
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            mlp_bias="blk.0.ffn_up.bias" in file.tensors,
            dtype=_gguf_dtype(file),
            bos_token_id=None,
            eos_token_ids=(),
        )
    ends = [token_id for name in ("eos", "eot", "eom") for token_id in _gguf_token(file, name, config.vocab_size)]
    return replace(
        config,
        bos_token_id=next(iter(_gguf_token(file, "bos", config.vocab_size)), None),
        eos_token_ids=tuple(dict.fromkeys(ends)),
    )


def _gguf_token(file: GGUFFile, name: str, vocab_size: int) -> tuple[int, ...]:
    """One id, or none."""
    key = f"tokenizer.ggml.{name}_token_id"
    return known_tokens([file.get(key, int)], key, file.path, vocab_size) if file.has(key) else ()


def _refuse_unsupported_gguf(file: GGUFFile) -> None:
    if file.get("split.count", int, 1) > 1:
        raise ConfigError(FIELD, f"{file.path} is one part of a split file; merge the parts with gguf-split first")
    if file.get("llama.expert_count", int, 0) > 0:
        raise ConfigError(FIELD, f"{file.path} is a mixture of experts, which is not supported")


def _read_gguf_rope(file: GGUFFile) -> RopeConfig:
    theta = file.get("llama.rope.freq_base", float, 10000.0)
    kind = file.get("llama.rope.scaling.type", str, "none")
    factor = file.get("llama.rope.scaling.factor", float, file.get("llama.rope.scale_linear", float, 1.0))
    if kind not in ("none", "linear"):
        raise ConfigError(FIELD, f"{file.path}: rope scaling type {shown(kind)} is not supported; none and linear are")
    is_linear = kind == "linear" or file.has("llama.rope.scale_linear")
    if "rope_freqs.weight" in file.tensors:
        if is_linear:
            raise ConfigError(FIELD, f"{file.path} has both rope_freqs.weight and linear rope scaling")
        return RopeConfig(theta=theta, kind="factors", factors=file.read_floats("rope_freqs.weight"))
    return RopeConfig(theta=theta, kind="linear", factor=factor) if is_linear else RopeConfig(theta=theta)


def _gguf_dtype(file: GGUFFile) -> str:
    """Of the layers' matrices; quantized ones are computed in bfloat16."""
    tensor = file.tensors.get("blk.0.attn_q.weight", file.tensors["token_embd.weight"])
    return {"F32": "float32", "F16": "float16"}.get(tensor.type_name, "bfloat16")
