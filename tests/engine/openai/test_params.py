"""Which bodies are taken, and what do they ask the engine for?"""

import json
from typing import Any

import pytest

from engine.openai.errors import ApiError
from engine.openai.fields import ChatRequest, CompletionRequest, DetokenizeRequest, SamplingFields
from engine.openai.params import chat_params, completion_params, plain_messages, template_variables, tool_choice_of
from engine.openai.parse import parse_body, prompts_of
from ipc.params import SamplingParams

CHAT = {"messages": [{"role": "user", "content": "x"}]}
COMPLETION = {"prompt": "x"}

OPTIONAL = {
    "completion": [name for name in CompletionRequest.model_fields if name != "prompt"],
    "chat": [name for name in ChatRequest.model_fields if name != "messages"],
}


def completion(**fields: Any) -> CompletionRequest:
    return parse_body(json.dumps(COMPLETION | fields).encode(), CompletionRequest)


def chat(**fields: Any) -> ChatRequest:
    return parse_body(json.dumps(CHAT | fields).encode(), ChatRequest)


def asked(kind: str, **fields: Any) -> SamplingParams:
    return completion_params(completion(**fields)) if kind == "completion" else chat_params(chat(**fields))[0]


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_a1_null_equals_absent_for_every_optional_field(kind: str) -> None:
    absent = asked(kind)
    for name in OPTIONAL[kind]:
        assert asked(kind, **{name: None}) == absent, name
    assert asked(kind, **dict.fromkeys(OPTIONAL[kind])) == absent
    assert asked(kind, stop=[], logit_bias={}, user="") == absent
    inner = {"stream_options": {"include_usage": None}, "stream": True}
    assert asked(kind, **inner, structured_outputs=None) == absent


def test_a2_either_name_of_the_limit_counts_and_the_newer_wins() -> None:
    assert asked("chat").max_tokens is None, "up to the context limit"
    assert asked("chat", max_tokens=5).max_tokens == 5
    assert asked("chat", max_completion_tokens=6).max_tokens == 6
    assert asked("chat", max_completion_tokens=6, max_tokens=5).max_tokens == 6
    assert asked("completion").max_tokens == 16
    assert asked("completion", max_tokens=5).max_tokens == 5
    assert asked("completion", min_tokens=20).max_tokens == 20


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("completion", {"best_of": 3}, "best_of"),
        ("completion", {"best_of": 3, "n": 2}, "best_of"),
        ("completion", {"suffix": "end"}, "suffix"),
        ("completion", {"messages": []}, "messages"),
        ("completion", {"max_completion_tokens": 3}, "max_completion_tokens"),
        ("completion", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("completion", {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ("completion", {"lora": "x"}, "lora"),
        ("completion", {"guided_json": {}}, "guided_json"),
        ("completion", {"temperature": "warm"}, "temperature"),
        ("completion", {"temperature": -1}, "temperature"),
        ("completion", {"n": 0}, "n"),
        ("completion", {"n": True}, "n"),
        ("completion", {"n": 1.5}, "n"),
        ("completion", {"seed": -1}, "seed"),
        ("completion", {"top_p": 0}, "top_p"),
        ("completion", {"logprobs": 21}, "logprobs"),
        ("completion", {"max_tokens": 0}, "max_tokens"),
        ("completion", {"stop": ""}, "stop"),
        ("completion", {"stop": ["x"] * 17}, "stop"),
        ("completion", {"stop": [1]}, "stop[0]"),
        ("completion", {"stop_token_ids": ["x"]}, "stop_token_ids[0]"),
        ("completion", {"logit_bias": {"x": 1}}, "logit_bias"),
        ("completion", {"logit_bias": {"5": 101}}, "logit_bias.5"),
        ("completion", {"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
        ("completion", {"structured_outputs": {}}, "structured_outputs"),
        ("completion", {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ("completion", {"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ("completion", {"structured_outputs": {"pattern": "a"}}, "structured_outputs.pattern"),
        ("completion", {"timeout": 0}, "timeout"),
        ("completion", {"priority": 1 << 31}, "priority"),
        ("chat", {"functions": [{}]}, "functions"),
        ("chat", {"function_call": "auto"}, "function_call"),
        ("chat", {"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ("chat", {"audio": {}}, "audio"),
        ("chat", {"modalities": ["audio"]}, "modalities[0]"),
        ("chat", {"store": True}, "store"),
        ("chat", {"reasoning_effort": "high"}, "reasoning_effort"),
        ("chat", {"web_search_options": {}}, "web_search_options"),
        ("chat", {"service_tier": "flex"}, "service_tier"),
        ("chat", {"echo": True}, "echo"),
        ("chat", {"suffix": ""}, "suffix"),
        ("chat", {"chat_template": "{{ 1 }}"}, "chat_template"),
        ("chat", {"top_logprobs": 3}, "top_logprobs"),
        ("chat", {"logprobs": 3}, "logprobs"),
        ("chat", {"response_format": {"type": "xml"}}, "response_format"),
        ("chat", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ("chat", {"response_format": {"type": "json_schema", "json_schema": {"schema": 7}}}, "response_format.json_schema.schema"),
        ("chat", {"tools": [{"type": 7}]}, "tools[0]"),
        ("chat", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ("chat", {"tool_choice": "any"}, "tool_choice"),
    ],
)
def test_a3_x8_what_would_change_the_result_and_is_not_done_is_refused_by_name(kind: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        asked(kind, **fields)
    assert refused.value.status == 400
    assert refused.value.param is not None and refused.value.param.startswith(param), refused.value.param
    assert param.partition(".")[0].partition("[")[0] in refused.value.message


def test_a3_values_without_effect_are_taken() -> None:
    absent = asked("completion")
    assert asked("completion", best_of=1, suffix="", echo=False, stream=False, user="me") == absent
    assert asked("completion", n=2, best_of=2).n == 2
    assert asked("completion", n=1, presence_penalty=0, frequency_penalty=0.0) == absent
    assert asked("chat", store=False, service_tier="auto", modalities=["text"], metadata={"a": "b"}, tools=[], verbosity="medium",
                 parallel_tool_calls=True, tool_choice="none", response_format={"type": "text"}) == asked("chat")  # fmt: skip


def test_what_the_engine_knows_reaches_it() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "n": 3, "seed": 7, "stop": ["a", "b"], "frequency_penalty": 0.5, "presence_penalty": -0.5,
        "top_k": 4, "min_p": 0.1, "typical_p": 0.8, "repetition_penalty": 1.5, "min_tokens": 2, "stop_token_ids": [5],
        "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False, "allowed_token_ids": [5, 6],
        "bad_words": ["no"], "logprobs_mode": "processed", "prefix_caching": False, "cache_salt": "s",
    }  # fmt: skip
    told = completion_params(completion(**fields, logit_bias={"5": 2}, max_tokens=9, logprobs=2, echo=True, structured_outputs={"regex": "a"}))
    expected = SamplingParams(
        **fields, logit_bias={5: 2}, max_tokens=9, logprobs=2, prompt_logprobs=2, structured={"regex": "a"}  # type: ignore[arg-type]
    )
    assert told == expected
    every = set(SamplingFields.model_fields) - {"model", "stream", "stream_options", "user", "priority", "timeout", "return_token_ids"}
    assert every - set(fields) == {"logit_bias", "structured_outputs", "logits_processors"}, "a new field needs a place here"


def test_forms_of_answers() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    params, names = chat_params(chat(response_format=form))
    assert params.structured is not None and json.loads(params.structured.json_schema or "") == schema
    assert names["structured"] == "response_format"
    assert asked("chat", response_format={"type": "json_object"}).structured == asked(
        "completion", structured_outputs={"json_object": True}).structured
    with pytest.raises(ApiError, match="response_format and structured_outputs both"):
        asked("chat", response_format={"type": "json_object"}, structured_outputs={"regex": "a"})


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", ""], [[5], []], 7, None, {"a": 1}, ["a", [5]], [5.5], [None], [[[5]]] * 2000, ["a"] * 1025])
def test_c15_prompts_that_are_none(prompt: Any) -> None:
    with pytest.raises(ApiError) as refused:
        prompts_of(prompt)
    assert (refused.value.status, refused.value.param) == (400, "prompt") and "prompt" in refused.value.message


def test_prompts_of_every_kind() -> None:
    assert prompts_of("a") == ["a"]
    assert prompts_of(["a", "b"]) == ["a", "b"]
    assert prompts_of([5, 6]) == [[5, 6]]
    assert prompts_of([[5], [6, 7]]) == [[5], [6, 7]]


def test_messages_become_plain() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    body = chat(messages=[
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ])  # fmt: skip
    user, assistant, tool = plain_messages(body.messages)
    assert user == {"role": "user", "content": body.messages[0].content}, "the template joins parts, or takes them"
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}} and assistant["content"] == ""
    assert tool["tool_call_id"] == "1"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
        {"role": "user", "content": [{"type": "text", "text": 7}]},
        {"role": "assistant", "tool_calls": [7]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
    ],
)
def test_messages_that_nobody_can_read(message: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        plain_messages(chat(messages=[message]).messages)
    assert refused.value.param is not None and refused.value.param.startswith("messages")
    assert "messages[0]" in refused.value.message


def test_template_variables() -> None:
    body = chat()
    assert tool_choice_of(body) == "none"
    assert template_variables([], "none", {"enable_thinking": False}, True) == {"enable_thinking": False, "add_generation_prompt": True}
    with pytest.raises(ApiError, match="messages"):
        template_variables([], "none", {"messages": []}, None)


def test_long_lists_of_wrong_tokens_are_refused_fast() -> None:
    body = json.dumps({"tokens": ["x"] * 500_000}).encode()
    with pytest.raises(ApiError, match=r"tokens\[0\]"):
        parse_body(body, DetokenizeRequest)
