"""Makes the reference results of tests/golden again.

    python -m tests.make_golden MODEL.gguf [quickstart] [text] [greedy]

Without names all three are made.
"""

import hashlib
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from tests.oracle import Oracle, reference_tokenizer

GOLDEN = Path(__file__).parent / "golden"
NUM_PROMPTS = 40
NUM_OUTPUT = 64
MAX_PROMPT = 700
NUM_TEXT_TOKENS = 2000
QUICKSTART = {"The capital of France is": 32, "The three primary colors are": 39}
"""Prompt and the most tokens of its answer."""


def prompts(tokenizer: Any, text: str) -> Iterator[tuple[str, list[int]]]:
    """Kind and ids: cuts of the text and of a chat, and random ids, short and long in turn."""
    draw = random.Random(20)
    lengths = [1, 1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 700]
    lengths += [draw.choice((draw.randint(4, 80), draw.randint(80, 300), draw.randint(300, MAX_PROMPT)))
                for _ in range(NUM_PROMPTS - len(lengths))]
    prose = tokenizer.encode(text)
    for index, length in enumerate(lengths):
        start = draw.randrange(len(prose) - length)
        if index % 4 == 3:
            question = tokenizer.decode(prose[start : start + max(1, length - 20)])
            yield "chat", tokenizer.encode(
                f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            )[-length:]
        elif index % 2:
            yield "random", [draw.randrange(100, 40000) for _ in range(length)]
        else:
            yield "text", prose[start : start + length]


def over_text(oracle: Oracle, ids: Sequence[int]) -> dict[str, list[Any]]:
    """At each position but the last: the most likely next token, the actual next one's log probability, and the gap."""
    logprobs = oracle.logprobs(ids)[:-1]
    top = logprobs.topk(2, -1).values
    actual = logprobs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    return {
        "top_ids": logprobs.argmax(-1).tolist(),
        "logprobs": [round(x, 4) for x in actual.tolist()],
        "gaps": _short((top[:, 0] - top[:, 1]).tolist()),
    }


def make_quickstart(tokenizer: Any, oracle: Oracle) -> dict[str, Any]:
    answers = []
    for prompt, num_tokens in QUICKSTART.items():
        greedy = oracle.greedy(tokenizer.encode(prompt), num_tokens, stop_ids=[tokenizer.eos_token_id])
        answers.append({
            "text": prompt, "max_tokens": num_tokens, "prompt": greedy.prompt, "token_ids": greedy.token_ids,
            "gaps": _short(greedy.gaps), "answer": tokenizer.decode(greedy.token_ids, skip_special_tokens=True),
        })  # fmt: skip
    return {"answers": answers}


def make_text(tokenizer: Any, oracle: Oracle, model_path: Path) -> dict[str, Any]:
    ids = tokenizer.encode(_text())[:NUM_TEXT_TOKENS]
    if len(ids) != NUM_TEXT_TOKENS:
        raise SystemExit(f"text.txt has {len(ids)} tokens, fewer than {NUM_TEXT_TOKENS}")
    return {
        "token_ids": ids,
        "float32": over_text(oracle, ids),
        "bfloat16": over_text(Oracle.of(model_path, torch.bfloat16), ids),
    }


def make_greedy(tokenizer: Any, oracle: Oracle) -> dict[str, Any]:
    results = []
    for kind, prompt in tqdm(list(prompts(tokenizer, _text()))):
        greedy = oracle.greedy(prompt, NUM_OUTPUT)
        results.append({
            "kind": kind, "prompt": greedy.prompt, "token_ids": greedy.token_ids, "second_ids": greedy.second_ids,
            "gaps": _short(greedy.gaps), "logprobs": [round(x, 5) for x in greedy.logprobs],
            "prompt_end_top": [[i, round(x, 5)] for i, x in greedy.prompt_end_top],
        })  # fmt: skip
    return {"prompts": results}


def main() -> None:
    model_path, wanted = Path(sys.argv[1]), sys.argv[2:] or ["quickstart", "text", "greedy"]
    torch.set_num_threads(1)
    tokenizer, oracle = reference_tokenizer(model_path), Oracle.of(model_path)
    source = {
        "model": model_path.name,
        "sha256": hashlib.sha256(model_path.read_bytes()).hexdigest(),
        "oracle": f"transformers {transformers.__version__}, torch {torch.__version__}, CPU, 1 thread",
    }
    makers = {
        "quickstart": lambda: make_quickstart(tokenizer, oracle),
        "text": lambda: make_text(tokenizer, oracle, model_path),
        "greedy": lambda: make_greedy(tokenizer, oracle),
    }
    for name in wanted:
        _write(f"smollm2_{name}", {**source, **makers[name]()})


def _text() -> str:
    return (GOLDEN / "text.txt").read_text(encoding="utf-8")


def _short(values: Sequence[float]) -> list[float]:
    return [float(f"{x:.5g}") for x in values]


def _write(name: str, content: dict[str, Any]) -> None:
    """One entry a line, so that a change can be read in a diff."""
    lines = []
    for key, value in content.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            items = ",\n".join(json.dumps(item, separators=(",", ":")) for item in value)
            lines.append(f"{json.dumps(key)}: [\n{items}\n]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}")
    (GOLDEN / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
