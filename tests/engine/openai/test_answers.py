"""Corners of answers, built of outputs by hand; bodies that look right and are not; and faults of the server itself."""

import asyncio
import gc
import json
import logging
from typing import Any

import pytest

from engine.openai.app import Server
from engine.openai.chat_reply import ChatReply
from engine.openai.completion_reply import CompletionReply
from engine.openai.errors import ApiError
from engine.openai.link import EngineLink
from engine.openai.logprobs import TextOffsets
from engine.openai.params import completion_params, plain_messages, template_variables
from engine.openai.replies import Head
from engine.openai.server_events import dumps, integers
from engine.outputs import Output, TokenLogprob, Usage
from engine.prompts import Prepared
from engine.text.chat_template import ChatTemplate
from engine.text.sources import read_text_files
from engine.text.tokenizer import Tokenizer
from ipc.errors import PeerLost, RequestError
from ipc.params import SamplingParams
from tests.conftest import Checkpoints
from tests.engine.openai.test_params import chat, completion
from tests.engine.openai.test_server import Bench, bench, error_of, info  # noqa: F401 fixtures
from tests.http_server import events_of
from tests.tiny import BOS, EOS, FIRST_BYTE, text_ids


@pytest.fixture(scope="module")
def tokenizer(checkpoints: Checkpoints) -> Tokenizer:
    files = read_text_files(checkpoints.fx_r)
    return Tokenizer(files.tokenizer, files.tokenizer_config)


def logprob(tokenizer: Tokenizer, token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id=token_id, logprob=-1.0, rank=1, token_bytes=tokenizer.token_bytes(token_id))


def output(index: int = 0, **fields: Any) -> Output:
    plain = {"request_id": "r", "delta": "", "text": "", "token_ids": [], "num_new_tokens": 0, "seed": 1}
    return Output(**{**plain, "usage": Usage(prompt_tokens=3, completion_tokens=0), "index": index, **fields})


def reply_of(tokenizer: Tokenizer, token_ids: list[int], echoed: str, **fields: Any) -> CompletionReply:
    params = SamplingParams(logprobs=0, prompt_logprobs=0, **fields)
    head = Head(answer_id="a", kind="text_completion", model="m")
    return CompletionReply(head, [Prepared(token_ids=token_ids, params=params)], params, tokenizer, [echoed])


def test_d7_a_stream_that_ends_before_its_prompt_was_read_has_its_finish_reasons(tokenizer: Tokenizer) -> None:
    reply = reply_of(tokenizer, text_ids("abc"), "abc", n=2)
    ended = [output(index, finish_reason="timeout", logprobs=[], prompt_logprobs=None if index else [None]) for index in (1, 0)]
    events = events_of(iter(b"".join(reply.events([(0, one) for one in ended])).decode().splitlines()))
    choices = [choice for event in events for choice in event["choices"]]
    assert sorted((c["index"], c["finish_reason"], c["text"]) for c in choices) == [(0, "timeout", "abc"), (1, "timeout", "abc")]


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize(("token_ids", "echoed", "expected"), [
    ([*text_ids("a"), EOS, *text_ids("b")], "a</s>b", [0, 1, 5]),
    ([BOS, *text_ids("ab")], "ab", [0, 0, 1]),
])  # fmt: skip
def test_d9_offsets_are_those_in_the_text_that_is_echoed(
    tokenizer: Tokenizer, token_ids: list[int], echoed: str, expected: list[int], skips: bool
) -> None:
    reply = reply_of(tokenizer, token_ids, echoed, skip_special_tokens=skips)
    known: list[TokenLogprob | None] = [None, *(logprob(tokenizer, one) for one in token_ids[1:])]
    made = {"text": "c", "token_ids": text_ids("c"), "logprobs": [logprob(tokenizer, *text_ids("c"))]}
    reply.keep([(0, output(finish_reason="length", prompt_logprobs=known, **made))])
    [choice] = json.loads(b"".join(reply.body()))["choices"]
    assert choice["text"] == echoed + "c" and choice["logprobs"]["text_offset"] == [*expected, len(echoed)]


def test_d9_bytes_that_form_no_character_do_not_shift_what_follows(tokenizer: Tokenizer) -> None:
    offsets = TextOffsets(tokenizer, skip_special_tokens=True)
    raw = b"a\xe1b\xc3\xa9c"  # as text: a, a mark, b, é, c
    assert [offsets.next(FIRST_BYTE + byte) for byte in raw] == [0, 1, 2, 3, 3, 4]


def test_f6_large_answers_are_made_in_pieces(tokenizer: Tokenizer) -> None:
    prompt = text_ids("ab")
    reply = reply_of(tokenizer, prompt, "ab", n=5)
    known: list[TokenLogprob | None] = [None, logprob(tokenizer, prompt[1])]
    ended = [output(index, finish_reason="length", logprobs=[], prompt_logprobs=None if index else known) for index in range(5)]
    reply.keep([(0, one) for one in ended])
    pieces = list(reply.body())
    assert len(pieces) == 7 and [c["index"] for c in json.loads(b"".join(pieces))["choices"]] == list(range(5))
    reply = reply_of(tokenizer, prompt, "ab", n=5)
    assert len([piece for piece in reply.events([(0, one) for one in ended[::-1]]) if piece]) == 5


@pytest.mark.parametrize("count", [0, 1, 1 << 14, (1 << 14) + 1, 40_000])
def test_long_lists_are_written_in_parts(count: int) -> None:
    assert b"[" + integers(list(range(count))) + b"]" == dumps(list(range(count)))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_fault_of_ours_is_json_and_ends_no_connection(
    bench: Bench, path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture  # noqa: F811
) -> None:
    def fail(*args: Any, **fields: Any) -> Any:
        raise ZeroDivisionError("planted")

    with monkeypatch.context() as planted, caplog.at_level(logging.ERROR):
        planted.setattr(Server, "_head", fail)
        response = bench.post(path)
    assert response.status_code == 500 and error_of(response)["code"] == "internal" and "planted" not in response.text
    [record] = [record for record in caplog.records if record.exc_info]
    assert response.headers["x-request-id"] in record.getMessage()
    assert response.headers.get("connection") != "close" and bench.post(path).status_code == 200


def test_a_fault_of_ours_in_mid_stream_is_an_event(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def fail(*args: Any) -> Any:
        raise ZeroDivisionError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(ChatReply, "_last_event", fail)
        events = bench.stream("/v1/chat/completions")
    assert events[-1] == "[DONE]" and events[-2]["error"]["code"] == "internal"


@pytest.mark.parametrize("name", ["self", "params", "messages", "tools", "add_generation_prompt"])
def test_names_that_no_template_variable_can_have(bench: Bench, name: str) -> None:  # noqa: F811
    for path in ("/v1/chat/completions", "/tokenize"):
        body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {name: {}}}
        response = bench.http.post(path, json=body)
        assert response.status_code == 400 and error_of(response)["param"] == "chat_template_kwargs"
        assert name in error_of(response)["message"]


def test_what_is_nested_too_deep_is_named(bench: Bench) -> None:  # noqa: F811
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    error = error_of(bench.post("/v1/chat/completions", chat_template_kwargs={"a": deep}))
    assert error["param"] == "chat_template_kwargs" and error["message"].startswith("chat_template_kwargs.a[0]")
    template = ChatTemplate("{{ tools }}", {})
    with pytest.raises(RequestError) as refused:
        template.render([{"role": "user", "content": "x"}], tools=[{"a": deep}])
    assert refused.value.field == "tools"


def test_a_token_id_written_in_two_ways_is_refused() -> None:
    with pytest.raises(ApiError, match="twice") as refused:
        completion_params(completion(logit_bias={"5": 1, "05": 2}))
    assert refused.value.param == "logit_bias"


def test_a_message_of_nothing_but_nulls_is_refused() -> None:
    with pytest.raises(ApiError, match=r"messages\[0\].content is missing"):
        plain_messages(chat(messages=[{"role": "assistant", "content": None, "tool_calls": None}]).messages)
    assert template_variables([], "none", None, None) == {}


def test_u4_an_engine_that_stays_away_is_no_traceback(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    class Nobody:
        is_lost = True

        async def attach(self) -> "Nobody":
            await asyncio.sleep(0)
            raise PeerLost("no engine answered")

    async def main() -> None:
        link = EngineLink("tcp://127.0.0.1:1", reconnect_s=1.0)
        monkeypatch.setattr(link, "_client", Nobody())
        for _ in range(3):
            with pytest.raises(ApiError) as refused:
                await link.client()
            assert refused.value.status == 503
        asked = asyncio.create_task(link.client())
        await asyncio.sleep(0)
        asked.cancel()  # as when a request has waited long enough: nobody learns how the attaching ended
        await asyncio.gather(asked, return_exceptions=True)
        await asyncio.sleep(0)
        del asked, link
        gc.collect()

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
        gc.collect()
    assert {record.getMessage() for record in caplog.records} == {"the engine at tcp://127.0.0.1:1 is gone; looking for one"}
