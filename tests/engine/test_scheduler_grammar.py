"""Does every step with a grammar get its masks, in whatever way its requests end meanwhile?

The fake workers sample from the masks that they get, run no such step without, and refuse masks that nobody promised; the
harness compares each answer with one that was made alone.
"""

from typing import Any

import pytest

from engine.policies import SchedulingPolicy
from engine.request import Request, RequestStatus
from ipc.messages import GrammarOutput
from tests.engine.scheduler_harness import Harness
from tests.fakes import FakeGrammar, RuleBroken


def rows_masked(harness: Harness) -> list[tuple[int, list[int]]]:
    return [(masks.step_id, masks.rows) for masks in harness.masks]


def constrained(harness: Harness, num_prompt: int = 3, *, length: int = 6, **params: Any) -> Request:
    return harness.add(num_prompt, grammar=FakeGrammar(length, key=len(harness.requests)), **params)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_answers_are_those_of_lone_runs_and_end_when_the_grammar_is_complete(num_stages: int, async_scheduling: bool) -> None:
    harness = Harness(num_stages=num_stages, async_scheduling=async_scheduling)
    requests = [constrained(harness, 3 + number, length=5 + number) for number in range(4)]
    free = [harness.add(4) for _ in range(4)]
    harness.drain()
    assert [(len(r.output_token_ids), r.finish_reason) for r in requests] == [(5 + n, "stop") for n in range(4)]
    assert [r.finish_reason for r in free] == ["length"] * 4
    promised = [plan.step_id for plan in harness.plans if plan.has_grammar]
    assert [masks.step_id for masks in harness.masks] == promised


def test_only_steps_in_which_a_grammars_row_samples_promise_masks() -> None:
    harness = Harness(max_num_batched_tokens=4, max_num_seqs=2)
    constrained(harness, 9, length=2)
    first, second, third = harness.send_all()
    assert [plan.has_grammar for plan in (first, second, third)] == [False, False, True]
    harness.drain()


def test_rule_7_a_step_goes_ahead_of_its_grammars_last_token_and_the_mask_follows() -> None:
    harness = Harness(num_stages=2)
    request = constrained(harness)
    first, second = harness.send(), harness.send()
    assert first is not None and second is not None and second.needs_tokens_of_step == first.step_id
    assert rows_masked(harness) == [(1, [request.row])], "the first mask needs no token"
    assert not harness.worker.masks and len(harness.worker.unexecuted) == 1
    harness.receive()
    assert rows_masked(harness)[1] == (2, [request.row])
    assert not harness.worker.unexecuted
    harness.drain()


def test_a_promise_is_kept_without_rows_when_the_only_request_is_gone() -> None:
    harness = Harness(num_stages=2)
    request = constrained(harness)
    harness.send_all()
    assert [plan.step_id for plan in harness.worker.unexecuted] == [2]
    harness.abort(request)
    assert rows_masked(harness)[-1] == (2, [])
    assert harness.masks[-1].masks.size == 0
    harness.drain()


def test_a_promise_is_kept_for_the_others_when_one_request_is_gone() -> None:
    harness = Harness(num_stages=1)
    gone, stays = constrained(harness), constrained(harness)
    harness.send_all()
    assert [plan.step_id for plan in harness.worker.unexecuted] == [2]
    row = stays.row
    harness.abort(gone)
    assert rows_masked(harness)[-1][0] == 1, "the other one's token is not back yet"
    harness.receive()
    assert rows_masked(harness)[-1] == (2, [row])
    harness.drain()


def test_a_step_behind_the_last_token_of_a_complete_answer_gets_an_empty_promise_kept() -> None:
    harness = Harness(num_stages=1)
    request = constrained(harness, length=1)
    harness.send_all()
    assert len(harness.worker.unexecuted) == 1
    (progress,) = harness.receive()
    assert request.finish_reason == "stop" and len(progress.new_token_ids) == 1
    assert rows_masked(harness)[-1] == (2, [])
    harness.drain()


def test_a_complete_answer_that_is_also_as_long_as_it_may_be_ended_by_itself() -> None:
    harness = Harness()
    complete, cut = constrained(harness, length=4, max_tokens=4), constrained(harness, length=5, max_tokens=4)
    harness.drain()
    assert (complete.finish_reason, cut.finish_reason) == ("stop", "length")


def test_end_and_stop_tokens_end_an_answer_before_its_grammar_sees_them() -> None:
    grammars = FakeGrammar(6, key=1), FakeGrammar(6, key=2)
    harness = Harness(eos_token_ids=frozenset(grammars[0].allowed()))
    requests = [harness.add(3, grammar=grammars[0]), harness.add(3, grammar=grammars[1], stop_token_ids=grammars[1].allowed())]
    harness.drain()
    for request, grammar in zip(requests, grammars, strict=True):
        assert (request.finish_reason, len(request.output_token_ids), grammar.accepted) == ("stop", 1, [])
    assert requests[1].stop_reason == requests[1].output_token_ids[0]


def test_preemption_does_not_change_answers() -> None:
    # Blocks for one long request and a bit: the newer one gives way in the middle of its answer.
    harness = Harness(num_stages=2, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=24, block_size=2, num_blocks=13)
    requests = [constrained(harness, 6, length=12) for _ in range(2)]
    harness.drain()
    assert harness.total("preemptions") > 0
    assert [len(r.output_token_ids) for r in requests] == [12, 12]


def test_a_preempted_requests_step_in_flight_gets_its_mask_since_its_token_counts() -> None:
    harness = Harness(
        num_stages=2, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=16, block_size=2, num_blocks=8,
        policy=SchedulingPolicy.PRIORITY,
    )  # fmt: skip
    victim = constrained(harness, 6, length=8, priority=1)
    harness.send_all()
    row = victim.row
    assert [plan.rows for plan in harness.worker.unexecuted] == [[row]], "its second token's mask is owed"
    harness.add(14, max_tokens=1)
    harness.send()
    assert victim.status is RequestStatus.WAITING and victim.num_steps_in_flight == 2
    harness.receive()
    assert rows_masked(harness)[-1] == (2, [row])
    harness.drain()
    assert len(victim.output_token_ids) == 8


def test_grammars_go_on_after_the_workers_were_lost() -> None:
    harness = Harness(num_stages=2)
    request = constrained(harness, length=8)
    free = harness.add(5)
    harness.send_all()
    for _ in range(3):
        harness.receive()
        harness.send_all()
    assert 0 < len(request.output_token_ids) < 8
    harness.lose_workers()
    harness.drain()
    assert len(request.output_token_ids) == 8 and free.finish_reason == "length"


def test_a_token_that_the_grammar_does_not_allow_fails_its_request_alone() -> None:
    harness = Harness(num_stages=1)
    request, other = constrained(harness), constrained(harness)
    harness.send()
    request.grammar._key += 1000  # its next mask is another one than the worker had
    failed = [item for item in harness.receive() if item.error]
    assert [item.request for item in failed] == [request] and "is not one of" in str(failed[0].error)
    harness.drain()
    assert other.finish_reason == "stop"


def test_without_grammars_nothing_is_promised() -> None:
    harness = Harness()
    harness.add(5)
    harness.drain()
    assert not harness.masks and not any(plan.has_grammar for plan in harness.plans)


def test_the_fake_workers_refuse_masks_that_nobody_promised() -> None:
    harness = Harness()
    harness.add(5)
    harness.send()
    with pytest.raises(RuleBroken, match="were promised"):
        harness.worker.take_masks(GrammarOutput(core_id=5, epoch=1, step_id=1, rows=[], masks=FakeGrammar(1).mask[:0]))
