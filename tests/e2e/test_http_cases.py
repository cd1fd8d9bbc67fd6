"""The HTTP server before a real engine: text, stops, log probabilities, lists, and what comes back of them."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests import tiny
from tests.conftest import Checkpoints
from tests.e2e.harness import Engine, EnginePool
from tests.http_server import stream

pytestmark = pytest.mark.e2e

FLAGS = ("--http", "127.0.0.1:0", "--dtype", "float32", "--num-kv-blocks", "512", "--max-num-seqs", "32")
START = [0]
"""After this prompt the chain model says its whole script."""


def url_of(engine: Engine) -> str:
    line = next(line for line in engine.output.lines if line.startswith("brigade ready"))
    return re.search(r"http=(\S+)", line)[1]  # type: ignore[index]


@pytest.fixture
def chain(engines: EnginePool, checkpoints: Checkpoints) -> Iterator[httpx.Client]:
    engine = engines.get(checkpoints.chain, flags=FLAGS)
    with httpx.Client(base_url=url_of(engine), timeout=60) as http:
        yield http


@pytest.fixture
def tiny_llama(engines: EnginePool, checkpoints: Checkpoints) -> Iterator[httpx.Client]:
    engine = engines.get(checkpoints.fx_r, flags=FLAGS)
    with httpx.Client(base_url=url_of(engine), timeout=60) as http:
        yield http


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={"temperature": 0, "max_tokens": 40, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


def both_ways(http: httpx.Client, **body: Any) -> dict[str, Any]:
    """One choice whole, after a look that the stream says the same."""
    whole = complete(http, **body)
    asked = {"temperature": 0, "max_tokens": 40, "stream_options": {"include_usage": True}, **body}
    *events, done = stream(http, "/v1/completions", asked)
    usage = events.pop()["usage"]
    choices = [c for e in events for c in e["choices"]]
    made = whole["choices"][0]
    assert done == "[DONE]" and usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert "".join(c["text"] for c in choices) == made["text"]
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == (made["finish_reason"], made["stop_reason"])
    for name in ("token_ids",):
        if name in made:
            assert sum((c[name] for c in choices), []) == made[name]
    if made["logprobs"] is not None:
        for column, values in made["logprobs"].items():
            joined = sum((c["logprobs"][column] for c in choices if c["logprobs"]), [])
            if column in ("tokens", "text_offset"):
                assert joined == values, column
            assert len(joined) == len(values)
    return whole


SCRIPT = tiny.SCRIPT_TEXT


@pytest.mark.parametrize("stop", ["serv", " ", "k", "é", "日本", "tail 👩"])
def test_d2_a5_stop_strings_are_cut_inside_tokens(chain: httpx.Client, stop: str) -> None:
    cut = SCRIPT.index(stop)
    for keeps in (False, True):
        whole = both_ways(chain, prompt=START, stop=stop, include_stop_str_in_output=keeps, return_token_ids=True)
        made = whole["choices"][0]
        assert made["text"] == SCRIPT[: cut + len(stop) if keeps else cut]
        assert (made["finish_reason"], made["stop_reason"]) == ("stop", stop)
        shown = b""
        generated = next(i + 1 for i, piece in enumerate(tiny.SCRIPT) if stop.encode() in (shown := shown + piece))
        assert whole["usage"]["completion_tokens"] == generated == len(made["token_ids"])


def test_a5_which_of_several_stops_it_was(chain: httpx.Client) -> None:
    colon = tiny.SCRIPT.index(b":") + 1
    made = both_ways(chain, prompt=START, stop=["never", "café", "tail"], stop_token_ids=[colon])["choices"][0]
    assert made["stop_reason"] == "café" and made["text"] == "Sky 😀 "
    made = both_ways(chain, prompt=START, stop=["never", "tail", "end"], stop_token_ids=[colon])["choices"][0]
    assert made["stop_reason"] == colon and made["finish_reason"] == "stop"
    made = both_ways(chain, prompt=START)["choices"][0]
    assert (made["finish_reason"], made["stop_reason"]) == ("stop", None)


@pytest.mark.parametrize("how", [{}, {"stop_token_ids": [5]}, {"stop": "café"}, {"max_tokens": 4}])
def test_a6_ids_text_logprobs_and_usage_agree(chain: httpx.Client, how: dict[str, Any]) -> None:
    whole = both_ways(chain, prompt=START, logprobs=0, return_token_ids=True, **how)
    made = whole["choices"][0]
    ids, columns = made["token_ids"], made["logprobs"]
    assert len(ids) == whole["usage"]["completion_tokens"] == len(columns["tokens"]) == len(columns["token_logprobs"])
    assert ids == list(range(1, len(ids) + 1)), "the script's tokens, an end token included"
    if not how:
        assert len(ids) == len(tiny.SCRIPT) + 1 and columns["tokens"][-1] == "</s>"
    chat = chain.post("/v1/chat/completions", json={
        "messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "temperature": 0, "logprobs": True, "return_token_ids": True,
    }).json()  # fmt: skip
    if "error" not in chat:
        assert len(chat["choices"][0]["token_ids"]) == len(chat["choices"][0]["logprobs"]["content"]) == chat["usage"]["completion_tokens"]


def test_d9_offsets_are_positions_in_the_whole_text(chain: httpx.Client) -> None:
    prompt = [0, *range(1, 8)]  # ends inside the two bytes-long pieces of a character
    made = both_ways(chain, prompt=prompt, echo=True, logprobs=1, max_tokens=9)["choices"][0]
    text, columns = made["text"], made["logprobs"]
    assert len(columns["tokens"]) == len(prompt) + 9 and columns["token_logprobs"][0] is None
    assert columns["text_offset"] == sorted(columns["text_offset"])
    whole = [(o, t) for o, t in zip(columns["text_offset"], columns["tokens"], strict=True) if not t.startswith("bytes:") and t != "<s>"]
    assert whole and all(text[offset:].startswith(token) for offset, token in whole)
    made = both_ways(chain, prompt=START, logprobs=1)["choices"][0]
    for offset, token in zip(made["logprobs"]["text_offset"], made["logprobs"]["tokens"], strict=True):
        assert token.startswith("bytes:") or token == "</s>" or made["text"][offset:].startswith(token)


def test_d9_prompts_log_probabilities_equal_those_of_generating(tiny_llama: httpx.Client) -> None:
    made = both_ways(tiny_llama, prompt="Grüße", max_tokens=12, logprobs=2, return_token_ids=True, ignore_eos=True)["choices"][0]
    ids = made["prompt_token_ids"] + made["token_ids"]
    both_ways(tiny_llama, prompt=ids, echo=True, max_tokens=1, logprobs=2)
    again = complete(tiny_llama, prompt=ids, echo=True, max_tokens=1, logprobs=2, n=2)
    for choice in again["choices"]:
        behind = choice["logprobs"]["token_logprobs"][len(made["prompt_token_ids"]) : len(ids)]
        assert behind == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-3)


def test_d10_everyone_gets_their_own(tiny_llama: httpx.Client) -> None:
    prompts = [f"{i}" * (1 + 9 * i) for i in range(10)]
    alone = [complete(tiny_llama, prompt=prompt, max_tokens=8)["choices"][0]["text"] for prompt in prompts]
    for _ in range(2):
        made = complete(tiny_llama, prompt=prompts, max_tokens=8)["choices"]
        assert [c["index"] for c in made] == list(range(10)) and [c["text"] for c in made] == alone

    def ask(number: int) -> str:
        body = {"prompt": prompts[number % 10], "max_tokens": 8, "temperature": 0}
        if number % 2:
            return str(complete(tiny_llama, **body)["choices"][0]["text"])
        events = stream(tiny_llama, "/v1/completions", body)
        return "".join(c["text"] for e in events if e != "[DONE]" for c in e["choices"])

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(ask, range(32))) == [alone[number % 10] for number in range(32)]


def test_d5_bytes_that_form_no_character_end_nobody(tiny_llama: httpx.Client) -> None:
    def ask(number: int) -> tuple[int, int]:
        response = tiny_llama.post("/v1/completions", json={"prompt": "x", "max_tokens": 12, "temperature": 1, "seed": number, "ignore_eos": True})
        made = json.loads(response.content.decode("utf-8"))
        return response.status_code, made["usage"]["completion_tokens"]

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(ask, range(200))) == {(200, 12)}


def test_c15_nothing_to_answer_is_refused_and_others_go_on(tiny_llama: httpx.Client) -> None:
    alone = complete(tiny_llama, prompt="long", max_tokens=100, ignore_eos=True)["choices"][0]["text"]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, tiny_llama, prompt="long", max_tokens=100, ignore_eos=True)
        for prompt in ("", [], [[]], ["", "a"]):
            response = tiny_llama.post("/v1/completions", json={"prompt": prompt})
            assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"
        response = tiny_llama.post("/v1/chat/completions", json={"messages": []})
        assert response.status_code == 400 and response.json()["error"]["param"] == "messages"
        assert running.result()["choices"][0]["text"] == alone


def test_a1_null_is_absent_before_the_engine_too(tiny_llama: httpx.Client) -> None:
    from engine.openai.fields import ChatRequest, CompletionRequest

    for path, model, body in (
        ("/v1/completions", CompletionRequest, {"prompt": "x"}),
        ("/v1/chat/completions", ChatRequest, {"messages": [{"role": "user", "content": "x"}]}),
    ):
        fixed = {**body, "temperature": 0, **({"max_tokens": 6} if "prompt" in body else {"max_completion_tokens": 6})}
        optional = {name: None for name in model.model_fields if name not in fixed}
        expected = tiny_llama.post(path, json=fixed).json()["choices"]
        assert tiny_llama.post(path, json={**optional, **fixed}).json()["choices"] == expected


def test_a2_a_chat_without_a_limit_goes_on_to_the_context_s(tiny_llama: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "seed": 1}
    for fields, expected in (({"max_tokens": 20}, 20), ({"max_completion_tokens": 21}, 21), ({"max_tokens": 5, "max_completion_tokens": 22}, 22)):
        assert tiny_llama.post("/v1/chat/completions", json={**body, **fields}).json()["usage"]["completion_tokens"] == expected
    made = tiny_llama.post("/v1/chat/completions", json={**body, "messages": [{"role": "user", "content": "x" * 800}]}).json()
    assert made["usage"]["total_tokens"] == 1024 and made["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "string", "pattern": "["}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": 7}}}},
        {"structured_outputs": {"regex": "["}},
        {"structured_outputs": {"grammar": "nonsense ("}},
        {"logits_processors": {"none": {}}},
        {"lora_request": "x"},
        {"allowed_token_ids": [100_000]},
        {"stop_token_ids": [100_000]},
        {"logit_bias": {"100000": 1}},
    ],
)
def test_x8_what_can_not_be_done_is_400_with_two_stages(tiny_llama: httpx.Client, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    response = tiny_llama.post("/v1/chat/completions", json={**body, **fields})
    assert response.status_code == 400, response.text
    name = next(iter(fields))
    assert response.json()["error"]["param"].startswith(name) and name in response.json()["error"]["message"]
    assert tiny_llama.post("/v1/chat/completions", json=body).status_code == 200


def test_x8_a_schema_holds_with_two_stages(tiny_llama: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": form, "max_tokens": 60, "seed": 3}
    made = tiny_llama.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert made["finish_reason"] == "stop" and set(json.loads(made["message"]["content"])) == {"ok"}


def test_tokens_go_there_and_back(tiny_llama: httpx.Client) -> None:
    made = tiny_llama.post("/tokenize", json={"prompt": "Grüße 👩‍💻"}).json()
    assert made["tokens"] == tiny.text_ids("Grüße 👩‍💻") and made["count"] == len(made["tokens"])
    assert tiny_llama.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "Grüße 👩‍💻"}
    chat = tiny_llama.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    assert tiny_llama.post("/v1/chat/completions", json=asked).json()["usage"]["prompt_tokens"] == chat["count"]
    for body in ({}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}):
        assert tiny_llama.post("/tokenize", json=body).status_code == 400
