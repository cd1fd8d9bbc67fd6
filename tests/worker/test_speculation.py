"""Drafts through scheduler and stages in this process: the same tokens in fewer steps, beside requests that take none."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.request import AnswerGrammar, Request
from ipc.errors import ProtocolError
from ipc.messages import DraftTokens, ModelRunnerOutput, RejectedDrafts
from ipc.params import SamplingParams
from tests.worker.pipeline import Pipeline, Plans, tokens_of
from tests.worker.scheduled import Engine, prompt_of
from worker.request_states import RequestStates
from worker.verification import NO_DRAFT, DraftPlaces

VOCAB_SIZE = 512

FEW = tuple(range(20, 24))
"""So few allowed tokens that an answer repeats itself by chance, now and then."""


class Allowed:
    """A grammar that allows the same tokens all the time."""

    is_complete = False

    def __init__(self, token_ids: Sequence[int]) -> None:
        bits = np.zeros(VOCAB_SIZE, np.uint8)
        bits[list(token_ids)] = 1
        self.mask = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> None:
        assert self.mask[token_id // 32] >> (token_id % 32) & 1


Asked = tuple[Sequence[int], dict[str, Any]]
"""A prompt and parameters."""

REPEATS = [
    (prompt_of(20, 1), {"temperature": 0.0, "max_tokens": 60}),
    (prompt_of(40, 2) * 2, {"temperature": 0.0, "max_tokens": 60, "allowed_token_ids": FEW[:2]}),
    (prompt_of(33, 6), {"temperature": 0.0, "max_tokens": 60, "allowed_token_ids": FEW[:3]}),
    ([*FEW, *FEW, *FEW, 21, 21, 22], {"temperature": 0.7, "seed": 3, "max_tokens": 60, "allowed_token_ids": FEW[:2]}),
    (list(FEW) * 4, {"temperature": 0.3, "seed": 9, "max_tokens": 60, "allowed_token_ids": FEW[:2], "min_tokens": 30,
                     "stop_token_ids": (20,)}),
    (list(FEW) * 4, {"temperature": 1.0, "seed": 4, "max_tokens": 60, "logit_bias": ((20, 9.0), (21, 8.0))}),
]  # fmt: skip
OTHERS = [
    (prompt_of(9, 3), {"temperature": 0.0, "max_tokens": 40, "repetition_penalty": 1.3}),
    (prompt_of(9, 3), {"temperature": 0.8, "seed": 5, "max_tokens": 40, "frequency_penalty": 0.4, "presence_penalty": 0.2}),
    (list(FEW) * 3, {"temperature": 0.5, "seed": 6, "max_tokens": 40, "bad_word_ids": ((20, 21), (7,))}),
    (prompt_of(50, 4), {"temperature": 1.0, "seed": 7, "max_tokens": 40}),
    (list(FEW) * 3, {"temperature": 0.5, "seed": 6, "max_tokens": 40, "grammar": Allowed(FEW)}),
    (prompt_of(30, 5), {"temperature": 0.0, "max_tokens": 20, "logprobs": 1, "prompt_logprobs": 0}),
]  # fmt: skip


def answers(path: Path, num_stages: int, asked: Sequence[Asked], lookup: int, **changes: Any) -> tuple[list[list[int]], Engine]:
    """Token ids of all, which run side by side; and the engine behind it."""
    rules = {"speculative_lookup_tokens": lookup} | changes.pop("rules", {})
    engine = Engine(path, num_stages, rules=rules, **({"max_num_seqs": 64, "budget": 64} | changes))
    scheduler, requests = engine.scheduler, []
    for number, (prompt, given) in enumerate(asked):
        params = dict(given)
        grammar: AnswerGrammar | None = params.pop("grammar", None)
        requests.append(Request(
            request_id=str(number), internal_id=number, client=b"c", prompt_token_ids=np.asarray(prompt, np.int32),
            params=SamplingParams(**({"seed": 0} | params)), grammar=grammar,
        ))  # fmt: skip
        scheduler.add(requests[-1])
    in_flight = []
    while scheduler.has_unfinished():
        while (plan := scheduler.schedule()) is not None:
            in_flight.append(plan)
        for masks in scheduler.take_masks():
            engine.pipeline.masks[masks.step_id] = masks
        scheduler.update(engine.pipeline.run(in_flight.pop(0)))
        scheduler.check_books()
        for masks in scheduler.take_masks():
            engine.pipeline.masks[masks.step_id] = masks
    return [list(request.output_token_ids) for request in requests], engine


@pytest.fixture(scope="module")
def plain(path) -> list[list[int]]:
    """Without speculation, each request alone."""
    return [answers(path, 1, [asked], 0)[0][0] for asked in [*REPEATS, *OTHERS]]


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_the_same_tokens_with_and_without_drafts(path, plain, num_stages):
    found, engine = answers(path, num_stages, [*REPEATS, *OTHERS], 8)
    assert found == plain
    stats = engine.scheduler.stats()
    assert stats.num_draft_tokens > stats.num_accepted_draft_tokens > 40, "both right and wrong drafts belong to this test"


@pytest.mark.parametrize("changes", [
    {"num_blocks": 17}, {"rules": {"async_scheduling": False}}, {"rules": {"prefix_caching": False}}, {"attention_backend": "cpu"},
    {"cudagraph_mode": "full_and_piecewise"},
], ids=["preempted", "synchronous", "no prefix cache", "native", "graphs"])  # fmt: skip
def test_the_same_tokens_whatever_else_happens(path, plain, changes):
    found, engine = answers(path, 2, [*REPEATS, *OTHERS], 16, **changes)
    assert found == plain
    assert engine.scheduler.stats().num_accepted_draft_tokens > 40
    assert (engine.scheduler.stats().preemptions > 0) == ("num_blocks" in changes)


def test_a_prefix_that_drafts_computed_is_found_and_right(path, plain):
    """The second request's prompt goes on behind the first one's answer."""
    prompt, params = REPEATS[1]
    longer = [*prompt, *plain[1]]
    alone, _ = answers(path, 1, [(longer, params)], 0)
    rules = {"speculative_lookup_tokens": 8}
    engine = Engine(path, 2, rules=rules)
    for number, tokens in enumerate((prompt, longer)):
        request = Request(request_id=str(number), internal_id=number, client=b"c", prompt_token_ids=np.asarray(tokens, np.int32),
                          params=SamplingParams(seed=0, **params))  # fmt: skip
        engine.scheduler.add(request)
        while engine.scheduler.has_unfinished():
            engine.scheduler.update(engine.pipeline.run(engine.scheduler.schedule()))
    assert engine.scheduler.stats().prefix_hit_tokens >= len(longer) - 32
    assert engine.scheduler.stats().num_accepted_draft_tokens > 10
    assert request.output_token_ids == alone[0]


# ------------------------------------------------------------------------------------------------- the parts


def with_drafts(plan, row: int, drafts: Sequence[int]):
    """The plan, which computes one token of this row, with drafts behind it."""
    index = plan.rows.index(row)
    counts = list(plan.num_scheduled_tokens)
    counts[index] += len(drafts)
    return replace(
        plan, num_scheduled_tokens=counts, drafts=DraftTokens(indices=[index], counts=[len(drafts)], token_ids=list(drafts))
    )


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("num_right", [0, 1, 4])
def test_drafts_up_to_the_first_wrong_one_stand(path, num_stages, num_right):
    pipeline, plans, prompt = Pipeline(path, num_stages), Plans(), prompt_of(17)
    expected = Pipeline(path, 1)
    reference = Plans()
    reference.add(0, prompt)
    tokens = [tokens_of(expected.run(reference.step({0: 17})))[0]]
    tokens += [tokens_of(expected.run(reference.step({0: 1})))[0] for _ in range(8)]
    plans.add(0, prompt)
    plans.add(1, prompt)
    pipeline.run(plans.step({0: 17, 1: 17}))
    drafts = [*tokens[1 : 1 + num_right], *[(token + 1) % VOCAB_SIZE for token in tokens[1 + num_right : 5]]]
    output = pipeline.run(with_drafts(plans.step({1: 1, 0: 1}), 0, drafts))
    of_row = dict(zip(output.rows, split(output), strict=True))
    assert of_row == {0: tokens[1 : num_right + 2], 1: tokens[1:2]}
    plan = plans.step({0: 1, 1: 1})
    if num_right < 4:
        plan = replace(plan, rejected=RejectedDrafts(indices=[plan.rows.index(0)], counts=[4 - num_right]))
    assert tokens_of(pipeline.run(plan)) == {0: tokens[num_right + 2], 1: tokens[2]}


def split(output: ModelRunnerOutput) -> list[list[int]]:
    token_ids = iter(output.token_ids)
    return [[next(token_ids) for _ in range(count)] for count in output.counts]


def test_a_draft_is_a_token_of_the_vocabulary(path):
    pipeline, plans = Pipeline(path, 1), Plans()
    plans.add(0, prompt_of(5))
    pipeline.run(plans.step({0: 5}))
    with pytest.raises(ProtocolError, match="an id is outside"):
        pipeline.run(with_drafts(plans.step({0: 1}), 0, [VOCAB_SIZE]))


@pytest.mark.parametrize(("drafts", "complaint"), [
    (DraftTokens(indices=[0], counts=[2], token_ids=[5]), "1 token ids for 2 places"),
    (DraftTokens(indices=[1], counts=[1], token_ids=[5]), "rows number"),
    (DraftTokens(indices=[0, 0], counts=[1, 1], token_ids=[5, 5]), "rows number"),
    (DraftTokens(indices=[0], counts=[0], token_ids=[]), "rows number"),
    (DraftTokens(indices=[0], counts=[3], token_ids=[5, 5, 5]), "row 2: 3 drafts"),
])  # fmt: skip
def test_drafts_that_do_not_fit_the_plan_are_refused(drafts, complaint):
    states = RequestStates(4, 32, is_first=True, is_last=True)
    states.num_known[2], states.num_computed[2] = 10, 9
    with pytest.raises(ProtocolError, match=complaint):
        states.add_drafts(np.array([2]), np.array([3]), drafts)


@pytest.mark.parametrize(("known", "computed"), [(10, 8), (31, 30)])
def test_drafts_stand_behind_the_newest_token_and_within_the_context(known, computed):
    states = RequestStates(4, 32, is_first=True, is_last=True)
    states.num_known[2], states.num_computed[2] = known, computed
    with pytest.raises(ProtocolError, match="row 2: 2 drafts behind"):
        states.add_drafts(np.array([2]), np.array([3]), DraftTokens(indices=[0], counts=[2], token_ids=[5, 5]))


def test_no_more_drafts_are_taken_back_than_there_were():
    states = RequestStates(4, 32, is_first=True, is_last=True)
    states.num_known[2], states.num_computed[2] = 10, 9
    states.add_drafts(np.array([2]), np.array([3]), DraftTokens(indices=[0], counts=[2], token_ids=[5, 5]))
    with pytest.raises(ProtocolError, match="3 of 2 drafts"):
        states.take_back(np.array([2]), RejectedDrafts(indices=[0], counts=[3]))
    states.take_back(np.array([2]), RejectedDrafts(indices=[0], counts=[2]))
    with pytest.raises(ProtocolError, match="1 of 0 drafts"):
        states.take_back(np.array([2]), RejectedDrafts(indices=[0], counts=[1]))


@pytest.mark.parametrize("counts", [[1, 0], [3, 2], [1, 1], [4, 1], [1], [2, 3]])
def test_tokens_that_the_step_could_not_have_sampled_are_refused(counts):
    states = RequestStates(4, 32, is_first=True, is_last=False)
    states.await_tokens(1, np.array([2, 0]), np.array([10, 5]), np.array([2, 0]))
    token_ids = [5] * (3 if counts == [1, 1] else sum(counts))
    with pytest.raises(ProtocolError, match="SampledTokens"):
        states.accept_tokens(1, [2, 0], token_ids, counts)


def test_several_tokens_of_a_row_land_one_behind_the_other():
    states = RequestStates(4, 32, is_first=True, is_last=False)
    states.await_tokens(1, np.array([2, 0, 3]), np.array([10, 5, 30]), np.array([2, 0, 3]))
    states.free([0])
    states.accept_tokens(1, [2, 0, 3], [40, 41, 42, 50, 60, 61, 62], [3, 1, 3])
    assert states.token_ids[2, 9:14].tolist() == [0, 40, 41, 42, 0] and not states.token_ids[0].any()
    assert states.token_ids[3, 29:].tolist() == [0, 60, 61]


def test_verification_against_its_definition():
    rng = random.Random(1)
    for _ in range(200):
        rows = [[rng.randrange(2) for _ in range(rng.randrange(4))] for _ in range(rng.randrange(1, 6))]
        sampled = [[rng.randrange(2) for _ in range(len(drafts) + 1)] for drafts in rows]
        expected = []
        for drafts, tokens in zip(rows, sampled, strict=True):
            count = 1
            while count <= len(drafts) and drafts[count - 1] == tokens[count - 1]:
                count += 1
            expected.append(tokens[:count])
        starts = np.cumsum([0] + [len(tokens) for tokens in sampled[:-1]])
        places = DraftPlaces(
            starts=starts, expected=np.array([token for drafts in rows for token in [*drafts, NO_DRAFT]], np.int32)
        )
        flat = np.array([token for tokens in sampled for token in tokens])
        counts, stands = places.verify(flat)
        assert counts.tolist() == [len(tokens) for tokens in expected]
        assert flat[stands].tolist() == [token for tokens in expected for token in tokens]
