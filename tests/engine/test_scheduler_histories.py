"""Do random days keep every promise: balanced books, own tokens only, one ending each, nobody starved?

The harness checks the books and what each request saw after every step; the fake workers check every read and write.
"""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from engine.kv_spec import FullAttention, KVSpec, SlidingWindow, most_blocks
from engine.request import Request, RequestStatus
from tests.engine.scheduler_harness import EOS, Harness
from tests.fakes import REPEATING, FakeGrammar

QUICK_HISTORIES = 150
MANY_HISTORIES = 2_000

FULL = FullAttention()
GROUPS = st.sampled_from([
    (FULL,), (FULL,), (SlidingWindow(5),), (FULL, SlidingWindow(3)), (SlidingWindow(1), FULL, SlidingWindow(7)),
    (SlidingWindow(4), SlidingWindow(4)),
])  # fmt: skip
CONFIGS = st.fixed_dictionaries({
    "num_stages": st.integers(1, 4),
    "max_num_seqs": st.sampled_from([1, 2, 4, 6, 8]),
    "max_num_batched_tokens": st.sampled_from([1, 3, 8, 16, 24]),
    "block_size": st.integers(1, 5),
    "max_model_len": st.sampled_from([2, 7, 16, 24, 30]),
    "eos_token_ids": st.sampled_from([frozenset(), EOS, frozenset(range(0, 500, 9))]),
    "kv_groups": GROUPS,
    "prefix_caching": st.sampled_from([True, True, True, False]),
    "has_constant_hash": st.booleans(),
    "speculative_lookup_tokens": st.sampled_from([0, 1, 3, 16]),
})
PARAMS = st.fixed_dictionaries({
    "max_tokens": st.sampled_from([1, 2, 9, 25, None]),
    "stop_token_ids": st.sampled_from([(), (), (6,), tuple(range(1, 500, 17))[:20]]),
    "ignore_eos": st.booleans(),
    "logprobs": st.sampled_from([None, None, 0, 2]),
    "prompt_logprobs": st.sampled_from([None, None, None, 0, 1]),
    "prefix_caching": st.sampled_from([True, True, True, False]),
    "seed": st.sampled_from([0, 1, REPEATING, REPEATING + 1, REPEATING + 2]),
})  # fmt: skip


def smallest_pool(config: dict[str, Any]) -> int:
    return most_blocks(
        config.get("kv_groups", (FULL,)), config["max_model_len"], config["block_size"], config["max_num_batched_tokens"]
    )


def family_prompt(family: int, num_common: int, num_tokens: int, tail: int) -> list[int]:
    """Prompts of one family begin with the same tokens; families 0 and 1 repeat few tokens, so that blocks look alike."""
    common = [5 + (i * 7 * family) % (3 if family < 2 else 90) for i in range(min(num_common, num_tokens))]
    return common + [100 + tail * 31 % 290 + i % 7 for i in range(num_tokens - len(common))]


class RandomDay(RuleBasedStateMachine):
    """One history: a small engine, and whatever may happen to it."""

    @initialize(config=CONFIGS, spare_blocks=st.sampled_from([0, 0, 1, 3, 8]))
    def begin(self, config: dict[str, Any], spare_blocks: int) -> None:
        self.harness = Harness(**config, num_blocks=smallest_pool(config) + spare_blocks)

    @rule(
        params=PARAMS, family=st.integers(0, 2), common=st.integers(0, 20), num_tokens=st.integers(1, 29),
        tail=st.integers(0, 3), salt=st.sampled_from([(), (), ((0, b"a"),), ((4, b"image"),)]), count=st.integers(1, 4),
        grammar=st.sampled_from([None, None, 1, 4, 30]),
    )  # fmt: skip
    def add(
        self, params: dict[str, Any], family: int, common: int, num_tokens: int, tail: int,
        salt: tuple[tuple[int, bytes], ...], count: int, grammar: int | None,
    ) -> None:  # fmt: skip
        num_tokens = min(num_tokens, self.harness.config.max_model_len - 1)
        for number in range(count):
            self.harness.add(
                family_prompt(family, common, num_tokens, tail + number), key_parts=salt,
                grammar=None if grammar is None else FakeGrammar(grammar, key=number), **params,
            )  # fmt: skip

    @rule(number=st.integers(0, 1000))
    def add_again(self, number: int) -> None:
        """The same prompt, or the beginning of a conversation's next turn."""
        if self.harness.requests:
            earlier = self.harness.requests[number % len(self.harness.requests)]
            longer = [*earlier.prompt_token_ids.tolist(), *earlier.output_token_ids][: self.harness.config.max_model_len - 1]
            self.harness.add(longer if number % 2 else earlier.prompt_token_ids.tolist(), seed=number % 3)

    @rule()
    def send(self) -> None:
        self.harness.send()

    @rule()
    def receive(self) -> None:
        if self.harness.worker.num_in_flight:
            self.harness.receive()

    @rule(count=st.integers(1, 6))
    def turns(self, count: int) -> None:
        for _ in range(count):
            self.harness.send_all()
            self.receive()

    @rule(number=st.integers(0, 1000))
    def abort(self, number: int) -> None:
        if self.harness.requests:
            self.harness.abort(self.harness.requests[number % len(self.harness.requests)])

    @rule(number=st.integers(0, 1000), what=st.sampled_from(["nan", "loss", "loss", "reset", "reset", *[None] * 5]))
    def disturb(self, number: int, what: str | None) -> None:
        """Rarely, or nothing would ever get far."""
        if what == "loss":
            self.harness.lose_workers()
        elif what == "reset":
            self.harness.reset_prefix_cache()
        elif what == "nan" and self.harness.requests:
            request: Request = self.harness.requests[number % len(self.harness.requests)]
            self.harness.worker.nan_requests.add(request.request_id)

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()


def run_histories(count: int) -> None:
    run_state_machine_as_test(
        RandomDay,
        settings=settings(
            max_examples=count, stateful_step_count=40, deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        ),
    )  # fmt: skip


def test_random_histories() -> None:
    run_histories(QUICK_HISTORIES)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_random_histories() -> None:
    run_histories(MANY_HISTORIES)


def long_day(seed: int, groups: tuple[KVSpec, ...], *, turns: int = 200) -> Harness:
    """Many requests at once on few blocks: preemption all the time, while the oldest that runs never stands still."""
    draw = random.Random(seed)
    config: dict[str, Any] = {
        "num_stages": draw.randint(1, 4),
        "max_num_seqs": draw.randint(2, 10),
        "max_num_batched_tokens": draw.choice([4, 8, 16, 64]),
        "max_model_len": draw.randint(16, 40),
        "block_size": draw.choice([1, 2, 4]),
        "kv_groups": groups,
        "eos_token_ids": EOS,
    }
    harness = Harness(**config, num_blocks=smallest_pool(config) + draw.randint(0, 6))
    for _ in range(turns):
        if draw.random() < 0.3:
            num_tokens = draw.randint(1, config["max_model_len"] // 2)
            harness.add(
                family_prompt(draw.randint(0, 2), draw.randint(0, num_tokens), num_tokens, draw.randint(0, 50)),
                max_tokens=draw.randint(1, 40),
                logprobs=draw.choice([None, 1]),
                prompt_logprobs=draw.choice([None, None, 1]),
            )
        if draw.random() < 0.05 and harness.requests:
            harness.abort(draw.choice(harness.requests))
        if draw.random() < 0.7:
            harness.send_all()
        if harness.worker.pending and draw.random() < 0.8:
            harness.receive()
    stands_still_since = 0
    last_state: tuple[int, int] | None = None
    while harness.scheduler.has_unfinished() or harness.worker.pending:
        harness.send_all()
        harness.receive()
        # A preempted one waits for room in the queue, where few may pass it; once the oldest runs, nothing stops it.
        running = [request for request in harness.scheduler.unfinished() if request.status is RequestStatus.RUNNING]
        state = (running[0].internal_id, running[0].num_computed_tokens + 1000 * len(running[0].output_token_ids)) if running else None
        stands_still_since = stands_still_since + 1 if state == last_state else 0
        last_state = state
        # A decode may wait two rounds for company, and prompts take their share of the steps.
        assert stands_still_since <= 4 * harness.scheduler.depth
    harness.check_end()
    return harness


@pytest.mark.parametrize("seed", range(30))
def test_long_days_with_tiny_pools(seed: int) -> None:
    long_day(seed, [(FULL,), (FULL, SlidingWindow(6)), (SlidingWindow(6),)][seed % 3])


@pytest.mark.parametrize("groups", [(FULL,), (FULL, SlidingWindow(6)), (SlidingWindow(6),)])
def test_such_days_have_everything_that_is_to_be_tested(groups: tuple[KVSpec, ...]) -> None:
    """Hits, evictions and preemptions: without them the tests above would say little."""
    days = [long_day(seed, groups, turns=120) for seed in range(100, 110)]
    assert sum(day.total("preemptions") for day in days) > (10 if FULL in groups else 0)
    assert sum(day.total("prefix_hit_tokens") for day in days) > 20
    assert sum(day.worker.num_shared_tokens for day in days) > 20
