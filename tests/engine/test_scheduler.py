"""Who runs when: budget, cohorts, chunks, admission, preemption, endings, and what a step costs."""

import time
from dataclasses import replace

import numpy as np
import pytest

from engine.cost_model import Coefficients, FixedCosts
from engine.request import Request, RequestStatus
from engine.scheduler import Scheduler
from ipc import codec
from ipc.errors import ConfigError, RequestError
from ipc.messages import ModelRunnerOutput, SchedulerOutput
from ipc.params import SamplingParams
from tests.engine.scheduler_harness import EOS, Harness, make_config
from tests.fakes import expected_output

EVEN_COSTS = FixedCosts(Coefficients(head_s=0.0))
"""A pipeline without a head: one cohort per stage is best."""


def test_one_request_from_prompt_to_end() -> None:
    harness = Harness(num_stages=2, async_scheduling=False)
    request = harness.add(6, max_tokens=3, ignore_eos=True)
    (first,) = harness.send_all()
    assert first.step_id == 1 and first.needs_tokens_of_step == 0
    (new,) = first.new_requests
    assert new.token_ids.tolist() == list(request.prompt_token_ids) and new.num_computed_tokens == 0
    assert new.params == request.params and new.block_ids == ([0, 1],)
    (item,) = harness.receive()
    assert item.new_token_ids == request.output_token_ids and item.request is request
    (second,) = harness.send_all()
    assert (second.rows, second.num_scheduled_tokens, second.new_requests) == ([new.row], [1], ())
    harness.drain()
    assert request.finish_reason == "length" and len(request.output_token_ids) == 3


def test_freed_rows_ride_with_the_next_step() -> None:
    harness = Harness(num_stages=1)
    harness.add(3, max_tokens=1)
    harness.drain()
    assert harness.send() is None, "nothing is sent only to free a row"
    harness.add(3, max_tokens=1)
    plan = harness.send()
    assert plan is not None and plan.freed_rows == [0]
    harness.drain()


def test_decodes_come_first_and_chunks_take_what_is_left() -> None:
    harness = Harness(num_stages=1, max_num_batched_tokens=8)
    decodes = [harness.add(2, ignore_eos=True) for _ in range(3)]
    harness.send_all()
    harness.receive()
    long = harness.add(20)
    single = harness.add(1)
    plan = harness.send()
    assert plan is not None
    assert plan.num_scheduled_tokens == [1, 1, 1, 5]
    assert plan.rows == [*(r.row for r in decodes), long.row]
    assert single.status is RequestStatus.WAITING, "the budget is spent"
    harness.drain()


def test_a_row_with_one_token_stands_before_chunks_whoever_it_is() -> None:
    harness = Harness(num_stages=1, max_num_batched_tokens=16)
    chunk, single = harness.add(5), harness.add(1)
    plan = harness.send()
    assert plan is not None and plan.rows == [single.row, chunk.row]
    harness.drain()


@pytest.mark.parametrize(("num_stages", "num_requests"), [(1, 5), (2, 8), (2, 5), (3, 4), (4, 8), (4, 3)])
def test_decodes_split_evenly_over_the_stages(num_stages: int, num_requests: int) -> None:
    harness = Harness(
        num_stages=num_stages, max_num_seqs=16, max_num_batched_tokens=64, async_scheduling=False, costs=EVEN_COSTS
    )
    for _ in range(num_requests):
        harness.add(3, ignore_eos=True, max_tokens=50)
    for _ in range(4 * num_stages):
        harness.send_all()
        harness.receive()
    for _ in range(4 * num_stages):
        harness.send_all()
        harness.receive()
        harness.send_all()
        sizes = sorted(len(plan.rows) for plan, _ in harness.worker.pending)
        assert sum(sizes) == num_requests
        assert len(sizes) == min(num_stages, num_requests) and sizes[-1] - sizes[0] <= 1
    harness.drain()


def test_cohorts_even_out_again_when_requests_leave() -> None:
    harness = Harness(num_stages=2, max_num_batched_tokens=64, async_scheduling=False, costs=EVEN_COSTS)
    requests = [harness.add(3, ignore_eos=True, max_tokens=40) for _ in range(8)]
    harness.send_all()
    harness.receive()
    harness.send_all()
    leaving = [request for request in requests if request.row in harness.worker.pending[0][0].rows][:2]
    for request in leaving:
        harness.abort(request)
    for _ in range(6):
        harness.receive()
        harness.send_all()
    assert sorted(len(plan.rows) for plan, _ in harness.worker.pending) == [3, 3]
    harness.drain()


def test_no_more_than_depth_steps_are_in_flight() -> None:
    harness = Harness(num_stages=3, max_num_batched_tokens=2)
    harness.add(20)
    assert len(harness.send_all()) == 4
    assert harness.scheduler.schedule() is None
    assert harness.scheduler.stats().steps_in_flight == 4
    harness.drain()


def test_admission_is_first_come_first_served_and_bounded() -> None:
    harness = Harness(num_stages=2, max_num_seqs=2)
    requests = [harness.add(4) for _ in range(5)]
    harness.send_all()
    assert [r.status for r in requests[:3]] == [RequestStatus.RUNNING, RequestStatus.RUNNING, RequestStatus.WAITING]
    assert (harness.scheduler.stats().running, harness.scheduler.stats().waiting) == (2, 3)
    assert harness.scheduler.unfinished() == requests
    harness.drain()
    first_runs = [new.request_id for plan in harness.plans for new in plan.new_requests]
    assert first_runs == ["r0", "r1", "r2", "r3", "r4"]


def test_admission_leaves_a_block_for_each_running_request() -> None:
    """Else the newcomer is preempted as soon as an older one reaches its block's edge."""
    harness = Harness(num_stages=1, max_model_len=16, block_size=4, num_blocks=5)
    harness.add(7, max_tokens=8, ignore_eos=True)
    second = harness.add(7, max_tokens=8, ignore_eos=True)
    harness.send_all()
    assert second.status is RequestStatus.RUNNING
    third = harness.add(1, max_tokens=1)
    harness.receive()
    harness.send_all()
    assert third.status is RequestStatus.WAITING
    harness.drain()


def test_a_crowded_pool_preempts_the_newest_and_all_finish() -> None:
    """k2: many requests without room for their growth."""
    harness = Harness(num_stages=2, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=96, block_size=16, num_blocks=12)
    requests = [harness.add(20, max_tokens=60, ignore_eos=True) for _ in range(8)]
    harness.drain()
    assert all(len(r.output_token_ids) == 60 for r in requests)
    assert 0 < harness.scheduler.stats().preemptions <= 8
    assert requests[0].num_preemptions == 0
    readmitted = [new for plan in harness.plans for new in plan.new_requests if len(new.token_ids) > new.num_prompt_tokens]
    assert readmitted and all(new.num_prompt_tokens == 20 for new in readmitted)


def test_the_newest_request_waits_in_place_rather_than_give_up_its_blocks() -> None:
    harness = Harness(num_stages=1, max_num_seqs=2, max_model_len=12, block_size=4, num_blocks=4)
    old = harness.add(6, max_tokens=6, ignore_eos=True)
    new = harness.add(1, max_tokens=11, ignore_eos=True)
    harness.drain()
    assert old.num_preemptions == new.num_preemptions == 0
    waited = [plan for plan in harness.plans if plan.rows == [0]]
    assert len(waited) >= 2, "the pool was empty for a while"
    assert len(new.output_token_ids) == 11


def test_nobody_is_admitted_while_an_older_prompt_lacks_blocks() -> None:
    harness = Harness(num_stages=1, max_num_batched_tokens=16, max_model_len=60, block_size=1, num_blocks=61)
    for _ in range(4):
        harness.add(4, max_tokens=20, ignore_eos=True)
    harness.send()
    harness.receive()
    long = harness.add(36, max_tokens=1)
    while long.num_scheduled_tokens < 24:
        harness.send()
        harness.receive()
    tiny = harness.add(1, max_tokens=1)
    harness.send()
    assert long.num_scheduled_tokens == 24, "the decodes grew faster than admission foresaw"
    assert harness.scheduler.stats().free_blocks == 9, "enough for the tiny one, too few for the long one's chunk"
    assert tiny.status is RequestStatus.WAITING
    harness.receive()
    harness.drain()


def test_preempted_requests_come_back_before_newer_ones() -> None:
    harness = Harness(num_stages=2, max_num_seqs=4, max_model_len=40, block_size=2, num_blocks=30)
    requests = [harness.add(8, max_tokens=30, ignore_eos=True) for _ in range(6)]
    harness.drain()
    assert sum(r.num_preemptions for r in requests) > 0
    ends = [max(p.step_id for p in harness.plans for n in p.new_requests if n.request_id == r.request_id) for r in requests]
    assert ends == sorted(ends), "each older request is (re)admitted no later than a newer one"


@pytest.mark.parametrize("state", ["waiting", "prefilling", "in flight", "ready", "over", "preempted"])
def test_abort_in_every_state(state: str) -> None:
    """k6: idempotent, and free blocks are exact."""
    harness = Harness(num_stages=2, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=20, block_size=1, num_blocks=20)
    blocker = harness.add(2, max_tokens=18, ignore_eos=True)
    request = harness.add(12 if state == "prefilling" else 2, max_tokens=1 if state == "over" else 17, ignore_eos=True)
    if state != "waiting":
        harness.send()
    if state in ("ready", "over", "preempted"):
        harness.receive()
    while state == "preempted" and not request.num_preemptions:
        harness.send_all()
        harness.receive()
    assert request.is_finished == (state == "over")
    for _ in range(2):
        harness.abort(request)
    assert request.finish_reason == ("length" if state == "over" else "abort")
    harness.drain()
    assert blocker.finish_reason == "length"


def test_stop_from_outside_carries_its_reason() -> None:
    harness = Harness()
    request = harness.add(4, ignore_eos=True)
    harness.send_all()
    harness.abort(request, "stop")
    assert request.finish_reason == "stop" and request.stop_reason is None
    harness.receive()
    assert harness.endings[0] == ["stop"] and not harness.scheduler.has_unfinished()


@pytest.mark.parametrize(
    ("params", "position", "reason"),
    [({}, None, "stop"), ({"ignore_eos": True}, None, "length"), ({"stop": True}, 4, "stop"), ({"stop": True}, 0, "stop")],
)
def test_endings_by_eos_stop_id_and_length(params: dict[str, bool], position: int | None, reason: str) -> None:
    prompt = [9, 8, 7]
    free, _, _ = expected_output(
        prompt, SamplingParams(seed=0, max_tokens=10, ignore_eos=True), eos_token_ids=frozenset(), max_model_len=64
    )
    eos = frozenset({free[2]}) if position is None else frozenset()
    harness = Harness(eos_token_ids=eos)
    stop_ids = () if position is None else (free[position],)
    request = harness.add(prompt, max_tokens=10, stop_token_ids=stop_ids, ignore_eos=params.get("ignore_eos", False))
    harness.drain()
    length = 10 if reason == "length" else (position if position is not None else 2) + 1
    assert request.output_token_ids == free[:length]
    assert (request.finish_reason, request.stop_reason) == (reason, stop_ids[0] if stop_ids else None)


def test_an_end_token_that_is_also_a_stop_id_counts_as_the_models_own() -> None:
    prompt = [9, 8, 7]
    free, _, _ = expected_output(
        prompt, SamplingParams(seed=0, max_tokens=1), eos_token_ids=frozenset(), max_model_len=64
    )
    harness = Harness(eos_token_ids=frozenset({free[0]}))
    request = harness.add(prompt, stop_token_ids=(free[0],))
    harness.drain()
    assert (request.finish_reason, request.stop_reason) == ("stop", None)


@pytest.mark.parametrize(("length", "max_tokens", "answered"), [(61, 1, 1), (61, 10, 3), (62, 10, 2), (63, 10, 1), (63, None, 1)])
def test_c16_the_context_limit_is_met_exactly(length: int, max_tokens: int | None, answered: int) -> None:
    harness = Harness(max_model_len=64, num_blocks=16, block_size=4)
    request = harness.add(length, max_tokens=max_tokens, ignore_eos=True)
    harness.drain()
    assert (len(request.output_token_ids), request.finish_reason) == (answered, "length")


def test_a_request_without_room_for_a_token_is_refused_with_both_numbers() -> None:
    harness = Harness(max_model_len=64)
    request = Request(
        request_id="x", internal_id=99, client=b"", prompt_token_ids=[1] * 64, params=SamplingParams(seed=1)
    )
    with pytest.raises(RequestError, match="have 64 tokens; with max_model_len=64"):
        harness.scheduler.add(request)
    assert not harness.scheduler.has_unfinished()


def test_unfinished_requests_go_on_in_the_next_epoch() -> None:
    harness = Harness(num_stages=2, max_num_batched_tokens=8, eos_token_ids=EOS)
    for length in (3, 9, 20):
        harness.add(length, max_tokens=20, prompt_logprobs=0)
    for _ in range(3):
        harness.send_all()
        harness.receive()
    later = Harness(num_stages=2, max_num_batched_tokens=8, eos_token_ids=EOS)
    later.requests, later.seen, later.endings = harness.requests, harness.seen, harness.endings
    later.told_prompt_logprobs = harness.told_prompt_logprobs
    assert any(r.output_token_ids for r in harness.requests)
    for request in harness.scheduler.unfinished():
        request.requeue()
        later.scheduler.add(request)
    later.drain()


def test_a_resubmitted_request_goes_on_behind_its_tokens() -> None:
    harness = Harness()
    params = SamplingParams(seed=4, max_tokens=9, ignore_eos=True)
    tokens, _, _ = expected_output([5, 6, 7], params, eos_token_ids=frozenset(), max_model_len=64)
    request = Request(
        request_id="r0", internal_id=0, client=b"", prompt_token_ids=np.asarray([5, 6, 7], np.int32), params=params,
        output_token_ids=tokens[:4],
    )
    harness.requests, harness.seen, harness.endings = [request], {0: tokens[:4]}, {0: []}
    harness.scheduler.add(request)
    harness.drain()
    assert request.output_token_ids == tokens
    (new,) = harness.plans[0].new_requests
    assert (new.num_prompt_tokens, new.token_ids.tolist()) == (3, [5, 6, 7, *tokens[:4]])


def test_k10_steps_without_anything_to_sample_are_legal() -> None:
    harness = Harness(num_stages=2, max_num_batched_tokens=16, max_model_len=256)
    for _ in range(4):
        harness.add(200, max_tokens=1)
    harness.drain()


def test_statistics_count_what_happened() -> None:
    harness = Harness(num_stages=2)
    harness.add(5, max_tokens=4, ignore_eos=True)
    harness.add(7, max_tokens=2, ignore_eos=True)
    harness.drain()
    stats = harness.scheduler.stats()
    assert (stats.num_prompt_tokens, stats.num_generated_tokens, stats.preemptions) == (12, 6, 0)
    assert (stats.free_blocks, stats.total_blocks, stats.steps_in_flight) == (200, 200, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "block_size: must be at least 1, got 0"),
        ({"num_stages": 0}, "num_stages: must be at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs: must be"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_batched_tokens: 8 is below max_num_seqs=9: a step must"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens: must be"),
        ({"max_model_len": 1}, "max_model_len: must be at least 2"),
        ({"num_blocks": 15}, "num_blocks: 15 blocks of 4 tokens hold less than one request of max_model_len=64"),
    ],
)
def test_impossible_limits_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(make_config(), **change)


# ------------------------------------------------------------------------------------------------ wire and cost


def decoding(num_requests: int, prompt_length: int) -> Scheduler:
    """One stage, all requests decoding and ready."""
    config = make_config(
        num_stages=1,
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_requests * prompt_length,
        max_model_len=prompt_length + 1000,
        block_size=16,
        num_blocks=60_000,
    )
    scheduler = Scheduler(config, core_id=1 << 60, epoch=1)
    for i in range(num_requests):
        scheduler.add(
            Request(
                request_id=f"r{i}", internal_id=i, client=b"", prompt_token_ids=np.full(prompt_length, 7, np.int32),
                params=SamplingParams(seed=i, ignore_eos=True),
            )
        )
    step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> SchedulerOutput:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(answer(plan))
    return plan


def answer(plan: SchedulerOutput) -> ModelRunnerOutput:
    count = len(plan.rows)
    return ModelRunnerOutput(
        core_id=plan.core_id, epoch=1, step_id=plan.step_id, rows=plan.rows, token_ids=[9] * count, counts=[1] * count
    )


def test_a_step_of_64_decodes_fits_400_bytes_when_every_row_takes_a_block() -> None:
    sizes = {}
    for prompt_length in (16, 8000):
        scheduler = decoding(64, prompt_length)
        plans = [step(scheduler) for _ in range(17)]
        growing = [plan for plan in plans if len(plan.cached_requests.indices) == 64]
        assert growing, "all rows cross a block's edge together"
        sizes[prompt_length] = [sum(map(len, codec.encode(plan))) for plan in plans]
        assert max(sizes[prompt_length]) <= 400
    assert max(sizes[8000]) - max(sizes[16]) <= 70, "block ids of two bytes instead of one"


@pytest.mark.alone
def test_schedule_takes_microseconds_and_does_not_depend_on_context() -> None:
    """Best of many, so that neighbours on the machine do not matter; the bound is several times what was measured."""
    best = {length: min(timed_step(scheduler) for _ in range(300)) for length, scheduler in (
        (length, decoding(64, length)) for length in (32, 8000)
    )}
    assert best[32] < 300e-6 and best[8000] < 300e-6, best


def timed_step(scheduler: Scheduler) -> float:
    begin = time.perf_counter()
    plan = scheduler.schedule()
    end = time.perf_counter()
    assert plan is not None and len(plan.rows) == 64
    scheduler.update(answer(plan))
    return end - begin


@pytest.mark.alone
def test_a_crowd_of_waiting_requests_costs_a_step_nothing() -> None:
    scheduler = decoding(16, 32)
    alone = min(timed(scheduler) for _ in range(200))
    for i in range(20_000):
        scheduler.add(
            Request(request_id="w", internal_id=1000 + i, client=b"", prompt_token_ids=[1], params=SamplingParams(seed=1))
        )
    crowded = min(timed(scheduler) for _ in range(200))
    assert crowded < 3 * alone + 20e-6


def timed(scheduler: Scheduler) -> float:
    begin = time.perf_counter()
    plan = scheduler.schedule()
    end = time.perf_counter()
    assert plan is not None
    scheduler.update(answer(plan))
    return end - begin
