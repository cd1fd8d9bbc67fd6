"""Cached beginnings against the real model: the same ids and log probabilities, cold, warm and after any churn.

Cases C9, C10, K14, K15 and X7 of the list of faults.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import Checkpoints
from tests.e2e.compare import check_stream, greedy_params
from tests.e2e.conftest import TinyOracle, random_prompt
from tests.e2e.harness import ROOT, Engine, EnginePool, serve
from tests.e2e.raw import RawClient, Stream, positions
from tests.oracle import Excused, Greedy

pytestmark = pytest.mark.e2e

BLOCK = 16
SMALL = ("--block-size", str(BLOCK), "--num-kv-blocks", "16", "--max-model-len", "256", "--max-num-seqs", "8")
ROOMY = ("--block-size", str(BLOCK), "--num-kv-blocks", "256", "--max-model-len", "512", "--max-num-seqs", "16")
NUM_TOKENS = 8
LOGPROB_TOLERANCE = 1e-4
"""Between two runs of the same prompt in float32, whatever was cached."""


def reset(client: RawClient) -> None:
    reply = client.ask("reset_prefix_cache")
    assert not reply.error, reply.error


def hits(client: RawClient) -> int:
    return int(client.stats()["prefix_cache_hit_tokens_total"])


def first_logprob(stream: Stream) -> float:
    return positions(stream.logprobs, start=len(stream.prompt))[0].logprob


def run_each(
    client: RawClient, expected: Sequence[Greedy], excused: list[Excused], *, concurrency: int = 1
) -> list[float]:
    """All right by the oracle; the first log probability of each."""
    requests = [(e.prompt, greedy_params(len(e.token_ids))) for e in expected]
    streams = client.run(requests, concurrency=concurrency, timeout_s=60)
    for e, stream in zip(expected, streams, strict=True):
        excused += check_stream(client, e, stream)
    return [first_logprob(stream) for stream in streams]


def assert_same(first: Sequence[float], second: Sequence[float]) -> None:
    assert all(abs(a - b) < LOGPROB_TOLERANCE for a, b in zip(first, second, strict=True)), (first, second)


def crowd_out(engine: Engine, tiny_oracle: TinyOracle) -> None:
    """Requests that don't fit together, so that some are refused blocks and preempted."""
    before = engine.raw.stats()["preemptions_total"]
    draw = random.Random(90)
    streams = [
        engine.raw.submit(random_prompt(draw, 20), max_tokens=60, temperature=0.0, ignore_eos=True) for _ in range(8)
    ]
    engine.raw.wait(streams, 60)
    assert engine.raw.stats()["preemptions_total"] > before


def test_c9_cold_warm_and_after_others_lacked_blocks(
    engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    engine = engines.get(checkpoints.fx_r, flags=SMALL)
    client = engine.raw
    draw = random.Random(9)
    common = random_prompt(draw, 48)
    lengths = (15, 16, 17, 31, 32, 33, 48)
    expected = [tiny_oracle.greedy([*common[:length], *random_prompt(draw, 5)], NUM_TOKENS) for length in lengths]
    reset(client)
    cold = []
    for one in expected:
        reset(client)
        cold += run_each(client, [one], excused)
    before = hits(client)
    run_each(client, expected, excused)
    warm = run_each(client, expected, excused)
    assert hits(client) - before >= 2 * sum(length // BLOCK * BLOCK for length in lengths[1:]) - 48
    assert_same(cold, warm)
    crowd_out(engine, tiny_oracle)
    assert_same(cold, run_each(client, expected, excused))
    engine.settle()


def test_c10_whole_blocks_leave_one_token_to_compute(
    engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    engine = engines.get(checkpoints.fx_r, flags=ROOMY)
    client = engine.raw
    for length in (16, 32, 64):
        [expected] = tiny_oracle.expect(100 + length, [length], NUM_TOKENS)
        cold = run_each(client, [expected], excused)
        for _ in range(2):
            before = hits(client)
            assert_same(cold, run_each(client, [expected], excused))
            assert hits(client) - before == length - BLOCK
        one = tiny_oracle.greedy(expected.prompt, 1)
        assert_same(cold, run_each(client, [one], excused))
        assert_same(cold * 8, run_each(client, [expected] * 8, excused, concurrency=8))
    engine.settle()


def pairs_in_one_step(
    engine: Engine, tiny_oracle: TinyOracle, excused: list[Excused], *, num_pairs: int, most_delay_s: float
) -> None:
    client, draw = engine.raw, random.Random(14)
    for number in range(num_pairs):
        common = random_prompt(draw, 64)
        first_prompt, second_prompt = [*common, *random_prompt(draw, 3)], [*common, *random_prompt(draw, 6)]
        expected = tiny_oracle.greedy(second_prompt, NUM_TOKENS)
        first = client.submit(first_prompt, **greedy_params(NUM_TOKENS))
        second = client.submit(second_prompt, **greedy_params(NUM_TOKENS))
        if number % 2:
            client.pump_for(draw.uniform(0, most_delay_s))
            client.abort(first.request_id)
        client.wait([first, second], 30)
        excused += check_stream(client, expected, second)
    engine.settle()


@pytest.mark.parametrize("num_pairs", [16, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_k14_pairs_with_one_beginning_in_the_same_millisecond(
    num_pairs: int, engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    """The first of every other pair is aborted, maybe before its blocks are written."""
    engine = engines.get(checkpoints.fx_r, flags=ROOMY)
    pairs_in_one_step(engine, tiny_oracle, excused, num_pairs=num_pairs, most_delay_s=0.03)


@pytest.mark.parametrize("num_rounds", [10, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_k15_churn_far_beyond_the_pool_and_the_old_beginning_again(
    num_rounds: int, engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    """Evicted means gone."""
    engine = engines.get(checkpoints.fx_r, flags=SMALL)
    client, draw = engine.raw, random.Random(15)
    [expected] = tiny_oracle.expect(15, [64 + 3], NUM_TOKENS)
    reset(client)
    first = run_each(client, [expected], excused)
    for _ in range(num_rounds):
        before = hits(client)
        assert_same(first, run_each(client, [expected], excused))
        assert hits(client) - before == 64, "just computed, and nothing else ran since"
        others = [(random_prompt(draw, 100), {"max_tokens": 4, "temperature": 0.0}) for _ in range(5)]
        client.run(others, concurrency=draw.choice([1, 3]), timeout_s=60)
        before = hits(client)
        assert_same(first, run_each(client, [expected], excused))
        assert hits(client) == before, "five prompts of seven blocks leave nothing of it in a pool of sixteen"
    engine.settle()


def test_salts_and_opting_out_change_no_token(
    engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    client = engines.get(checkpoints.fx_r, flags=ROOMY).raw
    [expected] = tiny_oracle.expect(77, [40], NUM_TOKENS)
    run_each(client, [expected], excused)
    for params, num_hits in (({"cache_salt": "a"}, 0), ({"cache_salt": "a"}, 32), ({"prefix_caching": False}, 0), ({}, 32)):
        before = hits(client)
        [stream] = client.run([(expected.prompt, greedy_params(NUM_TOKENS) | params)], concurrency=1, timeout_s=30)
        excused += check_stream(client, expected, stream)
        assert hits(client) - before == num_hits


def test_prompt_logprobs_are_complete_on_a_warm_cache(
    engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    client = engines.get(checkpoints.fx_r, flags=ROOMY).raw
    [expected] = tiny_oracle.expect(78, [50], NUM_TOKENS)
    run_each(client, [expected], excused)
    before = hits(client)
    params = greedy_params(NUM_TOKENS) | {"prompt_logprobs": 0}
    [stream] = client.run([(expected.prompt, params)], concurrency=1, timeout_s=30)
    assert hits(client) == before
    told = positions(stream.prompt_logprobs, start=1)
    assert [p.token_id for p in told] == expected.prompt[1:]
    right = tiny_oracle.oracle.logprobs(expected.prompt)
    for index, position in enumerate(told):
        assert abs(position.logprob - float(right[index][position.token_id])) < 1e-3


def test_x7_a_constant_hash_gives_right_answers(
    checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused], tmp_path: Path
) -> None:
    """Prompts that differ in their first, middle or last block only, cold and warm. Python's own hash differs in each process."""
    log = tmp_path / "log"
    env = {"PYTHONPATH": f"{Path(__file__).parent / 'constant_hash'}:{ROOT}", "BRIGADE_HASH_LOG": str(log)}
    draw = random.Random(7)
    start = random_prompt(draw, 4 * BLOCK + 3)
    prompts = [start]
    for place in (0, BLOCK, 2 * BLOCK + 5, 4 * BLOCK - 1, 4 * BLOCK + 1):
        other = list(start)
        other[place] += 1 if other[place] < 511 else -1
        prompts.append(other)
    prompts.append(start[BLOCK:] + start[:BLOCK])
    expected = [tiny_oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    with serve(checkpoints.fx_r, pp=1, flags=ROOMY, env=env) as engine:
        assert log.read_text() == "constant\n"
        cold = run_each(engine.raw, expected, excused)
        assert_same(cold, run_each(engine.raw, expected, excused, concurrency=3))
        assert hits(engine.raw) > 4 * BLOCK * len(prompts), "the cache was not used"
