"""Do tools of a request constrain the answer, and does the answer's text become calls, whole and streamed?"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.text.sources import read_text_files
from ipc.messages import AddRequest
from tests.conftest import Checkpoints
from tests.fake_core import FakeCore, model_info, say
from tests.http_server import serving, stream
from tests.tiny import text_ids

PATH = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture
def bench(checkpoints: Checkpoints) -> Iterator[tuple[FakeCore, httpx.Client]]:
    files = read_text_files(checkpoints.fx_r)
    info = model_info(tokenizer=files.tokenizer, tokenizer_config=files.tokenizer_config, chat_template=TEMPLATE, max_model_len=4096)
    with FakeCore(info=info) as core, serving(core.address) as url, httpx.Client(base_url=url, timeout=20) as http:
        yield core, http


def test_a_call_is_no_text(bench: tuple[FakeCore, httpx.Client]) -> None:
    core, http = bench
    core.reply = say([*text_ids(f"Let me see. {CALL}{CALL}"), 1], "stop")
    made = http.post(PATH, json=ASK).json()["choices"][0]
    first, second = made["message"]["tool_calls"]
    assert made["finish_reason"] == "tool_calls" and made["message"]["content"].strip() == "Let me see."
    assert first["type"] == "function" and first["id"] != second["id"]
    assert first["function"]["name"] == "weather" and json.loads(first["function"]["arguments"]) == {"city": "Köln"}

    events = stream(http, PATH, ASK)
    choices = [c for e in events if e != "[DONE]" for c in e["choices"]]
    assert "".join(c["delta"].get("content") or "" for c in choices).strip() == "Let me see."
    pieces = [piece for c in choices for piece in c["delta"].get("tool_calls", [])]
    for index in (0, 1):
        own = [piece for piece in pieces if piece["index"] == index]
        assert own[0]["id"] and own[0]["function"]["name"] == "weather" and all("id" not in piece for piece in own[1:])
        assert json.loads("".join(piece["function"]["arguments"] for piece in own)) == {"city": "Köln"}
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["tool_calls"]
    assert "<tool" not in json.dumps(events)


def test_the_schema_constrains_and_the_template_sees_the_tools(bench: tuple[FakeCore, httpx.Client]) -> None:
    core, http = bench
    core.reply = say([*text_ids('{"city": "Rom"}'), 1], "stop")
    named = {"type": "function", "function": {"name": "weather"}}
    made = http.post(PATH, json=ASK | {"tool_choice": named}).json()["choices"][0]
    _, request = core.next(AddRequest)
    assert request.params.structured is not None and request.params.structured.json_schema is not None
    assert made["message"] == {
        "role": "assistant", "content": None, "refusal": None,
        "tool_calls": [{"id": made["message"]["tool_calls"][0]["id"], "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}],
    }  # fmt: skip
    assert bytes(token - 3 for token in request.prompt_token_ids).decode().count('"weather"') == 1
    for choice in ("auto", "required"):
        http.post(PATH, json=ASK | {"tool_choice": choice})
        _, request = core.next(AddRequest)
        assert request.params.structured is not None and "%json" in (request.params.structured.grammar or "")
    http.post(PATH, json=ASK | {"tool_choice": "none"})
    _, request = core.next(AddRequest)
    assert request.params.structured is None and request.prompt_token_ids.tolist() == text_ids("x")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice.function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools[0].function.parameters.type"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_x8_what_makes_no_sense_is_refused_by_name(bench: tuple[FakeCore, httpx.Client], fields: dict[str, Any], param: str) -> None:
    response = bench[1].post(PATH, json=ASK | fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
