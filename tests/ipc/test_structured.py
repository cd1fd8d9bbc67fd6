"""Is a form of an answer that can't be meant refused with its field and the rule, and does a good one survive the wire?"""

from typing import Any

import pytest

from ipc.codec import decode, encode
from ipc.errors import RequestError
from ipc.messages import AddRequest
from ipc.params import SamplingParams
from ipc.structured import MAX_CHOICES, MAX_GRAMMAR_BYTES, StructuredOutput
from tests.wire_samples import ids

GOOD: list[dict[str, Any]] = [
    {"json_schema": {"type": "object", "properties": {"é": {"enum": [1, None]}}}}, {"json_schema": "{}"}, {"json_schema": True},
    {"json_object": True}, {"regex": "a+|é"}, {"choice": ["a", "b"]}, {"choice": ("",)}, {"grammar": 'start: "x"'},
    {"regex": "x" * MAX_GRAMMAR_BYTES}, {"regex": "a", "json_object": False, "choice": (), "grammar": None},
]  # fmt: skip

BAD: list[tuple[Any, str, str]] = [
    ({}, "structured", "must have exactly one of json_schema, json_object, regex, choice, grammar; none is given"),
    ({"json_object": False}, "structured", "none is given"),
    ({"regex": "a", "choice": ["b"]}, "structured", "got regex and choice"),
    ({"json": "{}"}, "structured", "structured.json is not known"),
    ({5: "{}"}, "structured", "structured.5 is not known"),
    ("{}", "structured", "must be a StructuredOutput or a map, got str"),
    ([], "structured", "got list"),
    (True, "structured", "got bool"),
    ({"json_object": 1}, "structured.json_object", "must be true or false"),
    ({"json_schema": 7}, "structured.json_schema", "structured.json_schema=7 must be text or an object, got int"),
    ({"json_schema": {"const": float("nan")}}, "structured.json_schema", "structured.json_schema={'const': nan} can't be written as JSON"),
    ({"json_schema": {"a": {1, 2}}}, "structured.json_schema", "structured.json_schema={'a': {1, 2}} can't be written as JSON"),
    ({"regex": ""}, "structured.regex", "is empty"),
    ({"regex": b"a"}, "structured.regex", "must be text, got bytes"),
    ({"regex": "\ud800"}, "structured.regex", "must be valid Unicode text"),
    ({"regex": "é" * (MAX_GRAMMAR_BYTES // 2 + 1)}, "structured.regex", f"has 65538 bytes; at most {MAX_GRAMMAR_BYTES}"),
    ({"grammar": 1.5}, "structured.grammar", "must be text, got float"),
    ({"choice": "abc"}, "structured.choice", "must be a list of texts"),
    ({"choice": ["a", 1]}, "structured.choice", "must be a list of texts"),
    ({"choice": ["a"] * (MAX_CHOICES + 1)}, "structured.choice", f"has 1025 entries; at most {MAX_CHOICES}"),
    ({"choice": ["x" * 1000] * 66}, "structured.choice", "has 66000 bytes"),
]


@pytest.mark.parametrize(("value", "field", "rule"), BAD, ids=range(len(BAD)))
def test_what_can_not_be_meant_is_refused(value: Any, field: str, rule: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(structured=value)
    assert caught.value.field == field and rule in caught.value.reason
    assert len(caught.value.reason) < 250


@pytest.mark.parametrize("value", GOOD, ids=range(len(GOOD)))
def test_a_form_survives_the_wire(value: dict[str, Any]) -> None:
    params = SamplingParams(structured=value)
    assert params == SamplingParams(structured=StructuredOutput(**value))
    message = AddRequest(request_id="r", prompt_token_ids=ids(1), params=params)
    received = decode(encode(message), [AddRequest]).params
    assert received == params and received.structured.kind == next(iter(value))


def test_a_bad_form_on_the_wire_is_the_requests_own_error() -> None:
    frames = encode(AddRequest(request_id="r", prompt_token_ids=ids(1), params=SamplingParams(structured={"regex": "a"})))
    frames[2] = frames[2].replace(b"regex", b"regax")
    with pytest.raises(RequestError, match="structured.regax is not known"):
        decode(frames, [AddRequest])


def test_a_schema_is_sent_in_the_order_of_its_properties() -> None:
    assert StructuredOutput(json_schema={"b": 1, "a": {"é": None}}).json_schema == '{"b": 1, "a": {"é": null}}'
