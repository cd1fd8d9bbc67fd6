"""What does choosing tokens cost on the CPU, beside a softmax and an argmax of the same logits?

Ours is all that the last stage does for it: the rows' parameters, their rules, the draw and its counts. Both sides of a case run in
turns in one process, so that a busy machine is busy for both; medians are told.
    python -m scripts.bench.sampling [--threads 1 --threads 2] [--rounds 41] [--json sampling.json] [names of cases]
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor

from ipc.messages import NewRequestData
from ipc.params import SamplingParams
from kernels.cpu.native import native_library
from scripts.bench.results import Verdict, fail, finish, markdown, script_options
from worker.sampler import sample
from worker.sampling_states import SamplingStates

VOCAB_SIZE, BATCH_SIZE = 49152, 64
PROMPT, ANSWER = 200, 100
"""Tokens of each request so far."""

SCALES = {"flat": 1.5, "peaked": 3.5}
"""Standard deviation of the logits: of 49,152 tokens 0.9 of the weight is that of some 20,000, or of some 800."""

PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5}
OTHERS_BAR = 1.05
"""Of the time of a batch without it, that one row with penalties may make of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What all rows of a batch ask for, and what it may cost."""

    params: dict[str, Any]
    bar: float | None = None
    """Most of the time of a softmax and an argmax; None where nothing is promised."""


FILTERS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 50}, "top_p": {"top_p": 0.9}, "top_k_top_p": {"top_k": 50, "top_p": 0.9}
}  # fmt: skip
CASES = {
    "greedy": Case(params={"temperature": 0.0}, bar=0.6),
    "temperature": Case(params={}),
    **{name: Case(params=params, bar=3.0) for name, params in FILTERS.items()},
    "min_p": Case(params={"min_p": 0.05}),
    "typical_p": Case(params={"typical_p": 0.9}),
    "penalties": Case(params=PENALTIES),
}
BESIDE = ("greedy", "temperature", "top_k_top_p")
"""What the others ask for where one row asks for penalties."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    name: str
    logits: str
    threads: int
    ours_ms: float
    other_ms: float
    share: float
    """Median of our time / the other one's, each of one round."""

    bar: float | None


class Batch:
    """Rows of requests in the middle of their answers, as the last stage has them."""

    def __init__(self, params: Sequence[dict[str, Any]]) -> None:
        self._rows = np.arange(len(params))
        self._positions = np.full(len(params), PROMPT + ANSWER)
        self._token_ids = np.random.default_rng(1).integers(0, VOCAB_SIZE, (len(params), PROMPT + ANSWER), np.int32)
        self._states = SamplingStates(
            len(params), vocab_size=VOCAB_SIZE, eos_token_ids=(2,), device=torch.device("cpu"), processors={}
        )
        for row, own in enumerate(params):
            self._states.add(NewRequestData(
                row=row, request_id=f"r{row}", token_ids=self._token_ids[row], num_prompt_tokens=PROMPT,
                num_computed_tokens=PROMPT + ANSWER - 1, block_ids=([],), params=SamplingParams(seed=row, **own),
            ))  # fmt: skip

    def choose(self, logits: Tensor) -> Tensor:
        """Tokens of a step. Mutates the logits of rows with penalties."""
        params = self._states.batch(self._rows, self._positions)
        rules = self._states.rules(self._rows, self._positions, self._token_ids)
        if rules is not None:
            rules.apply(logits)
        sampled = sample(logits, params)
        if rules is not None:
            rules.count(sampled)
        return sampled


def seconds(function: Callable[[Tensor], object], logits: Tensor) -> float:
    started = time.perf_counter()
    function(logits)
    return time.perf_counter() - started


def compare(
    ours: Callable[[Tensor], object], other: Callable[[Tensor], object], logits: Tensor, num_rounds: int
) -> tuple[float, float, float]:
    """Median seconds of both and of their ratio; each begins in turn, on logits that are new to it."""
    scratch, pairs = logits.clone(), []
    for number in range(-2, num_rounds):
        took = {}
        for function in (ours, other) if number % 2 else (other, ours):
            scratch.copy_(logits)
            took[function] = seconds(function, scratch)
        if number >= 0:  # the rounds before warm
            pairs.append((took[ours], took[other]))
    mine, theirs, ratios = zip(*((a, b, a / b) for a, b in pairs), strict=True)
    return statistics.median(mine), statistics.median(theirs), statistics.median(ratios)


def softmax_argmax(logits: Tensor) -> Tensor:
    return logits.softmax(dim=1).argmax(dim=1)


def measure(name: str, scale: str, threads: int, num_rounds: int) -> list[Result]:
    """One case on logits of one kind, and the same with penalties in one row where that is asked."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(BATCH_SIZE, VOCAB_SIZE, generator=generator) * SCALES[scale]
    case = CASES[name]
    batch = Batch([case.params] * BATCH_SIZE)
    compared = [(name, batch.choose, softmax_argmax, case.bar)]
    if name in BESIDE:
        one = Batch([*[case.params] * (BATCH_SIZE - 1), {**case.params, **PENALTIES}])
        compared.append((f"{name}, one row with penalties / none", one.choose, batch.choose, OTHERS_BAR))
    results = []
    for title, ours, other, bar in compared:
        ours_s, other_s, share = compare(ours, other, logits, num_rounds)
        results.append(Result(
            name=title, logits=scale, threads=threads, ours_ms=ours_s * 1e3, other_ms=other_s * 1e3, share=share, bar=bar
        ))  # fmt: skip
    return results


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("names", nargs=-1, type=click.Choice(sorted(CASES)))
@click.option("--threads", multiple=True, type=click.IntRange(1), help="Repeatable.  [default: 1, and torch's own choice]")
@script_options
@torch.inference_mode()
def command(names: tuple[str, ...], threads: tuple[int, ...], rounds: int, json_path: str | None, check: bool) -> None:
    """Time the choice of 64 tokens of a vocabulary of 49,152 against a softmax and an argmax."""
    library = native_library()
    if library is None:
        fail("there is no native code to measure")
    counts = threads or sorted({1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)))})
    results = [
        result
        for count in counts for name in names or CASES for scale in SCALES
        for result in measure(name, scale, count, rounds)
    ]  # fmt: skip
    rows = [
        [one.name, one.logits, str(one.threads), f"{one.ours_ms:.3f}", f"{one.other_ms:.3f}", f"{one.share:.3f}",
         "-" if one.bar is None else f"{one.bar:.2f}"]
        for one in results
    ]
    table = markdown(["case", "logits", "threads", "ours, ms", "other, ms", "share", "bar"], rows)
    verdicts = [
        Verdict(name=f"{one.name}, {one.logits}, {one.threads} threads: bar / share", value=one.bar / one.share, bar=1.0)
        for one in results if one.bar is not None
    ]  # fmt: skip
    result = {"instruction_set": library.instruction_set, "rounds": rounds, "cases": [asdict(one) for one in results]}
    finish(result, table, verdicts, json_path=json_path, check=check)


if __name__ == "__main__":
    command()
