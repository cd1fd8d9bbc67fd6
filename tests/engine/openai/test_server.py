"""What does the server answer, in which order, and what does it ask of the core? In front of a core that a test plays."""

import json
import logging
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from engine.text.sources import read_text_files
from ipc.messages import AbortRequest, AddRequest, ModelInfo
from tests.conftest import Checkpoints
from tests.fake_core import FakeCore, Reply, model_info, say, stay_silent
from tests.http_server import serving, stream
from tests.tiny import BOS, text_ids

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"

READY = {"ready": True, "state": "ready"}
PATHS = ("/v1/completions", "/v1/chat/completions")
ASK: dict[str, dict[str, Any]] = {PATHS[0]: {"prompt": "x"}, PATHS[1]: {"messages": [{"role": "user", "content": "x"}]}}


@pytest.fixture(scope="session")
def info(checkpoints: Checkpoints) -> ModelInfo:
    files = read_text_files(checkpoints.fx_r)
    return model_info(
        name="tiny", tokenizer=files.tokenizer, tokenizer_config=files.tokenizer_config, chat_template=TEMPLATE, max_model_len=2048
    )


class Bench:
    """A core and a server in front of it."""

    def __init__(self, core: FakeCore, url: str) -> None:
        self.core = core
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=20)
        self.sdks: list[openai.OpenAI] = []

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.http.post(path, json=ASK.get(path, {}) | fields)

    def sdk(self, **options: Any) -> openai.OpenAI:
        self.sdks.append(openai.OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 20} | options))
        return self.sdks[-1]

    def stream(self, path: str, **fields: Any) -> list[Any]:
        return stream(self.http, path, ASK[path] | fields)


@pytest.fixture
def bench(info: ModelInfo) -> Iterator[Bench]:
    with FakeCore(info=info, reply=say(text_ids("Hello!")), answers=dict.fromkeys(("health", "stats"), READY)) as core, serving(core.address) as url:
        one = Bench(core, url)
        with one.http:
            yield one
        for sdk in one.sdks:
            sdk.close()


def reply_to(bench: Bench, reply: Reply) -> None:
    bench.core.reply = reply


def error_of(response: httpx.Response) -> dict[str, Any]:
    content = response.json()
    assert list(content) == ["error"] and set(content["error"]) == {"message", "type", "param", "code"}
    return dict(content["error"])


# ------------------------------------------------------------------------------------------ order of events


def choice_events(events: list[Any], index: int) -> list[dict[str, Any]]:
    return [c for e in events if e != "[DONE]" for c in e["choices"] if c["index"] == index]


def text_of(choices: list[dict[str, Any]]) -> str:
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("reason", ["stop", "length", "abort", "timeout"])
def test_d7_d8_one_finish_reason_then_usage_then_done(bench: Bench, path: str, usage: bool, reason: str) -> None:
    reply_to(bench, say([*text_ids("Hello"), 1], reason))
    asked = {"stream_options": {"include_usage": True}} if usage else {}
    events = bench.stream(path, **asked)
    assert events.pop() == "[DONE]" and "[DONE]" not in events
    if usage:
        last = events.pop()
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 6
        assert all(event["usage"] is None for event in events)
        assert bench.post(path).json()["usage"] == last["usage"]
    else:
        assert all("usage" not in event for event in events)
    choices = choice_events(events, 0)
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + [reason]
    assert text_of(choices) == "Hello", "the end token is no text"
    if path == PATHS[1]:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert choices[-1]["delta"] == {}
        assert all("role" not in c["delta"] for c in choices[1:])


@pytest.mark.parametrize("path", PATHS)
def test_d7_one_token_and_two_choices(bench: Bench, path: str) -> None:
    reply_to(bench, say(text_ids("H")))
    choices = choice_events(bench.stream(path, max_tokens=1), 0)
    assert text_of(choices) == "H" and [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]

    def two(core: FakeCore, client: bytes, request: AddRequest) -> None:
        for position, token in enumerate(text_ids("abc")):
            for index in (1, 0):
                core.output(client, request.request_id, [token], index=index, finish_reason="length" if position == 2 else None)

    reply_to(bench, two)
    events = bench.stream(path, n=2)
    for index in (0, 1):
        own = choice_events(events, index)
        assert text_of(own) == "abc" and [c["finish_reason"] for c in own][-1] == "length"
        assert sum(c["finish_reason"] is not None for c in own) == 1
    assert events[-1] == "[DONE]"
    whole = bench.post(path, n=2).json()
    assert [c["index"] for c in whole["choices"]] == [0, 1] and whole["usage"]["completion_tokens"] == 6


def test_d7_the_connection_is_closed_soon_after_the_end_marker(bench: Bench) -> None:
    body = json.dumps(ASK[PATHS[1]] | {"stream": True}).encode()
    address = bench.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=10) as raw:
        head = f"POST {PATHS[1]} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        got, done_at = b"", 0.0
        while piece := raw.recv(1 << 16):
            got += piece
            if b"[DONE]" in got and not done_at:
                done_at = time.monotonic()
        assert done_at and time.monotonic() - done_at < 1.0


def test_an_error_in_mid_stream_is_an_event_and_before_it_a_status(bench: Bench) -> None:
    def fail(core: FakeCore, client: bytes, request: AddRequest) -> None:
        if request.params.max_tokens == 2:
            core.output(client, request.request_id, text_ids("H"))
        core.fail(client, request.request_id, "internal", "a stage is broken")

    reply_to(bench, fail)
    events = bench.stream(PATHS[0], max_tokens=2)
    assert events[-1] == "[DONE]" and events[-2]["error"]["message"] == "a stage is broken"
    response = bench.post(PATHS[0], stream=True, max_tokens=3)
    assert response.status_code == 500 and error_of(response)["code"] == "internal"


# ------------------------------------------------------------------------------------------ what the core is asked


def test_c17_a_chat_has_the_bos_of_its_template_only_and_a_prompt_that_of_its_tokenizer(bench: Bench) -> None:
    made = bench.post(PATHS[1], return_token_ids=True).json()
    _, request = bench.core.next(AddRequest)
    assert request.prompt_token_ids.tolist() == [BOS, *text_ids("x")] == made["choices"][0]["prompt_token_ids"]
    assert made["usage"]["prompt_tokens"] == 2
    bench.post(PATHS[0])
    _, request = bench.core.next(AddRequest)
    assert request.prompt_token_ids.tolist() == text_ids("x"), "this tokenizer adds none"


def test_priority_timeout_and_the_request_id_reach_the_core(bench: Bench) -> None:
    response = bench.http.post(PATHS[0], json=ASK[PATHS[0]] | {"priority": -3, "timeout": 2.5}, headers={"X-Request-Id": "mine-7"})
    assert response.headers["x-request-id"] == "mine-7" and response.json()["id"] == "cmpl-mine-7"
    _, request = bench.core.next(AddRequest)
    assert request.request_id.startswith("mine-7") and (request.priority, request.timeout_s) == (-3, 2.5)
    for bad in ("", "a b", "x" * 97, "é".encode().decode("latin-1")):
        response = bench.http.post(PATHS[0], json=ASK[PATHS[0]], headers=[(b"X-Request-Id", bad.encode("latin-1"))])  # type: ignore[arg-type]
        assert response.status_code == 200 and response.headers["x-request-id"] != bad
    assert bench.http.get("/nope").headers["x-request-id"]


def test_two_requests_may_have_the_same_id(bench: Bench) -> None:
    with ThreadPoolExecutor(2) as pool:
        sent = [pool.submit(bench.http.post, PATHS[0], json=ASK[PATHS[0]], headers={"X-Request-Id": "same"}) for _ in range(2)]
        assert [one.result().status_code for one in sent] == [200, 200]


def test_echo_and_token_ids(bench: Bench) -> None:
    made = bench.post(PATHS[0], prompt=text_ids("Hé"), echo=True, return_token_ids=True).json()["choices"][0]
    assert made["text"] == "HéHello!" and made["token_ids"] == text_ids("Hello!") and made["prompt_token_ids"] == text_ids("Hé")
    events = choice_events(bench.stream(PATHS[0], prompt="Hé", echo=True, return_token_ids=True), 0)
    assert text_of(events) == "HéHello!" and sum((e["token_ids"] for e in events), []) == text_ids("Hello!")
    assert [e["prompt_token_ids"] for e in events if "prompt_token_ids" in e] == [text_ids("Hé")]


def test_d10_lists_keep_their_order(bench: Bench) -> None:
    def say_prompt(core: FakeCore, client: bytes, request: AddRequest) -> None:
        say([*request.prompt_token_ids.tolist(), *text_ids("!")])(core, client, request)

    reply_to(bench, say_prompt)
    prompts = [f"prompt {i} " * (i + 1) for i in range(10)]
    made = bench.post(PATHS[0], prompt=prompts).json()
    assert [(c["index"], c["text"]) for c in made["choices"]] == [(i, f"{p}!") for i, p in enumerate(prompts)]
    events = bench.stream(PATHS[0], prompt=[text_ids(p) for p in prompts])
    assert [text_of(choice_events(events, i)) for i in range(10)] == [f"{p}!" for p in prompts]


# ------------------------------------------------------------------------------------------ errors


def test_a4_the_sdk_raises_what_fits(bench: Bench) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    sdk = bench.sdk()
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.completions.create(model="tiny", prompt="x" * 2048)
    assert bad.value.body["param"] == "prompt" and "2048 tokens; the context limit is 2048" in bad.value.message  # type: ignore[index]
    with pytest.raises(openai.BadRequestError, match="temperature"):
        sdk.chat.completions.create(**chat, temperature=-1)  # type: ignore[call-overload]
    with pytest.raises(openai.NotFoundError, match="'other' is not served here; tiny is"):
        sdk.chat.completions.create(**chat | {"model": "other"})  # type: ignore[call-overload]
    for code, raised in (("overloaded", openai.RateLimitError), ("unavailable", openai.InternalServerError), ("bad_request", openai.BadRequestError)):
        reply_to(bench, lambda core, client, request, code=code: core.fail(client, request.request_id, code, "why"))  # type: ignore[misc]
        for streams in (False, True):
            with pytest.raises(raised, match="why") as caught:
                sdk.chat.completions.create(**chat, stream=streams)  # type: ignore[call-overload]
            assert caught.value.status_code == {"overloaded": 429, "unavailable": 503}.get(code, 400)  # type: ignore[attr-defined]
            assert caught.value.request_id  # type: ignore[attr-defined]


def test_a4_bad_json_paths_methods_and_sizes(bench: Bench, info: ModelInfo) -> None:
    for path in (*PATHS, "/tokenize", "/detokenize"):
        for body in (b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"a":1}{'):
            response = bench.http.post(path, content=body, headers={"content-type": "application/json"})
            assert response.status_code == 400 and error_of(response)["message"], (path, body[:20])
        for method in ("GET", "PUT", "DELETE", "PATCH"):
            response = bench.http.request(method, path)
            assert response.status_code == 405 and response.headers["allow"] == "POST" and error_of(response)
    assert error_of(bench.http.post("/v1/completion", json={}))["code"] == "not_found"
    assert bench.http.post(PATHS[0], content="prompt=x", headers={"content-type": "application/x-www-form-urlencoded"}).status_code == 400
    assert error_of(bench.http.get("/v1/models/none"))["code"] == "model_not_found"
    response = bench.http.get("/health", headers={"x": "y" * 40_000})
    assert response.status_code == 431 and "at most" in error_of(response)["message"]
    response = bench.http.get("/health", headers={f"x{i}": "y" for i in range(120)})
    assert response.status_code == 431 and error_of(response)
    with serving(bench.core.address, max_body_bytes=1000) as url:
        for content in (b"x" * 1001, iter([b"x" * 600] * 2)):
            response = httpx.post(f"{url}{PATHS[0]}", content=content)
            assert response.status_code == 413 and "1000" in error_of(response)["message"]
        assert httpx.post(f"{url}{PATHS[0]}", content=json.dumps(ASK[PATHS[0]]).encode().ljust(1000)).status_code == 200


def test_what_is_no_http_gets_an_answer_of_the_same_form(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    host, port = bench.url.removeprefix("http://").split(":")
    for sent in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=10) as raw:
            raw.sendall(sent)
            got = b""
            while piece := raw.recv(1 << 16):
                got += piece
        head, _, body = got.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["code"] == "invalid_http"
    # Some clients offer another protocol with every request.
    assert bench.http.get("/health", headers={"connection": "upgrade, http2-settings", "upgrade": "h2c"}).status_code == 200
    assert caplog.records == []


def test_a4_keys(bench: Bench) -> None:
    with serving(bench.core.address, api_keys=("first-key", "second-key")) as url:
        for key in ("first-key", "second-key"):
            assert bench.sdk(base_url=f"{url}/v1", api_key=key).models.list().data[0].id == "tiny"
        with pytest.raises(openai.AuthenticationError) as refused:
            bench.sdk(base_url=f"{url}/v1", api_key="first-ke").models.list()
        assert refused.value.code == "invalid_api_key"
        assert httpx.get(f"{url}/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nope"):
            response = httpx.get(url + path)
            assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer" and error_of(response)
        assert httpx.get(f"{url}/v1/models", headers={"authorization": "Basic first-key"}).status_code == 401


def test_origins(bench: Bench) -> None:
    origin = {"origin": "https://example.com"}
    assert "access-control-allow-origin" not in bench.http.get("/health", headers=origin).headers
    with serving(bench.core.address, cors_origins=("https://example.com",), api_keys=("k",)) as url:
        assert httpx.get(f"{url}/v1/models", headers=origin).headers["access-control-allow-origin"] == "https://example.com"
        asked = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        assert httpx.options(url + PATHS[1], headers=asked).status_code == 200
        assert "access-control-allow-origin" not in httpx.get(f"{url}/health", headers={"origin": "https://other.com"}).headers


def test_names_of_the_model(bench: Bench) -> None:
    with serving(bench.core.address, served_model_names=("gpt-x", "org/name")) as url:
        sdk = bench.sdk(base_url=f"{url}/v1")
        assert [card.id for card in sdk.models.list()] == ["gpt-x", "org/name", "tiny"]
        assert sdk.models.retrieve("org/name").id == "org/name"
        assert httpx.post(url + PATHS[0], json={"prompt": "x"}).json()["model"] == "gpt-x"
        assert httpx.post(url + PATHS[0], json={"prompt": "x", "model": "tiny"}).json()["model"] == "tiny"


def test_an_engine_that_is_gone_is_503_and_found_again(info: ModelInfo) -> None:
    core = FakeCore(info=info, reply=stay_silent)
    with core, serving(core.address, reconnect_s=1.0) as url:
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(httpx.post, url + PATHS[0], json={"prompt": "x"}, timeout=20)
            core.next(AddRequest)
            core.die()
            assert sent.result().status_code == 503 and error_of(sent.result())["code"] == "engine_unavailable"
        for path in ("/health", "/v1/models", "/metrics"):
            response = httpx.get(url + path, timeout=20)
            assert response.status_code == 503 and response.headers["retry-after"] == "1"
        with FakeCore(info=info, reply=say(text_ids("again")), answers=dict.fromkeys(("health", "stats"), READY), endpoint=core.address):
            deadline = time.monotonic() + 15
            while (response := httpx.post(url + PATHS[0], json={"prompt": "x"}, timeout=20)).status_code == 503:
                assert time.monotonic() < deadline
            assert response.json()["choices"][0]["text"] == "again"
            assert httpx.get(f"{url}/health").status_code == 200


# ------------------------------------------------------------------------------------------ clients that leave


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"prompt": ["a", "b", "c", "d", "e"]}, {"n": 3}, {"prompt": ["a", "b"], "stream": True, "n": 2}])
@pytest.mark.parametrize("has_begun", [True, False])
def test_p11_who_leaves_ends_all_that_was_asked(bench: Bench, fields: dict[str, Any], has_begun: bool) -> None:
    def begin(core: FakeCore, client: bytes, request: AddRequest) -> None:
        core.output(client, request.request_id, text_ids("H"))

    reply_to(bench, begin if has_begun else stay_silent)
    host, port = bench.url.removeprefix("http://").split(":")
    body = json.dumps(ASK[PATHS[0]] | fields).encode()
    num_prompts = len(fields.get("prompt", "x"))
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(f"POST {PATHS[0]} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        sent = {bench.core.next(AddRequest)[1].request_id for _ in range(num_prompts)}
        if has_begun and "stream" in fields:
            assert raw.recv(1 << 16)
    left = time.monotonic()
    ended = {bench.core.next(AbortRequest)[1].request_id for _ in range(num_prompts)}
    assert ended == sent and time.monotonic() - left < 1.0


def test_u4_a_client_that_leaves_is_one_line_without_its_prompt(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    reply_to(bench, stay_silent)
    host, port = bench.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "a secret", "stream": True}).encode()
    with caplog.at_level(logging.INFO):
        for _ in range(100):
            with socket.create_connection((host, int(port)), timeout=10) as raw:
                raw.sendall(f"POST {PATHS[0]} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
                bench.core.next(AddRequest)
            bench.core.next(AbortRequest)
        assert bench.post("/tokenize", prompt="x").status_code == 200
    lines = [record.getMessage() for record in caplog.records]
    about = [line for line in lines if "the client left" in line]
    assert len(about) == 100 and len(lines) < 150
    assert not any("secret" in line for line in lines)


def test_a_client_that_leaves_in_mid_body_is_no_error(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    host, port = bench.url.removeprefix("http://").split(":")
    with caplog.at_level(logging.WARNING):
        with socket.create_connection((host, int(port)), timeout=10) as raw:
            raw.sendall(f"POST {PATHS[0]} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n".encode() + b"{")
        assert bench.post(PATHS[0]).status_code == 200
    assert [record.getMessage() for record in caplog.records] == []
