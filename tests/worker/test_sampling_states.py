"""Rows' sampling parameters and rules: what changes them, what a step is told of them, and what is left to later owners."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ipc.errors import ConfigError
from ipc.messages import NewRequestData
from ipc.params import SamplingParams
from tests.sampling_reference import Array, changed_logits, shares_of
from tests.worker.draws import assert_fair
from worker.logits_processors import ProcessedRow, load_processors
from worker.sampler import Filters, SamplingBatch, sample
from worker.sampling_states import NO_LOGPROBS, SamplingStates

VOCAB_SIZE = 70
EOS = (1, 2)


def states(vocab_size: int, processors: dict[str, Any]) -> SamplingStates:
    return SamplingStates(
        8, vocab_size=vocab_size, eos_token_ids=EOS, device=torch.device("cpu"),
        processors={name.replace("__", ":"): process for name, process in processors.items()},
    )  # fmt: skip


def new(row: int, prompt: Sequence[int], answer: Sequence[int] = (), **params: Any) -> NewRequestData:
    return NewRequestData(
        row=row, request_id=f"r{row}", token_ids=np.array([*prompt, *answer], np.int32), num_prompt_tokens=len(prompt),
        num_computed_tokens=0, block_ids=([],), params=SamplingParams(seed=5, **params),
    )  # fmt: skip


class Rows:
    """States with the tokens that ``RequestStates`` would have."""

    def __init__(self, vocab_size: int = VOCAB_SIZE, **processors: Any) -> None:
        self.states = states(vocab_size, processors)
        self.token_ids = np.zeros((8, 40), np.int32)
        self.lengths: dict[int, int] = {}

    def add(self, request: NewRequestData) -> None:
        self.states.add(request)
        self.lengths[request.row] = len(request.token_ids)
        self.token_ids[request.row, : len(request.token_ids)] = request.token_ids

    def changed(self, rows: list[int], logits: Tensor, sampled: Sequence[int] | None = None) -> Tensor:
        """Logits after the rows' rules; then they sample these tokens."""
        positions = np.array([self.lengths[row] for row in rows])
        rules = self.states.rules(np.array(rows), positions, self.token_ids)
        changed = logits.clone()
        if rules is not None:
            rules.apply(changed)
        if sampled is not None:
            if rules is not None:
                rules.count(torch.tensor(sampled))
            self.token_ids[rows, positions] = sampled
            self.lengths.update({row: self.lengths[row] + 1 for row in rows})
        return changed


def logits_of(num_rows: int) -> Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(3)) * 4


def test_rows_without_rules_cost_nothing() -> None:
    rows = Rows()
    rows.add(new(0, [5, 6], temperature=0.0))
    rows.add(new(1, [5, 6], top_k=3, ignore_eos=True, stop_token_ids=(7,)))
    assert rows.states.rules(np.array([0, 1]), np.array([2, 2]), rows.token_ids) is None
    assert len(rows.states._counts.counts) == 0, "memory for counts that nobody asked for"
    batch = rows.states.batch(np.array([0]), np.array([2]))
    assert batch.is_greedy and batch.typical_rows is None


CASES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7}, {"presence_penalty": 1.5}, {"frequency_penalty": -0.75},
    {"repetition_penalty": 0.5, "presence_penalty": -1.0, "frequency_penalty": 2.0},
    {"logit_bias": {3: 100.0, 69: -7.5}}, {"allowed_token_ids": [0, 31, 32, 69]},
    {"bad_word_ids": [[9], [8, 9, 10], [20, 21], [21]]}, {"min_tokens": 5, "stop_token_ids": [40]},
    {"min_tokens": 5, "stop_token_ids": [40], "ignore_eos": True},
    {"repetition_penalty": 2.0, "logit_bias": {9: 50.0, 1: 100.0}, "min_tokens": 4, "bad_word_ids": [[8, 9]], "allowed_token_ids": [1, 8, 9]},
]  # fmt: skip


@pytest.mark.parametrize("together", [False, True])
def test_s4_rules_change_logits_as_defined(together: bool) -> None:
    """Step after step, alone and beside rows with other rules, and with an answer that was there before."""
    prompt, answer, says = [5, 6, 5, 9, 20], [6, 7, 20], [21, 8, 9, 1, 6, 6]
    groups = [list(range(len(CASES[:8])))] if together else [[i] for i in range(len(CASES))]
    for group in groups:
        rows, logits = Rows(), logits_of(len(group))
        for row, index in enumerate(group):
            rows.add(new(row, prompt, answer, **CASES[index]))
        said = list(answer)
        for token_id in says:
            changed = rows.changed(list(range(len(group))), logits, [token_id] * len(group))
            for row, index in enumerate(group):
                expected = changed_logits(logits[row].double().numpy(), prompt, said, SamplingParams(**CASES[index]), EOS)
                finite = np.isfinite(expected)
                assert np.array_equal(changed[row].isfinite().numpy(), finite)
                assert np.abs(changed[row].numpy()[finite] - expected[finite]).max() < 1e-5
            said.append(token_id)


# What each rule may be, over a vocabulary of 40 tokens, a prompt and an answer.
IDS = st.integers(0, 39)
RULES: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.floats(0.1, 10), "presence_penalty": st.floats(-2, 2), "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(IDS, st.floats(-20, 20), min_size=1, max_size=20),
    "allowed_token_ids": st.lists(IDS, min_size=1, max_size=40, unique=True),
    "bad_word_ids": st.lists(st.lists(IDS, min_size=1, max_size=3), min_size=1, max_size=20), "min_tokens": st.integers(1, 12),
}  # fmt: skip
EXAMPLES: dict[str, Any] = {
    "repetition_penalty": 1.6, "presence_penalty": 1.5, "frequency_penalty": 0.6, "logit_bias": {3: 6.0, 5: -1.5, 39: 9.0},
    "allowed_token_ids": [1, 5, 6, 7, 20, 21, 38], "bad_word_ids": [[4], [6, 20, 32], [20, 9], [8, 10]], "min_tokens": 9,
}  # fmt: skip
FAST = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def ruled(seed: int, prompt: list[int], answer: list[int], **params: Any) -> tuple[Tensor, Array]:
    """Random logits after a row's rules, and the shares that the definition gives them."""
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(seed)) * 2
    rows = Rows(vocab_size=40)
    rows.add(new(0, prompt, answer, **params))
    return rows.changed([0], logits)[0], shares_of(logits[0].double().numpy(), prompt, answer, SamplingParams(**params), EOS)


@pytest.mark.parametrize("name", RULES)
def test_each_rule(name: str) -> None:
    @FAST
    @given(st.integers(0, 1 << 32), st.lists(IDS, min_size=1, max_size=12), st.lists(IDS, max_size=12), RULES[name])
    def holds(seed: int, prompt: list[int], answer: list[int], value: Any) -> None:
        changed, expected = ruled(seed, prompt, answer, max_tokens=100, **{name: value})
        assert np.array_equal(changed.isfinite().numpy(), expected > 0)
        assert np.abs(changed.double().softmax(dim=0).numpy() - expected).max() < 1e-6

    holds()


@pytest.mark.parametrize("name", [*EXAMPLES, "all"])
def test_a_hundred_thousand_draws(name: str) -> None:
    params = EXAMPLES if name == "all" else {name: EXAMPLES[name]}
    changed, shares = ruled(4, [5, 6, 5, 9, 20], [6, 7, 6, 20], max_tokens=100, **params)
    assert np.abs(shares - ruled(4, [5], [6])[1]).max() > 0.005, "the rule does not show"
    count = 100_000
    filters = Filters(
        temperature=torch.ones(count), top_k=torch.zeros(count, dtype=torch.int64),
        top_p=torch.ones(count, dtype=torch.float64), min_p=torch.zeros(count, dtype=torch.float64),
    )  # fmt: skip
    seeds = torch.arange(count) * 7 + 3
    batch = SamplingBatch(filters=filters, seed=seeds, position=seeds % 1000, is_greedy=False)
    assert_fair(sample(changed.expand(count, -1).contiguous(), batch), shares)


def test_s13_a_new_owner_of_a_row_finds_nothing_of_the_old_one() -> None:
    rows, logits = Rows(), logits_of(1)
    everything = {
        "repetition_penalty": 2.0, "logit_bias": {3: 9.0}, "min_tokens": 9, "bad_word_ids": [[4]], "allowed_token_ids": [3, 4, 5],
        "logprobs": 3, "prompt_logprobs": -1, "logprobs_mode": "processed", "typical_p": 0.5, "min_p": 0.5, "top_k": 3, "top_p": 0.5,
    }  # fmt: skip
    rows.add(new(0, [5, 6], **everything))
    rows.changed([0], logits, [5])
    assert (rows.states.num_logprobs[0], rows.states.num_prompt_logprobs[0]) == (3, VOCAB_SIZE)
    rows.states.free([0])
    rows.add(new(0, [5, 6]))
    assert torch.equal(rows.changed([0], logits), logits)
    filters = rows.states.batch(np.array([0]), np.array([2])).filters
    assert [filters.temperature.item(), filters.top_k.item(), filters.top_p.item(), filters.min_p.item()] == [1, 0, 1, 0]
    assert filters.typical_p is None and not rows.states.wants_processed[0]
    assert rows.states.num_logprobs[0] == rows.states.num_prompt_logprobs[0] == NO_LOGPROBS


def test_counts_have_room_for_many_rows_and_begin_anew() -> None:
    rows, logits = Rows(), logits_of(8)
    for _ in range(3):
        for row in range(8):
            rows.add(new(row, [row, 60 - row], [9], presence_penalty=1.0, repetition_penalty=1.5))
        changed = rows.changed(list(range(8)), logits, [11] * 8)
        for row in range(8):
            params = SamplingParams(presence_penalty=1.0, repetition_penalty=1.5)
            expected = changed_logits(logits[row].double().numpy(), [row, 60 - row], [9], params, EOS)
            assert np.abs(changed[row].numpy() - expected).max() < 1e-5
        rows.states.free([1, 3, 5])


@pytest.mark.parametrize("is_freed", [True, False])
def test_penalties_that_are_kept_from_step_to_step_end_with_their_row(is_freed: bool) -> None:
    """The same rows sample again, one of them with another owner."""
    rows, logits = Rows(), logits_of(2)
    for row in range(2):
        rows.add(new(row, [5, 6], [9], presence_penalty=1.0))
    changed = rows.changed([0, 1], logits, [9, 9])
    assert torch.equal(changed[:, 9], rows.changed([0, 1], logits)[:, 9])
    if is_freed:
        rows.states.free([1])
    rows.add(new(1, [7, 8], [11], presence_penalty=-2.0))
    changed = rows.changed([0, 1], logits)
    assert changed[0, 9] == logits[0, 9] - 1 and changed[1, 11] == logits[1, 11] + 2
    assert changed[1, 9] == logits[1, 9]


# ------------------------------------------------------------------------------------------------ processors


def test_processors_see_the_rows_that_name_them() -> None:
    calls: list[list[ProcessedRow]] = []

    def double(logits: Tensor, rows: Sequence[ProcessedRow]) -> None:
        calls.append(list(rows))
        logits *= torch.tensor([[float(row.arguments.get("by", 2.0))] for row in rows])

    rows, logits = Rows(my__double=double, my__other=lambda *_: pytest.fail("nobody asked for it")), logits_of(3)
    rows.add(new(0, [5], logits_processors={"my:double": {"by": 3.0}}, logit_bias={4: 1.0}))
    rows.add(new(1, [5]))
    rows.add(new(2, [5, 6], [7], logits_processors={"my:double": {}}))
    changed = rows.changed([2, 0, 1], logits)
    assert torch.equal(changed[0], logits[0] * 2) and torch.equal(changed[2], logits[2])
    assert changed[1, 4] == logits[1, 4] * 3 + 1, "biases come after processors"
    ((first, second),) = calls
    assert (first.request_id, first.token_ids.tolist(), first.num_prompt_tokens) == ("r2", [5, 6, 7], 2)
    assert (second.request_id, second.arguments) == ("r0", {"by": 3.0})


def test_a_processor_that_fails_spoils_its_rows_alone(caplog: pytest.LogCaptureFixture) -> None:
    def fail(logits: Tensor, rows: Sequence[ProcessedRow]) -> None:
        raise KeyError(rows[0].arguments["missing"])

    rows, logits = Rows(my__fail=fail), logits_of(2)
    rows.add(new(0, [5], logits_processors={"my:fail": {}}))
    rows.add(new(1, [5]))
    changed = rows.changed([0, 1], logits)
    assert changed[0].isnan().all() and torch.equal(changed[1], logits[1])
    assert "a logits processor failed" in caplog.text


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("nothing", "must have the form module:attribute"), (":x", "must have the form"), ("x:", "must have the form"),
        ("no.such.module:f", "no.such.module can't be imported (ModuleNotFoundError"), ("math:nothing", "math has no nothing"),
        ("math:pi", "is a float, which can't be called"), ("..math:pi", "can't be imported"),
    ],
)  # fmt: skip
def test_wrong_names_of_processors_are_refused(name: str, rule: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_processors([name])
    assert refused.value.field == "--logits-processor" and repr(name) in str(refused.value) and rule in str(refused.value)


def test_processors_are_loaded_by_name() -> None:
    loaded = load_processors(["tests.sampling_reference:softmax", "collections:Counter.update"])
    assert list(loaded) == ["tests.sampling_reference:softmax", "collections:Counter.update"]
