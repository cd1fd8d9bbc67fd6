"""Speculation by lookup on two real stages: the oracle's tokens, drafts that are accepted, and stops in their middle."""

import pytest

from tests import tiny
from tests.conftest import Checkpoints
from tests.e2e.conftest import TinyOracle
from tests.e2e.harness import Engine, EnginePool
from tests.oracle import Excused, check_greedy

pytestmark = pytest.mark.e2e

FLAGS = ("--num-kv-blocks", "256", "--max-num-seqs", "64", "--speculative-lookup-tokens", "8")


def drafts(engine: Engine) -> tuple[int, int]:
    stats = engine.raw.stats()
    return int(stats["draft_tokens_total"]), int(stats["accepted_draft_tokens_total"])


def test_many_at_once_get_the_same_tokens_with_and_without_drafts(
    engines: EnginePool, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    """Requests with log probabilities get no drafts; those with few allowed tokens soon repeat themselves."""
    engine = engines.get(checkpoints.fx_r, flags=FLAGS)
    before = drafts(engine)
    expected = tiny_oracle.expect(61, [7, 33, 90], 24)
    few = [
        {"max_tokens": 80, "temperature": temperature, "seed": 5, "ignore_eos": True, "allowed_token_ids": (20, 21, 22)[:count]}
        for temperature, count in ((0.0, 2), (0.0, 3), (0.3, 2), (1.0, 2))
    ]
    requests = [(e.prompt, {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}) for e in expected]
    for params in few:
        requests += [([20, 21, 22] * 4, params), ([20, 21, 22] * 4, {**params, "logprobs": 0})]
    streams = engine.raw.run(requests, concurrency=len(requests), timeout_s=60)
    for e, stream in zip(expected, streams, strict=False):
        excused += check_greedy(e, engine.raw.greedy, stream.token_ids)
    pairs = streams[len(expected) :]
    assert [s.token_ids for s in pairs[::2]] == [s.token_ids for s in pairs[1::2]]
    drafted, accepted = (after - earlier for after, earlier in zip(drafts(engine), before, strict=True))
    assert drafted >= accepted > 20
    engine.settle()


def test_a_stop_id_among_accepted_drafts(engines: EnginePool, checkpoints: Checkpoints) -> None:
    """After token k the chain says k + 1; the prompt has said it before."""
    engine = engines.get(checkpoints.chain, flags=FLAGS)
    before = drafts(engine)
    script = list(range(1, len(tiny.SCRIPT)))
    streams = {
        stop: engine.raw.submit([*script, 1], temperature=0.0, max_tokens=64, stop_token_ids=(stop,)) for stop in script[7:24]
    }
    engine.raw.wait(streams.values(), 60)
    for stop, stream in streams.items():
        assert stream.token_ids == list(range(2, stop + 1))
        assert (stream.finish_reason, stream.stop_reason) == ("stop", stop)
    drafted, accepted = (after - earlier for after, earlier in zip(drafts(engine), before, strict=True))
    assert drafted >= accepted > 20
    engine.settle()
