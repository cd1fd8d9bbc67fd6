"""Structured output through the core's process: real grammars, fake workers that sample from the masks they get."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from engine.text.tokenizer import Tokenizer
from ipc.messages import AbortRequest, AddRequest, RequestFailed
from tests.engine.test_core import DEADLINE_S, add, answer_to, running_core
from tests.fakes import VOCAB_SIZE
from tests.tiny import EOS, byte_vocabulary, text_ids, write_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
          "required": ["a", "n"], "additionalProperties": False}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, byte_vocabulary(VOCAB_SIZE), merges=[(b"\xfe", b"\xff")], bos="<s>", eos="</s>", pad="<pad>")
    return (folder / "tokenizer.json").read_bytes()


@pytest.fixture(scope="module")
def text_of(tokenizer: bytes) -> Any:
    return Tokenizer(tokenizer).decode


def ask(request_id: str, form: dict[str, Any], **params: Any) -> AddRequest:
    return add(request_id, [1, 2, 3], structured=form, **{"max_tokens": 60, **params})


def np_ids(token_ids: list[int]) -> Any:
    return np.array(token_ids, np.int32)


def test_answers_have_the_form_and_others_are_not_disturbed(tmp_path: Path, tokenizer: bytes, text_of: Any) -> None:
    with running_core(tmp_path, tokenizer=tokenizer, eos_token_ids=(EOS,)) as engine:
        group, client, other = engine.group(), engine.client(), engine.client()
        client.attach()
        other.ask(add("free", [5], max_tokens=40, ignore_eos=True))
        client.ask(ask("json", {"json_schema": SCHEMA}))
        tokens, reason = client.collect("json")
        value = json.loads(text_of(tokens))
        assert reason == "stop" and value["a"] in ("x", "yy") and 0 <= value["n"] <= 99
        client.ask(ask("regex", {"regex": "(ab|c){3}"}))
        tokens, reason = client.collect("regex")
        assert reason == "stop" and len(text_of(tokens).replace("ab", "c")) == 3
        assert other.collect("free") == (answer_to([5], 40), "length")
        promised = [plan.step_id for plan in group.plans if plan.has_grammar]
        kept = [masks.step_id for masks in group.masks]
        assert kept == promised[: len(kept)] and len(promised) - len(kept) <= 1, "the last one may be under way"
        assert all(new.params.structured is None for plan in group.plans for new in plan.new_requests)
        group.stop()


def test_x8_what_can_not_be_compiled_reaches_no_worker(tmp_path: Path, tokenizer: bytes) -> None:
    with running_core(tmp_path, tokenizer=tokenizer) as engine:
        group, client = engine.group(), engine.client()
        client.attach()
        for form, field in (
            ({"json_schema": {"properties": {"a": {"pattern": "["}}}}, "structured.json_schema"),
            ({"json_schema": {"type": 7}}, "structured.json_schema"),
            ({"regex": "("}, "structured.regex"),
            ({"grammar": "start: nothing"}, "structured.grammar"),
        ):
            client.ask(ask("bad", form))
            answer = client.hear()
            assert isinstance(answer, RequestFailed) and (answer.code, answer.field) == ("bad_request", field)
        client.ask(ask("good", {"choice": ["yes"]}))
        assert client.collect("good") == (text_ids("yes"), "stop")
        assert [new.request_id for plan in group.plans for new in plan.new_requests] == ["good"]
        group.stop()


def test_a_model_without_a_tokenizer_refuses(tmp_path: Path) -> None:
    with running_core(tmp_path, tokenizer=b"") as engine:
        group, client = engine.group(), engine.client()
        client.attach()
        client.ask(ask("a", {"regex": "a"}))
        assert client.collect("a") == ([], "bad_request: structured output needs a tokenizer, and this model has none")
        group.stop()


def test_an_answer_that_is_complete_already_ends_at_once(tmp_path: Path, tokenizer: bytes) -> None:
    with running_core(tmp_path, tokenizer=tokenizer) as engine:
        group, client = engine.group(), engine.client()
        client.attach()
        client.ask(ask("empty", {"choice": [""]}))
        assert client.collect("empty") == ([], "stop")
        assert group.plans == [] and client.stats()["requests_waiting"] == 0
        group.stop()


def test_an_answer_goes_on_where_a_client_resubmits_it(tmp_path: Path, tokenizer: bytes) -> None:
    with running_core(tmp_path, tokenizer=tokenizer) as engine:
        group, client = engine.group(), engine.client()
        client.attach()
        begun = np_ids(text_ids("yes, "))
        message = ask("resumed", {"choice": ["yes, sir", "no"]})
        client.ask(AddRequest(
            request_id="resumed", prompt_token_ids=message.prompt_token_ids, params=message.params, output_token_ids=begun,
        ))  # fmt: skip
        output = client.hear()
        tokens = list(output.new_token_ids)
        while output.finish_reason is None:
            output = client.hear()
            tokens += output.new_token_ids
        assert (tokens, output.finish_reason) == (text_ids("sir"), "stop")
        client.ask(AddRequest(
            request_id="foreign", prompt_token_ids=message.prompt_token_ids, params=message.params, output_token_ids=np_ids([9]),
        ))  # fmt: skip
        answer = client.hear()
        assert isinstance(answer, RequestFailed) and answer.field == "output_token_ids"
        group.stop()


def test_aborts_keep_the_promise_of_masks(tmp_path: Path, tokenizer: bytes) -> None:
    hold = threading.Event()
    with running_core(tmp_path, tokenizer=tokenizer) as engine:
        group, client = engine.group(hold=hold), engine.client()
        client.attach()
        client.ask(ask("gone", {"regex": "a+"}))
        while client.stats()["steps_in_flight"] < 2:
            pass
        client.ask(AbortRequest(request_id="gone"))
        assert client.collect("gone") == ([], "abort")
        hold.set()
        client.ask(ask("next", {"choice": ["ok"]}))
        assert client.collect("next") == (text_ids("ok"), "stop")
        assert [masks.rows for masks in group.masks][1] == [], "the step behind the first one has nobody left"
        assert client.stats()["kv_blocks_free"] == 64
        group.stop()


def test_a_time_limit_keeps_the_promise_of_masks(tmp_path: Path, tokenizer: bytes) -> None:
    hold = threading.Event()
    with running_core(tmp_path, tokenizer=tokenizer) as engine:
        group, client = engine.group(hold=hold), engine.client()
        client.attach()
        hold.set()
        client.ask(ask("warm", {"choice": ["ok"]}))
        assert client.collect("warm")[1] == "stop"
        hold.clear()
        message = ask("late", {"regex": "a+"})
        client.ask(AddRequest(
            request_id="late", prompt_token_ids=message.prompt_token_ids, params=message.params, timeout_s=0.5,
        ))  # fmt: skip
        tokens, reason = client.collect("late")
        assert reason == "timeout"
        hold.set()
        client.ask(ask("next", {"choice": ["ok"]}))
        assert client.collect("next") == (text_ids("ok"), "stop")
        group.stop()


def test_a_request_that_is_aborted_while_its_grammar_is_compiled_gets_its_one_ending(tmp_path: Path, tokenizer: bytes) -> None:
    with running_core(tmp_path, tokenizer=tokenizer) as engine:
        group, client = engine.group(), engine.client()
        client.attach()
        client.ask(ask("gone", {"regex": "a+"}))  # the tokenizer is loaded first
        client.ask(AbortRequest(request_id="gone"))
        assert client.collect("gone") == ([], "abort")
        client.ask(ask("gone", {"choice": ["ok"]}))
        assert client.collect("gone") == (text_ids("ok"), "stop")
        group.stop()


def test_requests_with_grammars_wait_while_no_epoch_is_ready(tmp_path: Path, tokenizer: bytes) -> None:
    with running_core(tmp_path, tokenizer=tokenizer) as engine:
        group, client = engine.group(), engine.client()
        client.attach()
        group.fail("made to", fatal=False)
        while client.stats()["kv_blocks_total"] != 0:
            pass
        group.stop()
        client.ask(ask("early", {"choice": ["ok"]}))
        while client.stats()["requests_waiting"] == 0:
            pass
        second = engine.group()
        assert client.collect("early") == (text_ids("ok"), "stop")
        second.stop()


def test_the_tokenizer_is_loaded_with_the_first_grammar(tmp_path: Path, tokenizer: bytes) -> None:
    with running_core(tmp_path, tokenizer=tokenizer) as engine:
        group, client = engine.group(), engine.client()
        client.attach()
        process = psutil.Process(engine.found.pid)

        def has_llguidance() -> bool:
            return any("llguidance" in m.path for m in process.memory_maps())

        client.ask(add("free", [1]))
        assert client.collect("free")[1] == "length" and not has_llguidance()
        client.ask(ask("json", {"choice": ["ok"]}))
        assert client.collect("json")[1] == "stop" and has_llguidance()
        group.stop()


def test_sigterm_with_masks_owed_ends_in_time(tmp_path: Path, tokenizer: bytes) -> None:
    hold = threading.Event()
    with running_core(tmp_path, tokenizer=tokenizer, drain_timeout_s=0.2) as engine:
        group, client = engine.group(hold=hold), engine.client()
        client.attach()
        client.ask(ask("cut", {"regex": "a+"}))
        while client.stats()["steps_in_flight"] < 2:
            pass
        psutil.Process(engine.found.pid).terminate()
        assert client.collect("cut") == ([], "unavailable: the engine is shutting down")
        hold.set()
        assert group.shut_down.wait(DEADLINE_S) and group.masks[-1].rows == []
        group.stop()
