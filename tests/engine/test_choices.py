"""Several answers to one request: seeds, who waits for whom, and what becomes of each, whatever ends first. (S12)"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from engine.admission import check_request
from engine.choices import OpenRequests, choices_of, seed_of_choice
from engine.request import ClientId, Request
from ipc.channel import receive_within
from ipc.codec import decode
from ipc.errors import RequestError
from ipc.messages import AbortRequest, AddRequest, RequestFailed, RequestOutput, TokenUpdates
from ipc.params import MAX_SEED, SamplingParams
from ipc.routes import ToldOutputs
from ipc.structured import StructuredOutput
from tests.engine.test_core import DEADLINE_S, Engine, RawClient, running_core
from tests.fake_core import model_info
from tests.fake_group import FakeGroup
from tests.fakes import VOCAB_SIZE, FakeGrammar, expected_output
from tests.tiny import byte_vocabulary, text_ids, write_tokenizer

PROMPT = list(range(10, 31))
"""Five full blocks of four tokens, and one more token."""

CLIENT = ClientId(0, b"c")


def ask(request_id: str = "r", prompt: list[int] = PROMPT, *, takes_updates: bool = False, timeout_s: float | None = None,
        **params: Any) -> AddRequest:
    return AddRequest(request_id=request_id, prompt_token_ids=np.array(prompt, np.int32),
                      params=SamplingParams(**{"max_tokens": 8, "seed": 3, "n": 3, **params}),
                      takes_updates=takes_updates, timeout_s=timeout_s)


def answers(n: int = 3, prompt: list[int] = PROMPT, num_tokens: int = 8) -> dict[int, list[int]]:
    """What the fake workers say to each choice."""
    return {
        index: expected_output(prompt, SamplingParams(max_tokens=num_tokens, seed=seed_of_choice(3, index)),
                               eos_token_ids=frozenset(), max_model_len=64)[0]
        for index in range(n)
    }


def collect(
    client: RawClient, request_id: str, n: int, had: Mapping[int, int] | None = None
) -> tuple[dict[int, list[int]], dict[int, str], list[RequestOutput]]:
    """Tokens and endings by choice, and each one's last output; nothing may come behind that.

    ``had``: tokens of each open choice of a resubmission.
    """
    had = dict.fromkeys(range(n), 0) if had is None else had
    told, tokens, reasons, last = ToldOutputs(), {}, {}, []
    while len(reasons) < len(had):
        message = decode(receive_within(client.socket, DEADLINE_S, "the core"), (RequestOutput, RequestFailed, TokenUpdates))
        for output in told.expand(message):
            assert isinstance(output, RequestOutput), output
            if output.request_id != request_id:
                continue
            assert output.index not in reasons and output.index in had
            tokens.setdefault(output.index, []).extend(output.new_token_ids)
            assert output.num_output_tokens == had[output.index] + len(tokens[output.index])
            if output.finish_reason:
                reasons[output.index] = output.finish_reason
                last.append(output)
    return tokens, reasons, sorted(last, key=lambda output: output.index)


@contextmanager
def serving(tmp_path: Path, *, hold: threading.Event | None = None, **changes: Any) -> Iterator[tuple[Engine, FakeGroup, RawClient]]:
    with running_core(tmp_path, **changes) as engine:
        group, client = engine.group(hold=hold), engine.client()
        client.attach()
        yield engine, group, client
        if hold is not None:
            hold.set()
        group.stop()


def expect_idle(client: RawClient) -> None:
    stats = client.stats()
    assert (stats["requests_running"], stats["requests_waiting"]) == (0, 0)
    assert stats["kv_blocks_free"] == stats["kv_blocks_total"]


# ----------------------------------------------------------------------------------------------------------- seeds


def test_seeds_are_those_of_the_documented_generator() -> None:
    """The second and later outputs of splitmix64 from 1234567 are known from its reference implementation."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [seed_of_choice(1234567, index) for index in range(1, 6)] == [output >> 1 for output in known]
    assert seed_of_choice(7, 0) == 7
    for seed in (0, 7, MAX_SEED):
        seeds = [seed_of_choice(seed, index) for index in range(64)]
        assert len(set(seeds)) == 64 and all(0 <= one <= MAX_SEED for one in seeds)


def test_choices_differ_in_seed_and_index_alone() -> None:
    message = ask(cache_salt="s", structured={"regex": "a"}, prompt_logprobs=1)
    choices = choices_of(message, CLIENT, first_id=5, seed=3, now=1.0)
    assert [(c.internal_id, c.index, c.params.seed) for c in choices] == [(5 + i, i, seed_of_choice(3, i)) for i in range(3)]
    assert all((c.params.n, c.params.structured, c.params.cache_salt) == (1, None, None) for c in choices)
    assert all(c.cache_key_parts == ((0, b"salt:s"),) for c in choices)
    assert [c.params.prompt_logprobs for c in choices] == [1, None, None], "they come once"
    assert choices[0].output_token_ids is not choices[1].output_token_ids


# ------------------------------------------------------------------------------------------------- who waits for whom


def held(n: int = 4, structured: StructuredOutput | None = None, **options: bool) -> tuple[OpenRequests, list[Request]]:
    open_requests = OpenRequests()
    choices = choices_of(ask(n=n), CLIENT, first_id=1, seed=3, now=0.0)
    open_requests.add(choices)
    open_requests.hold(choices, structured, **{"waits_for_blocks": True, **options})
    return open_requests, choices


def test_the_others_wait_until_they_are_released() -> None:
    open_requests, choices = held()
    assert (len(open_requests), open_requests.num_held, open_requests.num_held_tokens) == (4, 3, 3 * len(PROMPT))
    assert open_requests.release(choices[2]) == []
    assert open_requests.release(choices[0]) == choices[1:] and open_requests.release(choices[0]) == []
    assert (open_requests.num_held, open_requests.num_held_tokens) == (0, 0)
    assert list(open_requests) == open_requests.find(CLIENT, "r") == choices[::-1]
    assert open_requests.find(CLIENT, "r", 2) == [choices[2]] and open_requests.find(CLIENT, "r", 9) == []


def test_the_next_one_goes_ahead_when_the_first_is_over() -> None:
    form = StructuredOutput(regex="a")
    open_requests, choices = held(structured=form)
    assert open_requests.cancel(choices[1]) and not open_requests.cancel(choices[1])
    assert open_requests.remove(choices[1]) is None
    assert open_requests.remove(choices[0]) == (choices[2], form), "its form is to be compiled first"
    assert open_requests.num_held == 1
    assert open_requests.compiled(choices[2], FakeGrammar(2)) == []
    assert open_requests.remove(choices[2]) == (choices[3], None) and choices[3].grammar is not None, "it is compiled already"
    assert open_requests.remove(choices[3]) is None
    assert (len(open_requests), open_requests.num_held, open_requests.num_held_tokens) == (0, 0, 0)
    assert (CLIENT, "r") not in open_requests


def test_each_choice_gets_a_grammar_of_its_own_at_its_start() -> None:
    open_requests, choices = held(3, StructuredOutput(regex="a"), waits_for_blocks=False)
    grammar = FakeGrammar(2)
    assert open_requests.compiled(choices[0], grammar) == choices[1:], "there are no blocks to wait for"
    grammar.accept(grammar.allowed()[0])
    assert choices[1].grammar is not choices[2].grammar
    assert choices[1].grammar.accepted == choices[2].grammar.accepted == []  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------- through the core


@pytest.mark.parametrize("takes_updates", [False, True])
def test_s12_choices_are_distinct_repeatable_and_share_the_prompt(tmp_path: Path, takes_updates: bool) -> None:
    with serving(tmp_path) as (_, group, client):
        for name in ("a", "b"):
            client.ask(ask(name, takes_updates=takes_updates))
            tokens, reasons, last = collect(client, name, 3)
            assert tokens == answers() and len({tuple(ids) for ids in tokens.values()}) == 3
            assert set(reasons.values()) == {"length"}
            assert [output.seed for output in last] == [seed_of_choice(3, index) for index in range(3)]
            # The first one of all computes all; then every full block is known.
            assert [output.num_cached_tokens for output in last] == [0 if name == "a" else 20, 20, 20]
        client.ask(ask("alone", n=1))
        assert collect(client, "alone", 1)[0] == {0: answers()[0]}, "choice 0 is what n=1 gives"
        client.ask(ask("last", n=1, seed=seed_of_choice(3, 2)))
        assert collect(client, "last", 1)[0] == {0: answers()[2]}, "a choice can be had again alone"
        assert client.stats()["prefix_cache_hit_tokens_total"] == 7 * 20
        first = group.plans[0].new_requests
        assert [new.params.seed for new in first] == [3], "the others wait for its blocks"
        expect_idle(client)


@pytest.mark.parametrize("changes, params", [
    ({"prefix_caching": False}, {}), ({}, {"prefix_caching": False}), ({}, {"prompt": [5, 6]}),
])
def test_where_nothing_is_shared_all_go_at_once(tmp_path: Path, changes: dict[str, Any], params: dict[str, Any]) -> None:
    with serving(tmp_path, **changes) as (_, group, client):
        client.ask(ask(**params))
        tokens, _, last = collect(client, "r", 3)
        assert tokens == answers(prompt=params.get("prompt", PROMPT))
        assert [output.num_cached_tokens for output in last] == [0, 0, 0]
        before_first_token = [new for plan in group.plans[: 3 if "prompt" not in params else 1] for new in plan.new_requests]
        assert len(before_first_token) > 1
        expect_idle(client)


def test_prompt_logprobs_come_with_the_first_choice_alone(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, _group, client):
        client.ask(ask(prompt_logprobs=1, max_tokens=2))
        told: dict[int, int] = {0: 0, 1: 0, 2: 0}
        ended = 0
        while ended < 3:
            output = client.hear()
            assert isinstance(output, RequestOutput)
            told[output.index] += 0 if output.prompt_logprobs is None else len(output.prompt_logprobs.ranks)
            ended += output.finish_reason is not None
        assert told == {0: len(PROMPT) - 1, 1: 0, 2: 0}


@pytest.mark.parametrize("index", [0, 1, 2])
def test_one_choice_can_be_ended_while_the_others_wait_or_run(tmp_path: Path, index: int) -> None:
    hold = threading.Event()
    with serving(tmp_path, hold=hold) as (_, _group, client):
        client.ask(ask())
        client.ask(AbortRequest(request_id="r", index=index, reason="stop"))
        client.ask(AbortRequest(request_id="r", index=index))
        client.ask(AbortRequest(request_id="r", index=40))
        assert client.hear().index == index  # type: ignore[union-attr]
        hold.set()
        others = [i for i in range(3) if i != index]
        tokens: dict[int, list[int]] = {i: [] for i in others}
        reasons: dict[int, str] = {}
        while len(reasons) < 2:
            output = client.hear()
            assert isinstance(output, RequestOutput) and output.index != index
            tokens[output.index] += output.new_token_ids
            if output.finish_reason:
                reasons[output.index] = output.finish_reason
        assert tokens == {i: answers()[i] for i in others} and set(reasons.values()) == {"length"}
        expect_idle(client)


@pytest.mark.parametrize("n", [1, 3])
def test_aborting_by_id_before_the_first_token_ends_all_and_frees_the_id(tmp_path: Path, n: int) -> None:
    hold = threading.Event()
    with serving(tmp_path, hold=hold) as (_, _group, client):
        client.ask(ask(n=n))
        client.ask(ask(n=n))
        refused = client.hear()
        assert isinstance(refused, RequestFailed) and refused.code == "duplicate"
        client.ask(AbortRequest(request_id="r"))
        assert set(collect(client, "r", n)[1].values()) == {"abort"}
        client.ask(ask(n=n))
        hold.set()
        assert collect(client, "r", n)[0] == answers(n)
        expect_idle(client)


def test_every_choice_has_its_ending_when_the_time_is_over(tmp_path: Path) -> None:
    hold = threading.Event()
    with serving(tmp_path, hold=hold) as (_, _group, client):
        client.ask(ask(timeout_s=0.2))
        assert collect(client, "r", 3)[1] == {0: "timeout", 1: "timeout", 2: "timeout"}
        hold.set()
        client.ask(ask("next"))
        assert collect(client, "next", 3)[0] == answers()
        expect_idle(client)


def test_choices_go_on_where_the_first_one_is_over_with_its_first_token(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, _group, client):
        client.ask(ask(max_tokens=1))
        assert collect(client, "r", 3)[0] == answers(num_tokens=1)
        client.ask(ask("stop", stop_token_ids=[answers()[0][0]]))
        tokens, reasons, _ = collect(client, "stop", 3)
        assert (tokens[0], reasons[0]) == (answers()[0][:1], "stop") and len(tokens) == 3
        expect_idle(client)


def test_preemption_of_any_of_them_changes_nothing(tmp_path: Path) -> None:
    """Sixteen blocks: one answer needs twelve."""
    with serving(tmp_path, num_kv_blocks=16) as (_, _group, client):
        for name in ("a", "b"):
            client.ask(ask(name, max_tokens=26))
        mixed: dict[tuple[str, int], list[int]] = {}
        ended = 0
        while ended < 6:
            output = client.hear()
            assert isinstance(output, RequestOutput), output
            mixed.setdefault((output.request_id, output.index), []).extend(output.new_token_ids)
            ended += output.finish_reason is not None
        assert mixed == {(name, i): ids for name in ("a", "b") for i, ids in answers(num_tokens=26).items()}
        assert client.stats()["preemptions_total"] > 0
        expect_idle(client)


def test_choices_count_as_requests_and_tokens_in_the_queue(tmp_path: Path) -> None:
    hold = threading.Event()
    with serving(tmp_path, hold=hold, max_queued_requests=2, max_queued_tokens=80) as (_, _group, client):
        client.ask(ask("never", n=7))
        answer = client.hear()
        assert isinstance(answer, RequestFailed) and (answer.code, answer.field) == ("bad_request", "n")
        client.ask(ask("fits", n=4))
        while client.stats()["requests_running"] != 1:
            pass
        client.ask(ask("too many", n=3, prompt=[1]))
        answer = client.hear()
        assert isinstance(answer, RequestFailed) and "4 requests are open" in answer.reason
        client.ask(ask("too long", n=1))
        answer = client.hear()
        assert isinstance(answer, RequestFailed) and "63 prompt tokens wait" in answer.reason, "those of three choices"
        assert client.stats()["requests_waiting"] == 3
        hold.set()
        assert collect(client, "fits", 4)[0] == answers(4)
        expect_idle(client)


@pytest.mark.parametrize(
    ("field", "rule", "given"),
    [
        ("indices", "has 3 tokens, and n=3: indices and counts must say", {}),
        ("indices", "indices=[0, 3] must be ascending numbers from 0 to n-1=2", {"indices": [0, 3], "counts": [1, 2]}),
        ("indices", "indices=[1, 0] must be ascending", {"indices": [1, 0], "counts": [1, 2]}),
        ("indices", "indices=[1, 1] must be ascending", {"indices": [1, 1], "counts": [1, 2]}),
        ("indices", "indices=[-1, 1] must be ascending", {"indices": [-1, 1], "counts": [1, 2]}),
        ("counts", "counts has 1 entries for 2 of indices", {"indices": [0, 2], "counts": [3]}),
        ("counts", "counts=[1, 1] must add up to the 3 tokens", {"indices": [0, 2], "counts": [1, 1]}),
        ("counts", "counts=[4, -1] must add up", {"indices": [0, 2], "counts": [4, -1]}),
        ("output_token_ids", "has 3 tokens, max_tokens=3 leaves none", {"indices": [0, 2], "counts": [3, 0], "max_tokens": 3}),
    ],
)
def test_whose_the_tokens_are_that_a_resubmission_brings(field: str, rule: str, given: dict[str, Any]) -> None:
    message = ask(**({"max_tokens": given.pop("max_tokens")} if "max_tokens" in given else {}))
    resubmitted = replace(message, output_token_ids=np.array([1, 2, 3], np.int32), **given)
    with pytest.raises(RequestError) as refused:
        check_request(resubmitted, model_info())
    assert refused.value.field == field and rule in refused.value.reason


def test_choices_that_were_begun_elsewhere_go_on_from_where_each_was(tmp_path: Path) -> None:
    """Choice 1 is over there; the others have two tokens and none. Their seeds are what they would have been."""
    with serving(tmp_path) as (_, _group, client):
        whole = answers()
        client.ask(replace(
            ask("again"), output_token_ids=np.array(whole[0][:2], np.int32), counts=[2, 0], indices=[0, 2]
        ))
        assert collect(client, "again", 3, had={0: 2, 2: 0})[0] == {0: whole[0][2:], 2: whole[2]}
        expect_idle(client)


def test_choices_of_lost_workers_and_those_that_wait_for_an_epoch_run_in_it(tmp_path: Path) -> None:
    hold = threading.Event()
    with running_core(tmp_path) as engine:
        group, client = engine.group(hold=hold), engine.client()
        client.attach()
        watcher = engine.client()
        client.ask(ask("lost"))
        while client.stats()["requests_running"] != 1:
            pass
        group.fail("made to", fatal=False)
        hold.set()  # it hears of its failure with the next step
        while watcher.stats()["kv_blocks_total"]:
            pass
        group.stop()
        assert watcher.stats()["requests_waiting"] == 3
        other = engine.client()
        other.attach()
        other.ask(ask("cut"))
        other.ask(AbortRequest(request_id="cut", index=0))
        assert other.hear().request_id == "cut"  # type: ignore[union-attr]
        other.ask(AbortRequest(request_id="cut"))
        assert [other.hear().index for _ in range(2)] == [2, 1]  # type: ignore[union-attr]
        second = engine.group()
        assert collect(client, "lost", 3)[0] == answers()
        expect_idle(client)
        second.stop()


def test_a_client_that_goes_takes_all_of_its_choices_along(tmp_path: Path) -> None:
    hold = threading.Event()
    with serving(tmp_path, hold=hold) as (engine, _group, client):
        gone = engine.client()
        gone.attach()
        gone.ask(ask())
        while client.stats()["requests_waiting"] != 2:
            pass
        gone.socket.close(0)
        hold.set()
        while client.stats()["requests_waiting"] or client.stats()["requests_running"]:
            pass
        client.ask(ask())
        assert collect(client, "r", 3)[0] == answers()
        expect_idle(client)


def test_a_drain_lets_the_waiting_choices_end(tmp_path: Path) -> None:
    hold = threading.Event()
    with serving(tmp_path, hold=hold) as (engine, group, client):
        client.ask(ask())
        while client.stats()["requests_waiting"] != 2:
            pass
        psutil.Process(engine.found.pid).terminate()
        hold.set()
        assert collect(client, "r", 3)[0] == answers()
        assert group.shut_down.wait(DEADLINE_S)


def test_a_drain_that_takes_too_long_ends_them_with_one_error(tmp_path: Path) -> None:
    hold = threading.Event()
    with serving(tmp_path, hold=hold, drain_timeout_s=0.1) as (engine, group, client):
        client.ask(ask())
        while client.stats()["requests_waiting"] != 2:
            pass
        psutil.Process(engine.found.pid).terminate()
        answer = client.hear()
        assert isinstance(answer, RequestFailed) and (answer.request_id, answer.code) == ("r", "unavailable")
        hold.set()
        assert group.shut_down.wait(DEADLINE_S)
        assert not client.socket.poll(100), "nothing comes behind it"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, byte_vocabulary(VOCAB_SIZE), merges=[(b"\xfe", b"\xff")], bos="<s>", eos="</s>", pad="<pad>")
    return (folder / "tokenizer.json").read_bytes()


def test_every_choice_has_the_form(tmp_path: Path, tokenizer: bytes) -> None:
    with serving(tmp_path, tokenizer=tokenizer) as (_, _group, client):
        for prompt in (PROMPT, [5]):
            client.ask(ask(prompt=prompt, n=4, structured={"regex": "[a-z]{6}"}, max_tokens=20))
            tokens, reasons, _ = collect(client, "r", 4)
            assert set(reasons.values()) == {"stop"} and len({tuple(ids) for ids in tokens.values()}) == 4
            letters = set(text_ids("abcdefghijklmnopqrstuvwxyz"))
            assert all(len(ids) == 6 and letters.issuperset(ids) for ids in tokens.values())
        client.ask(ask("empty", structured={"choice": [""]}))
        assert collect(client, "empty", 3)[:2] == ({0: [], 1: [], 2: []}, {0: "stop", 1: "stop", 2: "stop"})
        client.ask(ask("bad", structured={"regex": "("}))
        answer = client.hear()
        assert isinstance(answer, RequestFailed) and answer.field == "structured.regex"
        client.ask(ask("first gone", structured={"regex": "[a-z]{5}"}, max_tokens=20))
        client.ask(AbortRequest(request_id="first gone", index=0))
        tokens, reasons, _ = collect(client, "first gone", 3)
        assert (reasons[1], reasons[2]) == ("stop", "stop") and len(tokens[1]) == len(tokens[2]) == 5
        expect_idle(client)
