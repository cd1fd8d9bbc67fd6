"""Does the last stage wait for a step's masks, and sample from the tokens that they allow and no others?"""

import numpy as np
import pytest
import torch

from ipc.errors import ProtocolError
from ipc.messages import GrammarOutput, SchedulerOutput
from ipc.params import SamplingParams
from ipc.spans import Kind
from tests.worker.pipeline import Pipeline, Plans, tokens_of

VOCAB_SIZE = 512
RANDOM = SamplingParams(temperature=1.0, seed=5, logprobs=2)


def masks_of(step_id: int, allowed: dict[int, list[int]], *, num_words: int = VOCAB_SIZE // 32) -> GrammarOutput:
    bits = np.zeros((len(allowed), num_words * 32), np.uint8)
    for i, token_ids in enumerate(allowed.values()):
        bits[i, token_ids] = 1
    words = np.packbits(bits, axis=1, bitorder="little").reshape(-1).view(np.int32)
    return GrammarOutput(core_id=7, epoch=3, step_id=step_id, rows=list(allowed), masks=words)


def promising(plan: SchedulerOutput) -> SchedulerOutput:
    return SchedulerOutput(**{name: getattr(plan, name) for name in plan.__slots__} | {"has_grammar": True})


def start(path, num_stages: int, params: SamplingParams = RANDOM) -> tuple[Pipeline, Plans]:
    pipeline, plans = Pipeline(path, num_stages), Plans()
    for row in range(3):
        plans.add(row, [5 + row, 90, 17 + 3 * row], params)
    return pipeline, plans


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("params", [RANDOM, SamplingParams(temperature=0.0, seed=1), SamplingParams(top_k=3, seed=4), SamplingParams(top_p=0.3, seed=4)],
                         ids=["random", "greedy", "top_k", "top_p"])  # fmt: skip
def test_rows_with_a_mask_get_a_token_that_it_allows_and_others_what_they_get_anyway(path, num_stages, params):
    free, plans = start(path, num_stages, params)
    expected = [tokens_of(free.run(plans.step(dict.fromkeys(range(3), count)))) for count in (3, 1)]
    pipeline, plans = start(path, num_stages, params)
    first = promising(plans.step(dict.fromkeys(range(3), 3)))
    pipeline.masks[first.step_id] = masks_of(first.step_id, {2: [7, 300, 511], 0: [11]})
    tokens = tokens_of(pipeline.run(first))
    assert tokens[0] == 11 and tokens[2] in (7, 300, 511) and tokens[1] == expected[0][1]
    second = promising(plans.step(dict.fromkeys(range(3), 1)))
    pipeline.masks[second.step_id] = masks_of(second.step_id, {0: [expected[1][0], 3]})
    assert tokens_of(pipeline.run(second))[1] == expected[1][1]


def test_the_choice_among_allowed_tokens_is_the_softmax_of_their_logits(path):
    pipeline, plans = start(path, 1, SamplingParams(temperature=0.0, seed=1))
    plan = promising(plans.step(dict.fromkeys(range(3), 3)))
    runner = pipeline.runners[0]
    batch = runner.prepare(plan)
    result = runner.execute_model(batch, None)
    logits = result.logits.clone()
    allowed = [3, 40, 41, 99, 500]
    output = runner.sample_tokens(batch, result, masks_of(plan.step_id, {1: allowed}))
    assert tokens_of(output)[1] == allowed[int(logits[1, allowed].argmax())]


def test_log_probabilities_are_those_of_the_model(path):
    free, plans = start(path, 1)
    expected = free.run(plans.step(dict.fromkeys(range(3), 3))).logprobs
    pipeline, plans = start(path, 1)
    plan = promising(plans.step(dict.fromkeys(range(3), 3)))
    pipeline.masks[plan.step_id] = masks_of(plan.step_id, {0: [7]})
    columns = pipeline.run(plan).logprobs
    assert columns.token_ids[0] == 7 and columns.logprobs[0] < -1e-3, "not the 0.0 of the only token that is left"
    assert torch.equal(torch.tensor(columns.logprobs[1:3]), torch.tensor(expected.logprobs[1:3]))


def test_a_promise_without_rows_changes_nothing(path):
    free, plans = start(path, 1)
    expected = tokens_of(free.run(plans.step(dict.fromkeys(range(3), 3))))
    pipeline, plans = start(path, 1)
    plan = promising(plans.step(dict.fromkeys(range(3), 3)))
    pipeline.masks[plan.step_id] = masks_of(plan.step_id, {})
    assert tokens_of(pipeline.run(plan)) == expected


def test_only_the_last_stage_asks_for_masks_and_not_before_it_has_computed(path):
    pipeline, plans = start(path, 2)
    plan = promising(plans.step(dict.fromkeys(range(3), 3)))
    clock = pipeline.stages[1]._clock
    done = []

    def take(step_id: int, timeout_s: float) -> GrammarOutput:
        done.extend(kind for kind in clock.snapshot(60)[:, 0].tolist() if kind in (Kind.PREPARE, Kind.FORWARD, Kind.SAMPLE))
        assert (clock.snapshot(60)[-1][0], timeout_s) == (Kind.WAIT_MASKS, 1.0)
        return masks_of(step_id, {0: [7]})

    assert pipeline.stages[0].run_step(plan) is None, "the first stage needs no masks"
    assert tokens_of(pipeline.stages[1].run_step(plan, take_masks=take))[0] == 7
    assert done[-1] == Kind.FORWARD
    _, waits = clock.busy_and_waits()
    assert waits[Kind.WAIT_MASKS] > 0


@pytest.mark.parametrize(("masks", "complaint"), [
    (masks_of(1, {5: [1]}), r"rows: \[5\] are not among the rows that sample, \[0, 1, 2\]"),
    (masks_of(1, {0: [1]}, num_words=15), "masks: has 15 words for 1 rows of 16 words each"),
])
def test_masks_that_do_not_fit_the_step_are_refused(path, masks, complaint):
    pipeline, plans = start(path, 1)
    pipeline.masks[1] = masks
    with pytest.raises(ProtocolError, match=complaint):
        pipeline.run(promising(plans.step(dict.fromkeys(range(3), 3))))
