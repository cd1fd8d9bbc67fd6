"""Text in, text out: are prompts checked, stop strings honoured, and ids, text, logprobs and usage in agreement?"""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from engine import AsyncClient, Client, Output, SamplingParams
from engine.text.byte_alphabet import spell
from ipc.errors import ConfigError, PeerLost, RequestError
from ipc.messages import AbortRequest, AddRequest, ModelInfo, TokenLogprobs
from tests.fake_core import FakeCore, Reply, model_info, say, stay_silent

BOS, EOS, TURN, FIRST = 0, 1, 2, 3
"""Ids below FIRST are special; the byte b is FIRST + b."""

TEMPLATE = "{{ bos_token }}{% for m in messages %}<turn>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<turn>{% endif %}"


def tokenizer_json(*, adds_bos: bool) -> bytes:
    vocabulary = {"<s>": BOS, "</s>": EOS, "<turn>": TURN} | {spell(bytes([b])): FIRST + b for b in range(256)}
    vocabulary |= {spell(piece): 259 + i for i, piece in enumerate([b"Obs", b"erv", b"ation", b" Paris"])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>", "<turn>")])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return backend.to_str().encode()


def info(*, adds_bos: bool = False, **fields: Any) -> ModelInfo:
    base: dict[str, Any] = {
        "tokenizer": tokenizer_json(adds_bos=adds_bos), "chat_template": TEMPLATE,
        "tokenizer_config": b'{"bos_token": "<s>", "eos_token": "</s>"}',
    }  # fmt: skip
    return model_info(**base | fields)


def ids(text: str | bytes) -> list[int]:
    return [FIRST + byte for byte in (text.encode() if isinstance(text, str) else text)]


def fake(reply: Reply = stay_silent, **fields: Any) -> FakeCore:
    return FakeCore(info=info(**fields), reply=reply)


def collect(reply: Reply, params: SamplingParams | None = None, prompt: str | Sequence[int] = "x") -> list[Output]:
    """All outputs of one request, checked for what must hold for any request."""
    with fake(reply) as core, Client(core.address) as client:
        outputs = list(client.generate(prompt, params))
    seen = ""
    for output in outputs:
        seen += output.delta
        assert output.text == seen
        assert output.usage.completion_tokens == len(output.token_ids)
        assert output.logprobs is None or [entry.token_id for entry in output.logprobs] == output.token_ids
    assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 30))


# ------------------------------------------------------------------------------------------------------------ text


def test_text_streams_in_whole_characters() -> None:
    script = "Sky 😀 café 👩‍💻".encode()
    outputs = collect(say(ids(script)))
    assert outputs[-1].text == script.decode()
    assert "".join(o.delta for o in outputs) == script.decode()
    assert not any("\ufffd" in o.delta for o in outputs)
    assert outputs[-1].token_ids == ids(script)
    assert outputs[-1].num_new_tokens == 1


def test_a_cut_tail_comes_with_the_last_output() -> None:
    outputs = collect(say(ids(b"a\xe2\x98")))
    assert [o.delta for o in outputs] == ["a", "", "\ufffd"]


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_an_end_token_is_in_the_ids_but_not_in_the_text(chunk: int) -> None:
    for params, stop_reason, last in (
        (SamplingParams(), None, EOS), (SamplingParams(skip_special_tokens=False), None, EOS),
        (SamplingParams(stop_token_ids=(FIRST + ord("!"),)), FIRST + ord("!"), FIRST + ord("!")),
    ):  # fmt: skip
        output = collect(say([*ids("Hi"), last], "stop", chunk=chunk, stop_reason=stop_reason), params)[-1]
        assert (output.text, output.finish_reason, output.stop_reason) == ("Hi", "stop", stop_reason)
        assert output.token_ids == [*ids("Hi"), last]
        assert output.usage.completion_tokens == 3


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    tokens = [BOS, *ids("a"), TURN, *ids("b")]
    assert collect(say(tokens))[-1].text == "ab"
    assert collect(say(tokens), SamplingParams(skip_special_tokens=False))[-1].text == "<s>a<turn>b"


def test_length_and_abort_keep_all_text() -> None:
    for reason in ("length", "abort"):
        output = collect(say(ids("all"), reason))[-1]
        assert (output.text, output.finish_reason, output.stop_reason) == ("all", reason, None)


def test_seed_and_usage_are_told() -> None:
    output = collect(say(ids("ab"), num_cached_tokens=16), prompt="1234")[-1]
    assert output.seed == 5
    assert (output.usage.prompt_tokens, output.usage.completion_tokens, output.usage.cached_tokens) == (4, 2, 16)


# ---------------------------------------------------------------------------------------------------- stop strings


def endless(tokens: Sequence[int]) -> Reply:
    """Says the tokens one by one and never ends by itself: only an abort ends it."""

    def reply(core: FakeCore, client: bytes, request: AddRequest) -> None:
        for token in tokens:
            core.output(client, request.request_id, [token], num_prompt_tokens=1, seed=5)

    return reply


def test_d2_a_stop_string_ends_the_request_at_the_core() -> None:
    """Inside tokens " Obs", "erv", "ation": the text is cut, the ids are those really made, the core is told."""
    tokens = [259, 260, 261, *ids(" and more")]
    with fake(endless(tokens)) as core, Client(core.address) as client:
        outputs = list(client.generate("x", SamplingParams(stop=("serv", "never"))))
        assert core.next(AbortRequest)[1].reason == "stop"
    last = outputs[-1]
    assert (last.text, last.finish_reason, last.stop_reason) == ("Ob", "stop", "serv")
    assert last.token_ids == [259, 260] and last.usage.completion_tokens == 2
    assert [o.delta for o in outputs] == ["Ob", ""]


def two_voices(first: Sequence[int], second: Sequence[int], *, ends: bool = True) -> Reply:
    """Two choices, a token of each in turn."""

    def reply(core: FakeCore, client: bytes, request: AddRequest) -> None:
        for count in range(1, max(len(first), len(second)) + 1):
            for index, tokens in enumerate((first, second)):
                if count <= len(tokens):
                    core.output(
                        client, request.request_id, [tokens[count - 1]], num_prompt_tokens=1, num_output_tokens=count,
                        seed=index, index=index, finish_reason="length" if ends and count == len(tokens) else None,
                    )  # fmt: skip

    return reply


def spoken(outputs: Sequence[Output]) -> dict[int, str]:
    """The text of each choice; deltas join to it, and nothing comes behind its end."""
    texts: dict[int, str] = {}
    over = set()
    for output in outputs:
        assert output.index not in over and output.seed == output.index
        texts[output.index] = texts.get(output.index, "") + output.delta
        assert output.text == texts[output.index]
        if output.finish_reason is not None:
            over.add(output.index)
    assert over == set(texts)
    return texts


def test_d3_choices_have_texts_of_their_own() -> None:
    voices = two_voices(ids("日本 😀"), ids("ča 👩‍💻 é"))
    with fake(voices) as core, Client(core.address) as client:
        outputs = list(client.generate("x", SamplingParams(n=2, echo=True)))
    assert spoken(outputs) == {0: "x日本 😀", 1: "xča 👩‍💻 é"}
    assert not any("\ufffd" in output.delta for output in outputs)

    async def go() -> None:
        with fake(voices) as core:
            async with AsyncClient(core.address) as client:
                outputs = [output async for output in client.generate("x", SamplingParams(n=2))]
                assert spoken(outputs) == {0: "日本 😀", 1: "ča 👩‍💻 é"}

    run(go())


@pytest.mark.parametrize("is_async", [False, True])
def test_a_stop_string_ends_its_choice_alone(is_async: bool) -> None:
    """Both stop in the end: one after the other, each is told to the core, and the second ends the request."""
    voices = two_voices(ids("ab! and more than that"), ids("cd and much later!e"), ends=False)
    params = SamplingParams(n=2, stop="!")

    async def read(address: str) -> list[Output]:
        async with AsyncClient(address) as client:
            return [output async for output in client.generate("x", params)]

    with fake(voices, ) as core:
        if is_async:
            outputs = asyncio.run(read(core.address))
        else:
            with Client(core.address) as client:
                stream = client.generate("x", params)
                outputs = list(stream)
                assert list(stream) == []
        aborts = [core.next(AbortRequest)[1] for _ in range(2)]
    assert spoken(outputs) == {0: "ab", 1: "cd and much later"}
    assert [(output.index, output.stop_reason) for output in outputs if output.finish_reason] == [(0, "!"), (1, "!")]
    assert [(abort.index, abort.reason) for abort in aborts] == [(0, "stop"), (None, "stop")]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
def test_the_result_of_a_stop_string_does_not_depend_on_how_tokens_come(chunk: int) -> None:
    output = collect(say(ids("one two three"), chunk=chunk), SamplingParams(stop="o t"))[-1]
    assert (output.text, output.finish_reason, output.stop_reason) == ("one tw", "stop", "o t")
    assert output.token_ids == ids("one two t")


def test_a5_the_stop_string_can_stay() -> None:
    params = SamplingParams(stop=(" Pari",), include_stop_str_in_output=True)
    output = collect(say([*ids("in"), 262, *ids("!")]), params)[-1]
    assert (output.text, output.stop_reason, output.token_ids) == ("in Pari", " Pari", [*ids("in"), 262])


def test_what_might_have_become_a_stop_string_comes_with_the_end() -> None:
    outputs = collect(say(ids("STO")), SamplingParams(stop="STOP"))
    assert [o.delta for o in outputs] == ["", "", "STO"]
    assert outputs[-1].finish_reason == "length"


def test_a_stop_string_that_only_the_end_completes() -> None:
    """The cut tail becomes U+FFFD when the stream ends; a match there is a match."""
    output = collect(say(ids(b"a\xe2\x98")), SamplingParams(stop="\ufffd"))[-1]
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "\ufffd")


def test_a_stop_string_wins_over_an_end_in_the_same_message() -> None:
    output = collect(say([*ids("abc"), EOS], "stop", chunk=9), SamplingParams(stop="b"))[-1]
    assert (output.text, output.stop_reason, output.token_ids) == ("a", "b", ids("ab"))


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, "a"), (2, "a"), (3, "abXa"), (6, "abXabXa"), (20, "abXabXabXc")]
)  # fmt: skip
def test_s2_a_stop_string_within_min_tokens_is_passed_over(min_tokens: int, text: str, chunk: int) -> None:
    """The first that a token behind them completes ends the answer, wherever it begins."""
    output = collect(say(ids("abXabXabXc"), chunk=chunk), SamplingParams(stop=("bX",), min_tokens=min_tokens))[-1]
    assert (output.text, output.finish_reason) == (text, "length" if min_tokens == 20 else "stop")


def test_a_stop_string_that_overlaps_itself_may_be_completed_later() -> None:
    output = collect(say(ids("xaaaay")), SamplingParams(stop=("aaa",), min_tokens=4))[-1]
    assert (output.text, output.stop_reason) == ("xa", "aaa")


# ------------------------------------------------------------------------------------------------- words and echo


def sent(params: SamplingParams, prompt: str | list[int] = "x", **fields: Any) -> tuple[AddRequest, Output]:
    with fake(say(ids("y")), **fields) as core, Client(core.address) as client:
        output = list(client.generate(prompt, params))[-1]
        return core.next(AddRequest)[1], output


def test_bad_words_travel_as_ids_with_and_without_a_space() -> None:
    request, _ = sent(SamplingParams(bad_words=(" cat", "é"), bad_word_ids=((7,),)))
    assert request.params.bad_words == ()
    expected = [(7,), *(tuple(ids(text)) for word in ("cat", "é") for text in sorted((word, " " + word), key=ids))]
    assert sorted(request.params.bad_word_ids) == sorted(expected)


def test_a_bad_word_of_too_many_tokens_is_refused() -> None:
    with fake() as core, Client(core.address) as client, pytest.raises(RequestError, match="17 tokens; at most 16") as refused:
        client.generate("x", SamplingParams(bad_words="a" * 16))
    assert refused.value.field == "bad_words"


def test_echo_puts_the_prompt_in_front() -> None:
    params = SamplingParams(echo=True, stop=("x",))
    assert sent(params, "xü")[1].text == "xüy"
    assert sent(params, [BOS, *ids("ab")])[1].text == "aby"
    assert sent(SamplingParams(echo=True, skip_special_tokens=False), [BOS, *ids("ab")])[1].text == "<s>aby"


@pytest.mark.parametrize("params", [{"bad_words": "a"}, {"echo": True}], ids=str)
def test_what_needs_text_is_refused_without_a_tokenizer(params: dict[str, Any]) -> None:
    with fake(tokenizer=b"") as core, Client(core.address) as client, pytest.raises(RequestError, match="needs a tokenizer"):
        client.generate([5], SamplingParams(**params))


# -------------------------------------------------------------------------------------------------------- logprobs


def columns(start: int, rows: list[list[tuple[int, float]]], ranks: list[int]) -> TokenLogprobs:
    flat = [entry for row in rows for entry in row]
    return TokenLogprobs(
        start=start, num_top=len(rows[0]) - 1, token_ids=np.array([i for i, _ in flat], np.int32),
        logprobs=np.array([p for _, p in flat], np.float32), ranks=np.array(ranks, np.int32),
    )  # fmt: skip


def test_logprobs_are_aligned_with_the_ids() -> None:
    def reply(core: FakeCore, client: bytes, request: AddRequest) -> None:
        core.output(client, request.request_id, [], prompt_logprobs=columns(1, [[(7, -1.0), (8, -0.5)]], [2]))
        core.output(client, request.request_id, [], prompt_logprobs=columns(2, [[(9, -3.0), (8, -0.5)]], [4]))
        core.output(client, request.request_id, ids("é")[:1], logprobs=columns(3, [[(FIRST + 0xC3, -1.5), (262, -0.25)]], [3]))
        last = columns(4, [[(FIRST + 0xA9, -0.5), (262, -0.75)], [(FIRST + 33, -2.0), (500, -0.125)]], [1, 9])
        core.output(client, request.request_id, [*ids("é")[1:], FIRST + 33], logprobs=last, finish_reason="length")

    outputs = collect(reply, SamplingParams(logprobs=1, prompt_logprobs=1), [6, 7, 9])
    last = outputs[-1]
    assert last.logprobs is not None and last.prompt_logprobs is not None
    first = last.logprobs[0]
    assert (first.token_id, first.logprob, first.rank, first.top) == (FIRST + 0xC3, -1.5, 3, ((262, -0.25),))
    assert (first.token_bytes, first.text, first.top_bytes) == (b"\xc3", "\ufffd", (b" Paris",))
    assert b"".join(entry.token_bytes for entry in last.logprobs).decode() == last.text == "é!"
    assert last.logprobs[2].top == ((500, -0.125),) and last.logprobs[2].top_bytes == (b"",)
    assert last.prompt_logprobs[0] is None
    assert [(e.token_id, e.logprob, e.rank) for e in last.prompt_logprobs[1:] if e] == [(7, -1.0, 2), (9, -3.0, 4)]
    assert [o.num_new_tokens for o in outputs] == [0, 0, 1, 2]
    assert outputs[1].prompt_logprobs is not None and len(outputs[1].prompt_logprobs) == 3


def test_logprobs_end_where_a_stop_string_ends_the_ids() -> None:
    def reply(core: FakeCore, client: bytes, request: AddRequest) -> None:
        entries = columns(1, [[(token, -1.0)] for token in ids("abc")], [1, 1, 1])
        core.output(client, request.request_id, ids("abc"), logprobs=entries, finish_reason="length")

    output = collect(reply, SamplingParams(stop="b", logprobs=0))[-1]
    assert output.token_ids == ids("ab")
    assert output.logprobs is not None and [e.token_id for e in output.logprobs] == ids("ab")


def test_no_logprobs_unless_asked_for() -> None:
    output = collect(say(ids("a")))[-1]
    assert output.logprobs is None and output.prompt_logprobs is None


# --------------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("adds_bos", [True, False])
def test_plain_prompts_get_bos_where_the_tokenizer_adds_it(adds_bos: bool) -> None:
    with fake(say([FIRST]), adds_bos=adds_bos) as core, Client(core.address) as client:
        list(client.generate("hi"))
        assert core.next(AddRequest)[1].prompt_token_ids.tolist() == [BOS] * adds_bos + ids("hi") == client.tokenize("hi")
        list(client.generate(ids("hi")))
        assert core.next(AddRequest)[1].prompt_token_ids.tolist() == ids("hi")
        list(client.generate(np.array([5, 6], np.uint16)))  # type: ignore[arg-type]
        assert core.next(AddRequest)[1].prompt_token_ids.tolist() == [5, 6]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_c17_a_chat_gets_no_bos_but_its_templates(adds_bos: bool) -> None:
    with fake(say(ids("ok")), adds_bos=adds_bos) as core, Client(core.address) as client:
        outputs = list(client.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=9)))
        request = core.next(AddRequest)[1]
        assert request.prompt_token_ids.tolist() == [BOS, TURN, *ids("hi"), TURN]
        assert request.params.max_tokens == 9
        assert outputs[-1].text == "ok"
        list(client.chat([{"role": "user", "content": "hi"}], add_generation_prompt=False))
        assert core.next(AddRequest)[1].prompt_token_ids.tolist() == [BOS, TURN, *ids("hi")]


BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "prompt has 0 tokens; at least one is needed"),
    ([], "prompt has 0 tokens; at least one is needed"),
    ("x" * 64, "prompt has 64 tokens; the context limit is 64 with at least one token for the answer"),
    ([5] * 100, "prompt has 100 tokens; the context limit is 64"),
    ([-1], "prompt holds -1; a token id is an integer from 0 to"),
    ([1 << 31], "prompt holds 2147483648; a token id is an integer from 0 to"),
    ([1.0], "prompt holds 1.0; a token id is an integer"),
    ([True], "prompt holds True; a token id is an integer"),
    ([[1]], r"prompt holds \[1\]; a token id is an integer"),
    (["a"], "prompt holds 'a'; a token id is an integer"),
    ("a\ud800", "prompt can't be encoded"),
    (None, "prompt must be a text or a list of token ids, got NoneType"),
    (5, "prompt must be a text or a list of token ids, got int"),
    (b"abc", "prompt must be a text or a list of token ids, got bytes"),
    ({1: 2}, "prompt must be a text or a list of token ids, got dict"),
]


@pytest.mark.parametrize(("prompt", "words"), BAD_PROMPTS, ids=range(len(BAD_PROMPTS)))
def test_bad_prompts_are_refused_and_the_client_goes_on(prompt: Any, words: str) -> None:
    with fake(say(ids("ok"))) as core, Client(core.address) as client:
        with pytest.raises(RequestError, match=words) as caught:
            client.generate(prompt)
        assert (caught.value.field, caught.value.code) == ("prompt", "bad_request")
        assert list(client.generate("x" * 63))[-1].text == "ok"


def test_an_empty_prompt_is_fine_where_bos_is_added() -> None:
    with fake(say([FIRST]), adds_bos=True) as core, Client(core.address) as client:
        list(client.generate(""))
        assert core.next(AddRequest)[1].prompt_token_ids.tolist() == [BOS]


def test_bad_messages_and_parameters_are_refused() -> None:
    with fake() as core, Client(core.address) as client:
        calls: list[tuple[Callable[[], Any], str, str]] = [
            (lambda: client.chat([]), "messages", "at least one message"),
            (lambda: client.chat([{"role": "user", "content": "x" * 80}]), "messages", "messages has 83 tokens; the context limit is 64"),
            (lambda: client.generate("x", {"top_k": 1}), "params", "params must be SamplingParams, got dict"),  # type: ignore[arg-type]
            (lambda: client.generate("x", SamplingParams(top_k=-1)), "top_k", "top_k=-1 must be between"),
            (lambda: client.generate("x", request_id=""), "request_id", "1 to 128 characters"),
            (lambda: client.generate("x", priority=1 << 40), "priority", "32 bits"),
        ]
        for call, field, words in calls:
            with pytest.raises(RequestError, match=words) as caught:
                call()
            assert caught.value.field == field


def test_the_cores_refusal_comes_from_the_stream() -> None:
    def reply(core: FakeCore, client: bytes, request: AddRequest) -> None:
        core.fail(client, request.request_id, "bad_request", "stop_token_ids holds 9999", "stop_token_ids")

    with fake(reply) as core, Client(core.address) as client:
        stream = client.generate("x")
        with pytest.raises(RequestError, match="holds 9999") as caught:
            next(stream)
        assert caught.value.field == "stop_token_ids"
        assert list(stream) == []


def test_a_model_without_a_tokenizer_speaks_ids() -> None:
    with FakeCore(info=model_info(), reply=say([7, 8])) as core, Client(core.address) as client:
        output = list(client.generate([1, 2]))[-1]
        assert (output.token_ids, output.text) == ([7, 8], "")
        for call in (
            lambda: client.generate("text"), lambda: client.chat([{"role": "user", "content": "x"}]), lambda: client.tokenize("x"),
            lambda: client.detokenize([1]), lambda: client.tokenizer,
        ):  # fmt: skip
            with pytest.raises(RequestError, match="this model has no tokenizer; send token ids"):
                call()
        with pytest.raises(RequestError, match="stop needs a tokenizer.*stop_token_ids"):
            client.generate([1], SamplingParams(stop="x"))


def test_a_model_without_a_template_refuses_chats_only() -> None:
    with fake(say(ids("ok")), chat_template=None) as core, Client(core.address) as client:
        with pytest.raises(RequestError, match="no chat template"):
            client.chat([{"role": "user", "content": "x"}])
        assert list(client.generate("x"))[-1].text == "ok"


def test_a_tokenizer_that_can_not_be_read_closes_the_client_again() -> None:
    with fake(tokenizer=b"nonsense") as core:
        with pytest.raises(ConfigError, match="tokenizer: can't be read"):
            Client(core.address)

        async def go() -> None:
            with pytest.raises(ConfigError, match="tokenizer: can't be read"):
                async with AsyncClient(core.address):
                    pass

        run(go())


# ------------------------------------------------------------------------------------------------------ everything else


def test_tokenize_and_detokenize_are_inverse() -> None:
    with fake() as core, Client(core.address) as client:
        for text in ("Hello <turn> 世界\n", "", "é" * 20):
            assert client.detokenize(client.tokenize(text), skip_special_tokens=False) == text
        assert client.detokenize([BOS, *ids("a"), EOS]) == "a"
        assert client.tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
        assert client.model.name == "fake"


def test_abort_stats_health_and_leaving_early() -> None:
    with fake() as core, Client(core.address) as client:
        stream = client.generate("x", request_id="r")
        client.abort("r")
        assert [(o.finish_reason, o.text) for o in stream] == [("abort", "")]
        assert client.stats()["running"] == 1 and client.health()["op"] == "health"
        with client.generate("x", request_id="s") as left:
            assert left.request_id == "s"
        while core.next(AbortRequest)[1].request_id != "s":
            continue


def test_nobody_at_the_address() -> None:
    with pytest.raises(PeerLost, match="no engine answered at tcp://127.0.0.1:1 within 0.1 s"):
        Client("tcp://127.0.0.1:1", timeout_s=0.1)
    with pytest.raises(PeerLost, match="not attached"):
        AsyncClient("tcp://127.0.0.1:1").generate("x")


def test_the_async_client_does_the_same() -> None:
    async def go() -> None:
        with fake(endless([259, 260, 261])) as core:
            async with AsyncClient(core.address) as client:
                outputs = [o async for o in client.generate("x", SamplingParams(stop="serv"))]
                assert (await asyncio.to_thread(core.next, AbortRequest))[1].reason == "stop"
                assert (outputs[-1].text, outputs[-1].stop_reason) == ("Ob", "serv")
                core.reply = say(ids("日本"), chunk=4)
                outputs = [o async for o in client.chat([{"role": "user", "content": "hi"}])]
                assert [o.delta for o in outputs] == ["日", "本"]
                assert client.detokenize(client.tokenize("hi")) == "hi" and client.model.name == "fake"
                assert client.tokenizer.decode(ids("a")) == "a"
                assert (await client.stats())["running"] == 1 and (await client.health())["op"] == "health"
                core.reply = stay_silent
                async with client.generate("x", request_id="r") as stream:
                    await client.abort(stream.request_id)
                    assert [o.finish_reason async for o in stream] == ["abort"]
                with pytest.raises(RequestError, match="prompt has 0 tokens"):
                    client.generate("")

    run(go())


def test_leaving_an_async_stream_early_aborts_the_request() -> None:
    async def go() -> None:
        with fake(endless(ids("abc"))) as core:
            async with AsyncClient(core.address) as client:
                async for _ in client.generate("x", request_id="r"):
                    break
                assert (await asyncio.to_thread(core.next, AbortRequest))[1].request_id == "r"

    run(go())


def test_importing_the_clients_loads_neither_torch_nor_the_core() -> None:
    script = (
        "import sys; from engine import AsyncClient, Client, SamplingParams\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers', 'triton', 'gguf', 'safetensors', 'worker', 'scripts')]\n"
        "bad += [m for m in ('engine.core', 'engine.scheduler', 'engine.gateway', 'engine.executor') if m in sys.modules]\n"
        "print(bad)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
