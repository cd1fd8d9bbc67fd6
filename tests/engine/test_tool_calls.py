"""Do grammars hold an answer to a call's form, and are calls read back out of it, however the text was cut? (X8)"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.grammar import Grammar, Vocabulary
from engine.openai.call_forms import BARE, FORMS, HEADED, LISTED, MAX_CALLS, TAGGED, CallForm, form_of
from engine.openai.tool_calls import (
    MAX_TOOLS,
    Fed,
    ToolCallParser,
    blamed_on_tools,
    check_tools,
    tool_grammar,
    with_parsed_arguments,
)
from engine.text.tokenizer import Tokenizer
from ipc.errors import RequestError
from ipc.params import SamplingParams
from ipc.structured import MAX_GRAMMAR_BYTES, StructuredOutput
from tests.tiny import BOS, EOS, byte_vocabulary, text_ids, write_tokenizer


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, **more} | ({} if parameters is None else {"parameters": parameters})
    return {"type": "function", "function": function}


WEATHER = tool("weather", {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]})
"""Each of the three names begins like another one."""
TOOLS = [WEATHER, tool("weather_now"), tool("w", {"properties": {"x": {"type": "integer"}, "y": {"type": "boolean"}}})]
NAMED = {"type": "function", "function": {"name": "weather"}}

CALLS = {
    TAGGED: ('<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>', "\n", ""),
    BARE: ('{"name": "weather", "parameters": {"city": "Rom"}}', None, ""),
    LISTED: ('{"name": "weather", "arguments": {"city": "Rom"}}', ", ", "]"),
    HEADED: ('[TOOL_CALLS]weather[ARGS]{"city": "Rom"}', "", ""),
}
"""One call in each form, what stands between two, and what behind the last."""


def written(form: CallForm, count: int = 1) -> str:
    call, between, end = CALLS[form]
    return ("[TOOL_CALLS] [" if form is LISTED else "") + (between or "").join([call] * count) + end


# ------------------------------------------------------------------------------------------------------ the grammar


def allowed(grammar: Grammar) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(grammar.mask.view(np.uint8), bitorder="little")).tolist())


def ending(vocabulary: Vocabulary, form: StructuredOutput | None, text: str) -> str:
    """ "no": the text has not the form; else whether an answer goes on behind it, may end there, or does end."""
    assert form is not None
    grammar = vocabulary.compile(form).copy(SamplingParams())
    for token_id in text_ids(text):
        if grammar.is_complete or token_id not in allowed(grammar):
            return "no"
        grammar.accept(token_id)
    return "over" if grammar.is_complete else "may end" if EOS in allowed(grammar) else "goes on"


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
def test_auto_is_any_text_or_calls(vocabulary: Vocabulary, form: CallForm) -> None:
    grammar = tool_grammar(TOOLS, "auto", form=form)
    for text in ("", "Hello.\n", "2 < 3 <tool [TOOL", " {}"):
        assert ending(vocabulary, grammar, text) == "may end"
    assert ending(vocabulary, grammar, written(form)) in ("may end", "over")
    before = ending(vocabulary, grammar, "Let me see.\n" + form.trigger + "x")
    assert before == ("may end" if form.is_whole_answer else "no")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
@pytest.mark.parametrize("is_parallel", [True, False])
def test_required_is_calls_and_nothing_else(vocabulary: Vocabulary, form: CallForm, is_parallel: bool) -> None:
    grammar = tool_grammar(TOOLS, "required", form=form, is_parallel=is_parallel)
    assert ending(vocabulary, grammar, "") == "goes on"
    assert ending(vocabulary, grammar, "H") == "no"
    is_several = is_parallel and form is not BARE
    assert ending(vocabulary, grammar, written(form)) == ("may end" if is_several and form is not LISTED else "over")
    if form is not BARE:
        assert (ending(vocabulary, grammar, written(form, 3)) == "no") is not is_parallel
        assert ending(vocabulary, grammar, written(form, MAX_CALLS + 1)) == "no"
    assert ending(vocabulary, grammar, written(form).replace("weather", "weathe")) == "no"
    assert ending(vocabulary, grammar, written(form).replace("city", "town")) == "no"
    assert ending(vocabulary, grammar, written(form).replace('"Rom"', "1")) == "no"


def test_required_answers_with_each_of_the_tools(vocabulary: Vocabulary) -> None:
    grammar = tool_grammar(TOOLS, "required")
    for name, arguments in (("weather_now", "{}"), ("w", '{"x": -1, "y": true}'), ("w", "{}")):
        text = f'<tool_call>{{"name":"{name}","arguments":{arguments}}}</tool_call>'
        assert ending(vocabulary, grammar, text) == "may end"
    for name, arguments in (("weather_now", '{"x'), ("w", '{"z')):
        assert ending(vocabulary, grammar, f'<tool_call>{{"name": "{name}", "arguments": {arguments}') == "no"


def test_a_named_tool_gets_its_arguments_as_the_answer(vocabulary: Vocabulary) -> None:
    grammar = tool_grammar(TOOLS, NAMED)
    assert ending(vocabulary, grammar, '{"city": "Rom"}') == "over"
    for text in ("H", "{}", "<", '{"x'):
        assert ending(vocabulary, grammar, text) == "no"


def test_nothing_is_constrained_without_tools_or_with_none() -> None:
    assert tool_grammar(TOOLS, "none") is tool_grammar([], "auto") is tool_grammar([], "none") is None


def test_special_tokens_of_a_form_are_tokens_and_no_text(vocabulary: Vocabulary) -> None:
    form = replace(LISTED, special_ids=(("[TOOL_CALLS]", BOS),))
    compiled = tool_grammar(TOOLS, "auto", form=form)
    assert form.shows_special_tokens and compiled is not None
    grammar = vocabulary.compile(compiled).copy(SamplingParams())
    for token_id in text_ids("Hm. [TOOL_CALLS]["):
        grammar.accept(token_id)
    assert {BOS, EOS} <= allowed(grammar)
    grammar.accept(BOS)
    for token_id in text_ids(written(LISTED).removeprefix("[TOOL_CALLS]")):
        grammar.accept(token_id)
    assert grammar.is_complete


def test_open_schemas_stay_open(vocabulary: Vocabulary) -> None:
    for parameters in ({}, {"properties": {}, "additionalProperties": {"type": "integer"}}, {"patternProperties": {"^x$": {}}}):
        assert ending(vocabulary, tool_grammar([tool("f", parameters)], {**NAMED, "function": {"name": "f"}}), '{"x": 1}') == (
            "no" if parameters == {} else "over"
        )


def test_schemas_that_refer_to_parts_of_themselves(vocabulary: Vocabulary) -> None:
    node = {"type": "object", "properties": {"n": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    tools = [tool("f", {"properties": {"a": {"$ref": "#/$defs/node"}}, "$defs": {"node": node}}), *TOOLS]
    text = '<tool_call>{"name": "f", "arguments": {"a": {"n": {"n": {}}}}}</tool_call>'
    assert ending(vocabulary, tool_grammar(tools, "required"), text) == "may end"


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}])
def test_what_can_not_be_enforced_is_refused_if_strict_and_ignored_otherwise(vocabulary: Vocabulary, choice: Any) -> None:
    schema = {"properties": {"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}}
    for strict in (None, False):
        form = tool_grammar([tool("f", schema, strict=strict)], choice)
        assert form is not None
        vocabulary.compile(form)
    form = tool_grammar([tool("f", schema, strict=True)], choice)
    assert form is not None
    with pytest.raises(RequestError, match="uniqueItems"):
        vocabulary.compile(form)


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize("wrong", [{"type": "strin"}, {"pattern": "["}, {"type": 7}])
def test_x8_a_refused_schema_is_told_in_the_clients_words(vocabulary: Vocabulary, choice: Any, wrong: Any) -> None:
    form = tool_grammar([*TOOLS, tool("f", {"properties": {"a": wrong}})], choice)
    assert form is not None
    with pytest.raises(RequestError) as caught:
        vocabulary.compile(form)
    told = blamed_on_tools(caught.value, form)
    assert told.field is not None and told.field.startswith("tools") and told.code == "bad_request"
    assert "can't be enforced" in told.reason and "structured" not in told.reason and "call_" not in told.reason
    if choice in ("auto", "required") and "pattern" not in wrong:
        assert told.field == "tools[3].function.parameters"


def test_other_errors_are_not_blamed_on_tools() -> None:
    form = StructuredOutput(grammar="start: /a/")
    for error in (RequestError("no", field="stop"), RequestError("no", code="internal", field="structured.grammar")):
        assert blamed_on_tools(error, form) is error


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("tools", "choice", "field", "words"), [
    ({}, "auto", "tools", "must be a list, got dict"),
    ([tool(f"f{i}") for i in range(MAX_TOOLS + 1)], "auto", "tools", "129 entries; at most 128"),
    (["x"], "auto", "tools[0]", "must be a map"),
    ([WEATHER, {"type": "custom"}], "auto", "tools[1].type", "='custom' is not supported; it must be 'function'"),
    ([{"function": {"name": "f"}}], "auto", "tools[0].type", "=None"),
    ([{"type": "function"}], "auto", "tools[0].function", "must be a map with a name, got NoneType"),
    ([tool("a b")], "auto", "tools[0].function.name", "='a b' must be 1 to 64 letters"),
    ([tool("")], "auto", "tools[0].function.name", "=''"),
    ([tool("x" * 65)], "auto", "tools[0].function.name", "64"),
    ([tool("f\n")], "auto", "tools[0].function.name", r"'f\n'"),
    ([tool(3)], "auto", "tools[0].function.name", "=3"),  # type: ignore[arg-type]
    ([WEATHER, WEATHER], "auto", "tools[1].function.name", "='weather' is the name of tools[0] too"),
    ([tool("f", description=3)], "auto", "tools[0].function.description", "=3 must be a text"),
    ([tool("f", [])], "auto", "tools[0].function.parameters", "=[] must be a JSON schema"),
    ([tool("f", strict="yes")], "auto", "tools[0].function.strict", "='yes' must be true or false"),
    ([tool("f", {"type": "string"})], "auto", "tools[0].function.parameters.type", "='string' must be 'object'"),
    (TOOLS, "any", "tool_choice", "='any' must be 'none', 'auto', 'required'"),
    (TOOLS, None, "tool_choice", "must be a text or a map"),
    ([], "required", "tool_choice", "needs tools, and there are none"),
    ([], NAMED, "tool_choice.function.name", "='weather' is not one of the tools; there are none"),
    (TOOLS, {"type": "function", "function": {"name": "x"}}, "tool_choice.function.name", "='x' is not one of the tools; there are weather,"),
    (TOOLS, {"type": "function"}, "tool_choice.function.name", "=None"),
    (TOOLS, {"type": "function", "function": {"name": []}}, "tool_choice.function.name", "=[]"),
    (TOOLS, {"type": "allowed_tools"}, "tool_choice.type", "='allowed_tools' is not supported"),
])  # fmt: skip
def test_x8_malformed_tools_are_refused_by_field_value_and_rule(tools: Any, choice: Any, field: str, words: str) -> None:
    for check in (check_tools, tool_grammar):
        with pytest.raises(RequestError) as caught:
            check(tools, choice)
        assert (caught.value.field, caught.value.code) == (field, "bad_request")
        assert caught.value.reason.startswith(field) and words in caught.value.reason


def test_tools_that_are_no_json_or_too_large_are_refused() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    for parameters in ({"const": {1, 2}}, {"const": float("nan")}, {"properties": deep}, {"const": "\ud800"}):
        for choice in ("auto", {"type": "function", "function": {"name": "f"}}):
            with pytest.raises(RequestError) as caught:
                tool_grammar([tool("f", parameters)], choice)
            assert caught.value.field == "tools"
    large = [tool(f"f{i}", {"properties": {"a": {"enum": ["x" * 1000]}}}) for i in range(80)]
    with pytest.raises(RequestError, match=f"tools make a grammar of .* at most {MAX_GRAMMAR_BYTES}"):
        tool_grammar(large, "auto")


def test_arguments_of_earlier_calls_become_maps() -> None:
    def message(arguments: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}

    user = {"role": "user", "content": "hi"}
    given_text, given_map = message('{"x": [1]}'), message({"x": [1]})
    assert with_parsed_arguments([user, given_text, given_map, message("")]) == [user, given_map, given_map, message({})]
    assert given_text == message('{"x": [1]}')
    assert with_parsed_arguments([{"tool_calls": "x"}, {"tool_calls": [3, {"function": 3}]}, 5])[2] == 5
    for wrong, words in (("{", "is not JSON"), ("[1]", "must be a JSON object"), ("[" * 100_000, "is not JSON")):
        with pytest.raises(RequestError, match=words) as caught:
            with_parsed_arguments([user, message(wrong)])
        assert caught.value.field == "messages" and caught.value.reason.startswith("messages[1].tool_calls[0].function.arguments=")


# ------------------------------------------------------------------------------------------------- which form it is


@pytest.mark.parametrize(("template", "form"), [
    (None, TAGGED), ("{{ messages }}", TAGGED), ('{{ "<tool_call>" }}', TAGGED),
    ("<|start_header_id|> {\"name\": function name, \"parameters\": ...}", BARE), ("<|start_header_id|>", TAGGED),
    ("[AVAILABLE_TOOLS] [TOOL_CALLS] [", LISTED), ("[TOOL_CALLS]' + name + '[ARGS]", HEADED),
])  # fmt: skip
def test_the_template_tells_the_form(template: str | None, form: CallForm) -> None:
    assert form_of(template) is form or form_of(template) == form


def test_special_tokens_of_the_model_are_found_in_its_form(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_vocabulary(280), merges=[(b"\xfe", b"\xff")], bos="<s>", eos="</s>", pad="[TOOL_CALLS]")
    tokenizer = Tokenizer((tmp_path / "tokenizer.json").read_bytes(), (tmp_path / "tokenizer_config.json").read_bytes())
    form = form_of("[TOOL_CALLS]", tokenizer)
    assert form.special_ids == (("[TOOL_CALLS]", tokenizer.encode("[TOOL_CALLS]", add_special_tokens=False)[0]),)
    assert form_of("", tokenizer).special_ids == ()


# ------------------------------------------------------------------------------------------------------- the parser


def read(pieces: list[str], form: CallForm = TAGGED, choice: Any = "auto") -> tuple[str, list[tuple[str, str]], bool]:
    """Content, calls as name and arguments, and whether there were any; checks ids and order on the way."""
    parser = ToolCallParser(TOOLS, choice, form=form)
    fed = [*map(parser.feed, pieces), parser.finish()]
    calls: list[list[str]] = []
    ids = []
    for delta in (delta for part in fed for delta in part.calls):
        if delta.name is not None:
            assert delta.index == len(calls) and delta.call_id and delta.arguments == ""
            calls.append([delta.name, ""])
            ids.append(delta.call_id)
        assert delta.index == len(calls) - 1
        calls[-1][1] += delta.arguments
    assert len(set(ids)) == len(ids)
    assert all(len(call_id) == 9 and call_id.isalnum() if form.has_short_ids else call_id.startswith("call_") for call_id in ids)
    return "".join(part.content for part in fed), [(name, arguments) for name, arguments in calls], parser.has_calls


ROM = ("weather", '{"city": "Rom"}')


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
def test_calls_are_read(form: CallForm) -> None:
    assert read([written(form)], form) == ("", [ROM], True)
    assert read(["\n\n" + written(form) + "\n"], form) == ("", [ROM], True)
    assert read(["Hello."], form) == ("Hello.", [], False)
    assert read(["  "], form) == ("  ", [], False)
    assert read([""], form) == ("", [], False)
    if form is not BARE:
        assert read(["Well.\n" + written(form, 2)], form) == ("Well.\n", [ROM, ROM], True)
        assert read([written(form) + " Done."], form) == (" Done.", [ROM], True)
    else:
        assert read(["Well. " + written(form)], form) == ("Well. " + written(form), [], False)


def test_arguments_come_as_they_are_made() -> None:
    parser = ToolCallParser(TOOLS, "required")
    assert parser.feed('<tool_call>\n{"name": "wea') == Fed()
    assert not parser.has_calls
    [begun] = parser.feed('ther", "arguments": ').calls + parser.feed("{").calls[:1]
    assert (begun.name, parser.has_calls) == ("weather", True)
    assert [delta.arguments for delta in parser.feed('"ci').calls] == ['"ci']
    assert [delta.arguments for delta in parser.feed('ty": "}\\"{"}').calls] == ['ty": "}\\"{"}']
    assert parser.feed("}\n</tool") == parser.feed("_call>") == parser.finish() == Fed()


def test_a_named_tools_answer_is_its_arguments() -> None:
    assert read(['{"ci', 'ty": "Rom"}'], choice=NAMED) == ("", [ROM], True)
    assert read([], choice=NAMED) == ("", [], False)


def test_without_tools_or_with_none_all_is_content() -> None:
    assert read([written(TAGGED)], choice="none") == (written(TAGGED), [], False)
    parser = ToolCallParser([], "auto")
    assert parser.feed("<tool_call>") == Fed(content="<tool_call>")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
def test_an_answer_cut_off_anywhere_never_shows_a_part_of_a_call(form: CallForm) -> None:
    text = written(form)
    first = len(form.trigger)
    for end in range(len(text)):
        content, calls, has_calls = read(list(text[:end]), form)
        assert content == ("" if end >= first else text[:end])
        assert has_calls is bool(calls)
        assert not calls or (calls[0][0] == "weather" and ROM[1].startswith(calls[0][1]))


@pytest.mark.parametrize("text", [
    "<tool_call>nothing", "<tool_call>{\"name\": \"unknown\", \"arguments\": {}}", "\n<tool_call>{\"nam\": 1}", "<tool_<tool_",
    "<tool_call>{\"name\": \"weather\", \"arguments\": 3}", "a <tool_call><tool_cal <tool_call>x", "<tool_call>" + " " * 70,
])  # fmt: skip
def test_what_began_like_a_call_and_was_none_is_text(text: str) -> None:
    for pieces in ([text], list(text)):
        assert read(pieces) == (text, [], False)


def test_a_call_behind_something_like_a_call() -> None:
    text = "<tool_call>" + written(TAGGED)
    assert read(list(text)) == ("<tool_call>", [ROM], True)


ARGUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\{}[]<>é😀\n tool_call/', max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2), max_leaves=6,
)  # fmt: skip
PROSE = st.lists(st.sampled_from(["Hi", " ", "\n", "<", "<tool", "_call>", "[TOOL", "CALLS] ", "é😀", "</tool_call>", "{}", ","]), max_size=6)


@st.composite
def answers(draw: st.DrawFn) -> tuple[CallForm, str, str, list[tuple[str, str]]]:
    """A form, an answer in it, and the content and the calls that it has."""
    form = draw(st.sampled_from(FORMS))
    most = 1 if form.between is None else 4
    calls = [
        (draw(st.sampled_from(["weather", "weather_now", "w"])),
         json.dumps(draw(st.dictionaries(st.text(max_size=3), ARGUMENTS, max_size=3)), ensure_ascii=False))
        for _ in range(draw(st.integers(0, most)))
    ]  # fmt: skip
    prose = "".join(draw(PROSE))
    if form.trigger in prose or (form.is_whole_answer and (calls or prose.lstrip().startswith("{"))):
        prose = ""
    blank = draw(st.sampled_from(["", " ", "\n"]))

    def spelled(literals: tuple[str, ...]) -> str:
        return "".join(blank + literal for literal in literals)

    text = prose
    for index, (name, arguments) in enumerate(calls):
        text += spelled((form.between or ()) if index else form.opening) + spelled(form.before_name)
        text += name + spelled(form.before_arguments) + blank + arguments + spelled(form.behind_arguments)
    if calls:
        text += spelled(form.closing)
    # A blank behind text belongs to it; one that stands alone in front of a call belongs to nobody.
    content = prose if not calls else prose + blank if prose.strip() else ""
    return form, text, content, calls


@given(answers(), st.data())
def test_cuts_change_nothing(answer: tuple[CallForm, str, str, list[tuple[str, str]]], data: st.DataObject) -> None:
    form, text, content, calls = answer
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces, form) == (content, calls, bool(calls))
    assert read(list(text), form) == (content, calls, bool(calls))


@given(st.sampled_from(FORMS), st.lists(st.sampled_from([
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "{", "}", "[", "]", '"name"', ":", '"', "weather", '"arguments"', '"parameters"', ",",
    '{"name": "w", "arguments": {', " ", "x",
]), max_size=14), st.integers(1, 5))  # fmt: skip
def test_any_text_is_read_alike_however_it_is_cut(form: CallForm, parts: list[str], size: int) -> None:
    text = "".join(parts)
    whole = read([text], form)
    assert read([text[i : i + size] for i in range(0, len(text), size)], form) == whole
    assert read(list(text), form) == whole


def test_long_arguments_cost_little() -> None:
    """Each character is looked at once: a megabyte of arguments in small pieces takes seconds, not hours."""
    parser = ToolCallParser(TOOLS, "auto")
    parser.feed('<tool_call>{"name": "w", "arguments": {"x": "')
    for _ in range(20_000):
        assert len(parser.feed("abcdefghij" * 5).calls) == 1
    assert len(parser._held) == 0
