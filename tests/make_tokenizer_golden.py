"""Makes tests/golden/smollm2_tokenizer.json and smollm2_tokenizer_hashes.json again: what transformers' tokenizer gives for
varied texts and chats.

    python -m tests.make_tokenizer_golden PATH/TO/SmolLM2-135M-Instruct.Q4_1.gguf
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import transformers

from tests.text_samples import CHATS, ids_hash, many_samples, samples

FILE = Path(__file__).parent / "golden" / "smollm2_tokenizer.json"
HASHES_FILE = FILE.with_name("smollm2_tokenizer_hashes.json")


def main(model: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(model.parent), gguf_file=model.name)
    texts = [{"text": text, "token_ids": tokenizer(text)["input_ids"]} for text in samples()]
    chats = [chat | {"token_ids": _chat_ids(tokenizer, chat)} for chat in CHATS]
    head = {
        "model": model.name,
        "sha256": hashlib.sha256(model.read_bytes()).hexdigest(),
        "oracle": f"transformers {transformers.__version__}, AutoTokenizer(gguf_file=...)",
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    lines += [f"{json.dumps(name)}: [\n{_rows(rows)}\n]" for name, rows in (("texts", texts), ("chats", chats))]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    hashes = [ids_hash(tokenizer(text)["input_ids"]) for text in many_samples()]
    rows = ",\n".join(json.dumps(hashes[i : i + 10], separators=(",", ":"))[1:-1] for i in range(0, len(hashes), 10))
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    HASHES_FILE.write_text("{\n" + ",\n".join([*lines, f'"hashes": [\n{rows}\n]']) + "\n}\n", encoding="utf-8")


def _chat_ids(tokenizer: Any, chat: dict[str, Any]) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(**chat, tokenize=True, return_dict=False)
    return ids


def _rows(rows: list[dict[str, Any]]) -> str:
    return ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
