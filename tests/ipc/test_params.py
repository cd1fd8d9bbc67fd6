"""Is every sampling parameter out of range refused with its field, its value and the rule?"""

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.errors import RequestError
from ipc.params import (
    MAX_CACHE_SALT_CHARS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
    MAX_TOKEN_ID,
    MAX_TOKENS,
    DrawRules,
    SamplingParams,
)

NOT_INTEGERS: list[Any] = [1.0, "1", True, [1], b"1", {}]
NO_NUMBERS: list[Any] = ["1", True, [1.0], {}]
NOT_NUMBERS: list[Any] = [*NO_NUMBERS, None]
BOOLEANS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "prefix_caching", "echo")
NOT_BOOLEANS: list[Any] = [0, 1, "true", None, []]

REFUSED: dict[str, tuple[list[Any], str]] = {
    "max_tokens": ([0, -1, MAX_TOKENS + 1, 10**5000, -(10**5000)], f"must be between 1 and {MAX_TOKENS}"),
    "temperature": ([-0.1, 100.5, float("nan"), float("inf"), float("-inf"), 10**400], "must be between 0 and 100"),
    "top_k": ([-1, MAX_TOKEN_ID + 1, 1 << 64], f"must be between 0 and {MAX_TOKEN_ID}"),
    "top_p": ([-0.5, 1.01, float("nan"), float("inf"), 2, 10**400], "must be above 0 and at most 1"),
    "seed": ([-1, MAX_SEED + 1, 1 << 64, 10**5000], f"must be between 0 and {MAX_SEED}"),
    "stop": ([[""], "", "x" * (MAX_STOP_STRING_CHARS + 1), ["a", "x" * 5000]],
             f"must have 1 to {MAX_STOP_STRING_CHARS} characters"),
    "stop_token_ids": ([[-1], [1, MAX_TOKEN_ID + 1], -1, [10**5000]], f"must be between 0 and {MAX_TOKEN_ID}"),
    "logprobs": ([-2, MAX_LOGPROBS + 1, 10**6], f"must be between -1 and {MAX_LOGPROBS}"),
    "prompt_logprobs": ([-2, MAX_LOGPROBS + 1], f"must be between -1 and {MAX_LOGPROBS}"),
    "cache_salt": (["", "x" * (MAX_CACHE_SALT_CHARS + 1)], f"must have 1 to {MAX_CACHE_SALT_CHARS} characters"),
    "min_p": ([-0.1, 1.1, float("nan")], "must be between 0 and 1"),
    "typical_p": ([-0.1, 1.1, float("nan")], "must be above 0 and at most 1"),
    "presence_penalty": ([-2.1, 2.1, float("nan")], "must be between -2 and 2"),
    "frequency_penalty": ([-2.1, 2.1, float("inf")], "must be between -2 and 2"),
    "repetition_penalty": ([-1, 10.5, float("nan")], "must be above 0 and at most 10"),
    "min_tokens": ([-1, MAX_TOKENS + 1], f"must be between 0 and {MAX_TOKENS}"),
    "n": ([0, -1, MAX_CHOICES + 1], f"must be between 1 and {MAX_CHOICES}"),
    "logit_bias": ([{-1: 1.0}, {MAX_TOKEN_ID + 1: 1.0}], f"must be between 0 and {MAX_TOKEN_ID}"),
    "allowed_token_ids": ([[-1], [5, MAX_TOKEN_ID + 1]], f"must be between 0 and {MAX_TOKEN_ID}"),
    "bad_words": (["", ["a", "x" * 65]], "must have 1 to 64 characters"),
    "bad_word_ids": ([[[]], [[1] * 17]], "must be a list of lists of 1 to 16 token ids"),
    "logprobs_mode": (["", "RAW", "cooked"], "must be one of raw, processed"),
    "logits_processors": ([{"": {}}, {"a:b": {"": 1}}], "must have 1 to"),
}  # fmt: skip

WRONG_TYPES: dict[str, tuple[list[Any], str]] = {
    **dict.fromkeys(("max_tokens", "seed", "logprobs", "prompt_logprobs"), (NOT_INTEGERS, "must be an integer")),
    "top_k": (NOT_INTEGERS, "must be an integer"),
    **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "repetition_penalty"), (NO_NUMBERS, "must be a number")),
    "stop": ([5, None, [5], ["a", None], {"a"}, [b"a"], iter("a")], "must be a text or a list of texts"),
    "stop_token_ids": ([1.5, None, "5", ["5"], [True], [None], {5}], "must be an integer or a list of integers"),
    **dict.fromkeys(BOOLEANS, (NOT_BOOLEANS, "must be true or false")),
    "cache_salt": ([5, b"a", ["a"], True], "must be text"),
    **dict.fromkeys(("min_tokens", "n"), ([*NOT_INTEGERS, None], "must be an integer")),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (NOT_NUMBERS, "must be a number")),
    "logit_bias": ([5, None, "a", [5], [[1, 2, 3]]], "must map token ids to numbers"),
    "allowed_token_ids": ([1.5, "5", ["5"], [True], {5}], "must be an integer or a list of integers"),
    "bad_words": ([5, None, [5], {"a"}], "must be a text or a list of texts"),
    "bad_word_ids": ([5, None, [5], "a", ["a"]], "must be a list of lists"),
    "logprobs_mode": ([5, None, ["raw"]], "must be one of raw, processed"),
    "logits_processors": ([5, None, "a:b", ["a:b"], {"a:b": 5}], "must map names of processors to maps of arguments"),
}

CASES = [(name, value, rule) for table in (REFUSED, WRONG_TYPES) for name, (values, rule) in table.items() for value in values]


def refused(**values: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    return caught.value


def test_the_cases_cover_every_field() -> None:
    names = {f.name for f in fields(SamplingParams)} - {"structured"}  # in test_structured.py
    assert set(WRONG_TYPES) == names
    assert set(REFUSED) == names - set(BOOLEANS)


@pytest.mark.parametrize(("name", "value", "rule"), CASES, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(CASES)])
def test_out_of_range_names_field_value_and_rule(name: str, value: Any, rule: str) -> None:
    error = refused(**{name: value})
    assert (error.field, error.code) == (name, "bad_request")
    assert error.reason.startswith(f"{name}=") and rule in error.reason
    assert len(error.reason) < 250


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [("top_k", -3, "top_k=-3 "), ("temperature", 1e9, "temperature=1000000000.0 "), ("max_tokens", 10**5000, "an integer of 16610 bits"),
     ("stop_token_ids", [4, -7], "stop_token_ids=-7 "), ("seed", "abc", "seed='abc' ")],
    ids=["top_k", "temperature", "max_tokens", "stop_token_ids", "seed"],
)  # fmt: skip
def test_the_value_is_shown(name: str, value: Any, shown: str) -> None:
    assert shown in refused(**{name: value}).reason


def test_too_many_entries() -> None:
    assert "stop has 17 entries; at most 16" in refused(stop=["a"] * (MAX_STOP_STRINGS + 1)).reason
    assert "stop_token_ids has 257 entries" in refused(stop_token_ids=[1] * (MAX_STOP_TOKEN_IDS + 1)).reason


def test_top_p_zero_is_refused() -> None:
    assert "top_p=0 must be above 0 and at most 1" in refused(top_p=0).reason


@pytest.mark.parametrize(
    ("params", "field", "rule"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "min_tokens=5 must not be above max_tokens=4"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "must have at least one id"),
        ({"logit_bias": {5: 101}}, "logit_bias", "logit_bias[5]=101 must be between -100 and 100"),
        ({"logit_bias": {5: "1"}}, "logit_bias", "logit_bias[5]='1' must be a number"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "logit_bias='5' must be an integer"),
        ({"logit_bias": [(5, 1), (5, 2)]}, "logit_bias", "logit_bias=5 is there twice"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias", "has 1025 entries; at most 1024"),
        ({"bad_words": " "}, "bad_words", "must be more than blanks"),
        ({"bad_word_ids": [[1, "2"]]}, "bad_word_ids", "bad_word_ids='2' must be an integer"),
        ({"typical_p": 0}, "typical_p", "must be above 0 and at most 1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "must be above 0 and at most 10"),
        ({"logits_processors": {"a:b": {"x": [1]}}}, "logits_processors", "must be a number, a boolean or a text"),
        ({"logits_processors": {"a:b": {"x": 1 << 64}}}, "logits_processors", "must be between"),
        ({"logits_processors": {"a:b": {"x": "y" * 65}}}, "logits_processors", "must have 1 to 64 characters"),
        ({"logits_processors": [("a:b", {}), ("a:b", {})]}, "logits_processors", "'a:b' is there twice"),
    ],
)  # fmt: skip
def test_contradictions_and_contents_are_refused(params: dict[str, Any], field: str, rule: str) -> None:
    error = refused(**params)
    assert error.field == field and rule in error.reason


def test_maps_become_pairs() -> None:
    params = SamplingParams(logit_bias={5: 1, 3: -2.5}, logits_processors={"a:b": {"x": 1}, "c:d": {}})  # type: ignore[arg-type]
    assert params.logit_bias == ((5, 1.0), (3, -2.5))
    assert params.logits_processors == (("a:b", (("x", 1),)), ("c:d", ()))
    assert hash(params) == hash(SamplingParams.from_wire(params.to_wire()))


def test_text_that_can_not_travel_is_refused() -> None:
    error = refused(stop=["a\ud800"])
    assert error.field == "stop" and "valid Unicode" in error.reason
    error.reason.encode()


def test_the_edges_are_allowed() -> None:
    params = SamplingParams(
        max_tokens=MAX_TOKENS, temperature=MAX_TEMPERATURE, top_k=MAX_TOKEN_ID, top_p=1, seed=MAX_SEED, stop="x" * MAX_STOP_STRING_CHARS,
        stop_token_ids=[0, MAX_TOKEN_ID], logprobs=MAX_LOGPROBS, prompt_logprobs=0,
    )  # fmt: skip
    assert params.stop == ("x" * MAX_STOP_STRING_CHARS,)
    assert params.stop_token_ids == (0, MAX_TOKEN_ID)
    assert SamplingParams(temperature=0, top_p=1e-9, seed=0, max_tokens=1, stop_token_ids=7).stop_token_ids == (7,)


def test_lists_are_frozen_copies() -> None:
    stops = ["a"]
    params = SamplingParams(stop=stops)  # type: ignore[arg-type]
    stops.append("b")
    assert params.stop == ("a",)
    with pytest.raises(AttributeError):
        params.top_k = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", [f.name for f in fields(SamplingParams)])
def test_a1_null_on_the_wire_is_unset(name: str) -> None:
    assert SamplingParams.from_wire({name: None}) == SamplingParams()


def test_unknown_names_are_refused() -> None:
    for name in ("topk", "", "__class__", 5, b"top_k"):
        with pytest.raises(RequestError, match="is not a known sampling parameter"):
            SamplingParams.from_wire({name: 1})


@given(
    st.builds(
        SamplingParams,
        max_tokens=st.none() | st.integers(1, MAX_TOKENS), temperature=st.none() | st.floats(0, 100),
        top_k=st.none() | st.integers(0, MAX_TOKEN_ID), top_p=st.none() | st.floats(0, 1, exclude_min=True), seed=st.none() | st.integers(0, MAX_SEED),
        stop=st.lists(st.text(min_size=1, max_size=5), max_size=4), stop_token_ids=st.lists(st.integers(0, MAX_TOKEN_ID), max_size=4),
        ignore_eos=st.booleans(), logprobs=st.none() | st.integers(-1, 20), min_p=st.none() | st.floats(0, 1),
        logit_bias=st.dictionaries(st.integers(0, MAX_TOKEN_ID), st.floats(-100, 100), max_size=4),
        bad_word_ids=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=3),
        allowed_token_ids=st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=3), n=st.integers(1, 3),
        logits_processors=st.dictionaries(
            st.text("abc:", min_size=1), st.dictionaries(st.text("xy", min_size=1), st.booleans() | st.integers(0, 9) | st.text("z", max_size=3), max_size=2),
            max_size=2,
        ),
    )
)  # fmt: skip
def test_any_valid_object_survives_the_wire(params: SamplingParams) -> None:
    assert SamplingParams.from_wire(params.to_wire()) == params


DEFAULTS = DrawRules(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, typical_p=0.8, repetition_penalty=1.5)


@pytest.mark.parametrize("name", DrawRules._fields)
def test_s14_what_is_set_travels_also_at_the_engines_default(name: str) -> None:
    usual = getattr(DrawRules(), name)
    params = SamplingParams(**{name: usual})
    assert params.to_wire() == {name: usual}
    resolved = SamplingParams.from_wire(params.to_wire()).resolved(DEFAULTS)
    assert resolved.draw_rules() == DEFAULTS._replace(**{name: usual}), "an explicit value wins, all others are the defaults"
    assert resolved.resolved(DrawRules()) == resolved


def test_s14_unset_is_none_and_means_the_engines_default_where_no_model_has_one() -> None:
    params = SamplingParams(seed=3)
    assert all(getattr(params, name) is None for name in DrawRules._fields) and params.to_wire() == {"seed": 3}
    assert params.draw_rules() == params.resolved(DrawRules()).draw_rules() == DrawRules()
    assert params.resolved(DEFAULTS).draw_rules() == DEFAULTS and params.resolved(DEFAULTS).seed == 3
