"""Do masks allow what a form allows and nothing else, and is a form that can't be compiled refused with the place?"""

import json
from typing import Any

import numpy as np
import pytest

from engine.config import ModelFiles
from engine.grammar import Grammar, Vocabulary
from engine.text.tokenizer import Tokenizer
from ipc.errors import RequestError
from ipc.params import SamplingParams
from ipc.structured import MAX_GRAMMAR_BYTES, StructuredOutput
from tests.engine.conftest import VOCAB_SIZE
from tests.tiny import BOS, EOS, FIRST_BYTE, text_ids

POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"enum": ["a", None]}}, "required": ["x", "y"],
         "additionalProperties": False}


def start(vocabulary: Vocabulary, params: SamplingParams | None = None, **form: Any) -> Grammar:
    return vocabulary.compile(StructuredOutput(**form)).copy(params or SamplingParams())


def allowed(grammar: Grammar) -> set[int]:
    assert grammar.mask.dtype == np.int32 and grammar.mask.shape == (-(-VOCAB_SIZE // 32),)
    return set(np.flatnonzero(np.unpackbits(grammar.mask.view(np.uint8), bitorder="little")).tolist())


def allowed_text(grammar: Grammar) -> str:
    """The single bytes that may come next, in order, and a $ for the end."""
    ids = allowed(grammar)
    return "".join(chr(i - FIRST_BYTE) for i in sorted(ids - {EOS})) + ("$" if EOS in ids else "")


def say(grammar: Grammar, text: str) -> Grammar:
    for token_id in text_ids(text):
        assert token_id in allowed(grammar), f"{chr(token_id - FIRST_BYTE)!r} is not in {allowed_text(grammar)!r}"
        grammar.accept(token_id)
    return grammar


@pytest.mark.parametrize(("form", "text"), [
    ({"regex": "a(b|c){2}"}, "abc"), ({"choice": ["yes", "no"]}, "no"), ({"choice": ["a\n\"\\\x7f/é😀"]}, "a\n\"\\\x7f/é😀"),
    ({"json_schema": POINT}, '{"x":-12, "y": null}'), ({"json_schema": POINT}, '{\n  "x": 1,\n  "y": "a"\n}'),
    ({"json_object": True}, '{"a": [1, {"b": "c\\né"}], "d": {}}'), ({"json_schema": True}, "[1, 2]"),
    ({"grammar": 'start: "x" | "(" start ")"'}, "((x))"), ({"grammar": 'root ::= "x" | "(" root ")"'}, "(x)"),
])  # fmt: skip
def test_an_answer_that_has_the_form_is_allowed_to_its_end_and_complete_there(
    vocabulary: Vocabulary, form: dict[str, Any], text: str
) -> None:
    grammar = start(vocabulary, **form)
    for end in range(1, len(text)):
        say(grammar, text[end - 1])
        assert not grammar.is_complete and EOS not in allowed(grammar)
    assert say(grammar, text[-1]).is_complete


@pytest.mark.parametrize(("form", "said", "following"), [
    ({"regex": "a(b|c){1,2}"}, "", "a"), ({"regex": "a(b|c){1,2}"}, "a", "bc"), ({"regex": "a(b|c){1,2}"}, "ab", "bc$"),
    ({"regex": "[0-9]+"}, "1", "0123456789$"), ({"choice": ["yes", "no", "yesno"]}, "", "ny"),
    ({"choice": ["yes", "no", "yesno"]}, "yes", "n$"), ({"json_schema": POINT}, "{", '\n "'), ({"json_schema": POINT}, '{"', "x"),
    ({"json_schema": {"enum": [1, 23]}}, "", "12"), ({"json_schema": {"type": "array", "maxItems": 0}}, "[", "\n ]"),
])  # fmt: skip
def test_the_mask_has_exactly_what_may_follow(vocabulary: Vocabulary, form: dict[str, Any], said: str, following: str) -> None:
    assert allowed_text(say(start(vocabulary, **form), said)) == following


def test_blank_space_between_the_parts_of_json_is_bounded(vocabulary: Vocabulary) -> None:
    assert " " not in allowed_text(say(start(vocabulary, json_schema=POINT), "{ "))
    grammar = say(start(vocabulary, json_schema=POINT), "{\n" + " " * 32)
    assert allowed_text(grammar) == '"'


def test_special_tokens_are_not_text(vocabulary: Vocabulary) -> None:
    grammar = start(vocabulary, regex="(?s:.{3,9})")
    assert not allowed(grammar) & {0, EOS, BOS}
    grammar = say(grammar, "abc")
    assert allowed(grammar) & {0, EOS, BOS} == {EOS}
    assert max(allowed(grammar)) < 280, "ids behind the tokenizer's last one are never allowed"


def test_ends_of_the_request_count_where_the_answer_may_end(vocabulary: Vocabulary) -> None:
    stops = SamplingParams(stop_token_ids=(BOS,))
    grammar = start(vocabulary, stops, regex="ab*")
    assert allowed(grammar) == {FIRST_BYTE + ord("a")}
    assert allowed(say(grammar, "a")) == {FIRST_BYTE + ord("b"), EOS, BOS}
    goes_on = start(vocabulary, SamplingParams(ignore_eos=True), regex="ab*")
    assert allowed(say(goes_on, "a")) == {FIRST_BYTE + ord("b")}
    ends = start(vocabulary, SamplingParams(ignore_eos=True), regex="ab?")
    assert say(ends, "ab").is_complete


def test_an_empty_answer_is_complete_at_once(vocabulary: Vocabulary) -> None:
    assert start(vocabulary, choice=[""]).is_complete
    assert not start(vocabulary, regex="a?").is_complete


def test_answers_of_one_grammar_do_not_know_of_each_other(vocabulary: Vocabulary) -> None:
    compiled = vocabulary.compile(StructuredOutput(regex="(ab|cd)+"))
    first, second = compiled.copy(SamplingParams()), compiled.copy(SamplingParams())
    say(first, "a")
    say(second, "c")
    assert (allowed_text(first), allowed_text(second), allowed_text(compiled)) == ("b", "d", "ac")
    assert allowed_text(say(first, "bc")) == "d"


def test_a_mask_that_was_taken_does_not_change(vocabulary: Vocabulary) -> None:
    grammar = start(vocabulary, regex="ab")
    mask = grammar.mask
    before = mask.copy()
    say(grammar, "a")
    assert mask.tolist() == before.tolist() != grammar.mask.tolist()


def test_a_token_that_does_not_fit_is_an_error(vocabulary: Vocabulary) -> None:
    grammar = start(vocabulary, regex="ab")
    with pytest.raises(RequestError, match="token 101 does not fit"):
        grammar.accept(FIRST_BYTE + ord("b"))


def test_a_form_that_gets_too_complex_on_the_way_is_the_clients_matter(vocabulary: Vocabulary) -> None:
    grammar = start(vocabulary, regex="(a{1000}){1000}")
    with pytest.raises(RequestError, match="too complex") as caught:
        say(grammar, "a" * 100)
    assert (caught.value.field, caught.value.code) == ("structured", "bad_request") and "\n" not in caught.value.reason


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": {"type": "object", "properties": {"a": {"type": "strin"}}}}, 'at #/properties/a ({"type": "strin"}): Invalid type'),
    ({"json_schema": {"anyOf": [{"type": "string"}, {"type": "string", "pattern": "a("}]}},
     'at #/anyOf/1 ({"type": "string", "pattern": "a("}): regular expression "a(", character 2: unclosed group'),
    ({"json_schema": {"$defs": {"x/y~": {"type": 7}}, "type": "array", "items": {"$ref": "#/$defs/x~1y~0"}}},
     'at #/$defs/x~1y~0 ({"type": 7}): type must be'),
    ({"json_schema": {"properties": {"a": {}, "b": {"items": {"properties": {"c": {"format": "colour"}}}}}}},
     'at #/properties/b/items/properties/c ({"format": "colour"}): '),
    ({"json_schema": {"type": "array", "items": {"$ref": "#/$defs/none"}}}, 'at #/items ({"$ref": "#/$defs/none"}): '),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, 'at # ({"type": "array", "uniqueItems": true}): Unimplemented keys: ["uniqueItems"]'),
    ({"json_schema": False}, "at # (false): Unsatisfiable schema"),
    ({"json_schema": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, "at #/properties/a (false): Unsatisfiable schema"),
    ({"json_schema": "7"}, "is 7; a JSON schema is an object or a boolean"),
    ({"json_schema": "{\"a\": "}, "line 1 column"),
    ({"json_schema": '{"const": NaN}'}, "not JSON compliant"),
    ({"json_schema": '{"const": 1e999}'}, "not JSON compliant"),
    ({"json_schema": "[" * 60_000}, "deep"),
    ({"json_schema": '{"not":' * 1000 + "{}" + "}" * 1000}, "deep"),
    ({"json_schema": {"x-guidance": {"no_such_option": 1}}}, "no_such_option"),
    ({"regex": "a(b"}, 'regular expression "a(b", character 2: unclosed group'),
    ({"regex": "(?=a)"}, "look-ahead"),
    ({"regex": "(" * 30_000 + ")" * 30_000}, ""),
    ({"grammar": 'start: a "b"'}, 'unknown name: "a"'),
    ({"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000}, "deep"),
    ({"grammar": "root ::= nothing"}, "nothing"),
    ({"grammar": "root ::= " + "(" * 30_000}, "is neither Lark"),
    ({"grammar": "hello"}, "is neither Lark"),
]


@pytest.mark.parametrize(("form", "said"), REFUSED, ids=range(len(REFUSED)))
def test_what_can_not_be_compiled_is_refused_with_the_place(vocabulary: Vocabulary, form: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        vocabulary.compile(StructuredOutput(**form))
    field = f"structured.{next(iter(form))}"
    assert (caught.value.field, caught.value.code) == (field, "bad_request")
    assert caught.value.reason.startswith(field) and said in caught.value.reason
    assert len(caught.value.reason) < 700 and "\n" not in caught.value.reason


def test_large_forms_are_compiled_or_refused_in_bounded_time(vocabulary: Vocabulary) -> None:
    words = [f"word{number}" for number in range(1000)]
    schema = {"type": "object", "properties": {word: {"enum": words[:5]} for word in words}}
    assert len(json.dumps(schema)) < MAX_GRAMMAR_BYTES + 20_000
    for form in ({"choice": words}, {"json_schema": {"enum": words}}, {"regex": "(a{1,1000}b{1,1000}){1,1000}"}):
        assert not start(vocabulary, **form).is_complete


def test_a_model_without_a_tokenizer_has_no_structured_output(files: ModelFiles) -> None:
    with pytest.raises(RequestError, match="this model has none"):
        Vocabulary(ModelFiles(), VOCAB_SIZE, ())
    word_pieces = json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": None,
        "post_processor": None, "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": "u", "continuing_subword_prefix": "##", "max_input_chars_per_word": 9,
                  "vocab": {"u": 0, "a": 1}},
    }).encode()
    with pytest.raises(RequestError, match="needs a tokenizer with bytes for tokens"):
        Vocabulary(ModelFiles(tokenizer=word_pieces), VOCAB_SIZE, ())


def test_a_model_without_an_end_token_has_structured_output(files: ModelFiles) -> None:
    vocabulary = Vocabulary(files, VOCAB_SIZE, ())
    assert say(start(vocabulary, regex="ab"), "ab").is_complete
    assert allowed_text(say(start(vocabulary, regex="ab*"), "a")) == "b"


def test_the_grammar_sees_the_bytes_that_the_detokenizer_adds(vocabulary: Vocabulary, files: ModelFiles) -> None:
    tokenizer = Tokenizer(files.tokenizer, files.tokenizer_config)
    for token_id in range(280):
        if b"\xff" in tokenizer.token_bytes(token_id):
            continue  # occurs in no text; llguidance marks special tokens with it
        assert vocabulary.tokenizer.decode_bytes([token_id]) == tokenizer.token_bytes(token_id)
