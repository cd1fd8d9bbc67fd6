"""The model runner against transformers: chunks, mixed batches, row reuse, two stages, log probabilities, NaNs."""

import random

import numpy as np
import pytest
import torch

from engine.request import Request
from engine.scheduler import Scheduler, SchedulerConfig
from ipc.errors import ProtocolError
from ipc.params import SamplingParams
from tests.oracle import LOGPROB_TOLERANCE
from tests.worker.pipeline import Pipeline, Plans, tokens_of


@pytest.fixture(scope="module")
def raw_logprobs(oracle):
    """Log-softmax [T, V] behind every token of a sequence."""

    def compute(token_ids):
        with torch.inference_mode():
            return oracle.model(torch.tensor([list(token_ids)])).logits[0].float().log_softmax(-1)

    return compute


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(3, 512), k=length)


def decode(pipeline: Pipeline, plans: Plans, rows: list[int], num_steps: int) -> dict[int, list[int]]:
    got: dict[int, list[int]] = {row: [] for row in rows}
    for _ in range(num_steps):
        for row, token_id in tokens_of(pipeline.run(plans.step(dict.fromkeys(rows, 1)))).items():
            got[row].append(token_id)
    return got


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("chunks", [(97,), (32, 32, 32, 1), (1, 95, 1)])
def test_chunks_of_a_prompt_give_the_oracles_tokens(path, oracle, num_stages, chunks):
    pipeline, plans, prompt = Pipeline(path, num_stages), Plans(), prompt_of(97)
    plans.add(3, prompt)
    outputs = [pipeline.run(plans.step({3: n})) for n in chunks]
    assert [output.rows for output in outputs] == [[]] * (len(chunks) - 1) + [[3]]
    expected = oracle.greedy(prompt, 12).token_ids
    assert [outputs[-1].token_ids[0], *decode(pipeline, plans, [3], 11)[3]] == expected


@pytest.mark.parametrize("num_stages", [1, 2])
def test_prefills_and_decodes_of_one_batch_do_not_disturb_each_other(path, oracle, num_stages):
    pipeline, plans = Pipeline(path, num_stages), Plans()
    first, second, third = prompt_of(20, 1), prompt_of(33, 2), prompt_of(5, 3)
    plans.add(0, first)
    got = {0: [tokens_of(pipeline.run(plans.step({0: 20})))[0]], 5: [], 9: []}
    plans.add(5, second)
    plans.add(9, third)
    for counts in ({0: 1, 5: 16}, {0: 1, 5: 16, 9: 5}, {9: 1, 0: 1, 5: 1}, {0: 1, 5: 1, 9: 1}, {5: 1, 0: 1, 9: 1}):
        for row, token_id in tokens_of(pipeline.run(plans.step(counts))).items():
            got[row].append(token_id)
    for row, prompt in ((0, first), (5, second), (9, third)):
        assert got[row] == oracle.greedy(prompt, len(got[row])).token_ids
    assert [len(got[row]) for row in (0, 5, 9)] == [6, 3, 4]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_row_that_is_used_again_sees_nothing_of_its_old_owner(path, oracle, num_stages):
    """C12: a long request leaves its row; a short one takes it and grows while another holds the old blocks."""
    pipeline, plans = Pipeline(path, num_stages, num_blocks=24), Plans(num_blocks=24)
    plans.add(0, prompt_of(200, 1))
    pipeline.run(plans.step({0: 200}))
    old_blocks = set(plans.blocks[0])
    plans.free(0)
    short, holder = prompt_of(5, 2), prompt_of(180, 3)
    # The holder is served first from a pool where the old blocks are the next ones.
    plans.add(1, holder)
    got = {1: [tokens_of(pipeline.run(plans.step({1: 180})))[1]], 0: []}
    assert set(plans.blocks[1]) & old_blocks
    plans.add(0, short)
    got[0].append(tokens_of(pipeline.run(plans.step({1: 1, 0: 5})))[0])
    got[1].append(int(oracle.greedy(holder, 2).token_ids[1]))
    for row, token_ids in decode(pipeline, plans, [0, 1], 59).items():
        got[row] += token_ids
    for row, prompt in ((0, short), (1, holder)):
        assert got[row] == oracle.greedy(prompt, len(got[row])).token_ids


def test_a_preempted_request_comes_back_as_a_new_one(path, oracle):
    pipeline, plans, prompt = Pipeline(path, 2), Plans(), prompt_of(30)
    plans.add(0, prompt)
    got = [tokens_of(pipeline.run(plans.step({0: 30})))[0]]
    got += decode(pipeline, plans, [0], 5)[0]
    plans.free(0)
    plans.add(4, prompt + got, num_prompt=30)
    got += [tokens_of(pipeline.run(plans.step({4: 36})))[4]]
    got += decode(pipeline, plans, [4], 5)[4]
    assert got == oracle.greedy(prompt, 12).token_ids


def test_the_first_stage_runs_ahead_of_the_last(path, oracle):
    """Two cohorts in flight: stage 0 computes step n + 1 before the last stage has finished step n."""
    pipeline, plans = Pipeline(path, 2), Plans()
    prompts = {0: prompt_of(10, 1), 1: prompt_of(17, 2)}
    got: dict[int, list[int]] = {0: [], 1: []}
    in_flight = []
    for turn in range(16):
        row = turn % 2
        if turn < 2:
            plans.add(row, prompts[row])
        plan = plans.step({row: len(prompts[row]) if turn < 2 else 1}, needs=max(0, turn - 1))
        assert pipeline.stages[0].run_step(plan) is None
        in_flight.append(plan)
        if len(in_flight) == 2:
            output = pipeline.stages[1].run_step(in_flight.pop(0), upcoming=in_flight[:1])
            for sampled_row, token_id in tokens_of(output).items():
                got[sampled_row].append(token_id)
    assert pipeline.links[0].num_ahead == 2
    for row, token_ids in got.items():
        assert token_ids == oracle.greedy(prompts[row], len(token_ids)).token_ids


@pytest.mark.parametrize("num_stages", [1, 2])
def test_the_real_scheduler_drives_the_stages(path, oracle, num_stages):
    """Admission, chunks, growth, preemption and row reuse as the engine does them."""
    config = SchedulerConfig(
        num_stages=num_stages, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=128, block_size=16, num_blocks=10,
        eos_token_ids=frozenset(),
    )  # fmt: skip
    scheduler = Scheduler(config, core_id=7, epoch=3)
    pipeline = Pipeline(path, num_stages, num_blocks=10, max_model_len=128, max_num_seqs=4)
    requests = [
        Request(
            request_id=str(i), internal_id=i, client=b"c", prompt_token_ids=prompt_of(8 + 11 * i, i),
            params=SamplingParams(temperature=0.0, max_tokens=45, seed=0),
        )
        for i in range(6)
    ]  # fmt: skip
    for request in requests:
        scheduler.add(request)
    in_flight = []
    while scheduler.has_unfinished():
        while (plan := scheduler.schedule()) is not None:
            in_flight.append(plan)
        scheduler.update(pipeline.run(in_flight.pop(0)))
    assert scheduler.stats().preemptions > 0
    for request in requests:
        assert list(request.output_token_ids) == oracle.greedy(list(request.prompt_token_ids), 45).token_ids


@pytest.mark.parametrize("num_stages", [1, 2])
def test_seeded_rows_do_not_depend_on_batch_or_stages(path, num_stages):
    params = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=11)
    alone, plans = Pipeline(path), Plans()
    plans.add(2, prompt_of(30), params)
    expected = [tokens_of(alone.run(plans.step({2: 30})))[2], *decode(alone, plans, [2], 8)[2]]
    mixed, plans = Pipeline(path, num_stages), Plans(seed=5)
    plans.add(7, prompt_of(30), params)
    plans.add(1, prompt_of(9, 4), SamplingParams(temperature=0.7, seed=3))
    mixed.run(plans.step({1: 9, 7: 13}))
    got = [tokens_of(mixed.run(plans.step({1: 1, 7: 17})))[7]]
    assert got + decode(mixed, plans, [1, 7], 8)[7] == expected
    assert len(set(expected)) > 3


def rows_of(columns):
    """(row, start, num_top, ids [n, 1 + num_top], logprobs, ranks [n]) per entry."""
    at = at_rank = 0
    for row, start, count, num_top in zip(
        columns.rows, columns.starts, columns.num_positions, columns.num_top, strict=True
    ):
        size = count * (1 + num_top)
        yield (
            row, start, num_top, columns.token_ids[at : at + size].reshape(count, -1),
            columns.logprobs[at : at + size].reshape(count, -1), columns.ranks[at_rank : at_rank + count],
        )  # fmt: skip
        at, at_rank = at + size, at_rank + count
    assert (at, at_rank) == (len(columns.token_ids), len(columns.ranks))
    assert len(columns.logprobs) == at


def check_entry(entry, sequence, raw):
    """One entry of columns against log-softmax of the whole sequence."""
    _, start, num_top, ids, logprobs, ranks = entry
    for i in range(len(ids)):
        expected = raw[start + i - 1]
        token_id = sequence[start + i]
        assert ids[i, 0] == token_id
        assert ranks[i] == int((expected >= expected[token_id]).sum())
        assert ids[i, 1:].tolist() == expected.topk(num_top).indices.tolist()
        assert np.abs(logprobs[i] - expected[ids[i].tolist()].numpy()).max() < LOGPROB_TOLERANCE


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("slice_rows", [None, 16])
def test_prompt_logprobs_over_chunks_and_only_for_rows_that_ask(path, raw_logprobs, num_stages, slice_rows, monkeypatch):
    if slice_rows:
        monkeypatch.setattr("worker.bookkeeping.MAX_LOGITS_BYTES", slice_rows * 4 * 512)
    pipeline, plans = Pipeline(path, num_stages), Plans()
    asking, other = prompt_of(60, 1), prompt_of(40, 2)
    plans.add(4, asking, SamplingParams(temperature=0.0, seed=0, prompt_logprobs=3, logprobs=2))
    plans.add(0, other)
    raw = raw_logprobs(asking)
    seen = []
    for counts in ({0: 20, 4: 25}, {4: 1, 0: 20}, {0: 1, 4: 34}):
        output = pipeline.run(plans.step(counts))
        assert output.prompt_logprobs is not None
        (entry,) = rows_of(output.prompt_logprobs)
        assert (entry[0], entry[2]) == (4, 3)
        check_entry(entry, asking, raw)
        seen += range(entry[1], entry[1] + len(entry[5]))
    assert seen == list(range(1, 60))
    # The last chunk's last position predicts the first new token, which is no part of the prompt.
    (sampled,) = rows_of(output.logprobs)
    assert (sampled[0], sampled[1], sampled[2]) == (4, 60, 2)
    check_entry(sampled, [*asking, tokens_of(output)[4]], raw)
    assert pipeline.run(plans.step({0: 1, 4: 1})).prompt_logprobs is None


def test_each_row_gets_as_many_alternatives_as_it_asked_for(path, raw_logprobs):
    pipeline, plans = Pipeline(path), Plans()
    prompts = {row: prompt_of(7, row) for row in range(4)}
    for row, num_top in ((0, 0), (1, None), (2, 5), (3, 1)):
        plans.add(row, prompts[row], SamplingParams(temperature=0.0, seed=0, logprobs=num_top))
    output = pipeline.run(plans.step(dict.fromkeys(range(4), 7)))
    entries = list(rows_of(output.logprobs))
    assert [(entry[0], entry[2]) for entry in entries] == [(0, 0), (2, 5), (3, 1)]
    for entry in entries:
        check_entry(entry, [*prompts[entry[0]], tokens_of(output)[entry[0]]], raw_logprobs(prompts[entry[0]]))


def test_a_step_that_asks_for_nothing_makes_logits_of_sampling_rows_only(path):
    pipeline, plans = Pipeline(path), Plans()
    plans.add(0, prompt_of(20, 1))
    plans.add(1, prompt_of(30, 2))
    runner = pipeline.runners[0]
    for counts, num_logits in (({0: 20, 1: 16}, 1), ({0: 1, 1: 14}, 2), ({0: 1, 1: 1}, 2)):
        batch = runner.prepare(plans.step(counts))
        result = runner.execute_model(batch, None)
        assert result.logits.shape == (num_logits, 512)
        output = runner.sample_tokens(batch, result)
        assert (output.logprobs, output.prompt_logprobs, output.nan_rows) == (None, None, [])
        runner.accept_tokens(output.step_id, output.rows, output.token_ids)
    plans.add(2, prompt_of(30, 3))
    assert runner.execute_model(runner.prepare(plans.step({2: 8})), None).logits is None


@pytest.mark.parametrize("num_stages", [1, 2])
def test_rows_whose_logits_are_nan_are_reported_and_others_go_on(path, oracle, num_stages):
    pipeline, plans = Pipeline(path, num_stages), Plans()
    good, bad, early = prompt_of(20, 1), prompt_of(9, 2), prompt_of(30, 3)
    plans.add(0, good)
    plans.add(6, bad, SamplingParams(temperature=0.8, seed=1, top_p=0.9, logprobs=2))
    plans.add(2, early, SamplingParams(temperature=0.0, seed=1, prompt_logprobs=1))
    broken_ids = torch.tensor(sorted({bad[-1], early[3]} - set(good)))
    assert len(broken_ids) == 2
    model = pipeline.runners[0]._model
    embed = model.embed
    model.embed = lambda ids: embed(ids).masked_fill(torch.isin(ids, broken_ids)[:, None], float("nan"))
    output = pipeline.run(plans.step({0: 20, 6: 9, 2: 10}))
    assert sorted(output.nan_rows) == [2, 6]
    assert sorted(output.rows) == [0, 6]
    assert all(0 <= token_id < 512 for token_id in output.token_ids)
    model.embed = embed
    plans.free(6)
    plans.free(2)
    got = [tokens_of(output)[0], *decode(pipeline, plans, [0], 5)[0]]
    assert got == oracle.greedy(good, 6).token_ids


def test_plans_that_contradict_the_rows_are_refused(path):
    pipeline, plans = Pipeline(path), Plans()
    plans.add(0, prompt_of(20))
    pipeline.run(plans.step({0: 20}))
    plans.step_id += 1
    with pytest.raises(ProtocolError, match="is 3 after step 1"):
        pipeline.run(plans.step({0: 1}))
    with pytest.raises(ProtocolError, match="an id is outside 0 to 511"):
        pipeline.runners[0].accept_tokens(1, [0], [512])


def test_a_step_without_tokens_passes_through(path, oracle):
    pipeline, plans, prompt = Pipeline(path, 2), Plans(), prompt_of(20)
    plans.add(0, prompt)
    pipeline.run(plans.step({0: 20}))
    plans.free(0)
    output = pipeline.run(plans.step({}))
    assert (output.rows, output.token_ids, output.step_id) == ([], [], 2)
    plans.add(0, prompt)
    assert tokens_of(pipeline.run(plans.step({0: 20})))[0] == oracle.greedy(prompt, 1).token_ids[0]


def test_the_first_stage_is_prepared_before_it_waits_for_tokens(path, monkeypatch):
    pipeline, plans, order = Pipeline(path, 2), Plans(), []
    prepare, take_until = pipeline.runners[0].prepare, pipeline.tokens.take_until
    monkeypatch.setattr(pipeline.runners[0], "prepare", lambda plan: order.append("prepare") or prepare(plan))
    monkeypatch.setattr(
        pipeline.tokens, "take_until", lambda *args, **kwargs: order.append("wait") or take_until(*args, **kwargs)
    )
    plans.add(0, prompt_of(12))
    pipeline.run(plans.step({0: 12}))
    pipeline.run(plans.step({0: 1}))
    assert order == ["prepare", "wait"] * 2


def test_tokens_that_come_after_their_row_was_given_away_are_dropped(path, oracle):
    pipeline, plans, prompt = Pipeline(path, 2), Plans(), prompt_of(20, 3)
    plans.add(0, prompt_of(12))
    first = plans.step({0: 12})
    plans.free(0)
    plans.add(0, prompt)
    second = plans.step({0: 20}, needs=1)
    assert pipeline.stages[0].run_step(first) is None
    late = pipeline.stages[1].run_step(first)
    assert late is not None and late.rows == [0]
    got = [tokens_of(pipeline.run(second))[0]] + decode(pipeline, plans, [0], 5)[0]
    assert got == oracle.greedy(prompt, 6).token_ids
