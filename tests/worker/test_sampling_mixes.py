"""Requests with every mix of parameters in one batch: does each get what it would get alone, and what its parameters mean?

The real scheduler drives real stages in one process; the meaning is tests/sampling_reference.py's, on transformers' logits.
"""

import random
from typing import Any

import numpy as np
import pytest
import torch

from ipc.params import SamplingParams
from kernels.sampling import gumbel_noise_definition
from tests.oracle import GAP, LOGPROB_TOLERANCE, Oracle
from tests.sampling_reference import changed_logits, shares_of
from tests.worker.sampled import Asked, Engine

EOS = (1,)
LENGTHS = (2, 60)
Array = Any


def mixed_params(draw: random.Random, index: int) -> SamplingParams:
    """Another mix for each index; half of all parameters in each."""
    words = [[draw.randrange(3, 512) for _ in range(draw.choice((1, 1, 2)))] for _ in range(20)]
    possible: dict[str, Any] = {
        "temperature": draw.choice((0.0, 0.3, 0.8, 1.5)), "top_k": draw.choice((1, 5, 40)), "top_p": draw.uniform(0.3, 0.99),
        "min_p": draw.uniform(0.001, 0.2), "typical_p": draw.uniform(0.3, 0.95), "presence_penalty": draw.uniform(-1, 2),
        "frequency_penalty": draw.uniform(-1, 2), "repetition_penalty": draw.uniform(0.8, 2.0),
        "min_tokens": draw.randrange(1, 12), "logit_bias": {draw.randrange(512): draw.uniform(-20, 8) for _ in range(30)},
        "allowed_token_ids": draw.sample(range(512), 200), "bad_word_ids": words, "stop_token_ids": draw.sample(range(512), 10),
        "ignore_eos": True, "logprobs_mode": "processed",
    }  # fmt: skip
    chosen = {name: value for name, value in possible.items() if draw.random() < 0.5}
    max_tokens = max(draw.randint(*LENGTHS), chosen.get("min_tokens", 0))
    return SamplingParams(seed=index, max_tokens=max_tokens, logprobs=draw.choice((0, 1, 5)), **chosen)  # type: ignore[arg-type]


def requests_of(seed: int, count: int) -> list[Asked]:
    draw = random.Random(seed)
    asked = []
    for index in range(count):
        params = mixed_params(draw, index)
        prompt = [draw.randrange(3, 512) for _ in range(draw.randint(2, 60))]
        asked.append(Asked(prompt, params, aborted_after=draw.randint(1, 10) if index % 8 == 5 else None))
    return asked


@pytest.fixture(scope="module")
def lone_runs(path) -> list[Asked]:
    """Each request alone, on one stage."""
    runs = [Asked(asked.prompt, asked.params) for asked in requests_of(48, 48)]
    engine = Engine(path, 1, max_num_seqs=1)
    for asked in runs:
        engine.add(asked)
        engine.run_all()
    return runs


def test_s13_parameters_mean_what_they_are_defined_to_mean(path, oracle, lone_runs) -> None:
    """Tokens have a share, and log probabilities are those of the raw or the processed distribution, at every position."""
    num_checked = 0
    for asked in lone_runs:
        assert asked.token_ids and len(asked.logprobs) == len(asked.token_ids)
        logits = reference_logits(oracle, asked)
        for index, token_id in enumerate(asked.token_ids):
            answer = asked.token_ids[:index]
            shares = shares_of(logits[index], asked.prompt, answer, asked.params, EOS)
            raw = shares_of(logits[index], asked.prompt, answer, SamplingParams(), ())
            told = asked.logprobs[index]
            expected = shares if asked.params.logprobs_mode == "processed" else raw
            if shares[token_id] == 0:
                assert is_near_an_edge(asked, logits, index, token_id), f"{asked.params}: token {index} has no share"
                continue
            for known_id, logprob in zip(told.token_ids.tolist(), told.logprobs.tolist(), strict=True):
                if expected[known_id] > 0 and np.isfinite(logprob):
                    assert abs(logprob - np.log(expected[known_id])) < 2 * LOGPROB_TOLERANCE, (asked.params, index, known_id)
                    num_checked += 1
            assert told.token_ids[0] == token_id
    assert num_checked > 1000


@pytest.mark.parametrize("num_stages", [1, 2])
def test_s13_requests_of_one_batch_do_not_depend_on_each_other(path, oracle, lone_runs, num_stages: int) -> None:
    """Arrivals and aborts at random, a pool that is too small for all, chunks, steps in flight: tokens as alone."""
    engine, together = Engine(path, num_stages, num_blocks=12), requests_of(48, 48)
    draw, waiting = random.Random(num_stages), list(together)
    draw.shuffle(waiting)
    while waiting or engine.scheduler.has_unfinished():
        for _ in range(min(len(waiting), draw.choice((0, 0, 1, 4)))):
            engine.add(waiting.pop())
        engine.step()
    assert engine.scheduler.stats().preemptions > 0
    for asked, alone in zip(together, lone_runs, strict=True):
        check_equal(asked, alone, oracle)


def check_equal(asked: Asked, alone: Asked, oracle: Oracle) -> None:
    count = len(alone.token_ids) if asked.aborted_after is None else asked.aborted_after
    for index, expected in enumerate(alone.token_ids[:count]):
        got = asked.token_ids[index]
        if got != expected:
            gap = score_gap(oracle, alone, index, got)
            assert gap < GAP, f"{asked.params}: token {index} is {got} instead of {expected}, although the gap is {gap:.3g}"
            return
        mine, theirs = asked.logprobs[index], alone.logprobs[index]
        assert (mine.start, mine.num_top) == (theirs.start, theirs.num_top)
        assert mine.token_ids[0] == expected
        finite = np.isfinite(theirs.logprobs) & np.isfinite(mine.logprobs)
        assert np.abs(mine.logprobs[finite] - theirs.logprobs[finite]).max() < LOGPROB_TOLERANCE
    assert len(asked.token_ids) >= count and (asked.aborted_after is not None or len(asked.token_ids) == count)


def reference_logits(oracle: Oracle, asked: Asked) -> Array:
    """[answer, V] float64: what the model says before each of its tokens."""
    with torch.inference_mode():
        logits = oracle.model(torch.tensor([asked.prompt + asked.token_ids[:-1]])).logits[0]
    return logits[len(asked.prompt) - 1 :].double().numpy()


def score_gap(oracle: Oracle, alone: Asked, index: int, other: int) -> float:
    """How far apart two tokens' sums of scaled logit and noise are."""
    answer, params = alone.token_ids[:index], alone.params
    logits = changed_logits(reference_logits(oracle, alone)[index], alone.prompt, answer, params, EOS)
    both = torch.tensor([[alone.token_ids[index], other]])
    position = torch.tensor([len(alone.prompt) + index])
    noise = gumbel_noise_definition(torch.tensor([params.seed]), position, both)[0].double().numpy()
    temperature = params.draw_rules().temperature
    scores = logits[both[0]] / temperature + noise if temperature else logits[both[0]]
    return float(abs(scores[0] - scores[1]))


def is_near_an_edge(asked: Asked, logits: Array, index: int, token_id: int) -> bool:
    """A filter left it out by less than float32's noise: with parameters a hair wider it stays."""
    rules = asked.params.draw_rules()
    wider = SamplingParams(**{
        **asked.params.to_wire(), "top_p": min(1.0, rules.top_p + GAP), "typical_p": min(1.0, rules.typical_p + GAP),
        "min_p": rules.min_p * (1 - GAP),
    })  # fmt: skip
    return bool(shares_of(logits[index], asked.prompt, asked.token_ids[:index], wider, EOS)[token_id] > 0)
