"""Faults of other engines' sampling, each driven through the real scheduler and real stages in one process.

Values are held against tests/sampling_reference.py on transformers' logits.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ipc.messages import TokenLogprobs
from tests import tiny
from tests.oracle import GAP, LOGPROB_TOLERANCE, Oracle
from tests.sampling_reference import Array, shares_of
from tests.worker.sampled import Asked, Engine
from tests.worker.scheduled import prompt_of

EOS, OTHER_END = 1, 7
NUM_SEEDS = 300
STAGES = pytest.mark.parametrize("num_stages", [1, 2])


@pytest.fixture(scope="module")
def two_ends(tmp_path_factory) -> Path:
    """FX-R with two end tokens in its generation_config.json."""
    folder = tmp_path_factory.mktemp("two-ends")
    return tiny.random_llama(folder / "model", config={"eos_token_id": [EOS, OTHER_END]})


@STAGES
@pytest.mark.parametrize("params", [{}, {"ignore_eos": True, "stop_token_ids": [OTHER_END]}], ids=["end", "stop id"])
def test_s2_ends_are_barred_for_exactly_min_tokens(path, num_stages: int, params: dict[str, Any]) -> None:
    """A bias calls for the end at every token, and prompts come in chunks."""
    forced = params.get("stop_token_ids", [EOS])[0]
    engine = Engine(path, num_stages, max_num_seqs=8, budget=8)
    counts = (0, 1, 4, 10)
    asked = [
        engine.ask(prompt_of(20, n), min_tokens=n, max_tokens=32, logit_bias={forced: 100.0}, temperature=t, **params)
        for n in counts for t in (0.0, 1.0)
    ]  # fmt: skip
    engine.run_all()
    assert [len(one.token_ids) for one in asked] == [n + 1 for n in counts for _ in range(2)]
    for one in asked:
        assert (one.token_ids.index(forced), one.finish_reason) == (len(one.token_ids) - 1, "stop")


def test_s5_ignore_eos_is_about_all_ends_of_the_model_and_no_stop_ids(two_ends) -> None:
    for end in (EOS, OTHER_END):
        engine = Engine(two_ends, 2)
        params = {"max_tokens": 12, "logit_bias": {end: 100.0}}
        ended = engine.ask(prompt_of(9), **params)
        ignored = engine.ask(prompt_of(9), ignore_eos=True, **params)
        stopped = engine.ask(prompt_of(9), ignore_eos=True, stop_token_ids=[end], **params)
        engine.run_all()
        assert (ended.token_ids, ended.finish_reason) == ([end], "stop")
        assert (ignored.token_ids, ignored.finish_reason) == ([end] * 12, "length")
        assert (stopped.token_ids, stopped.finish_reason) == ([end], "stop")


@STAGES
def test_s6_cold_temperatures_are_greedy_beside_hot_neighbours(path, oracle, num_stages: int) -> None:
    engine, prompt = Engine(path, num_stages), prompt_of(15)
    greedy = oracle.greedy(prompt, 20)
    cold = []
    for temperature in (0.0, 1e-12, 1e-6, 1e-4):
        cold.append(engine.ask(prompt, temperature=temperature, max_tokens=20, ignore_eos=True, prefix_caching=False))
        engine.ask(prompt, temperature=1.0, max_tokens=20, ignore_eos=True)
    engine.run_all()
    same = next((i for i, gap in enumerate(greedy.gaps) if gap < GAP), 20)
    assert same > 5, "the oracle is never sure: the test sees nothing"
    for one in cold:
        assert one.token_ids[:same] == greedy.token_ids[:same]


@pytest.fixture(scope="module")
def tied_pairs(tmp_path_factory) -> Path:
    """Token 2 i + 1 has the head row of token 2 i: their logits are equal."""
    folder = tmp_path_factory.mktemp("tied-pairs")
    return with_equal_pairs(tiny.random_llama(folder / "model", tied=False))


def with_equal_pairs(folder: Path) -> Path:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    head = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = head[::2].repeat_interleave(2, dim=0).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("top_k", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_s7_ties_at_the_edge_of_top_k_are_settled_alike_in_every_batch(tied_pairs, top_k: int) -> None:
    """Lower ids win: of pairs of equal logits the first k tokens, whatever the batch, and each seed has its token."""
    prompt = prompt_of(10)
    logits = Oracle.of(tied_pairs).model(torch.tensor([prompt])).logits[0, -1].detach()
    allowed = torch.sort(logits, descending=True, stable=True).indices[:top_k].tolist()
    drawn = {}
    for batch in (1, 4, 8, 16):
        engine, asked = Engine(tied_pairs, 1), []
        for first in range(0, NUM_SEEDS, batch):
            asked += [
                engine.ask(prompt, seed=seed, top_k=top_k, max_tokens=1, temperature=30.0) for seed in range(first, min(first + batch, NUM_SEEDS))
            ]
            engine.run_all()
        drawn[batch] = [one.token_ids for one in asked]
    assert drawn[1] == drawn[4] == drawn[8] == drawn[16]
    assert {token_id for (token_id,) in drawn[1]} == set(allowed)


@STAGES
def test_s4_penalties_count_tokens_that_the_prefix_cache_had(path, oracle, num_stages: int) -> None:
    """Beside rows with other penalties, cold and warm; log probabilities are those of the formulas, for 20 tokens."""
    engine, prompt = Engine(path, num_stages), [5, 9, 5, *prompt_of(45)]
    mixes = [
        {"repetition_penalty": 1.8}, {"presence_penalty": 1.5}, {"frequency_penalty": 1.2},
        {"repetition_penalty": 0.7, "presence_penalty": -1.0, "frequency_penalty": 0.5},
    ]  # fmt: skip
    runs = []
    for _ in ("cold", "warm"):
        runs += [
            engine.ask(prompt, max_tokens=20, ignore_eos=True, logprobs=5, logprobs_mode="processed", seed=i, **mix)
            for i, mix in enumerate(mixes)
        ]
        engine.run_all()
    assert engine.scheduler.stats().prefix_hit_tokens >= 4 * 32
    for one in runs:
        logits = logits_of(oracle, one)
        for index, token_id in enumerate(one.token_ids):
            shares = shares_of(logits[index], prompt, one.token_ids[:index], one.params, (EOS,))
            check_told(one.logprobs[index], token_id, np.log(shares))


@STAGES
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_s9_one_entry_for_each_token(path, oracle, num_stages: int, num_top: int) -> None:
    """Eight at a time; the sampled token is there, and the others are the most likely ones in order."""
    engine = Engine(path, num_stages)
    asked = [
        engine.ask(prompt_of(6, seed), max_tokens=12, temperature=2.0, seed=seed, logprobs=num_top, ignore_eos=True)
        for seed in range(8)
    ]  # fmt: skip
    engine.run_all()
    outside = 0
    for one in asked:
        assert len(one.logprobs) == len(one.token_ids) == 12
        logits = logits_of(oracle, one)
        for index, token_id in enumerate(one.token_ids):
            told = one.logprobs[index]
            assert (told.start, told.num_top, len(told.token_ids)) == (6 + index, num_top, 1 + num_top)
            check_told(told, token_id, shares_log(logits[index]))
            assert num_top == 0 or abs(told.logprobs[1] - shares_log(logits[index]).max()) < LOGPROB_TOLERANCE
            outside += token_id not in told.token_ids[1:]
    assert outside > 0, "every sampled token was among the most likely ones"


@STAGES
def test_s10_s11_prompt_logprobs_whatever_the_chunks_and_the_cache(path, oracle, num_stages: int) -> None:
    """The same prompt three times with them, without, and with, beside plain requests with the same beginning."""
    engine, prompt = Engine(path, num_stages, max_num_seqs=8, budget=16), prompt_of(100)
    with torch.inference_mode():
        right = oracle.model(torch.tensor([prompt])).logits[0].double().log_softmax(dim=1).numpy()
    for num_top in (1, 1, 1, None, 1):
        params = {"max_tokens": 4, "ignore_eos": True}
        one = engine.ask(prompt, prompt_logprobs=num_top, **params)
        others = [engine.ask([*prompt[:70], *prompt_of(9, seed)], **params) for seed in range(2)]
        engine.run_all()
        assert all(len(other.token_ids) == 4 for other in (one, *others))
        assert sum(len(piece.ranks) for piece in one.prompt_logprobs) == (0 if num_top is None else 99)
        position = 1
        for piece in one.prompt_logprobs:
            assert piece.start == position
            for ids, logprobs in zip(piece.token_ids.reshape(-1, 2), piece.logprobs.reshape(-1, 2), strict=True):
                assert ids[0] == prompt[position]
                assert np.abs(logprobs - right[position - 1][ids]).max() < LOGPROB_TOLERANCE
                position += 1


def logits_of(oracle: Oracle, asked: Asked) -> Array:
    """[answer, V] float64: what the model says before each token of the answer."""
    with torch.inference_mode():
        logits = oracle.model(torch.tensor([asked.prompt + asked.token_ids[:-1]])).logits[0]
    return np.asarray(logits[len(asked.prompt) - 1 :].double().numpy())


def shares_log(logits: Array) -> Array:
    return np.asarray(logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))


def check_told(told: TokenLogprobs, token_id: int, expected: Sequence[float] | Array) -> None:
    """Log probabilities of one position, the sampled token's first and the others falling."""
    assert told.token_ids[0] == token_id
    assert (np.diff(told.logprobs[1:]) <= 0).all()
    for known, logprob in zip(told.token_ids.tolist(), told.logprobs.tolist(), strict=True):
        assert abs(logprob - expected[known]) < LOGPROB_TOLERANCE
