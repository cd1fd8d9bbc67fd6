"""Does every answer that ended by itself have the form that was asked for, streamed, many at a time, with any split?"""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine import Client, Output, SamplingParams
from ipc.errors import RequestError
from tests.conftest import Checkpoints
from tests.e2e.harness import EnginePool
from tests.e2e.test_parity import FLAGS
from tests.tool_schemas import tool_schema

pytestmark = pytest.mark.e2e

AT_ONCE = 16
LONGEST_SHARE = 0.02
"""Of answers that may end by length."""

FORMATS = jsonschema.FormatChecker()
DAY, TIME = r"\d{4}-\d\d-\d\d", r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)"


def check_format(name: str, pattern: str) -> None:
    """As RFC 3339 has it; jsonschema looks at these only with other packages."""
    FORMATS.checks(name)(lambda value: not isinstance(value, str) or re.fullmatch(pattern, value, re.ASCII) is not None)


check_format("time", TIME)
check_format("date-time", f"{DAY}[Tt]{TIME}")


def follow(stream: Iterator[Output]) -> Output:
    """The last output of a stream whose pieces make its text."""
    pieces, last = [], None
    for last in stream:
        pieces.append(last.delta)
    assert last is not None and "".join(pieces) == last.text
    return last


def ask_all(client: Client, seeds: range, max_tokens: int, *, chat: bool) -> list[Output]:
    def ask(seed: int) -> Output:
        schema = tool_schema(seed)
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens, structured={"json_schema": schema})
        text = f"Call this tool with arguments that make sense: {json.dumps(schema)[:600]}"
        if chat:
            return follow(client.chat([{"role": "user", "content": text}], params))
        return follow(client.generate(text[:40], params))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(ask, seeds))


def check_all(seeds: range, outputs: list[Output]) -> None:
    cut = [seed for seed, output in zip(seeds, outputs, strict=True) if output.finish_reason == "length"]
    assert len(cut) <= LONGEST_SHARE * len(seeds), f"cut off: {cut}"
    for seed, output in zip(seeds, outputs, strict=True):
        if output.finish_reason != "length":
            assert output.finish_reason == "stop"
            jsonschema.Draft202012Validator(tool_schema(seed), format_checker=FORMATS).validate(json.loads(output.text))


@pytest.mark.parametrize("pp", [1, 2])
def test_tool_calls_of_a_random_model(pp: int, engines: EnginePool, checkpoints: Checkpoints) -> None:
    seeds = range(50) if pp == 2 else range(16)
    with engines.get(checkpoints.fx_r, pp=pp, flags=FLAGS).client() as client:
        check_all(seeds, ask_all(client, seeds, 900, chat=False))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", [range(100), range(100, 200), range(200, 300)], ids=str)
def test_300_tool_calls(part: range, engines: EnginePool, demo_model: Path) -> None:
    with engines.get(demo_model).client() as client:
        check_all(part, ask_all(client, part, 700, chat=True))


@pytest.mark.parametrize(("form", "pattern"), [
    ({"regex": "[a-f]{3}-[0-9]{2,4}"}, "[a-f]{3}-[0-9]{2,4}"),
    ({"choice": ["yes", "no", "maybe, é"]}, "yes|no|maybe, é"),
    ({"grammar": 'root ::= "<" [a-z] [a-z]? ">" | "(" root ")"'}, r"\(*<[a-z]{1,2}>\)*"),
    ({"grammar": 'start: "ab" | "c" start "d"'}, "c*abd*"),
])
def test_other_forms(form: dict[str, Any], pattern: str, engines: EnginePool, checkpoints: Checkpoints) -> None:
    with engines.get(checkpoints.fx_r, flags=FLAGS).client() as client:
        for seed in range(3):
            output = follow(client.generate("hello", SamplingParams(seed=seed, max_tokens=200, structured=form)))
            if output.finish_reason == "stop":
                assert re.fullmatch(pattern, output.text), output.text


def test_a_json_object(engines: EnginePool, checkpoints: Checkpoints) -> None:
    with engines.get(checkpoints.fx_r, flags=FLAGS).client() as client:
        params = SamplingParams(temperature=0.3, seed=5, max_tokens=100, structured={"json_object": True})
        output = follow(client.generate("hello", params))
        assert output.text.startswith("{")
        assert output.finish_reason == "length" or isinstance(json.loads(output.text), dict)


def test_answers_do_not_depend_on_the_batch_or_the_split(engines: EnginePool, checkpoints: Checkpoints) -> None:
    """Ids and log probabilities are the same alone and among others, with one stage and two."""

    def ask(client: Client, seed: int) -> tuple[list[int], list[float]]:
        form = {"json_schema": tool_schema(seed)} if seed % 3 else None
        output = follow(client.generate(f"number {seed}", SamplingParams(seed=seed, max_tokens=40, logprobs=0, structured=form)))
        return output.token_ids, [round(one.logprob, 2) for one in output.logprobs or []]

    seeds = range(9)
    with engines.get(checkpoints.fx_r, pp=1, flags=FLAGS).client() as client:
        alone = [ask(client, seed) for seed in seeds]
    with engines.get(checkpoints.fx_r, pp=2, flags=FLAGS).client() as client, ThreadPoolExecutor(len(seeds)) as pool:
        together = list(pool.map(lambda seed: ask(client, seed), seeds))
    assert [ids for ids, _ in together] == [ids for ids, _ in alone]
    for (_, ours), (_, theirs) in zip(together, alone, strict=True):
        assert ours == pytest.approx(theirs, abs=0.02)


def test_preemption_does_not_change_answers(engines: EnginePool, checkpoints: Checkpoints) -> None:
    def ask_all_of(client: Client) -> list[list[int]]:
        def ask(seed: int) -> list[int]:
            params = SamplingParams(seed=seed, max_tokens=60, ignore_eos=True, structured={"regex": "([a-z]+ )+[a-z]+"})
            return follow(client.generate("abcdefghij", params)).token_ids

        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(ask, range(8)))

    with engines.get(checkpoints.fx_r, flags=FLAGS).client() as client:
        expected = ask_all_of(client)
    flags = ("--num-kv-blocks", "14", "--max-model-len", "128", "--max-num-seqs", "8")
    engine = engines.get(checkpoints.fx_r, flags=flags)
    before = engine.raw.stats()["preemptions_total"]
    with engine.client() as client:
        assert ask_all_of(client) == expected
    assert engine.raw.stats()["preemptions_total"] > before


def test_x8_a_schema_that_can_not_be_compiled_is_refused_with_the_place_and_others_go_on(
    engines: EnginePool, checkpoints: Checkpoints
) -> None:
    with engines.get(checkpoints.fx_r, flags=FLAGS).client() as client:
        long = client.generate("hello", SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
        bad = {"json_schema": {"type": "object", "properties": {"a": {"pattern": "["}}}}
        with pytest.raises(RequestError, match=r"at #/properties/a .*unclosed character class") as caught:
            follow(client.generate("hello", SamplingParams(structured=bad)))
        assert caught.value.field == "structured.json_schema"
        assert len(follow(long).token_ids) == 50
