"""Workers die under streams that go on as if nothing had happened (number 1 in small), and under one that kills them (number 6)."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Checkpoints
from tests.e2e.compare import check_stream, greedy_params
from tests.e2e.conftest import TinyOracle
from tests.e2e.harness import ROOT, Engine, serve
from tests.e2e.raw import Stream, positions
from tests.e2e.test_parity import FLAGS
from tests.oracle import LOGPROB_TOLERANCE, Excused

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.slow]

RESTART_S = 90.0
NUM_TOKENS = 400

KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 5, "logprobs": 2},
    {"temperature": 0.7, "seed": 6, "top_k": 40, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
    {"temperature": 1.0, "seed": 7, "structured": {"regex": "([a-f]{2}[0-9] ){150}"}},
    {"temperature": 1.0, "seed": 8, "n": 1, "min_tokens": 350},
]
"""Beside greedy streams, which transformers knows."""


def submit(engine: Engine) -> list[Stream]:
    return [
        engine.raw.submit([9, 8, 7 + index], **{"max_tokens": NUM_TOKENS, "ignore_eos": True, **params})
        for index, params in enumerate(KINDS)
    ]


def assert_same(told: Stream, undisturbed: Stream) -> None:
    assert told.failed is None, told.failed
    assert (told.token_ids, told.finish_reason) == (undisturbed.token_ids, undisturbed.finish_reason)
    start = len(told.prompt)
    pairs = zip(positions(told.logprobs, start=start), positions(undisturbed.logprobs, start=start), strict=True)
    assert all(abs(a.logprob - b.logprob) < LOGPROB_TOLERANCE for a, b in pairs)


@pytest.mark.parametrize("victims", [(1, 0), pytest.param((0, 1, 1, 0, 0, 1, 0, 1), marks=pytest.mark.timeout(900))])
def test_number_1_streams_go_on_when_workers_are_killed(
    victims: tuple[int, ...], checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    expected = tiny_oracle.expect(31, [10, 70], NUM_TOKENS)
    with serve(checkpoints.fx_r, flags=FLAGS) as engine:
        raw = engine.raw
        undisturbed = submit(engine)
        raw.wait(undisturbed, 60)
        assert all(stream.failed is None for stream in undisturbed), undisturbed
        for victim in victims:
            epoch = raw.stats()["epoch"]
            greedy = [raw.submit(e.prompt, **greedy_params(NUM_TOKENS)) for e in expected]
            others = submit(engine)
            streams = [*greedy, *others]
            raw.pump_until(lambda: all(len(s.token_ids) > 5 for s in streams), 30, lambda: "the streams did not start")  # noqa: B023
            engine.tree().ranks[victim].kill()
            num_before = [len(stream.token_ids) for stream in streams]
            raw.wait(streams, RESTART_S)
            assert all(count < len(stream.token_ids) for count, stream in zip(num_before, streams, strict=True))
            excused += [found for e, stream in zip(expected, greedy, strict=True) for found in check_stream(raw, e, stream)]
            for told, calm in zip(others, undisturbed, strict=True):
                assert_same(told, calm)
            stats = engine.settle()
            assert stats["epoch"] == epoch + 1 and stats["requests_finished_total_error"] == 0
        assert raw.stats()["requests_resumed_total"] == len(victims) * 6


DEADLY = """
import os

def poison(logits, rows):
    for row in rows:
        if row.arguments["token"] in row.token_ids[row.num_prompt_tokens:].tolist():
            os.abort()
"""


def test_number_6_a_request_that_kills_its_workers_ends_alone(
    checkpoints: Checkpoints, tiny_oracle: TinyOracle, tmp_path: Path, excused: list[Excused]
) -> None:
    (tmp_path / "brigade_deadly.py").write_text(DEADLY)
    name = "brigade_deadly:poison"
    guilty, *neighbours = tiny_oracle.expect(66, [12, 5, 9, 17, 33, 6, 40, 8, 21], 120)
    others = {i for e in neighbours for i in e.token_ids}
    deadly = next(i for i in guilty.token_ids[20:] if i not in others)
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    with serve(checkpoints.fx_r, flags=[*FLAGS, "--logits-processor", name], env=env) as engine:
        params = {**greedy_params(120), "logits_processors": {name: {"token": deadly}}}
        victim = engine.raw.submit(guilty.prompt, **params)
        streams = [engine.raw.submit(e.prompt, **params) for e in neighbours]
        engine.raw.wait([victim, *streams], 3 * RESTART_S)
        assert victim.failed is not None and victim.failed.code == "internal"
        assert "when the workers died, 3 times" in victim.failed.reason
        assert victim.token_ids == guilty.token_ids[: len(victim.token_ids)] and victim.token_ids.count(deadly) <= 1
        for e, stream in zip(neighbours, streams, strict=True):
            excused += check_stream(engine.raw, e, stream)
        assert engine.settle()["epoch"] == 4
