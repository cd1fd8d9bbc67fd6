"""Do the eight rules for what is in flight hold? (design.md, section 5; each test fails when its rule is taken out)"""

import logging

import numpy as np
import pytest

from engine.batch_plan import BatchPlan
from engine.cost_model import Coefficients, FixedCosts
from engine.request import Request, RequestStatus
from ipc.errors import ProtocolError
from ipc.messages import ModelRunnerOutput
from ipc.params import SamplingParams
from tests.engine.scheduler_harness import EOS, Harness
from tests.fakes import RuleBroken, expected_output

EVEN_COSTS = FixedCosts(Coefficients(head_s=0.0))
"""A pipeline without a head: one cohort per stage is best."""


def rows_of(harness: Harness) -> dict[str, int]:
    return {owner.request_id: row for row, owner in enumerate(harness.worker.rows) if owner}


def test_rule_1_a_freed_block_serves_the_very_next_step_and_is_written_before_it_is_read() -> None:
    harness = Harness(num_stages=3, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=16, block_size=4, num_blocks=4)
    first = harness.add(16 - 1)
    assert harness.send() is not None
    freed = set(harness.plans[0].new_requests[0].block_ids[0])
    harness.abort(first)
    second = harness.add(15)
    plan = harness.send()
    assert plan is not None and len(harness.worker.pending) == 2, "nothing waits for the aborted request's step"
    plan = harness.send()
    assert plan is not None
    assert freed <= set(second.block_ids[0])
    harness.drain()


def test_rule_2_a_freed_row_rests_until_every_step_that_named_it_has_returned() -> None:
    harness = Harness(num_stages=2, max_num_seqs=1, max_num_batched_tokens=4)
    victim = harness.add(8)
    harness.send()
    harness.abort(victim)
    second = harness.add(3)
    harness.send()
    rows = rows_of(harness)
    assert rows[second.request_id] == 1, "row 0 is named by a step in flight"
    harness.receive()
    harness.abort(second)
    harness.add(3)
    harness.send()
    assert rows_of(harness)["r2"] == 0
    harness.drain()


def test_rule_2_admission_waits_when_every_free_row_rests() -> None:
    harness = Harness(num_stages=3, max_num_seqs=1)
    for _ in range(2):
        harness.add(3)
        harness.send()
        harness.abort(harness.requests[-1])
    harness.add(3)
    assert harness.send() is None
    harness.receive()
    assert harness.send() is not None
    harness.drain()


def test_rule_3_stage_0_has_every_token_it_needs_before_rows_change_hands() -> None:
    """The tokens of a row's last owner are consumed, if late, before the row has a new owner."""
    harness = Harness(num_stages=1, max_num_seqs=1, max_num_batched_tokens=8)
    for length in (5, 3, 6):
        harness.add(length, max_tokens=3)
    harness.drain()
    seen = [(plan.step_id, plan.needs_tokens_of_step, bool(plan.new_requests)) for plan in harness.plans]
    assert seen[:3] == [(1, 0, True), (2, 1, False), (3, 2, False)]
    for plan in harness.plans:
        if plan.new_requests and plan.new_requests[0].row in {row for p in harness.plans[: plan.step_id - 1] for row in p.rows}:
            last = max(p.step_id for p in harness.plans[: plan.step_id - 1] if plan.new_requests[0].row in p.rows)
            assert plan.needs_tokens_of_step >= last


def test_rule_3_a_step_needs_the_step_that_sampled_its_newest_input() -> None:
    harness = Harness(num_stages=2, max_num_batched_tokens=6, async_scheduling=False)
    harness.add(6, max_tokens=4, ignore_eos=True)
    harness.add(12, max_tokens=4, ignore_eos=True)
    harness.send_all()
    harness.receive()
    plan = harness.send()
    assert plan is not None and plan.num_scheduled_tokens == [1, 5]
    assert plan.needs_tokens_of_step == 1, "the decode's token; chunks of a prompt need no step"
    harness.drain()


def test_rule_4_no_block_is_ever_in_two_tables_and_old_outputs_publish_nothing() -> None:
    """Nothing is shared yet: tokens count as computed only when their output came and the request still has that life."""
    harness = Harness(num_stages=2, max_num_seqs=2, max_num_batched_tokens=4, max_model_len=16, block_size=2, num_blocks=8)
    old = harness.add(5, ignore_eos=True, max_tokens=11)
    harness.send()
    assert (old.num_scheduled_tokens, old.num_computed_tokens) == (4, 0)
    harness.receive()
    assert old.num_computed_tokens == 4
    victim = preempted_with_output_in_flight()
    harness2, request = victim
    assert request.num_computed_tokens == 0
    while request.num_steps_in_flight:
        harness2.receive()
        assert request.num_computed_tokens == 0, "the output is of a life that is over"
    harness2.drain()
    harness.drain()


def preempted_with_output_in_flight() -> tuple[Harness, Request]:
    """A harness whose newest request was preempted while the step of its last chunk is in flight."""
    # One stage more than there are requests: what is not sent is held back by a rule, not by the depth.
    harness = Harness(num_stages=3, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=14, block_size=2, num_blocks=7)
    old = harness.add(5, ignore_eos=True, max_tokens=9)
    harness.send_all()
    harness.receive()
    new = harness.add(3, ignore_eos=True, max_tokens=5, prompt_logprobs=1, logprobs=0)
    # old grows until the pool is empty; new is scheduled in a step of its own.
    while new.status is not RequestStatus.WAITING or not new.num_preemptions:
        harness.send_all()
        if new.num_preemptions:
            break
        harness.receive()
    assert old.status is RequestStatus.RUNNING
    assert new.num_steps_in_flight == 1
    return harness, new


def test_rule_5_output_of_a_preempted_request_is_accepted() -> None:
    harness, request = preempted_with_output_in_flight()
    before = len(request.output_token_ids)
    while request.num_steps_in_flight:
        harness.receive()
    assert len(request.output_token_ids) == before + 1
    assert harness.seen[request.internal_id] == request.output_token_ids
    harness.drain()


def test_rule_5_a_preempted_request_is_readmitted_only_after_its_last_step_returned() -> None:
    harness, request = preempted_with_output_in_flight()
    others = [r for r in harness.requests if r is not request]
    for other in others:
        harness.abort(other)
    assert request.num_steps_in_flight == 1 and harness.scheduler.stats().free_blocks == harness.config.num_blocks
    assert len(harness.worker.pending) < harness.scheduler.depth
    assert harness.send() is None, "all is free, and yet its output must come first"
    while request.num_steps_in_flight:
        harness.receive()
    plan = harness.send()
    assert plan is not None
    assert plan.new_requests[0].token_ids.tolist() == request.all_token_ids().tolist()
    harness.drain()


def test_rule_5_a_preempted_request_that_its_output_ends_is_over() -> None:
    harness, request = preempted_with_output_in_flight()
    object.__setattr__(request.params, "max_tokens", len(request.output_token_ids) + 1)
    while request.num_steps_in_flight:
        harness.receive()
    assert request.finish_reason == "length"
    assert harness.scheduler.stats().waiting == 0
    harness.drain()


def test_rule_5_a_victim_in_the_plan_being_built_is_taken_out_and_refunded() -> None:
    """The newer request comes back first and is planned first; then the older one needs its blocks."""
    harness = Harness(num_stages=1, max_num_seqs=3, max_num_batched_tokens=2, max_model_len=12, block_size=1, num_blocks=13,
                      async_scheduling=False)
    old = harness.add(2, ignore_eos=True, max_tokens=10)
    new = harness.add(2, ignore_eos=True, max_tokens=10)
    harness.send_all()
    harness.receive()
    found = False
    while harness.scheduler.has_unfinished() and not found:
        # Turn the order of return around, so that the newer one is planned first.
        if new.internal_id in harness.scheduler._decodes:
            harness.scheduler._decodes.move_to_end(new.internal_id, last=False)
        free = harness.scheduler.stats().free_blocks
        preemptions = new.num_preemptions
        plan = harness.send()
        if plan is not None and new.num_preemptions > preemptions and free == 1:
            found = True
            assert len(plan.rows) == 1 and plan.rows == [old.row], "the victim is out of the batch"
            assert new.num_steps_in_flight == 0 and new.row not in plan.rows
        if harness.worker.pending:
            harness.receive()
    assert found
    harness.drain()


def test_rule_5_the_refund_of_a_victim_is_exact() -> None:
    harness = Harness()
    one, two = harness.add(5), harness.add(1)
    plan = BatchPlan(8)
    plan.add(one, 5, ())
    plan.add(two, 1, ([4],))
    plan.remove(one)
    plan.remove(one)
    assert (plan.tokens_left, len(plan)) == (7, 1)
    plan.remove(two)
    assert (plan.tokens_left, len(plan)) == (8, 0)


def test_rule_6_output_of_an_aborted_request_is_discarded() -> None:
    harness = Harness(num_stages=2)
    request = harness.add(6)
    neighbour = harness.add(6)
    harness.send_all()
    harness.abort(request)
    harness.abort(request)
    progress = harness.receive()
    assert [item.request for item in progress] == [neighbour]
    assert request.output_token_ids == []
    harness.drain()


def test_rule_6_nothing_is_scheduled_past_lengths() -> None:
    """The workers refuse a sample past max_tokens or max_model_len; here both limits are met exactly."""
    harness = Harness(num_stages=3, max_model_len=20)
    by_tokens = harness.add(4, max_tokens=5, ignore_eos=True)
    by_context = harness.add(15, max_tokens=None, ignore_eos=True)
    harness.drain()
    assert (len(by_tokens.output_token_ids), len(by_context.output_token_ids)) == (5, 5)


def test_rule_7_chunks_of_one_prompt_run_in_consecutive_steps() -> None:
    harness = Harness(num_stages=3, max_num_batched_tokens=4)
    request = harness.add(10)
    plans = harness.send_all()
    assert [plan.num_scheduled_tokens for plan in plans] == [[4], [4], [2]]
    assert request.num_steps_in_flight == 3
    harness.drain()


def test_rule_7_a_decode_goes_ahead_with_a_placeholder_once_and_only_in_the_extra_step() -> None:
    harness = Harness(num_stages=3)
    request = harness.add(4, ignore_eos=True)
    first, second = harness.send_all()
    assert second.rows == first.rows and second.num_scheduled_tokens == [1]
    assert second.needs_tokens_of_step == first.step_id, "stage 0 gets the token that the core does not know"
    assert request.output_token_ids == [] and request.num_scheduled_tokens == 5
    harness.receive()
    (third,) = harness.send_all()
    assert third.needs_tokens_of_step == second.step_id
    harness.drain()


def test_rule_7_only_the_token_that_is_due_next_is_waited_for() -> None:
    """Any other would hold up stage 0 while steps behind it could run."""
    harness = Harness(num_stages=3, costs=EVEN_COSTS)
    for _ in range(3):
        harness.add(3, ignore_eos=True, max_tokens=20)
    for _ in range(30):
        harness.send_all()
        oldest = harness.worker.pending[0][0].step_id
        assert all(plan.needs_tokens_of_step <= max(oldest, harness.worker.last_returned_id + 1)
                   for plan, _ in harness.worker.pending)
        assert len(harness.worker.pending) <= 4
        harness.receive()
    harness.drain()


def test_rule_7_prompts_go_before_placeholders_while_the_pipeline_has_room() -> None:
    harness = Harness(num_stages=3, max_num_batched_tokens=8, costs=EVEN_COSTS)
    old = harness.add(3, ignore_eos=True)
    harness.send()
    new = harness.add(24, ignore_eos=True)
    plans = harness.send_all()
    assert [old.row in plan.rows for plan in plans] == [False, False, True], "in the extra step only"
    assert all(new.row in plan.rows for plan in plans)
    harness.drain()


def test_rule_7_no_placeholders_without_async_scheduling() -> None:
    """FakeWorker refuses a row whose sampled token is still in flight."""
    harness = Harness(num_stages=3, async_scheduling=False)
    assert harness.scheduler.depth == 3
    harness.add(4, ignore_eos=True)
    assert len(harness.send_all()) == 1
    harness.receive()
    assert len(harness.send_all()) == 1
    harness.drain()


def test_rule_6_what_a_stop_overran_is_never_seen() -> None:
    prompt = [9, 8, 7]
    tokens, _, _ = expected_output(
        prompt, SamplingParams(seed=0, max_tokens=10, ignore_eos=True), eos_token_ids=frozenset(), max_model_len=64
    )
    harness = Harness(num_stages=1)
    request = harness.add(prompt, max_tokens=10, stop_token_ids=(tokens[1],), ignore_eos=True)
    harness.send_all()
    harness.receive()
    harness.send_all()
    assert request.num_steps_in_flight == 2, "one of them samples past the stop"
    (item,) = harness.receive()
    assert request.finish_reason == "stop" and item.new_token_ids == [tokens[1]]
    assert harness.receive() == [], "the overrun token"
    assert request.output_token_ids == tokens[:2]
    harness.check_end()


def test_rule_5_both_tokens_of_a_preempted_request_in_two_steps_are_accepted() -> None:
    harness = Harness(num_stages=1)
    request = harness.add(2, ignore_eos=True, max_tokens=10)
    harness.send_all()
    assert request.num_steps_in_flight == 2
    harness.scheduler._preempt(request, BatchPlan(1))
    for num_tokens in (1, 2):
        assert harness.send() is None, "not before its last step is back"
        harness.receive()
        assert len(request.output_token_ids) == num_tokens
    plan = harness.send()
    assert plan is not None and plan.new_requests[0].token_ids.tolist() == request.all_token_ids().tolist()
    harness.drain()


def test_rule_8_an_exception_while_applying_one_output_fails_that_request_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness(num_stages=2)
    bad, good = harness.add(4), harness.add(4)
    real = type(harness.scheduler)._apply_token

    def apply(self: object, item: object, *rest: object) -> None:
        if item.request is bad:  # type: ignore[attr-defined]
            raise KeyError("a bug")
        real(self, item, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(type(harness.scheduler), "_apply_token", apply)
    with caplog.at_level(logging.CRITICAL):
        harness.send_all()
        failed, fine = harness.receive()
        harness.drain()
    assert failed.request is bad and failed.error is not None and failed.error.code == "internal"
    assert fine.error is None and good.finish_reason in ("stop", "length")


def test_a_missing_token_fails_its_request_and_frees_everything() -> None:
    harness = Harness(num_stages=1)
    request = harness.add(4)
    plan = harness.send()
    assert plan is not None
    harness.worker.receive()
    output = ModelRunnerOutput(core_id=5, epoch=1, step_id=1, rows=[], token_ids=[], counts=[])
    (item,) = harness.scheduler.update(output)
    assert item.error is not None and "no token" in item.error.reason
    assert request.finish_reason == "error" and harness.scheduler.stats().free_blocks == harness.config.num_blocks
    harness.scheduler.check_books()


@pytest.mark.parametrize("step_id", [0, 2, 3])
def test_an_output_that_is_not_due_is_refused(step_id: int) -> None:
    harness = Harness(num_stages=2, max_num_batched_tokens=4)
    harness.add(8)
    harness.send_all()
    output = ModelRunnerOutput(core_id=5, epoch=1, step_id=step_id, rows=[], token_ids=[], counts=[])
    with pytest.raises(ProtocolError, match=rf"step_id: is {step_id}, step 1 is to return next"):
        harness.scheduler.update(output)
    harness.scheduler.check_books()
    harness.drain()


def test_nan_ends_its_request_with_an_error() -> None:
    harness = Harness(num_stages=2, eos_token_ids=EOS)
    bad, good = harness.add(6), harness.add(6)
    harness.worker.nan_requests.add(bad.request_id)
    harness.send_all()
    item = next(i for i in harness.receive() if i.request is bad)
    assert item.error is not None and item.error.code == "internal" and "the model produced NaN" in item.error.reason
    assert item.new_token_ids == [] and bad.finish_reason == "error"
    harness.drain()
    assert good.finish_reason in ("stop", "length")


def test_the_fake_worker_sees_a_stale_slot() -> None:
    """The checker itself: a slot that someone else overwrote is noticed at the next read."""
    harness = Harness(num_stages=1)
    harness.add(6, ignore_eos=True)
    harness.send_all()
    harness.receive()
    block_id = harness.scheduler.unfinished()[0].block_ids[0][0]
    harness.worker.slots[block_id * harness.config.block_size] = (0, 1, ())
    with pytest.raises(RuleBroken, match="foreign or stale slot"):
        harness.send()


def test_prompt_logprobs_come_once_also_across_preemption() -> None:
    harness, request = preempted_with_output_in_flight()
    harness.drain()
    assert request.num_preemptions >= 1
    assert harness.told_prompt_logprobs[request.internal_id] == request.num_prompt_tokens


def test_prompt_logprobs_come_piece_by_piece() -> None:
    harness = Harness(num_stages=2, max_num_batched_tokens=4)
    request = harness.add(10, prompt_logprobs=2, max_tokens=1)
    harness.send_all()
    pieces = [harness.receive() for _ in range(2)]
    assert [(p[0].prompt_logprobs.start, len(p[0].prompt_logprobs.ranks)) for p in pieces] == [(1, 4), (5, 4)]  # type: ignore[union-attr]
    harness.drain()
    assert harness.told_prompt_logprobs[request.internal_id] == 10
    assert isinstance(pieces[0][0].prompt_logprobs.token_ids, np.ndarray)  # type: ignore[union-attr]
