"""Tiny checkpoints in Hugging Face layout, written on demand from fixed seeds, without torch or transformers.

``random_llama`` draws its weights with a standard deviation of 0.2: with the usual 0.02 a tied model repeats one token,
and its greedy answer stays the same with a layer missing or a foreign KV block. ``chain`` says a fixed script whatever
the prompt, one unique token per position, some of them cut inside a character.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

PAD, EOS, BOS = 0, 1, 2
FIRST_BYTE = 3
"""In ``random_llama`` the byte b is token ``FIRST_BYTE + b``."""

MERGED = (b"\xfe", b"\xff")
"""The one merge of its tokenizer, since some readers want at least one; it can't occur in text."""

SCRIPT: tuple[bytes, ...] = (
    b"Sky ", b"\xf0\x9f", b"\x98\x80", b" caf", b"\xc3", b"\xa9 ", b"\xe6", b"\x97\xa5", b"\xe6\x9c", b"\xac ",
    b"Obs", b"erv", b"ation", b":", b" tail", b" \xf0\x9f\x91", b"\xa9\xe2\x80", b"\x8d\xf0\x9f\x92", b"\xbb",
    b" end", b"\xe2\x98",
)  # fmt: skip
"""What ``chain`` says before its end token: piece i is token i + 1; the last one is half a character."""

SCRIPT_TEXT = b"".join(SCRIPT[:-1]).decode()
"""The script without the cut character at its end."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + '] ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)

Tensors = dict[str, NDArray[np.float32]]


def random_llama(
    folder: Path,
    *,
    num_layers: int = 5,
    hidden_size: int = 64,
    intermediate_size: int = 160,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vocab_size: int = 512,
    max_position_embeddings: int = 1024,
    tied: bool = True,
    garbage_head: bool = False,
    num_files: int = 1,
    std: float = 0.2,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A random Llama in float32.

    Args:
        folder: is made; the return value.
        tied: the output head is the embedding, and no head is on disk, unless ``garbage_head`` puts a wrong one there
            (transformers would then use it, so take the oracle from the same checkpoint without it).
        num_files: more than one gives shards and an index file.
        config: further entries of config.json, which win.
    """
    head_size = hidden_size // num_heads
    draw = np.random.Generator(np.random.Philox(seed))

    def normal(*shape: int) -> NDArray[np.float32]:
        return draw.standard_normal(shape, dtype=np.float32) * np.float32(std)

    tensors: Tensors = {"model.embed_tokens.weight": normal(vocab_size, hidden_size)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "self_attn.q_proj.weight": normal(num_heads * head_size, hidden_size),
            prefix + "self_attn.k_proj.weight": normal(num_kv_heads * head_size, hidden_size),
            prefix + "self_attn.v_proj.weight": normal(num_kv_heads * head_size, hidden_size),
            prefix + "self_attn.o_proj.weight": normal(hidden_size, num_heads * head_size),
            prefix + "mlp.gate_proj.weight": normal(intermediate_size, hidden_size),
            prefix + "mlp.up_proj.weight": normal(intermediate_size, hidden_size),
            prefix + "mlp.down_proj.weight": normal(hidden_size, intermediate_size),
            prefix + "input_layernorm.weight": np.ones(hidden_size, np.float32),
            prefix + "post_attention_layernorm.weight": np.ones(hidden_size, np.float32),
        }
    tensors["model.norm.weight"] = np.ones(hidden_size, np.float32)
    if not tied or garbage_head:
        tensors["lm_head.weight"] = normal(vocab_size, hidden_size)

    write_config(
        folder, num_layers=num_layers, hidden_size=hidden_size, intermediate_size=intermediate_size,
        num_heads=num_heads, num_kv_heads=num_kv_heads, vocab_size=vocab_size, tied=tied,
        max_position_embeddings=max_position_embeddings, extra=config or {},
    )  # fmt: skip
    write_tensors(folder, tensors, num_files)
    write_tokenizer(folder, byte_vocabulary(vocab_size), merges=[MERGED], bos="<s>", eos="</s>", pad="<pad>")
    return folder


def chain(folder: Path, pieces: Sequence[bytes] = SCRIPT) -> Path:
    """A Llama that answers any prompt ending in <s> with ``pieces`` and its end token; piece i is token i + 1.

    After a prompt that ends in token k it goes on with token k + 1. Attention and MLP add nothing: the embedding is
    one-hot, and row k + 1 of the head reads entry k.
    """
    if len(set(pieces)) != len(pieces):
        raise ValueError("the pieces of a script must differ from each other")
    vocab_size = len(pieces) + 2
    hidden_size = -(-vocab_size // 64) * 64
    num_layers, intermediate_size, eos = 4, 64, vocab_size - 1
    draw = np.random.Generator(np.random.Philox(1))

    tensors: Tensors = {
        "model.embed_tokens.weight": np.eye(vocab_size, hidden_size, dtype=np.float32),
        "model.norm.weight": np.ones(hidden_size, np.float32),
        "lm_head.weight": 4 * np.eye(vocab_size, hidden_size, k=-1, dtype=np.float32),
    }
    for layer in range(num_layers):
        shapes = {
            "self_attn.q_proj": (hidden_size, hidden_size), "self_attn.k_proj": (hidden_size // 2, hidden_size),
            "self_attn.v_proj": (hidden_size // 2, hidden_size), "mlp.gate_proj": (intermediate_size, hidden_size),
            "mlp.up_proj": (intermediate_size, hidden_size),
        }  # fmt: skip
        prefix = f"model.layers.{layer}."
        for name, shape in shapes.items():
            tensors[f"{prefix}{name}.weight"] = draw.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
        tensors[prefix + "self_attn.o_proj.weight"] = np.zeros((hidden_size, hidden_size), np.float32)
        tensors[prefix + "mlp.down_proj.weight"] = np.zeros((hidden_size, intermediate_size), np.float32)
        tensors[prefix + "input_layernorm.weight"] = np.ones(hidden_size, np.float32)
        tensors[prefix + "post_attention_layernorm.weight"] = np.ones(hidden_size, np.float32)

    write_config(
        folder, num_layers=num_layers, hidden_size=hidden_size, intermediate_size=intermediate_size, num_heads=4,
        num_kv_heads=2, vocab_size=vocab_size, tied=False, max_position_embeddings=1024,
        extra={"bos_token_id": 0, "eos_token_id": eos, "pad_token_id": None},
    )  # fmt: skip
    write_tensors(folder, tensors, 1)
    vocabulary = {"<s>": 0, "</s>": eos} | {_visible(piece): i + 1 for i, piece in enumerate(pieces)}
    write_tokenizer(folder, vocabulary, merges=[], bos="<s>", eos="</s>")
    return folder


def as_gguf(folder: Path, file: Path, *, architecture: str = "llama", tokenizer_kind: str = "gpt2") -> Path:
    """The model of a ``random_llama`` folder as a GGUF file in float32: same weights, same tokens."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(file, architecture)
    describe(writer, folder, tokenizer_kind)
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
            num_heads = heads.get(name.split(".")[-2])
            writer.add_tensor(gguf_name(name), tensor if num_heads is None else _interleaved(tensor, num_heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def describe(writer: gguf.GGUFWriter, folder: Path, tokenizer_kind: str) -> None:
    """Metadata and tokenizer of a ``random_llama`` folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    writer.add_name(folder.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model(tokenizer_kind)
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    control = {config[f"{name}_token_id"] for name in ("bos", "eos", "pad")}
    writer.add_token_types([3 if i in control else 1 for i in range(config["vocab_size"])])
    writer.add_token_merges([" ".join(_visible(part) for part in MERGED)])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def text_ids(text: str) -> list[int]:
    """Ids of a text under ``random_llama``'s tokenizer, which has one token a byte."""
    return [FIRST_BYTE + b for b in text.encode()]


def write_config(
    folder: Path,
    *,
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int,
    vocab_size: int,
    tied: bool,
    max_position_embeddings: int,
    extra: Mapping[str, Any],
) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size,
        "hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "hidden_act": "silu",
        "max_position_embeddings": max_position_embeddings, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "rope_scaling": None, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": tied,
        "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "torch_dtype": "float32",
    } | extra  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", {k: v for k, v in config.items() if v is not None})
    ends = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if config[k] is not None}
    _write_json(folder / "generation_config.json", ends)


def write_tensors(folder: Path, tensors: Tensors, num_files: int) -> None:
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, where = list(tensors), {}
    for index in range(num_files):
        file = f"model-{index + 1:05}-of-{num_files:05}.safetensors"
        share = names[index::num_files]
        save_file({name: tensors[name] for name in share}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(share, file)
    size = sum(t.nbytes for t in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": where})


def write_tokenizer(
    folder: Path, vocabulary: dict[str, int], *, merges: Sequence[tuple[bytes, bytes]], **special: str
) -> None:
    pairs = [(_visible(left), _visible(right)) for left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([text for text in special.values() if text])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1024, "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE, **{f"{name}_token": text for name, text in special.items()},
    })  # fmt: skip


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """Of a tensor by its Hugging Face name."""
    name = name.removesuffix(".weight")
    if not name.startswith("model.layers."):
        return f"{_GGUF_NAMES[name]}.weight"
    layer, inner = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_GGUF_NAMES[inner]}.weight"


def _interleaved(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows in the order of GGUF's Llama: the two halves that rotary embedding pairs lie side by side."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def byte_vocabulary(vocab_size: int) -> dict[str, int]:
    names = ["<pad>", "</s>", "<s>", *(_visible(bytes((b,))) for b in range(256))]
    names.append(_visible(b"".join(MERGED)))
    names += [f"<x{i}>" for i in range(vocab_size - len(names))]
    return {name: i for i, name in enumerate(names)}


def _visible(piece: bytes) -> str:
    """A byte string in the printable alphabet of byte-level BPE."""
    return "".join(_ALPHABET[b] for b in piece)


def _alphabet() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b if b in printable else next(others)) for b in range(256)]


_ALPHABET = _alphabet()


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
