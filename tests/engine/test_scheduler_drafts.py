"""Drafts in the scheduler: who gets how many, where they may stand, and what comes of right and wrong ones."""

from dataclasses import replace
from typing import Any

import pytest

from engine.batch_plan import BatchPlan
from engine.cost_model import Coefficients, FixedCosts
from engine.request import Request
from ipc.errors import ConfigError, ProtocolError
from ipc.messages import SchedulerOutput
from tests.engine.scheduler_harness import Harness, make_config
from tests.fakes import REPEATING, FakeGrammar

MANY_FIVES = [5] * 12


def drafting(most: int = 4, **changes: Any) -> Harness:
    return Harness(**({"speculative_lookup_tokens": most, "block_size": 16, "max_num_batched_tokens": 64, "max_num_seqs": 64} | changes))


def drafts_of(plan: SchedulerOutput) -> dict[int, list[int]]:
    """By row."""
    if plan.drafts is None:
        return {}
    ends = [sum(plan.drafts.counts[: i + 1]) for i in range(len(plan.drafts.counts))]
    return {
        plan.rows[index]: plan.drafts.token_ids[end - count : end]
        for index, count, end in zip(plan.drafts.indices, plan.drafts.counts, ends, strict=True)
    }


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("is_async", [True, False])
def test_repeated_text_takes_fewer_steps_and_the_same_tokens(num_stages: int, is_async: bool) -> None:
    num_steps = {}
    for most in (0, 8):
        harness = drafting(most, num_stages=num_stages, async_scheduling=is_async, num_cohorts=1)
        for seed in range(6):
            harness.add(MANY_FIVES, seed=REPEATING + seed, max_tokens=40)
        harness.drain()
        num_steps[most] = len(harness.plans)
        assert harness.total("num_draft_tokens") == harness.worker.num_drafts
        assert harness.total("num_accepted_draft_tokens") == harness.worker.num_accepted
        assert (harness.worker.num_accepted > 0) == (most > 0)
    assert num_steps[8] < num_steps[0]


def test_without_the_option_nobody_looks_anything_up() -> None:
    harness = drafting(0)
    request = harness.add(MANY_FIVES, seed=REPEATING, max_tokens=30)
    harness.drain()
    assert request.lookup is None and not any(plan.drafts for plan in harness.plans)


def test_text_that_repeats_nothing_gets_no_drafts_and_keeps_its_placeholders() -> None:
    plans = []
    for most in (0, 8):
        harness = drafting(most)
        for seed in range(4):
            harness.add(9, seed=seed, max_tokens=30)
        harness.drain()
        plans.append([(plan.rows, plan.num_scheduled_tokens, plan.needs_tokens_of_step) for plan in harness.plans])
    assert plans[0] == plans[1]


@pytest.mark.parametrize(("rules", "has_drafts"), [
    ({}, True), ({"logprobs": 0}, False), ({"presence_penalty": 0.5}, False), ({"bad_word_ids": ((400,),)}, False),
    ({"grammar": FakeGrammar(30)}, False),
])  # fmt: skip
def test_who_gets_drafts(rules: dict[str, Any], has_drafts: bool) -> None:
    harness = drafting()
    harness.add(MANY_FIVES, seed=REPEATING, max_tokens=30, **rules)
    harness.drain()
    assert any(plan.drafts for plan in harness.plans) == has_drafts


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_drafts_stay_within_the_block_of_the_token_before_them(block_size: int) -> None:
    harness = drafting(16, block_size=block_size, max_model_len=128)
    request = harness.add(MANY_FIVES, seed=REPEATING, max_tokens=100)
    most = 0
    while not request.is_finished:
        plan = harness.send()
        if plan is None:
            harness.receive()
            continue
        for drafts in drafts_of(plan).values():
            first = request.num_tokens
            assert (first - 1) // block_size == (first + len(drafts) - 1) // block_size
            most = max(most, len(drafts))
    harness.drain()
    assert most >= block_size // 2 - (block_size == 1) and (most > 0) == (block_size > 1)


@pytest.mark.parametrize("limit", [{"max_tokens": 30}, {"max_tokens": None, "max_model_len": 42}])
def test_nothing_is_guessed_beyond_the_last_token(limit: dict[str, Any]) -> None:
    harness = drafting(16, **({"max_model_len": limit.pop("max_model_len")} if "max_model_len" in limit else {}))
    requests = [harness.add(MANY_FIVES, seed=REPEATING + seed, ignore_eos=True, **limit) for seed in range(20)]
    harness.drain()
    assert all(len(request.output_token_ids) == 30 for request in requests)


def first_step_with_drafts(harness: Harness) -> SchedulerOutput:
    while True:
        plan = harness.send()
        if plan is None:
            harness.receive()
        elif plan.drafts is not None:
            return plan


def test_a_request_with_drafts_in_flight_is_in_no_other_step() -> None:
    harness = drafting(4, num_stages=2)
    request = harness.add(MANY_FIVES, seed=REPEATING, max_tokens=30)
    plan = first_step_with_drafts(harness)
    assert request.num_steps_in_flight == 1 and harness.send() is None
    assert plan.num_scheduled_tokens == [1 + len(drafts_of(plan)[request.row])]
    harness.receive()
    assert harness.send() is not None
    harness.drain()


def test_rejected_drafts_are_told_with_the_next_step_of_the_row() -> None:
    harness = drafting(16)
    request = harness.add(MANY_FIVES, seed=REPEATING, max_tokens=50)
    num_told = 0
    while not request.is_finished:
        plan = first_step_with_drafts(harness) if request.lookup is not None and request.awaits_token else harness.send()
        if plan is None or plan.drafts is None:
            if harness.worker.num_in_flight:
                harness.receive()
            continue
        num_drafts, num_known = len(drafts_of(plan)[request.row]), request.num_tokens
        harness.receive()
        num_accepted = request.num_tokens - num_known - 1
        if request.is_finished:
            break
        assert request.num_computed_tokens == request.num_scheduled_tokens == request.num_tokens - 1
        following = harness.send()
        assert following is not None
        rejected = following.rejected
        assert (0 if rejected is None else rejected.counts[0]) == num_drafts - num_accepted
        num_told += rejected is not None
    harness.drain()
    assert num_told


def test_a_stop_id_inside_an_accepted_run_ends_the_request_there() -> None:
    num_dropped = 0
    for seed in range(100):
        harness = drafting(8)
        harness.add([5, 5, 5, 5, 6] * 4, seed=REPEATING + seed, max_tokens=30, stop_token_ids=(6,))
        while harness.send_all() or harness.worker.num_in_flight:
            output = harness.worker.pending[0][1]
            told = sum(len(item.new_token_ids) for item in harness.receive())
            num_dropped += told < sum(output.counts) and max(output.counts) > 1
        harness.drain()
    assert num_dropped


@pytest.mark.parametrize("how", ["abort", "preempt", "loss"])
def test_what_happens_to_a_request_with_drafts_in_flight(how: str) -> None:
    harness = drafting(4)
    request = harness.add(MANY_FIVES, seed=REPEATING, max_tokens=30)
    first_step_with_drafts(harness)
    if how == "abort":
        harness.abort(request)
    elif how == "loss":
        harness.lose_workers()
    else:
        harness.scheduler._preempt(request, BatchPlan(64))
        harness.scheduler.check_books()
    harness.drain()


def test_drafts_of_a_victim_are_refunded() -> None:
    """With a pool for one and a half of them, requests are preempted all the time, in plans that have their drafts."""
    harness = drafting(4, num_blocks=12, block_size=4, max_model_len=48, max_num_batched_tokens=20)
    for seed in range(6):
        harness.add(MANY_FIVES, seed=REPEATING + seed, max_tokens=30)
    harness.drain()
    assert harness.total("preemptions") and harness.worker.num_accepted


def costs(step_s: float, token_s: float) -> FixedCosts:
    return FixedCosts(Coefficients(step_s=step_s, row_s=0.0, token_s=token_s, attention_s=0.0, head_s=0.0))


@pytest.mark.parametrize(("token_s", "most_drafts"), [(0.01, 32), (0.3, 3), (2.0, 0)])
def test_drafts_cost_no_more_than_the_step(token_s: float, most_drafts: int) -> None:
    harness = drafting(8, costs=costs(1.0, token_s), num_cohorts=1, max_num_seqs=64)
    for seed in range(4):
        harness.add(MANY_FIVES, seed=REPEATING + seed, max_tokens=40)
    harness.drain()
    in_one_step = max(sum(map(len, drafts_of(plan).values())) for plan in harness.plans)
    assert in_one_step <= most_drafts and (in_one_step > 0) == (most_drafts > 0)


def test_a_step_samples_at_no_more_positions_than_there_may_be_requests() -> None:
    harness = drafting(2, max_num_seqs=6, num_cohorts=1)
    for seed in range(6):
        harness.add(MANY_FIVES, seed=REPEATING + seed, max_tokens=30)
    harness.drain()
    assert max(len(plan.rows) + sum(map(len, drafts_of(plan).values())) for plan in harness.plans) <= 6


@pytest.mark.parametrize("most", [-1, 17])
def test_the_number_of_drafts_has_bounds(most: int) -> None:
    with pytest.raises(ConfigError, match="speculative_lookup_tokens: must be between 0 and 16"):
        make_config(speculative_lookup_tokens=most)


@pytest.mark.parametrize("what", ["more", "none", "other", "lost"])
def test_tokens_that_the_step_could_not_have_sampled_are_refused(what: str) -> None:
    harness = drafting(4)
    request: Request = harness.add(MANY_FIVES, seed=REPEATING, max_tokens=30)
    drafts = drafts_of(first_step_with_drafts(harness))[request.row]
    output = harness.worker.receive()
    token_ids = {
        "more": [*drafts, 5, 5], "none": [], "other": [drafts[0] + 1, 5], "lost": output.token_ids
    }[what]
    counts = [len(output.token_ids) + 1] if what == "lost" else [len(token_ids)]
    with pytest.raises(ProtocolError, match=r"ModelRunnerOutput\.counts"):
        harness.scheduler.update(replace(output, token_ids=token_ids, counts=counts))


def test_a_request_without_drafts_gets_one_token() -> None:
    harness = drafting(4)
    harness.add(5, max_tokens=30)
    harness.send()
    output = harness.worker.receive()
    with pytest.raises(ProtocolError, match="one token for each row"):
        harness.scheduler.update(replace(output, token_ids=[*output.token_ids, 5], counts=[2]))
