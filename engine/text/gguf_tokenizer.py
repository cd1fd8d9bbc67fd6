"""Turns the tokenizer in a GGUF file's metadata into what a Hugging Face folder would hold."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.text.byte_alphabet import BYTE_OF_CHARACTER, spell
from engine.text.gguf_metadata import read_metadata
from ipc.errors import ConfigError

_CONTROL, _USER_DEFINED = 3, 4
"""Values of tokenizer.ggml.token_type."""

_GPT2 = None
"""The split that tokenizers' ByteLevel step does by itself."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_SPLITS: dict[str, str | None] = {
    # transformers, our oracle, reads these three alike. For smollm that cuts several blanks before a digit otherwise
    # than the model's original tokenizer does.
    "default": _GPT2, "gpt-2": _GPT2, "smollm": _GPT2,
    "mpt": _GPT2, "olmo": _GPT2, "phi-2": _GPT2,
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "falcon3": _LLAMA3, "smaug-bpe": _LLAMA3,
    "dbrx": _LLAMA3, "pixtral": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "megrez": _QWEN2,
    "tekken": _TEKKEN,
}  # fmt: skip
"""tokenizer.ggml.pre to the pattern by which text is cut before merging."""

_WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"}
"""Kinds whose vocabulary holds words that no merge leads to: a word that is a token is taken whole."""

_ADDS_BOS = {"llama-bpe", "llama3", "llama-v3"}
"""Kinds that begin a prompt with BOS when the file says nothing about it; so does every sentencepiece one."""

_OTHER_SENTENCEPIECE = ("gemma", "phi3")
"""Architectures whose files say "llama" but whose tokenizers treat blanks in a way of their own."""

_NAMED_TEMPLATE = "tokenizer.chat_template."
"""In front of the names of chat templates that a file has beside its default one."""

_SPECIAL_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def convert(path: Path) -> tuple[bytes, bytes, str | None]:
    """The contents of tokenizer.json and tokenizer_config.json, and the chat template if there is one.

    Raises:
        ConfigError: a kind of tokenizer that is not supported, or metadata that does not fit together.
    """
    metadata = read_metadata(path, "tokenizer.", "general.architecture")
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ConfigError("MODEL", f"{path} has no tokenizer (tokenizer.ggml.tokens is missing); use a complete file")
    if kind == "gpt2":
        parts = _byte_level(path, metadata, tokens)
    elif kind == "llama" and not str(metadata.get("general.architecture")).startswith(_OTHER_SENTENCEPIECE):
        parts = _sentencepiece(path, metadata, tokens)
    else:
        of = f" for {metadata.get('general.architecture')!r} models" if kind == "llama" else ""
        raise ConfigError(
            "MODEL",
            f"{path}: tokenizer.ggml.model={kind!r}{of} is not supported; supported are 'gpt2' (byte-level BPE) and "
            "'llama' (sentencepiece BPE); use a Hugging Face folder with a tokenizer.json instead",
        )
    special = _special_tokens(path, metadata, tokens)
    adds = _added_around(metadata, kind, special)
    document = {
        "version": "1.0",
        "added_tokens": _added_tokens(metadata, tokens, parts["model"]["vocab"], is_byte_level=kind == "gpt2"),
        "post_processor": _template(special, tokens, adds),
        **parts,
    }
    template = metadata.get("tokenizer.chat_template")
    config: dict[str, Any] = special | {f"add_{name}": name in adds for name in ("bos_token", "eos_token")}
    named = {key.removeprefix(_NAMED_TEMPLATE): text for key, text in metadata.items() if key.startswith(_NAMED_TEMPLATE)}
    if named:
        everything = {"default": template, **named} if isinstance(template, str) else named
        config["chat_template"] = [{"name": name, "template": text} for name, text in everything.items()]
    return (
        json.dumps(document, ensure_ascii=False).encode(),
        json.dumps(config, ensure_ascii=False).encode(),
        template if isinstance(template, str) else None,
    )


def _byte_level(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        raise ConfigError(
            "MODEL",
            f"{path}: tokenizer.ggml.pre={pre!r} is not supported; supported are {', '.join(sorted(_SPLITS))}; "
            "use a Hugging Face folder with a tokenizer.json instead",
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ConfigError("MODEL", f"{path}: tokenizer.ggml.merges is missing, a 'gpt2' tokenizer needs it")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    split = _SPLITS[pre]
    pre_tokenizer: dict[str, Any] = byte_level
    if split is not None:
        cut = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [cut, byte_level | {"use_regex": False}]}
    alphabet = BYTE_OF_CHARACTER.keys()
    vocab = {token if alphabet >= set(token) else spell(token.encode()): i for i, token in enumerate(tokens)}
    return {
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "decoder": byte_level,
        "model": _bpe(vocab, [merge.split(" ", 1) for merge in merges], ignore_merges=pre in _WHOLE_WORDS_FIRST),
    }


def _sentencepiece(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    scores = metadata.get("tokenizer.ggml.scores")
    merges = metadata.get("tokenizer.ggml.merges")
    vocab = {token: i for i, token in enumerate(tokens)}
    if isinstance(merges, list):
        pairs = [merge.split(" ", 1) for merge in merges]
    elif isinstance(scores, list) and len(scores) == len(tokens):
        pairs = _merges_of(vocab, dict(zip(tokens, scores, strict=True)))
    else:
        raise ConfigError("MODEL", f"{path}: a 'llama' tokenizer needs one score for each of its {len(tokens)} tokens")
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    scheme = "first" if has_prefix else "never"
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": _bpe(vocab, pairs, byte_fallback=True, fuse_unk=True),
    }


def _merges_of(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[Sequence[str]]:
    """The merges that a sentencepiece vocabulary implies: every cut of a token into two tokens, best score first."""
    found = []
    for token, score in scores.items():
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        cuts = [(left, right) for left, right in cuts if left in vocab and right in vocab]
        cuts.sort(key=lambda cut: (vocab[cut[0]], vocab[cut[1]]))
        found += [(score, len(left), len(right), left, right) for left, right in cuts]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _bpe(vocab: Mapping[str, int], merges: Sequence[Sequence[str]], **flags: bool) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": vocab, "merges": merges, **flags,
    }  # fmt: skip


def _special_tokens(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    found = {}
    for name, key in _SPECIAL_IDS.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise ConfigError("MODEL", f"{path}: tokenizer.ggml.{key}={token_id} is not below {len(tokens)} tokens")
        found[name] = tokens[token_id]
    return found


def _added_around(metadata: Mapping[str, Any], kind: str, special: Mapping[str, str]) -> set[str]:
    """Which of bos_token and eos_token the tokenizer puts around a prompt."""
    adds_bos = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _ADDS_BOS
    wishes = {
        "bos_token": metadata.get("tokenizer.ggml.add_bos_token", adds_bos),
        "eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    return {name for name, is_wished in wishes.items() if is_wished and name in special}


def _added_tokens(
    metadata: Mapping[str, Any], tokens: list[str], vocab: Mapping[str, int], *, is_byte_level: bool
) -> list[dict[str, Any]]:
    """Tokens that are found in a text before it is cut: control tokens (special) and user-defined ones.

    In a byte-level vocabulary a control token with characters outside the alphabet is a mislabelled ordinary one.
    """
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    return [
        {
            "id": token_id, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": kind == _CONTROL,
        }
        for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (_CONTROL, _USER_DEFINED) and vocab.get(token) == token_id
        and (not is_byte_level or kind == _USER_DEFINED or BYTE_OF_CHARACTER.keys() >= set(token))
    ]  # fmt: skip


def _template(special: Mapping[str, str], tokens: list[str], adds: set[str]) -> dict[str, Any]:
    text = {"Sequence": {"id": "A", "type_id": 0}}
    pieces: list[dict[str, Any]] = [text]
    if "bos_token" in adds:
        pieces.insert(0, {"SpecialToken": {"id": special["bos_token"], "type_id": 0}})
    if "eos_token" in adds:
        pieces.append({"SpecialToken": {"id": special["eos_token"], "type_id": 0}})
    used = {special[name] for name in adds}
    return {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]} for token in used},
    }
