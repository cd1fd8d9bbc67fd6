"""Who runs first, who gives way, who may pass: each policy, and what it is good for."""

import random

import pytest

from engine.batch_plan import BatchPlan
from engine.cost_model import Coefficients, FixedCosts
from engine.pacing import CohortPacing, GreedyPacing, Load, Pace
from engine.policies import (
    MAX_PASSES,
    Deadlines,
    RunningSet,
    SchedulingPolicy,
    WaitingQueue,
    check_queue_room,
    rank_function,
)
from engine.request import Request, RequestStatus
from ipc.errors import ConfigError, RequestError
from ipc.params import SamplingParams
from tests.engine.scheduler_harness import Harness

FCFS, PRIORITY = SchedulingPolicy.FCFS, SchedulingPolicy.PRIORITY


def request(number: int, priority: int = 0, num_prompt: int = 3, deadline: float | None = None) -> Request:
    return Request(
        request_id=f"r{number}", internal_id=number, client=b"", prompt_token_ids=[1] * num_prompt,  # type: ignore[arg-type]
        params=SamplingParams(seed=0), priority=priority, deadline=deadline,
    )


# ------------------------------------------------------------------------------------------------------- the queues


@pytest.mark.parametrize("policy", [FCFS, PRIORITY])
def test_the_queue_gives_requests_in_the_policys_order_whatever_leaves_and_comes_back(policy: SchedulingPolicy) -> None:
    draw = random.Random(3)
    queue = WaitingQueue(rank_function(policy))
    inside: dict[int, Request] = {}
    everyone = [request(i, draw.randint(-2, 2), draw.randint(1, 9)) for i in range(60)]
    for _ in range(3000):
        one = draw.choice(everyone)
        if one.internal_id in inside:
            queue.discard(one)
            queue.discard(one)
            del inside[one.internal_id]
        else:
            queue.push(one)
            inside[one.internal_id] = one
        expected = sorted(inside.values(), key=rank_function(policy))
        assert queue.head() is (expected[0] if expected else None)
        assert len(queue) == len(inside) and (one in queue) == (one.internal_id in inside)
        assert queue.num_tokens == sum(r.num_tokens for r in expected)
        assert queue.num_squares == sum(r.num_tokens**2 for r in expected)
        assert queue.first(4) == expected[:4]
        assert len(queue._heap) <= 2 * len(queue) + 64 + 1, "what left is forgotten some time"
    assert list(queue) == sorted(inside.values(), key=rank_function(policy))


def test_the_first_victim_is_the_newest_or_the_one_of_lowest_priority() -> None:
    requests = [request(0, 5), request(1, -1), request(2, 0), request(3, 5)]
    for policy, order in ((FCFS, [3, 2, 1, 0]), (PRIORITY, [3, 0, 2, 1])):
        running = RunningSet(rank_function(policy))
        for one in requests:
            running.add(one)
        for number in order:
            victim = running.victim()
            assert victim.internal_id == number
            running.remove(victim)


def test_only_requests_of_lower_priority_make_room_and_no_more_than_needed() -> None:
    running = RunningSet(rank_function(PRIORITY))
    requests = [request(i, priority) for i, priority in enumerate([0, 1, 1, 2])]
    for one in requests:
        running.add(one)
    assert running.ranked_below(request(9, 1), lambda victims: len(victims) == 1) == [requests[3]]
    assert running.ranked_below(request(9, 1), lambda victims: len(victims) == 2) == [], "equals don't give way"
    assert running.ranked_below(request(9, 0), lambda victims: len(victims) == 2) == [requests[3], requests[2]]
    assert running.victim() is requests[3]


def test_deadlines_come_due_in_order_and_are_forgotten_when_over() -> None:
    deadlines = Deadlines()
    requests = [request(i, deadline=deadline) for i, deadline in enumerate([5.0, None, 3.0, 4.0])]
    for one in requests:
        deadlines.add(one)
    assert deadlines.nearest() == 3.0
    deadlines.discard(requests[2])
    assert deadlines.nearest() == 4.0 and deadlines.take_due(3.9) == []
    assert deadlines.take_due(5.0) == [requests[3], requests[0]]
    assert deadlines.nearest() is None
    for i in range(1000):
        one = request(10 + i, deadline=1e9)
        deadlines.add(one)
        deadlines.discard(one)
    assert len(deadlines._heap) <= 100


def test_a_queue_full_of_tokens_refuses_with_both_numbers_but_an_empty_one_takes_any_request() -> None:
    check_queue_room(0, 10_000, 100)
    check_queue_room(60, 40, 100)
    with pytest.raises(RequestError, match="60 prompt tokens wait, with the 41 of this request") as refused:
        check_queue_room(60, 41, 100)
    assert refused.value.code == "overloaded"


# ----------------------------------------------------------------------------------------------- order of requests


def first_runs(harness: Harness) -> list[str]:
    return [new.request_id for plan in harness.plans for new in plan.new_requests if not new.num_computed_tokens]


def test_fcfs_does_not_look_at_priorities() -> None:
    harness = Harness(max_num_seqs=1)
    for priority in (3, 1, 2):
        harness.add(4, priority=priority)
    harness.drain()
    assert first_runs(harness) == ["r0", "r1", "r2"]


def test_priority_runs_the_lowest_number_first_and_equals_in_order() -> None:
    harness = Harness(max_num_seqs=1, policy=PRIORITY)
    for priority in (0, 2, 1, 2, -1):
        harness.add(4, priority=priority, max_tokens=1)
    harness.drain()
    assert first_runs(harness) == ["r4", "r0", "r2", "r1", "r3"]


@pytest.mark.parametrize("short_of", ["seats", "blocks"])
def test_priority_takes_seat_and_blocks_from_the_lowest(short_of: str) -> None:
    """Its point: an urgent request does not wait for a long answer that is less so."""
    limits = {"max_num_seqs": 2, "num_blocks": 64} if short_of == "seats" else {"max_num_seqs": 4, "num_blocks": 16}
    harness = Harness(num_stages=2, policy=PRIORITY, block_size=4, max_model_len=64, **limits)
    low = harness.add(20, priority=2, max_tokens=40, ignore_eos=True)
    middle = harness.add(20, priority=1, max_tokens=40, ignore_eos=True)
    for _ in range(4):
        harness.send_all()
        harness.receive()
    assert low.status is middle.status is RequestStatus.RUNNING
    urgent = harness.add(20, priority=0, max_tokens=4, ignore_eos=True)
    num_steps = 0
    while not urgent.is_finished:
        harness.send_all()
        harness.receive()
        num_steps += 1
    assert num_steps < 20
    assert low.num_preemptions == 1 and middle.num_preemptions == 0
    harness.drain()


def test_priority_never_preempts_an_equal_to_admit_one() -> None:
    harness = Harness(max_num_seqs=1, policy=PRIORITY)
    harness.add(4, priority=1, max_tokens=30, ignore_eos=True)
    harness.send_all()
    harness.add(4, priority=1)
    harness.drain()
    assert harness.scheduler.stats().preemptions == 0


# -------------------------------------------------------------------------------------------------- passing (K11)


def test_k11_small_ones_pass_a_head_that_does_not_fit_and_it_is_not_starved() -> None:
    harness = Harness(num_stages=2, max_num_seqs=8, max_num_batched_tokens=160, max_model_len=160, block_size=16,
                      num_blocks=12, prefix_caching=False)
    running = harness.add(120, max_tokens=24, ignore_eos=True)
    harness.send_all()
    heavy = harness.add(90, max_tokens=6, ignore_eos=True)
    tiny = [harness.add(3, max_tokens=4, ignore_eos=True) for _ in range(20)]
    while not running.is_finished:
        assert heavy.status is RequestStatus.WAITING, "it does not fit beside the running one"
        harness.send_all()
        harness.receive()
    assert sum(one.is_finished for one in tiny) >= 8, "small ones have used the blocks that it could not"
    while heavy.status is RequestStatus.WAITING:
        harness.send_all()
        harness.receive()
    harness.drain()
    assert harness.scheduler.stats().preemptions == 0, "nobody who passed was in the way later"


def test_k11_nobody_passes_beyond_the_bound() -> None:
    harness = Harness(num_stages=1, max_num_seqs=8, max_num_batched_tokens=160, max_model_len=160, block_size=16,
                      num_blocks=12, prefix_caching=False)
    harness.add(60, max_tokens=100, ignore_eos=True)
    harness.send_all()
    heavy = harness.add(150, max_tokens=4, ignore_eos=True)
    tiny = [harness.add(3, max_tokens=2, ignore_eos=True) for _ in range(MAX_PASSES + 20)]
    most = 0
    while heavy.status is RequestStatus.WAITING:
        most = sum(one.status is not RequestStatus.WAITING for one in tiny)
        harness.send_all()
        harness.receive()
    assert heavy.num_passes == most == MAX_PASSES
    harness.drain()


def test_a_request_that_might_need_more_than_is_free_does_not_pass() -> None:
    harness = Harness(num_stages=1, max_num_batched_tokens=160, max_model_len=160, block_size=16, num_blocks=12)
    harness.add(120, max_tokens=20, ignore_eos=True)
    harness.send_all()
    harness.add(90, max_tokens=4)
    short_prompt_long_answer = harness.add(3, max_tokens=80, ignore_eos=True)
    harness.receive()
    assert harness.send() is not None and harness.scheduler.stats().free_blocks >= 2
    assert short_prompt_long_answer.status is RequestStatus.WAITING
    harness.drain()


# ---------------------------------------------------------------------------------------------------- size of steps


COSTS = Coefficients(step_s=2e-3, row_s=2e-5, token_s=3e-5, attention_s=2e-9, head_s=3e-3)


def load(num_decodes: int, **changes: float | bool) -> Load:
    values: dict[str, float | bool] = {
        "context": 500.0, "has_prompts": False, "num_prompt_tokens": 0, "num_prompt_squares": 0, "num_tokens_behind": 0,
        "num_squares_behind": 0, "free_share": 1.0, "last_step_s": 1.0, "last_step_samples": True,
    }
    return Load(num_decodes=num_decodes, **(values | changes))  # type: ignore[arg-type]


def cohorts(num_stages: int, num_decodes: int, costs: Coefficients) -> int:
    pacing = CohortPacing(num_stages, FixedCosts(costs))
    return round(num_decodes / pacing.pace(load(num_decodes)).cohort_size)


def test_one_cohort_per_stage_unless_another_number_promises_more_tokens_per_second() -> None:
    even = Coefficients(step_s=2e-3, head_s=0.0)
    assert [cohorts(8, count, even) for count in (8, 64, 500)] == [8, 8, 8]
    assert cohorts(8, 3, even) == 3
    assert cohorts(8, 64, COSTS) == 4, "each cohort costs the last stage a head"
    assert cohorts(2, 64, Coefficients(step_s=1e-3, head_s=0.0, return_s=1e-2)) == 3, "more hide a slow return"


def test_a_prompt_gets_its_share_of_the_time_and_no_more_while_decodes_run() -> None:
    for share in (0.3, 0.62, 0.8):
        pacing = CohortPacing(1, FixedCosts(COSTS), prefill_share=share)
        pace = pacing.pace(load(32, has_prompts=True, num_prompt_tokens=100_000, num_prompt_squares=10**10))
        alone = COSTS.step_s + 32 * COSTS.decode_time(500) + COSTS.head_s
        assert pace.step_s + COSTS.head_s == pytest.approx(alone / (1 - share))
    assert CohortPacing(1, FixedCosts(COSTS), prefill_share=1.0).pace(load(32, has_prompts=True)).step_s == float("inf")


def step_time(**changes: float | bool) -> Pace:
    return CohortPacing(4, FixedCosts(COSTS)).pace(load(32, has_prompts=True, **changes))


def test_prompts_that_wait_behind_the_first_speed_prompts_up_within_a_bound() -> None:
    usual, crowded, flooded = (step_time(num_tokens_behind=count).step_s for count in (0, 2_000, 10**7))
    assert usual < crowded < flooded < 11 * usual


def test_a_nearly_full_pool_slows_prompts_down() -> None:
    usual, half, empty = (step_time(free_share=share).step_s for share in (1.0, 0.05, 0.0))
    assert usual > half > empty


def test_steps_grow_only_as_fast_as_the_head_in_front_covers() -> None:
    behind_head, behind_none = (step_time(last_step_s=3e-3, last_step_samples=samples).step_s for samples in (True, False))
    assert behind_head == pytest.approx(3e-3 + COSTS.head_s / 3)
    assert 3e-3 < behind_none < behind_head


def test_a_lone_prompt_is_cut_so_that_the_pipeline_works_on_it_at_once() -> None:
    pacing = CohortPacing(8, FixedCosts(COSTS))

    def pass_s(step_s: float) -> float:
        work = COSTS.prompt_time(4000, 4000**2)
        num_steps = work / (step_s - COSTS.step_s)
        return (8 + num_steps - 1) * step_s

    chosen = pacing.pace(load(0, has_prompts=True, num_prompt_tokens=4000, num_prompt_squares=4000**2)).step_s
    assert pass_s(chosen) < min(pass_s(chosen / 1.5), pass_s(chosen * 1.5))
    tiny = pacing.pace(load(0, has_prompts=True, num_prompt_tokens=4, num_prompt_squares=16)).step_s
    assert tiny == float("inf"), "cutting a short one costs more than it brings"


def test_chunks_shrink_as_the_context_grows_and_their_time_stays() -> None:
    sizes = [COSTS.chunk_size(context, 0.05) for context in (0, 10_000, 100_000)]
    assert sizes[0] > sizes[1] > sizes[2] > 0
    for context, size in zip((0, 10_000, 100_000), sizes, strict=True):
        time_s = COSTS.row_s + COSTS.token_s * size + COSTS.attention_s * size * (2 * context + size)
        assert time_s == pytest.approx(0.05, rel=0.02)


def test_rule_5_a_preempted_request_does_not_pass_before_its_last_step_returned() -> None:
    harness = Harness(num_stages=3, max_num_batched_tokens=160, max_model_len=160, block_size=16, num_blocks=12,
                      prefix_caching=False)
    big = harness.add(120, max_tokens=24, ignore_eos=True)
    while not big.output_token_ids:
        harness.send_all()
        harness.receive()
    harness.add(90, max_tokens=4, ignore_eos=True)
    small = harness.add(3, max_tokens=6, ignore_eos=True)
    harness.send()
    assert small.num_steps_in_flight == 1, "it has passed"
    harness.scheduler._preempt(small, BatchPlan(1))
    harness.receive()
    assert small.num_steps_in_flight == 1 and harness.send() is not None
    assert small.status is RequestStatus.WAITING
    harness.drain()
    assert small.num_preemptions == 1


def test_small_groups_of_decodes_meet_until_there_are_as_many_as_is_best() -> None:
    """Requests that came one by one would stay alone for ever, and each step costs the last stage a head."""
    harness = Harness(num_stages=8, max_num_seqs=64, max_num_batched_tokens=64, max_model_len=300, num_blocks=5000,
                      costs=FixedCosts(COSTS))
    for _ in range(32):
        harness.add(2, max_tokens=200, ignore_eos=True)
        harness.send()
        if len(harness.worker.pending) > 6:
            harness.receive()
    for _ in range(40):
        harness.send_all()
        harness.receive()
    harness.send_all()
    assert harness.scheduler.stats().num_cohorts == 4
    assert [len(plan.rows) for plan, _ in harness.worker.pending] == [8] * 5, "four cohorts, and the first of them again"
    harness.drain()


def test_greedy_takes_all_that_is_ready() -> None:
    harness = Harness(num_stages=4, is_greedy=True, async_scheduling=False, max_num_batched_tokens=64)
    for _ in range(8):
        harness.add(3, ignore_eos=True)
    (plan,) = harness.send_all()
    assert len(plan.rows) == 8
    harness.receive()
    (plan,) = harness.send_all()
    assert len(plan.rows) == 8, "and so they stay together for ever"
    harness.drain()
    assert GreedyPacing().pace(load(5)).cohort_size == 5


def test_f2_cohorts_are_balanced_again_after_a_long_prompt() -> None:
    """No drain pattern: when the prompt is done, the pipeline holds even groups again."""
    harness = Harness(num_stages=2, max_num_seqs=9, max_num_batched_tokens=64, max_model_len=1000, num_blocks=2000,
                      costs=FixedCosts(Coefficients(head_s=0.0)))
    for _ in range(8):
        harness.add(3, max_tokens=300, ignore_eos=True)
    for _ in range(10):
        harness.send_all()
        harness.receive()
    long = harness.add(900, max_tokens=1)
    while not long.is_finished:
        harness.send_all()
        harness.receive()
    for _ in range(6):
        harness.send_all()
        harness.receive()
    harness.send_all()
    assert [len(plan.rows) for plan, _ in harness.worker.pending] == [4, 4, 4]
    harness.drain()


def test_f3_every_step_of_a_long_prompt_carries_decodes_too() -> None:
    harness = Harness(num_stages=2, max_num_seqs=5, max_num_batched_tokens=64, max_model_len=1000, num_blocks=2000)
    streams = [harness.add(3, max_tokens=300, ignore_eos=True) for _ in range(4)]
    for _ in range(10):
        harness.send_all()
        harness.receive()
    long = harness.add(800, max_tokens=1)
    seen = [len(one.output_token_ids) for one in streams]
    num_steps = 0
    while not long.is_finished:
        harness.send_all()
        harness.receive()
        num_steps += 1
    grown = [len(one.output_token_ids) - before for one, before in zip(streams, seen, strict=True)]
    assert min(grown) >= num_steps // 3 - 1, f"{grown} tokens in {num_steps} steps"
    harness.drain()


@pytest.mark.parametrize(("num_cohorts", "share"), [(0, 0.5), (4, 0.5), (None, 0.0), (None, 1.1)])
def test_impossible_paces_are_refused(num_cohorts: int | None, share: float) -> None:
    with pytest.raises(ConfigError, match="num_cohorts: must|prefill_share: must"):
        CohortPacing(2, FixedCosts(COSTS), num_cohorts=num_cohorts, prefill_share=share)
