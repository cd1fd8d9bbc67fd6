"""Do random days keep every promise: balanced books, own tokens only, one ending each, nobody starved?"""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.request import Request
from tests.engine.scheduler_harness import EOS, Harness

CONFIGS = st.fixed_dictionaries({
    "num_stages": st.integers(1, 4),
    "max_num_seqs": st.integers(1, 5),
    "max_num_batched_tokens": st.integers(1, 24),
    "block_size": st.integers(1, 5),
    "max_model_len": st.integers(2, 30),
    "eos_token_ids": st.sampled_from([frozenset(), EOS, frozenset(range(0, 500, 9))]),
})
REQUESTS = st.fixed_dictionaries({
    "prompt_share": st.floats(0, 1),
    "max_tokens": st.integers(1, 25) | st.none(),
    "stop_token_ids": st.sampled_from([(), tuple(range(1, 500, 17))[:20]]),
    "ignore_eos": st.booleans(),
    "logprobs": st.sampled_from([None, None, 0, 2]),
    "prompt_logprobs": st.sampled_from([None, None, 0, 1]),
})
ACTIONS = st.lists(
    st.tuples(st.just("add"), REQUESTS)
    | st.tuples(st.sampled_from(["send", "send", "receive", "turn", "turn"]), st.none())
    | st.tuples(st.just("abort"), st.integers(0, 1000))
    | st.tuples(st.just("nan"), st.integers(0, 1000)),
    max_size=70,
)


def act(harness: Harness, name: str, argument: Any) -> None:
    if name == "add":
        params = dict(argument)
        share = params.pop("prompt_share")
        harness.add(1 + int(share * (harness.config.max_model_len - 2)), **params)
    elif name == "send":
        harness.send()
    elif name == "turn":
        harness.send_all()
        if harness.worker.pending:
            harness.receive()
    elif name == "receive" and harness.worker.pending:
        harness.receive()
    elif name in ("abort", "nan") and harness.requests:
        request: Request = harness.requests[argument % len(harness.requests)]
        if name == "abort":
            harness.abort(request)
        else:
            harness.worker.nan_requests.add(request.request_id)


@given(config=CONFIGS, spare_blocks=st.integers(0, 8), actions=ACTIONS)
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_histories(config: dict[str, Any], spare_blocks: int, actions: list[tuple[str, Any]]) -> None:
    smallest = -(-config["max_model_len"] // config["block_size"])
    harness = Harness(**config, num_blocks=smallest + spare_blocks)
    for name, argument in actions:
        act(harness, name, argument)
    harness.drain()


@pytest.mark.parametrize("seed", range(40))
def test_long_days_with_tiny_pools(seed: int) -> None:
    """Many requests at once on few blocks: preemption all the time, while the oldest request never stands still."""
    draw = random.Random(seed)
    max_model_len = draw.randint(16, 40)
    block_size = draw.choice([1, 2, 4])
    harness = Harness(
        num_stages=draw.randint(1, 4),
        max_num_seqs=draw.randint(2, 10),
        max_num_batched_tokens=draw.choice([4, 8, 16, 64]),
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=-(-max_model_len // block_size) + draw.randint(0, 6),
        eos_token_ids=EOS,
    )
    for _ in range(200):
        if draw.random() < 0.3:
            harness.add(
                draw.randint(1, max_model_len // 2),
                max_tokens=draw.randint(1, 40),
                logprobs=draw.choice([None, 1]),
                prompt_logprobs=draw.choice([None, 1]),
            )
        if draw.random() < 0.05 and harness.requests:
            harness.abort(draw.choice(harness.requests))
        if draw.random() < 0.7:
            harness.send_all()
        if harness.worker.pending and draw.random() < 0.8:
            harness.receive()
    oldest_stands_still_since = 0
    oldest_state: tuple[int, int] | None = None
    while harness.scheduler.has_unfinished() or harness.worker.pending:
        harness.send_all()
        harness.receive()
        oldest = next(iter(harness.scheduler.unfinished()), None)
        state = (oldest.internal_id, oldest.num_computed_tokens + 1000 * len(oldest.output_token_ids)) if oldest else None
        oldest_stands_still_since = oldest_stands_still_since + 1 if state == oldest_state else 0
        oldest_state = state
        assert oldest_stands_still_since <= 2 * harness.scheduler.depth
    harness.check_end()
