"""The openai package as it is, before a real engine with two stages."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.conftest import Checkpoints
from tests.e2e.harness import EnginePool
from tests.e2e.test_http_cases import FLAGS, url_of

pytestmark = pytest.mark.e2e

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name a colour."}]
FIXED: dict[str, Any] = {"model": "fx-r", "temperature": 0, "seed": 1}


@pytest.fixture
def base_url(engines: EnginePool, checkpoints: Checkpoints) -> str:
    return url_of(engines.get(checkpoints.fx_r, flags=FLAGS)) + "/v1"


@pytest.fixture
def sdk(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_completions_whole_and_streamed(sdk: openai.OpenAI) -> None:
    whole = sdk.completions.create(**FIXED, prompt="Once", max_tokens=8, n=2, logprobs=2)
    assert len(whole.choices) == 2 and whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == 16
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and len(logprobs.tokens) == 8
    assert logprobs.top_logprobs is not None and len(logprobs.top_logprobs[0]) == 2
    chunks = list(sdk.completions.create(**FIXED, prompt="Once", max_tokens=8, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 8


def test_d8_chats_whole_and_streamed(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(**FIXED, messages=MESSAGES, max_completion_tokens=8, logprobs=True, top_logprobs=3)
    content = whole.choices[0].logprobs
    assert content is not None and content.content is not None
    assert len(content.content) == 8 and len(content.content[0].top_logprobs) == 3
    assert content.content[0].top_logprobs[0].token == content.content[0].token, "greedy"
    chunks = list(sdk.chat.completions.create(
        **FIXED, messages=MESSAGES, max_tokens=8, stream=True, stream_options={"include_usage": True}
    ))  # fmt: skip
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    last = chunks[-1].usage
    assert last is not None and whole.usage is not None
    assert (last.prompt_tokens, last.total_tokens) == (whole.usage.prompt_tokens, whole.usage.total_tokens)
    assert all(c.usage is None for c in chunks[:-1])


def test_the_sdk_s_own_helpers_understand_the_streams(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(**FIXED, messages=MESSAGES, max_tokens=8, n=2) as stream:
        kinds = {event.type for event in stream}
        final = stream.current_completion_snapshot
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert len(final.choices) == 2 and final.choices[0].finish_reason == "length"


def test_a_schema(sdk: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"], "additionalProperties": False}
    made = sdk.chat.completions.create(
        model="fx-r", seed=2, messages=MESSAGES, max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "digit", "schema": schema, "strict": True}},
    )  # fmt: skip
    assert made.choices[0].finish_reason == "stop"
    assert 0 <= json.loads(made.choices[0].message.content or "")["n"] <= 9


def test_fields_of_ours_go_through_extra_body(sdk: openai.OpenAI) -> None:
    made = sdk.completions.create(
        model="fx-r", prompt=[5, 6, 7], max_tokens=4,
        extra_body={"structured_outputs": {"regex": "ab?c"}, "return_token_ids": True, "priority": 1, "timeout": 30},
    )  # fmt: skip
    assert made.choices[0].text in ("abc", "ac")
    assert made.choices[0].prompt_token_ids == [5, 6, 7]  # type: ignore[attr-defined]


def test_asyncio(base_url: str) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as sdk:
            whole = await sdk.chat.completions.create(**FIXED, messages=MESSAGES, max_tokens=8)

            async def streamed() -> str:
                chunks = await sdk.chat.completions.create(**FIXED, messages=MESSAGES, max_tokens=8, stream=True)
                return "".join([c.choices[0].delta.content or "" async for c in chunks])

            texts = await asyncio.gather(*(streamed() for _ in range(8)))
            assert set(texts) == {whole.choices[0].message.content}
            with pytest.raises(openai.NotFoundError):
                await sdk.completions.create(model="none", prompt="x")
            assert [card.id async for card in sdk.models.list()] == ["fx-r"]

    asyncio.run(main())


def test_a4_errors_have_real_numbers(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="2000 tokens; the context limit is 1024"):
        sdk.completions.create(model="fx-r", prompt="x" * 2000)
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.completions.create(model="fx-r", prompt=[100_000])
    assert caught.value.param == "prompt" and "100000" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.completions.create(model="fx-r", prompt="x", best_of=3)
    assert caught.value.param == "best_of"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_tools(sdk: openai.OpenAI, choice: Any) -> None:
    schema = {
        "type": "object", "properties": {"city": {"enum": ["Rom", "Köln"]}, "days": {"type": "integer", "minimum": 1, "maximum": 3}},
        "required": ["city", "days"], "additionalProperties": False,
    }  # fmt: skip
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    asked: Any = {"model": "fx-r", "seed": 4, "messages": MESSAGES, "max_tokens": 200, "tools": tools, "tool_choice": choice}
    whole = sdk.chat.completions.create(**asked, parallel_tool_calls=False).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.tool_calls is not None and len(whole.message.tool_calls) == 1
    call = whole.message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather" and arguments["city"] in ("Rom", "Köln") and 1 <= arguments["days"] <= 3
    pieces = [
        piece for chunk in sdk.chat.completions.create(**asked, parallel_tool_calls=False, stream=True) for piece in chunk.choices[0].delta.tool_calls or []
    ]  # fmt: skip
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
    again = [*MESSAGES, whole.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert sdk.chat.completions.create(model="fx-r", messages=again, max_tokens=3).choices[0].finish_reason == "length"


def test_tools_that_can_not_be_called_are_refused(sdk: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"pattern": "["}}}
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(openai.BadRequestError, match="tools can't be enforced"):
        sdk.chat.completions.create(model="fx-r", messages=MESSAGES, tools=tools, tool_choice="required")
    absent: Any = {"type": "function", "function": {"name": "g"}}
    with pytest.raises(openai.BadRequestError, match="is not one of the tools") as caught:
        sdk.chat.completions.create(model="fx-r", messages=MESSAGES, tools=tools, tool_choice=absent)
    assert caught.value.param == "tool_choice.function.name"
