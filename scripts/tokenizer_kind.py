"""What kind of tokenizer does a checkpoint have? In a few words, for people."""

import json
from pathlib import Path
from typing import Any

from worker.gguf_file import read_gguf_file


def tokenizer_kind(model: str, tokenizer: bytes) -> str | None:
    """``tokenizer``: the tokenizer.json that the text side made of the checkpoint; None for one that has none."""
    if not tokenizer:
        return None
    document: dict[str, Any] = json.loads(tokenizer)
    kind = str(document.get("model", {}).get("type", "unknown"))
    if Path(model).is_file():
        metadata = read_gguf_file(model).metadata
        names = [metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre")]
        kind += f" (GGUF {', '.join(str(name) for name in names if name)})"
    return kind
