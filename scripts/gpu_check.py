"""Do stages on a GPU give the same tokens as stages on the CPU? Run by gpu_check.sh; prints a table.

    python -m scripts.gpu_check MODEL [--device cpu]

Starts MODEL (a folder or a .gguf file) in float32 with two stages, several times in turn: on the CPU, which is the
reference; on one GPU, which the stages share, staged through host memory, without graphs and with them; and with two GPUs by
NCCL. Each gets the same greedy requests. A token may differ from the reference only where the reference itself hardly preferred its own.

Exit code 0 when all agree, 1 when some do not or did not start, 2 without a GPU. With --device cpu all of them run on the
CPU, to try this script itself.
"""

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import click
import torch

from engine import Client, SamplingParams
from ipc.errors import EngineError
from scripts.bench.engine import Engine

NUM_STAGES = 2
NUM_TOKENS = 32
PROMPT_LENGTHS = (1, 2, 7, 16, 17, 60, 128, 300)
SEED = 20

MAX_GAP = 5e-4
"""Log probabilities of the two best tokens closer than this may change places in float32."""

REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to place the stages."""

    name: str
    flags: tuple[str, ...]
    gpus: str
    """CUDA_VISIBLE_DEVICES of its ranks; empty without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one request got."""

    token_ids: list[int]
    logprobs: list[float]
    gaps: list[float]
    """Between the log probabilities of the best token and the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one case did."""

    answers: list[Answer]
    start_s: float
    first_token_s: float
    """Of the first request, sent alone."""

    tokens_per_s: float
    """All requests at once, prompts included in the time."""


def cases_for(device: str, num_gpus: int) -> list[Case]:
    """The reference first."""
    reference = Case(name="CPU, gloo", flags=("--device", "cpu", "--transport", "gloo"), gpus="")
    if device == "cpu":
        staged = ("--device", "cpu", "--transport", "staged")
        return [reference, Case(name="CPU, staged, graphs", flags=(*staged, "--cudagraph-mode", "full_and_piecewise"), gpus="")]
    on_one = ("--device", "cuda", "--transport", "staged")
    cases = [
        reference,
        Case(name="one GPU, staged, eager", flags=(*on_one, "--cudagraph-mode", "none"), gpus="0"),
        Case(name="one GPU, staged", flags=on_one, gpus="0"),
    ]
    if num_gpus >= NUM_STAGES:
        cases.append(Case(name="two GPUs, staged", flags=("--device", "cuda", "--transport", "staged"), gpus="0,1"))
        cases.append(Case(name="two GPUs, NCCL", flags=("--device", "cuda", "--transport", "nccl"), gpus="0,1"))
    return cases


def run_case(case: Case, model: str) -> Result:
    """Start it, send the requests, stop it. Raises EngineError."""
    started = time.monotonic()
    words = [model, "--pp", str(NUM_STAGES), "--dtype", "float32", "--max-model-len", "512", *case.flags]
    with Engine(words, environment={"CUDA_VISIBLE_DEVICES": case.gpus}) as engine:
        start_s = time.monotonic() - started
        with Client(engine.address) as client:
            prompts = make_prompts(client.model.vocab_size)
            sent = time.monotonic()
            next(iter(_send(client, prompts[0], num_tokens=1)))
            first_token_s = time.monotonic() - sent
            sent = time.monotonic()
            # All are sent before the first is read.
            generations = [_send(client, prompt, num_tokens=NUM_TOKENS) for prompt in prompts]
            answers = [_collect(generation) for generation in generations]
            took = time.monotonic() - sent
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    return Result(answers=answers, start_s=start_s, first_token_s=first_token_s, tokens_per_s=num_tokens / took)


def make_prompts(vocab_size: int) -> list[list[int]]:
    """The same for every case."""
    generator = random.Random(SEED)
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in PROMPT_LENGTHS]


def differences(reference: Sequence[Answer], other: Sequence[Answer]) -> tuple[list[str], list[str]]:
    """Lines about tokens that differ for no reason, and about those that the reference hardly preferred.

    What a request generated behind its first difference is not compared: it answers another text.
    """
    wrong: list[str] = []
    excused: list[str] = []
    for number, (a, b) in enumerate(zip(reference, other, strict=True)):
        if len(a.token_ids) != len(b.token_ids):
            wrong.append(f"request {number}: {len(b.token_ids)} tokens, expected {len(a.token_ids)}")
        for position, (expected, got) in enumerate(zip(a.token_ids, b.token_ids, strict=False)):
            if expected != got:
                gap = a.gaps[position]
                line = f"request {number}, token {position}: {got}, expected {expected} (gap {gap:.1e})"
                (excused if gap < MAX_GAP else wrong).append(line)
                break
    return wrong, excused


def largest_deviation(reference: Sequence[Answer], other: Sequence[Answer]) -> float:
    """Of the log probabilities of tokens up to the first that differs."""
    largest = 0.0
    for a, b in zip(reference, other, strict=True):
        for i in range(min(len(a.token_ids), len(b.token_ids))):
            if a.token_ids[i] != b.token_ids[i]:
                break
            largest = max(largest, abs(a.logprobs[i] - b.logprobs[i]))
    return largest


def _send(client: Client, prompt: list[int], *, num_tokens: int):  # type: ignore[no-untyped-def]
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=2)
    return client.generate(prompt, params, timeout_s=REQUEST_TIMEOUT_S)


def _collect(generation) -> Answer:  # type: ignore[no-untyped-def]
    *_, last = generation
    told = last.logprobs
    return Answer(
        token_ids=list(last.token_ids),
        logprobs=[position.logprob for position in told],
        gaps=[position.top[0][1] - position.top[1][1] for position in told],
    )


@click.command()
@click.argument("model")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", help="cpu tries this script itself.")
def main(model: str, device: str) -> None:
    """Compare stages on GPUs with stages on the CPU."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and not num_gpus:
        click.echo("gpu_check: this machine has no GPU that torch can use; nothing was checked", err=True)
        sys.exit(2)
    names = [torch.cuda.get_device_name(i) for i in range(num_gpus)]
    click.echo(f"torch {torch.__version__}; GPUs: {', '.join(names) or 'none'}; {model}, {NUM_STAGES} stages, float32")
    reference: Result | None = None
    num_failed = 0
    for case in cases_for(device, num_gpus):
        try:
            result = run_case(case, model)
        except EngineError as error:
            click.echo(f"{case.name}: FAILED: {error}")
            num_failed += 1
            if reference is None:
                break
            continue
        reference = reference or result
        wrong, excused = differences(reference.answers, result.answers)
        num_failed += bool(wrong)
        deviation = largest_deviation(reference.answers, result.answers)
        click.echo(
            f"{case.name}: {'DIFFERENT' if wrong else 'same tokens'}; ready in {result.start_s:.1f} s, first token "
            f"{1e3 * result.first_token_s:.0f} ms, {result.tokens_per_s:.1f} tokens/s, log probabilities within {deviation:.1e}"
        )
        for line in (*wrong, *(f"{line}: a near tie, excused" for line in excused)):
            click.echo(f"  {line}")
    if device == "cuda" and num_gpus < NUM_STAGES:
        click.echo("two GPUs by NCCL: not run, this machine has one GPU")
    sys.exit(1 if num_failed else 0)


if __name__ == "__main__":
    main()
