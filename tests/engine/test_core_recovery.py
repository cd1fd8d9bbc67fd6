"""Worker groups that die under requests: the core's process over its real sockets, with fake groups that live again."""

import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from ipc.channel import receive_within
from ipc.codec import decode
from ipc.messages import AbortRequest, AddRequest, Control, RequestFailed, RequestOutput, TokenUpdates
from ipc.params import SamplingParams
from ipc.routes import ToldOutputs
from tests.engine.test_core import DEADLINE_S, Engine, RawClient, running_core, scheduler_config
from tests.fake_group import FakeGroup
from tests.fakes import REPEATING, VOCAB_SIZE, expected_output
from tests.tiny import EOS, byte_vocabulary, write_tokenizer

LIMITS: dict[str, Any] = {"max_num_seqs": 12, "max_num_batched_tokens": 24, "num_kv_blocks": 256}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, byte_vocabulary(VOCAB_SIZE), merges=[(b"\xfe", b"\xff")], bos="<s>", eos="</s>", pad="<pad>")
    return (folder / "tokenizer.json").read_bytes()


@dataclass(slots=True)
class Answer:
    """All that came for one choice."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    ending: str = ""
    reason: str = ""

    def take(self, output: RequestOutput) -> None:
        assert not self.ending, "something came behind the final message"
        self.token_ids += output.new_token_ids
        assert output.num_output_tokens == len(self.token_ids), "a token was lost or told twice"
        for values, columns in ((self.logprobs, output.logprobs), (self.prompt_logprobs, output.prompt_logprobs)):
            if columns is not None:
                values += columns.logprobs.tolist()
        self.ending = output.finish_reason or ""


def ask(request_id: str, prompt: Sequence[int], *, takes_updates: bool = False, timeout_s: float | None = None, priority: int = 0,
        **params: Any) -> AddRequest:
    return AddRequest(
        request_id=request_id, prompt_token_ids=np.array(prompt, np.int32), takes_updates=takes_updates, timeout_s=timeout_s,
        priority=priority, params=SamplingParams(**{"max_tokens": 20, "seed": 3, "ignore_eos": True, **params}),
    )  # fmt: skip


def collect(client: RawClient, asked: Sequence[AddRequest]) -> dict[tuple[str, int], Answer]:
    """Answers by request and choice, until all of these are over."""
    told = ToldOutputs()
    answers = {(message.request_id, index): Answer() for message in asked for index in range(message.params.n)}
    while not all(answer.ending for answer in answers.values()):
        message = decode(receive_within(client.socket, DEADLINE_S, "the core"), (RequestOutput, RequestFailed, TokenUpdates))
        for output in told.expand(message):
            if isinstance(output, RequestOutput):
                answers[output.request_id, output.index].take(output)
                continue
            for (request_id, _), answer in answers.items():
                if request_id == output.request_id:
                    assert answer.ending != output.code, "two errors for one request"
                    answer.ending, answer.reason = output.code, output.reason
    return answers


@contextmanager
def core_and_group(tmp_path: Path, *, tokenizer: bytes = b"{}", group: dict[str, Any] | None = None,
                   **changes: Any) -> Iterator[tuple[Engine, FakeGroup, RawClient]]:
    limits = LIMITS | changes
    with running_core(tmp_path, tokenizer=tokenizer, **limits) as engine:
        config = replace(scheduler_config(), max_num_seqs=limits["max_num_seqs"], num_blocks=256,
                         max_num_batched_tokens=limits["max_num_batched_tokens"])
        fake = FakeGroup(engine.found.worker_address, config, **(group or {}))
        client = engine.client()
        client.attach()
        try:
            yield engine, fake, client
        finally:
            fake.stop()


def health(client: RawClient) -> dict[str, Any]:
    client.ask(Control(control_id=1, op="health"))
    return dict(client.hear().values)  # type: ignore[union-attr]


def wait_until_running(client: RawClient, num: int) -> None:
    while client.stats()["requests_running"] != num:
        pass


# ---------------------------------------------------------------------------------------------- the same answers

ALL_KINDS = (
    ask("plain", [1, 2, 3]),
    ask("seeded", range(40, 70), seed=77, temperature=0.8, top_p=0.9),
    ask("penalties", [9, 9, 8], repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25),
    ask("stops", [4, 5], stop_token_ids=list(range(0, VOCAB_SIZE, 10))),
    ask("updates", [6, 5, 4], takes_updates=True),
    ask("logprobs", [11, 12], logprobs=2),
    ask("prompt logprobs", range(100, 130), prompt_logprobs=1, takes_updates=True),
    ask("choices", range(200, 220), n=3, takes_updates=True),
    ask("grammar", [1, 2], structured={"regex": "(ab|cd|e){4,9}"}),
    ask("repeats", [5, 5, 6, 5, 5], seed=REPEATING + 5, max_tokens=40),
    ask("one token", [31], max_tokens=1),
)


def answers_of(tmp_path: Path, tokenizer: bytes, deaths: Sequence[int], **changes: Any) -> dict[tuple[str, int], Answer]:
    group = {"deaths": deaths}
    with core_and_group(tmp_path, tokenizer=tokenizer, group=group, eos_token_ids=(EOS,), **changes) as (_, fake, client):
        for message in ALL_KINDS:
            client.ask(message)
        answers = collect(client, ALL_KINDS)
        stats = client.stats()
        assert stats["epoch"] == stats["worker_restarts_total"] + 1 == len(deaths) + 1 == fake.num_lives
        assert stats["requests_running"] == stats["requests_waiting"] == 0
        assert stats["kv_blocks_free"] == stats["kv_blocks_total"] > 0
        assert (stats["requests_resumed_total"] > 0) == bool(deaths)
    return answers


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tokenizer: bytes) -> dict[tuple[str, int], Answer]:
    answers = answers_of(tmp_path_factory.mktemp("calm"), tokenizer, [])
    for message in ALL_KINDS:
        if message.request_id in ("plain", "seeded", "penalties", "updates", "logprobs", "repeats"):
            told = answers[message.request_id, 0]
            params = replace(message.params, structured=None)
            assert told.token_ids == expected_output(
                message.prompt_token_ids.tolist(), params, eos_token_ids=frozenset(), max_model_len=64
            )[0]
    assert len(answers["logprobs", 0].logprobs) == 20 * 3 and len(answers["prompt logprobs", 0].prompt_logprobs) == 29 * 2
    assert answers["grammar", 0].ending == "stop"
    return answers


@pytest.mark.parametrize("deaths", [(6,), (14, 9), (1, 0, 5, 0, 0, 8), *(
    pytest.param((first, second), marks=pytest.mark.slow) for first in range(2, 13, 2) for second in range(7, 18, 5)
)])
def test_answers_are_the_same_whenever_workers_die(
    deaths: tuple[int, ...], undisturbed: dict[tuple[str, int], Answer], tmp_path: Path, tokenizer: bytes
) -> None:
    assert answers_of(tmp_path, tokenizer, deaths) == undisturbed


@pytest.mark.parametrize("changes", [
    {"speculative_lookup_tokens": 4}, {"max_num_seqs": 3, "scheduling_policy": "priority"},
    pytest.param({"async_scheduling": False}, marks=pytest.mark.slow),
    pytest.param({"prefix_caching": False}, marks=pytest.mark.slow),
])
def test_and_whatever_schedules_them(
    changes: dict[str, Any], undisturbed: dict[tuple[str, int], Answer], tmp_path: Path, tokenizer: bytes
) -> None:
    assert answers_of(tmp_path, tokenizer, (18, 12), **changes) == undisturbed


def test_workers_are_told_what_was_generated_and_how_it_goes_on(tmp_path: Path) -> None:
    with core_and_group(tmp_path, group={"deaths": [8]}) as (_, fake, client):
        message = ask("x", [1, 2, 3], repetition_penalty=1.5, seed=11)
        client.ask(message)
        [answer] = collect(client, [message]).values()
        before, after = (new for plan in fake.plans for new in plan.new_requests)
        num_known = len(after.token_ids) - 3
        assert num_known > 3 and after.token_ids.tolist() == [1, 2, 3, *answer.token_ids[:num_known]]
        assert (after.num_prompt_tokens, after.num_computed_tokens, after.params) == (3, 0, before.params)


def test_requests_run_again_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    with core_and_group(tmp_path, group={"deaths": [4, 2]}, max_num_seqs=2) as (_, fake, client):
        asked = [ask(name, [5, index]) for index, name in enumerate("abcdef")]
        for message in asked:
            client.ask(message)
        collect(client, asked)
        last = [new.request_id for plan in fake.plans if plan.epoch == 3 for new in plan.new_requests]
        assert list(dict.fromkeys(last)) == list("abcdef")


# ---------------------------------------------------------------------------------------------- while there is no group

def test_while_the_group_restarts_requests_wait_end_and_come(tmp_path: Path) -> None:
    hold = threading.Event()
    with core_and_group(tmp_path, group={"hold": hold}) as (engine, fake, client):
        other, watcher = engine.client(), engine.client()
        asked = [ask("stays", [1]), ask("aborted", [2]), ask("late", [3], timeout_s=1.0)]
        for message in asked:
            client.ask(message)
        other.ask(ask("dropped", [4]))
        wait_until_running(watcher, 4)
        assert health(watcher) == {"ready": True, "state": "ready", "epoch": 1}
        fake.fail("made to", fatal=False)
        hold.set()
        while watcher.stats()["ready"]:
            pass
        assert health(watcher) == {"ready": False, "state": "recovering", "epoch": 1}
        client.ask(AbortRequest(request_id="aborted"))
        client.ask(AbortRequest(request_id="aborted"))
        asked.append(ask("came", [5]))
        client.ask(asked[-1])
        other.socket.close(0)
        waiting = collect_some(client, {"aborted", "late"})
        assert {name: answer.ending for name, answer in waiting.items() if answer.ending} == {"aborted": "abort", "late": "timeout"}
        second = FakeGroup(engine.found.worker_address, fake.config)
        left = collect_some(client, {"stays", "came"}, waiting)
        for name, prompt in (("stays", [1]), ("came", [5])):
            assert left[name].token_ids == expected([*prompt], 20) and left[name].ending == "length"
        while (stats := watcher.stats())["requests_finished_total_disconnect"] == 0:
            pass
        assert stats["requests_resumed_total"] == 4
        assert stats["kv_blocks_free"] == stats["kv_blocks_total"] == 256
        second.stop()


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=num_tokens, seed=3)
    return expected_output(prompt, params, eos_token_ids=frozenset(), max_model_len=64)[0]


def collect_some(client: RawClient, names: set[str], answers: dict[str, Answer] | None = None) -> dict[str, Answer]:
    """Until these are over; others may be told of meanwhile."""
    answers = {} if answers is None else answers
    while not all(name in answers and answers[name].ending for name in names):
        output = client.hear()
        assert isinstance(output, RequestOutput), output
        answers.setdefault(output.request_id, Answer()).take(output)
    return answers


def test_a_drain_that_finds_no_group_ends_requests_in_time(tmp_path: Path) -> None:
    hold = threading.Event()
    with core_and_group(tmp_path, group={"hold": hold}, drain_timeout_s=0.3) as (engine, fake, client):
        watcher = engine.client()
        client.ask(ask("open", [1]))
        wait_until_running(watcher, 1)
        fake.fail("made to", fatal=False)
        hold.set()
        while watcher.stats()["ready"]:
            pass
        psutil.Process(engine.found.pid).terminate()
        tokens, ending = client.collect("open")
        assert ending == "unavailable: the engine is shutting down"
        assert engine.agent.wait(DEADLINE_S) == -signal.SIGTERM
        engine.wait_for_end()


def test_a_request_that_the_next_group_has_no_room_for_ends_and_others_go_on(tmp_path: Path) -> None:
    group = {"deaths": [24], "free_bytes": [10**9, 64_000]}  # a quarter of it, for two ranks with 1000 bytes a block: 8 blocks
    with core_and_group(tmp_path, group=group, num_kv_blocks=None) as (_, _fake, client):
        asked = [ask("long", range(1, 40), max_tokens=24), ask("short", [1, 2], max_tokens=24)]
        for message in asked:
            client.ask(message)
        answers = collect(client, asked)
        assert answers["short", 0].ending == "length" and len(answers["short", 0].token_ids) == 24
        assert answers["long", 0].ending == "bad_request" and "max_model_len=32" in answers["long", 0].reason


# ---------------------------------------------------------------------------------------------- what kills workers

def deadly_token(asked: Sequence[AddRequest], victim: str) -> int:
    """A token that the victim's answer meets after a while, and nothing else has."""
    outputs = {m.request_id: expected(m.prompt_token_ids.tolist(), m.params.max_tokens or 0) for m in asked}
    others = {i for m in asked for i in m.prompt_token_ids.tolist()}
    others |= {i for name, ids in outputs.items() if name != victim for i in ids}
    return next(i for index, i in enumerate(outputs[victim]) if index >= 5 and i not in others and i not in outputs[victim][:index])


@pytest.mark.parametrize("takes_chunks", [False, True])
def test_number_6_a_request_that_kills_the_workers_ends_alone(takes_chunks: bool, tmp_path: Path) -> None:
    """Its neighbours are in the same steps. Their prompts may take many steps, in which they are suspected as well."""
    length = 20 if takes_chunks else 2
    asked = [ask(name, [10 + index] * length) for index, name in enumerate("abcdXefgh")]
    deadly = deadly_token(asked, "X")
    with core_and_group(tmp_path, group={"deadly": deadly}) as (_, fake, client):
        for message in asked:
            client.ask(message)
        answers = collect(client, asked)
        guilty = answers.pop(("X", 0))
        whole = expected([14] * length, 20)
        assert guilty.ending == "internal" and "when the workers died, 3 times; the last time: rank " in guilty.reason
        assert guilty.token_ids == whole[: whole.index(deadly)]
        for message in asked:
            if message.request_id != "X":
                answer = answers[message.request_id, 0]
                assert (answer.token_ids, answer.ending) == (expected(message.prompt_token_ids.tolist(), 20), "length")
        assert client.stats()["epoch"] == fake.num_lives == 4
        # The third epoch is all trials: one after another, nothing of the one before in flight.
        third = [plan for plan in fake.plans if plan.epoch == 3]
        assert third[-1].rows and all(len(plan.rows) == 1 for plan in third)


def test_a_prompt_that_kills_the_workers_ends_alone(tmp_path: Path) -> None:
    asked = [ask("a", [1]), ask("X", [7, 499, 7]), ask("b", [2], n=2), ask("c", [3])]
    with core_and_group(tmp_path, group={"deadly": 499}) as (_, fake, client):
        for message in asked:
            client.ask(message)
        answers = collect(client, asked)
        assert answers["X", 0].ending == "internal" and answers["X", 0].token_ids == []
        assert all(answer.ending == "length" for key, answer in answers.items() if key[0] != "X")
        assert fake.num_lives <= 5


def test_choices_end_together_with_the_one_that_kills(tmp_path: Path) -> None:
    with core_and_group(tmp_path, group={"deadly": 499}) as (_, _fake, client):
        asked = [ask("X", [7, 499, 7], n=3), ask("a", [1])]
        for message in asked:
            client.ask(message)
        answers = collect(client, asked)
        assert [answers["X", i].ending for i in range(3)] == ["internal"] * 3 and answers["a", 0].ending == "length"
        assert client.stats()["requests_waiting"] == 0


def test_workers_that_die_by_chance_cost_nobody_an_answer(tmp_path: Path) -> None:
    """Each epoch brings some tokens: what was in flight then is cleared in the next one."""
    with core_and_group(tmp_path, group={"deaths": [12] * 4}) as (_, fake, client):
        asked = [ask(name, [5, index], max_tokens=40) for index, name in enumerate("abcd")]
        for message in asked:
            client.ask(message)
        answers = collect(client, asked)
        for message in asked:
            assert answers[message.request_id, 0].token_ids == expected(message.prompt_token_ids.tolist(), 40)
        assert fake.num_lives == 5


# ---------------------------------------------------------------------------------------------- hopeless loops

@pytest.mark.parametrize("deaths", [[5, *[0] * 5], [9, *[1] * 5]])
def test_a_crash_loop_ends_the_engine_with_its_last_cause(deaths: list[int], tmp_path: Path) -> None:
    """Never ready, or never a token: the sixth life is the fifth one in a row."""
    errors = tmp_path / "errors"
    group = {"deaths": deaths, "has_last_words": True}
    with core_and_group(tmp_path, group=group, error_file=str(errors)) as (engine, _fake, client):
        asked = [ask(name, [5, index]) for index, name in enumerate("abcdefgh")]
        for message in asked:
            client.ask(message)
        answers = collect(client, asked)
        given_up = [answer for answer in answers.values() if answer.ending == "unavailable"]
        assert all(answer.ending in ("unavailable", "internal") for answer in answers.values())
        assert len(given_up) >= 3
        cause = errors.read_text().strip()
        assert re.fullmatch("rank 1: end of life 6|rank [01] can't be reached|rank [01] was restarted", cause)
        assert {answer.reason for answer in given_up} == {f"the engine gave up: {cause}"}
        assert engine.agent.wait(DEADLINE_S) == -signal.SIGTERM
        engine.wait_for_end()
