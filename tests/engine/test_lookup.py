"""What the lookup expects, when drafts are earned, and for whom none are made."""

import random
from dataclasses import replace

import numpy as np
import pytest

from engine.drafting import takes_drafts
from engine.lookup import LEAST_RUN, NGRAM, Lookup
from engine.request import Request
from ipc.params import SamplingParams
from tests.fakes import FakeGrammar


def fed(token_ids: list[int], *, start: int = 1) -> Lookup:
    """A lookup that began with so many of these tokens and was told the others one by one."""
    lookup = Lookup(token_ids[:start])
    for token_id in token_ids[start:]:
        lookup.append(token_id)
    return lookup


def test_nothing_is_expected_of_tokens_that_never_came() -> None:
    lookup = fed(list(range(50)))
    assert (lookup.run, lookup.num_earned(8), lookup.drafts(8)) == (0, 0, [])


def test_drafts_are_earned_by_right_expectations() -> None:
    text = [*range(10, 30), 99]
    lookup = Lookup(text)
    earned = []
    for token_id in text[:9]:
        lookup.append(token_id)
        earned.append(lookup.num_earned(4))
    # The first tokens find the place, the next two are expected.
    silent = NGRAM + LEAST_RUN - 1
    assert earned == [0] * silent + [2, 3, 4, 4, 4]
    assert lookup.drafts(4) == text[9:13]
    lookup.append(7)
    assert lookup.run == lookup.num_earned(4) == 0


def test_the_newest_place_that_looks_alike_counts() -> None:
    lookup = fed([1, 2, 3, 50, 9, 9, 1, 2, 3, 60, 9, 8, 1, 2, 3])
    assert lookup.drafts(2) == [60, 9]


def test_what_is_repeated_is_followed_though_a_newer_place_looks_alike() -> None:
    first, second = [1, 2, 3, 4, 5, 6, 7], [3, 4, 5, 8]
    lookup = Lookup([*first, 20, *second, 21])
    for token_id in [*first[:5]]:
        lookup.append(token_id)
    assert lookup.drafts(1) == [6]


def test_one_changed_token_does_not_lose_the_place() -> None:
    text = list(range(10, 40))
    lookup = Lookup(text)
    for token_id in [*text[:8], 99, *text[9:11]]:
        lookup.append(token_id)
    assert (lookup.run, lookup.drafts(3)) == (2, text[11:14])


@pytest.mark.parametrize("period", [1, 2, 5])
def test_a_loop_goes_on_behind_the_end(period: int) -> None:
    loop = list(range(70, 70 + period))
    lookup = fed(loop * 24)
    assert lookup.num_earned(16) == 16
    assert lookup.drafts(16) == (loop * 16)[:16]


@pytest.mark.parametrize("start", [1, 2, 3, 4, 100, 1000])
def test_it_does_not_matter_how_much_was_there_at_the_start(start: int) -> None:
    rng = random.Random(5)
    text = [rng.randrange(3) for _ in range(1500)]
    whole, told = fed(text, start=1400), fed(text, start=start)
    # What was expected before the start nobody knows: behind a few wrong expectations both follow the same place.
    for token_id in [7, 8, 9, *text[20:30]]:
        whole.append(token_id)
        told.append(token_id)
    assert len(told.drafts(10)) == 10 and whole.drafts(10) == told.drafts(10)


def test_places_are_found_in_long_sequences_with_ids_of_any_size() -> None:
    """Now and then another group has the same hash; then the next tokens find the place."""
    rng = random.Random(2)
    text = [rng.randrange(1 << 31) for _ in range(5000)]
    lookup = fed(text, start=700)
    num_late = 0
    for place in range(0, 4900, 70):
        for token_id in text[place : place + NGRAM]:
            lookup.append(token_id)
        num_late += lookup.drafts(5) != text[place + NGRAM : place + NGRAM + 5]
        for token_id in text[place + NGRAM : place + 20]:
            lookup.append(token_id)
        assert lookup.drafts(5) == text[place + 20 : place + 25]
    assert num_late < 20


@pytest.mark.parametrize("kind", ["random", "words"])
def test_random_tokens_earn_next_to_nothing(kind: str) -> None:
    rng = random.Random(3)
    weights = [1 / (rank + 1) for rank in range(5000)] if kind == "words" else [1.0] * 5000
    lookup, num_wrong = Lookup([0]), 0
    for token_id in rng.choices(range(5000), weights, k=4000):
        num_wrong += lookup.num_earned(8)
        lookup.append(token_id)
    assert num_wrong < 40


def request(grammar: FakeGrammar | None = None, **params: object) -> Request:
    return Request(
        request_id="r", internal_id=1, client=b"c", prompt_token_ids=np.arange(5, dtype=np.int32),
        params=replace(SamplingParams(seed=1), **params), grammar=grammar,
    )  # fmt: skip


@pytest.mark.parametrize("params", [
    {}, {"temperature": 0.0}, {"logit_bias": ((5, 1.0),)}, {"allowed_token_ids": (3, 4)}, {"min_p": 0.1}, {"min_tokens": 2},
    {"prompt_logprobs": 1}, {"stop_token_ids": (5,)}, {"typical_p": 0.5},
])  # fmt: skip
def test_requests_that_take_drafts(params: dict[str, object]) -> None:
    assert takes_drafts(request(**params))


@pytest.mark.parametrize("params", [
    {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}, {"repetition_penalty": 1.1}, {"bad_word_ids": ((5,),)},
    {"logprobs": 0}, {"logits_processors": (("p", ()),)}, {"grammar": FakeGrammar(3)},
])  # fmt: skip
def test_requests_whose_tokens_depend_on_the_ones_before_take_none(params: dict[str, object]) -> None:
    assert not takes_drafts(request(**params))
