"""The load generator: what is drawn, when it is sent, what is noted, and what the figures say."""

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ipc.errors import ConfigError, PeerLost, RequestError
from ipc.messages import ModelInfo
from ipc.params import SamplingParams
from scripts.bench.cases import Case, Figures, fresh_prompts, peer_prompts
from scripts.bench.lengths import Lengths
from scripts.bench.load import LoadResult, PromptSource, Record, check_lengths, run_load, special_token_ids
from scripts.bench.measures import percentiles, steady_rate, summarize, table
from scripts.bench.traces import TraceRequest, draw_trace, read_trace


def model_info(**changes: Any) -> ModelInfo:
    added = {"added_tokens": [{"id": 3, "special": True}, {"id": 4, "special": False}]}
    values = {
        "core_id": 1, "version": "0", "name": "m", "num_stages": 2, "vocab_size": 12, "max_model_len": 64,
        "max_num_seqs": 8, "eos_token_ids": [1], "tokenizer": json.dumps(added).encode(), "tokenizer_config": b"{}",
    }  # fmt: skip
    return ModelInfo(**{**values, **changes})


class Script:
    """A client whose requests give one token per turn of the loop; a prompt may name how it ends instead."""

    def __init__(self) -> None:
        self.num_open = self.most_open = 0
        self.sent: list[tuple[list[int], SamplingParams]] = []

    async def generate(self, prompt: list[int], params: SamplingParams) -> AsyncIterator[Any]:
        self.sent.append((prompt, params))
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        assert params.max_tokens is not None
        for count in range(1, params.max_tokens + 1):
            await asyncio.sleep(0)
            if prompt == [-1] and count == 2:
                raise RequestError("no", code="unavailable")
            if prompt == [-2]:
                raise PeerLost("gone")
            yield SimpleNamespace(new_token_ids=[7], finish_reason="length" if count == params.max_tokens else None)
        self.num_open -= 1


def load(requests: list[TraceRequest], prompts: list[list[int]], **options: Any) -> tuple[Script, LoadResult]:
    script = Script()
    return script, asyncio.run(run_load(script, requests, prompts, **options))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ what is drawn


def test_lengths_are_fixed_uniform_or_log_uniform() -> None:
    source = random.Random(1)
    assert {Lengths.parse("7").draw(source) for _ in range(9)} == {7}
    uniform = [Lengths.parse("10:1000").draw(source) for _ in range(2000)]
    even = [Lengths.parse("log:10:1000").draw(source) for _ in range(2000)]
    assert min(uniform) >= 10 and max(uniform) <= 1000 and min(even) == 10 and max(even) <= 1000
    assert np.median(uniform) == pytest.approx(505, rel=0.1)
    assert np.median(even) == pytest.approx(100, rel=0.15)
    assert [str(Lengths.parse(text)) for text in ("5", "5:6", "log:5:6")] == ["5", "5:6", "log:5:6"]


@pytest.mark.parametrize("text", ["", "0", "-1", "a", "5:4", "1:2:3", "log:5", "exp:1:2", "99999999", "٣"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Lengths.parse(text)


def test_arrivals_are_poisson_and_repeat_with_the_seed() -> None:
    lengths = Lengths.parse("4:40")
    trace = draw_trace(4000, 8.0, lengths, lengths, 3)
    assert trace == draw_trace(4000, 8.0, lengths, lengths, 3) != draw_trace(4000, 8.0, lengths, lengths, 4)
    gaps = np.diff([request.arrival for request in trace])
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.06) and gaps.std() == pytest.approx(gaps.mean(), rel=0.1)
    assert {request.arrival for request in draw_trace(9, math.inf, lengths, lengths, 3)} == {0.0}


def test_prompts_avoid_special_tokens_and_repeat_with_the_seed() -> None:
    model = model_info()
    assert special_token_ids(model) == {1, 3}
    drawn = PromptSource(model, 5).draw(2000)
    assert set(drawn) == set(range(12)) - {1, 3}
    assert drawn == PromptSource(model, 5).draw(2000) != PromptSource(model, 6).draw(2000)
    assert PromptSource(model_info(tokenizer=b""), 5).draw(3)
    with pytest.raises(ConfigError, match="added_tokens"):
        PromptSource(model_info(tokenizer=b"\xff"), 5)


def test_prompts_of_peers_are_the_ones_they_draw() -> None:
    source = random.Random(1000 * 16 + 128)
    assert peer_prompts(Case(16, 128, 64)) == [[source.randrange(100, 40000) for _ in range(128)] for _ in range(16)]
    fresh = fresh_prompts(Case(2, 8, 1), 1, 512)
    assert fresh == fresh_prompts(Case(2, 8, 1), 1, 512) != fresh_prompts(Case(2, 8, 1), 2, 512)
    assert all(100 <= i < 512 for prompt in fresh for i in prompt)


def test_a_trace_of_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text('{"arrival": 2, "prompt": 3, "output": 4}\n\n{"prompt": 1, "arrival": 0.5, "output": 9}\n')
    assert read_trace(str(path)) == [TraceRequest(0.5, 1, 9), TraceRequest(2.0, 3, 4)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"arrival": 0, "prompt": 3}', "line 2: must be an object"),
        ('{"arrival": 0, "prompt": 3, "output": 1, "x": 1}', "line 2: must be an object"),
        ('{"arrival": 0, "prompt": 3.5, "output": 1}', "two of tokens"),
        ('{"arrival": true, "prompt": 3, "output": 1}', "two of tokens"),
        ('{"arrival": NaN, "prompt": 3, "output": 1}', "arrival=nan must be"),
        ('{"arrival": 1' + 400 * "0" + ', "prompt": 3, "output": 1}', "line 2: arrival=10000000000000000000 must be"),
        ('{"arrival": 0, "prompt": 0, "output": 1}', "prompt=0 and output=1"),
        ('{"arrival": 0, ', "is not JSON"),
    ],
)
def test_a_broken_json_line_is_refused_with_its_number(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text('{"arrival": 0, "prompt": 3, "output": 4}\n' + line)
    with pytest.raises(ConfigError, match=message):
        read_trace(str(path))


def test_a_request_that_can_not_fit_is_named() -> None:
    with pytest.raises(ConfigError, match=r"request 2 has a prompt of 60 .* max_model_len=64"):
        check_lengths(model_info(), [TraceRequest(0, 60, 4), TraceRequest(0, 60, 5)])


# ------------------------------------------------------------------------------------------------ how it is sent


def test_a_closed_loop_keeps_so_many_open() -> None:
    ended: list[Record] = []
    script, result = load([TraceRequest(9.0, 1, 3)] * 10, [[i] for i in range(10)], concurrency=4, on_end=ended.append)
    assert script.most_open == 4 and script.num_open == 0 and len(ended) == 10
    assert sorted(prompt for prompt, _ in script.sent) == [[i] for i in range(10)]
    assert all(params.max_tokens == 3 and params.ignore_eos and params.temperature == 0 for _, params in script.sent)
    assert all(len(record.token_times) == 3 and record.finish_reason == "length" for record in result.records)
    assert result.wall_s < 9


def test_an_open_loop_sends_at_the_arrivals_whatever_is_open() -> None:
    requests = [TraceRequest(0.02 * (i // 5), 1, 50) for i in range(15)]
    script, result = load(requests, [[i] for i in range(15)])
    assert [prompt[0] for prompt, _ in script.sent] == list(range(15))
    for request, record in zip(requests, result.records, strict=True):
        assert record.due == request.arrival <= record.sent < record.token_times[0] < record.end
    assert script.most_open >= 5


def test_a_failed_request_stands_on_its_record_and_a_lost_engine_ends_all() -> None:
    _, result = load([TraceRequest(0, 1, 3)] * 3, [[1], [-1], [2]], concurrency=2)
    assert [len(record.token_times) for record in result.records] == [3, 1, 3]
    assert str(result.records[1].error) == "no"
    with pytest.raises(RequestError):
        Figures.of(Case(3, 1, 3), result)
    for concurrency in (2, None):
        with pytest.raises(PeerLost, match="gone"):
            load([TraceRequest(0, 1, 3)] * 3, [[1], [-2], [2]], concurrency=concurrency)


# ------------------------------------------------------------------------------------------------ what it says


def test_percentiles() -> None:
    assert percentiles([]) == {}
    found = percentiles(float(i) for i in range(101))
    assert found == {"mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    assert percentiles([2.0]) == dict.fromkeys(("mean", "p50", "p90", "p99", "max"), 2.0)


def test_steady_rate_counts_from_the_last_first_token_to_the_first_last_one() -> None:
    slow = Record(num_prompt=1, num_output=4, token_times=[2.0, 3.0, 4.0, 5.0])
    fast = Record(num_prompt=1, num_output=4, token_times=[1.0, 2.0, 3.0, 4.5])
    assert steady_rate([slow, fast]) == pytest.approx(4 / 2.5)
    assert steady_rate([slow, Record(num_prompt=1, num_output=4, token_times=[0.0, 1.0])]) == 0.0
    assert steady_rate([slow, Record(num_prompt=1, num_output=4)]) == steady_rate([]) == 0.0


def test_a_summary_has_every_figure() -> None:
    records = [
        Record(num_prompt=10, num_output=3, due=1.0, sent=1.25, token_times=[2.0, 2.5, 4.0], end=4.0),
        Record(num_prompt=20, num_output=3, due=0.0, sent=0.0, token_times=[1.0], end=1.5, error=RequestError("x")),
        Record(num_prompt=30, num_output=3, error=RequestError("x")),
    ]
    summary = summarize(LoadResult(records=records, wall_s=4.0, client_cpu_s=0.2), model_info(), {"seed": 1})
    assert json.loads(json.dumps(summary)) == summary
    assert set(summary) == {
        "schema", "engine", "settings", "requests", "duration_s", "prompt_tokens", "output_tokens", "output_tok_s",
        "total_tok_s", "requests_s", "ttft_s", "inter_token_s", "end_to_end_s", "late_s", "client_cpu_share",
    }  # fmt: skip
    assert summary["schema"] == "brigade.bench/1" and summary["settings"] == {"seed": 1}
    assert summary["requests"] == {
        "completed": 1, "failed": 2, "num_errors": 1,
        "errors": [{"code": "bad_request", "message": "x", "count": 2}],
    }  # fmt: skip
    assert (summary["prompt_tokens"], summary["output_tokens"]) == (30, 4)
    assert (summary["output_tok_s"], summary["total_tok_s"], summary["requests_s"]) == (1.0, 8.5, 0.25)
    assert summary["ttft_s"]["p50"] == 1.0 and summary["end_to_end_s"]["max"] == 3.0
    assert summary["inter_token_s"]["mean"] == 1.0 and summary["late_s"] == 0.25 and summary["client_cpu_share"] == 0.05
    shown = table(summary)
    assert "1 requests completed, 2 failed" in shown and "2 x bad_request: x" in shown
    nothing = summarize(LoadResult(records=[], wall_s=0.0, client_cpu_s=0.0), model_info(), {})
    assert nothing["ttft_s"] == {} and " - " in table(nothing)
