"""Where a model's text side comes from: tokenizer, chat template and generation defaults of a folder or a GGUF file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.text import gguf_tokenizer
from ipc.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """What a client needs to turn text into tokens and back; see ModelInfo."""

    tokenizer: bytes = b""
    """A tokenizer.json; empty when the model has no tokenizer, so that it speaks token ids only."""

    tokenizer_config: bytes = b"{}"
    chat_template: str | None = None
    generation_config: bytes = b"{}"


def read_text_files(model_path: str) -> TextFiles:
    """Read them, converting where a file is in another form.

    Raises:
        ConfigError: a file is broken, or the tokenizer is of a kind that is not supported.
    """
    path = Path(model_path)
    if path.is_file():
        tokenizer, config, template = gguf_tokenizer.convert(path)
        return TextFiles(tokenizer=tokenizer, tokenizer_config=config, chat_template=template)
    if not path.is_dir():
        raise ConfigError("MODEL", f"{model_path!r} is neither a folder nor a file")
    config_object = _read_object(path / "tokenizer_config.json")
    extra = _read_object(path / "special_tokens_map.json")
    return TextFiles(
        tokenizer=_read_tokenizer(path),
        tokenizer_config=json.dumps(extra | config_object, ensure_ascii=False).encode(),
        chat_template=_read_template(path, config_object),
        generation_config=json.dumps(_read_object(path / "generation_config.json"), ensure_ascii=False).encode(),
    )


def _read_tokenizer(folder: Path) -> bytes:
    file = folder / "tokenizer.json"
    if file.is_file():
        return file.read_bytes()
    for other in ("tokenizer.model", "spiece.model", "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt"):
        if (folder / other).is_file():
            raise ConfigError(
                "MODEL",
                f"{folder} has its tokenizer as {other} only, which is not supported; write a tokenizer.json once with "
                f"transformers: AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})",
            )
    return b""


def _read_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The file of its own first, then the entry of the configuration, which may be a list of named ones."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except ValueError as error:
            raise ConfigError("MODEL", f"{file} is not UTF-8 text: {error}") from None
    entry = config.get("chat_template")
    if isinstance(entry, list):
        named = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}
        entry = named.get("default")
    return entry if isinstance(entry, str) else None


def _read_object(file: Path) -> dict[str, Any]:
    """A JSON object; empty when there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError("MODEL", f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError("MODEL", f"{file} must hold a JSON object, holds {type(content).__name__}")
    return content
