"""Where a model's text side comes from: tokenizer, chat template and generation defaults of a folder or a GGUF file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.text import gguf_tokenizer
from engine.text.tokenizer import Tokenizer
from ipc.errors import ConfigError

_DEFAULT = "default"
"""Name of the chat template that is taken where nothing asks for another one."""


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
    try:
        if path.is_file():
            tokenizer, config, template = gguf_tokenizer.convert(path)
            _check_tokenizer(path, tokenizer, config)
            return TextFiles(tokenizer=tokenizer, tokenizer_config=config, chat_template=template)
        if path.is_dir():
            return _read_folder(path)
    except OSError as error:
        raise ConfigError("MODEL", f"cannot read {error.filename or model_path}: {error.strerror}") from None
    raise ConfigError("MODEL", f"{model_path!r} is neither a folder nor a file")


def _read_folder(folder: Path) -> TextFiles:
    config_file, generation_file = folder / "tokenizer_config.json", folder / "generation_config.json"
    config_object = _read_object(config_file)
    extra = _read_object(folder / "special_tokens_map.json")
    templates = _read_templates(folder, config_object)
    config = _as_json(_with_templates(extra | config_object, templates), config_file)
    tokenizer = _read_tokenizer(folder)
    if tokenizer:
        _check_tokenizer(folder / "tokenizer.json", tokenizer, config)
    return TextFiles(
        tokenizer=tokenizer,
        tokenizer_config=config,
        chat_template=templates.get(_DEFAULT),
        generation_config=_as_json(_read_object(generation_file), generation_file),
    )


def _check_tokenizer(file: Path, tokenizer: bytes, config: bytes) -> None:
    """Load it as every client will: what is broken must not wait for the first of them."""
    try:
        Tokenizer(tokenizer, config)
    except ConfigError as error:
        raise ConfigError("MODEL", f"the tokenizer in {file} {error.message}; fetch the file again") from None


def _read_tokenizer(folder: Path) -> bytes:
    file = folder / "tokenizer.json"
    if file.is_file():
        content = file.read_bytes()
        if not content:
            raise ConfigError("MODEL", f"{file} is empty; fetch the file again")
        return content
    for other in ("tokenizer.model", "spiece.model", "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt"):
        if (folder / other).is_file():
            raise ConfigError(
                "MODEL",
                f"{folder} has its tokenizer as {other} only, which is not supported; write a tokenizer.json once with "
                f"transformers: AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})",
            )
    return b""


def _read_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """By name: files of their own first, then the entry of the configuration, which may be a list of named ones."""
    entry = config.get("chat_template")
    files = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    found: dict[str, str] = {}
    if (folder / "chat_template.jinja").is_file():
        found[_DEFAULT] = _read_text(folder / "chat_template.jinja")
    elif isinstance(entry, str):
        found[_DEFAULT] = entry
    elif isinstance(entry, list):
        items = [(item.get("name"), item.get("template")) for item in entry if isinstance(item, dict)]
        found = {name: text for name, text in items if isinstance(name, str) and isinstance(text, str)}
    return found | {file.stem: _read_text(file) for file in files}


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except ValueError as error:
        raise ConfigError("MODEL", f"{file} is not UTF-8 text: {error}") from None


def _with_templates(config: dict[str, Any], templates: dict[str, str]) -> dict[str, Any]:
    """Named templates reach clients within the tokenizer's configuration."""
    named = [{"name": name, "template": text} for name, text in templates.items()]
    others = {key: value for key, value in config.items() if key != "chat_template"}
    return others | {"chat_template": named} if templates.keys() - {_DEFAULT} else others


def _read_object(file: Path) -> dict[str, Any]:
    """A JSON object; empty when there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError("MODEL", f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError("MODEL", f"{file} must hold a JSON object, holds {type(content).__name__}")
    return content


def _as_json(content: dict[str, Any], file: Path) -> bytes:
    """What was read may still be too deep to be written, or hold half characters, which no text may."""
    try:
        return json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ConfigError("MODEL", f"{file} can't be passed on to clients: {error}") from None
