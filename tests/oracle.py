"""What would transformers say? Greedy ids, logit gaps and log probabilities of a model in plain float32.

The gap rule, in one place: where the two highest logits of the oracle lie within ``GAP`` a different id is not a fault.
The gap is shown, and the comparison goes on behind that position, on the oracle's ids.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

GAP = 5e-4
"""Logit gap below which float32 on another batch or split may choose the other token."""

LOGPROB_TOLERANCE = 1e-3
"""Allowed difference of a log probability in float32."""

NUM_TOP = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Greedy:
    """One prompt, its greedy continuation, and how close every decision was."""

    prompt: list[int]
    token_ids: list[int]
    gaps: list[float]
    """Highest logit minus the second highest, at each generated token."""
    second_ids: list[int]
    logprobs: list[float]
    """Log-softmax of each generated token."""
    prompt_end_top: list[tuple[int, float]]
    """The most likely tokens behind the prompt, with their log-softmax."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excused:
    """A different id that the gap rule allows."""

    position: int
    """Index in the generated tokens."""
    expected: int
    got: int
    gap: float


class Oracle:
    """A reference model in evaluation mode; every method runs one request alone."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        names = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in names else "past_key_values"

    @classmethod
    def of(cls, path: str | Path, dtype: torch.dtype = torch.float32) -> "Oracle":
        """The model of a folder in Hugging Face layout, or of a ``.gguf`` file."""
        return cls(AutoModelForCausalLM.from_pretrained(**_where(path), dtype=dtype))

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], num_tokens: int, *, stop_ids: Sequence[int] = ()) -> Greedy:
        """The most likely token, ``num_tokens`` times, or up to and with the first of ``stop_ids``."""
        result = Greedy(
            prompt=[int(i) for i in prompt], token_ids=[], gaps=[], second_ids=[], logprobs=[], prompt_end_top=[]
        )
        fed, cache = torch.tensor([result.prompt]), DynamicCache(config=self.model.config)
        while len(result.token_ids) < num_tokens and not (result.token_ids and result.token_ids[-1] in stop_ids):
            out = self.model(fed, use_cache=True, logits_to_keep=1, **{self.cache_argument: cache})
            logits = out.logits[0, -1].float()
            logprobs = logits.log_softmax(-1)
            if not result.token_ids:
                top = logprobs.topk(NUM_TOP)
                result.prompt_end_top.extend(zip(top.indices.tolist(), top.values.tolist(), strict=True))
            (first, second), ids = logits.topk(2).values.tolist(), logits.topk(2).indices.tolist()
            result.token_ids.append(ids[0])
            result.second_ids.append(ids[1])
            result.gaps.append(first - second)
            result.logprobs.append(float(logprobs[ids[0]]))
            fed = torch.tensor([ids[:1]])
        return result

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, V] float32: log-softmax of what may follow each of the T tokens."""
        logits = self.model(torch.tensor([[int(i) for i in token_ids]]), use_cache=False).logits[0]
        return logits.float().log_softmax(-1)


def reference_tokenizer(path: str | Path) -> Any:
    """The tokenizer that transformers makes of the same files."""
    return AutoTokenizer.from_pretrained(**_where(path))


def save_as_folder(gguf: Path, folder: Path) -> Path:
    """The Hugging Face folder that holds the same float32 weights and tokenizer as a GGUF file."""
    model = AutoModelForCausalLM.from_pretrained(**_where(gguf), dtype=torch.float32)
    # Loading expanded the weights; transformers would still call the model quantized, and not save it.
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    model.save_pretrained(folder)
    reference_tokenizer(gguf).save_pretrained(folder)
    return folder


def check_greedy(
    expected: Greedy, generate: Callable[[list[int], int], list[int]], first_ids: list[int] | None = None
) -> list[Excused]:
    """Compare a continuation with the oracle's under the gap rule; returns the ids that the rule excused.

    Args:
        expected: the oracle's result.
        generate: (prompt ids, number of tokens) -> ids, with end tokens ignored.
        first_ids: what was generated for the whole prompt already; None to ask ``generate``.

    Raises:
        AssertionError: at the first id that differs although the oracle's choice was clear.
    """
    excused: list[Excused] = []
    start, total = 0, len(expected.token_ids)
    while start < total:
        wanted = expected.token_ids[start:]
        got = first_ids if first_ids is not None else generate(expected.prompt + expected.token_ids[:start], len(wanted))
        first_ids = None
        assert len(got) == len(wanted), f"{len(got)} tokens where {len(wanted)} were asked for"
        differs = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=True)) if a != b), None)
        if differs is None:
            break
        position = start + differs
        gap = expected.gaps[position]
        found = Excused(position=position, expected=wanted[differs], got=got[differs], gap=gap)
        assert gap < GAP, (
            f"prompt of {len(expected.prompt)} tokens, generated token {position}: "
            f"expected {found.expected}, got {found.got}, although the gap is {gap:.4g}"
        )
        excused.append(found)
        start = position + 1
    return excused


def _where(path: str | Path) -> dict[str, str]:
    path = Path(path)
    if path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": str(path)}
