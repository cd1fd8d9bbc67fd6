"""Too few blocks, aborts at any moment, and seeds that outlive a preemption (K2 K6, number 4)."""

import itertools
import random
from typing import Any

import pytest

from tests.conftest import Checkpoints
from tests.e2e.compare import check_stream, greedy_params
from tests.e2e.conftest import TinyOracle, random_prompt
from tests.e2e.harness import EnginePool
from tests.e2e.raw import RawClient
from tests.e2e.test_parity import FLAGS
from tests.oracle import Excused

pytestmark = pytest.mark.e2e

TIGHT = ("--block-size", "16", "--num-kv-blocks", "12", "--max-model-len", "128", "--max-num-seqs", "8")
MOST_SILENCE_S = 10.0


def test_k2_all_finish_when_there_are_too_few_blocks(
    engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    engine = engines.get(checkpoints.fx_r, flags=TIGHT)
    expected = tiny_oracle.expect(2, [20] * 8, 60)
    before = engine.raw.stats()["preemptions_total"]
    streams = [engine.raw.submit(e.prompt, **greedy_params(60)) for e in expected]
    engine.raw.wait(streams, 60)
    times = sorted(t for stream in streams for t in stream.times)
    assert max(b - a for a, b in itertools.pairwise(times)) < MOST_SILENCE_S
    stats = engine.settle()
    assert stats["preemptions_total"] > before
    assert stats["kv_blocks_total"] == 12
    for e, stream in zip(expected, streams, strict=True):
        excused += check_stream(engine.raw, e, stream)


def seeded_requests() -> list[tuple[list[int], dict[str, Any]]]:
    draw = random.Random(4)
    return [
        (random_prompt(draw, 20), {
            "max_tokens": 60, "seed": draw.randrange(1 << 62), "temperature": draw.choice([0.8, 1.0, 1.5]),
            "top_k": draw.choice([0, 40]), "top_p": draw.choice([1.0, 0.95]), "ignore_eos": True,
        })
        for _ in range(8)
    ]  # fmt: skip


def test_number_4_seeds_give_the_same_ids_everywhere(engines: EnginePool, checkpoints: Checkpoints) -> None:
    """One stage and two, alone and in a batch, before and after a forced preemption."""
    requests = seeded_requests()
    one = engines.get(checkpoints.fx_r, pp=1, flags=FLAGS).raw
    expected = [s.token_ids for s in one.run(requests, concurrency=1, timeout_s=60)]
    assert len({tuple(ids) for ids in expected}) == len(requests)
    assert [s.token_ids for s in one.run(requests, concurrency=8, timeout_s=60)] == expected
    two = engines.get(checkpoints.fx_r, flags=FLAGS).raw
    for concurrency in (1, 8):
        assert [s.token_ids for s in two.run(requests, concurrency=concurrency, timeout_s=60)] == expected
    tight = engines.get(checkpoints.fx_r, flags=TIGHT)
    before = tight.raw.stats()["preemptions_total"]
    assert [s.token_ids for s in tight.raw.run(requests, concurrency=8, timeout_s=60)] == expected
    assert tight.raw.stats()["preemptions_total"] > before


def test_number_4_a_drawn_seed_is_told_and_works_again(engines: EnginePool, checkpoints: Checkpoints) -> None:
    client = engines.get(checkpoints.fx_r, flags=FLAGS).raw
    prompt, params = [9, 8, 7], {"max_tokens": 20, "ignore_eos": True}
    first, second = client.run([(prompt, params)] * 2, concurrency=2, timeout_s=30)
    assert first.seed != second.seed and first.token_ids != second.token_ids
    [again] = client.run([(prompt, {**params, "seed": first.seed})], concurrency=1, timeout_s=30)
    assert again.token_ids == first.token_ids


ONE_AT_A_TIME = ("--max-num-seqs", "1", "--num-kv-blocks", "64")


def test_k6_abort_while_waiting_twice_and_unknown(
    engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    engine = engines.get(checkpoints.fx_r, flags=ONE_AT_A_TIME)
    client = engine.raw
    running_expected, waiting_expected, after = tiny_oracle.expect(6, [10, 12, 14], [400, 10, 20])
    running = client.submit(running_expected.prompt, **greedy_params(400))
    client.pump_until(lambda: bool(running.token_ids), 20, lambda: "the first request did not start")
    waiting = client.submit(waiting_expected.prompt, **greedy_params(10))
    assert client.stats()["requests_waiting"] == 1
    client.abort("nobody knows this one")
    client.abort(waiting.request_id)
    client.abort(waiting.request_id)
    client.wait([waiting], 10)
    assert (waiting.finish_reason, waiting.token_ids) == ("abort", [])
    assert not running.is_over

    client.abort(running.request_id)
    client.abort(running.request_id)
    client.wait([running], 10)
    assert running.finish_reason == "abort"
    assert running.token_ids == running_expected.token_ids[: len(running.token_ids)]
    client.abort(running.request_id)

    last = client.submit(after.prompt, **greedy_params(20))
    client.wait([last], 20)
    excused += check_stream(client, after, last)
    engine.settle()
    assert not client.unclaimed


def abort_around_the_end(client: RawClient, oracle: TinyOracle, num_runs: int, step_s: float) -> list[str]:
    [expected] = oracle.expect(66, [10], 24)
    reasons = []
    for run in range(num_runs):
        stream = client.submit(expected.prompt, **greedy_params(24))
        client.pump_for(run * step_s)
        client.abort(stream.request_id)
        client.wait([stream], 10)
        assert stream.finish_reason in ("abort", "length")
        assert stream.token_ids == expected.token_ids[: len(stream.token_ids)]
        assert stream.finish_reason == "abort" or len(stream.token_ids) == 24
        reasons.append(stream.finish_reason)
    return reasons


@pytest.mark.parametrize(
    "num_runs, step_s", [(8, 0.02), pytest.param(40, 0.005, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_k6_abort_at_the_moment_of_the_last_token(
    num_runs: int, step_s: float, engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle
) -> None:
    engine = engines.get(checkpoints.fx_r, flags=ONE_AT_A_TIME)
    reasons = abort_around_the_end(engine.raw, tiny_oracle, num_runs, step_s)
    assert reasons[0] == "abort"
    engine.settle()
    assert not engine.raw.unclaimed


def test_k6_a_client_that_leaves_frees_what_it_had(
    engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    engine = engines.get(checkpoints.fx_r, flags=FLAGS)
    [beside] = tiny_oracle.expect(67, [8], 60)
    stream = engine.raw.submit(beside.prompt, **greedy_params(60))
    other = RawClient(engine.address)
    gone = [other.submit([7, 8, 9], max_tokens=900, ignore_eos=True) for _ in range(4)]
    other.pump_until(lambda: all(s.token_ids for s in gone), 20, lambda: "the requests did not start")
    other.close()
    engine.raw.wait([stream], 30)
    excused += check_stream(engine.raw, beside, stream)
    engine.settle()
