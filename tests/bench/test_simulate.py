"""The simulator: does the pipeline of numbers keep time, are traces read with care, and does the scheduler pass its exams?"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from engine.cost_model import Coefficients, StepShape
from engine.scheduler import SchedulerConfig
from ipc.errors import ConfigError
from scripts.bench.pipeline import PLAN, TOKENS, UPSTREAM, ModelledPipeline
from scripts.bench.report import gaps_of, summarize
from scripts.bench.simulate import Setup, command, run_variant, saturated_rate
from scripts.bench.simulation import SimulationResult
from scripts.bench.traces import Mix, TraceRequest, read_trace

COSTS = Coefficients(step_s=2e-3, row_s=2e-5, token_s=3e-5, attention_s=2e-9, head_s=3e-3)
"""The machine of the exams."""
CONFIG = SchedulerConfig(
    num_stages=8, max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=2, block_size=16, num_blocks=65536,
    prefix_caching=False,
)
SETUP = Setup(config=CONFIG, coefficients=COSTS, knows_costs=False, core_s=0.0)


def test_stages_keep_order_and_every_second_has_a_cause() -> None:
    pipeline = ModelledPipeline(3, Coefficients(step_s=1.0, row_s=0.0, token_s=0.0, attention_s=0.0, head_s=0.5, return_s=0.25))
    shape = StepShape(1, 1, 1, True)
    assert pipeline.send(1, shape, 0.0, 0, 0.0) == 3.75
    assert pipeline.send(2, shape, 0.0, 0, 0.0) == 5.25, "it queues behind the head"
    assert pipeline.send(3, shape, 2.0, 1, 0.0) == pytest.approx(3.75 + 3.5 + 0.25), "stage 0 waits for the token of step 1"
    first, _, last = pipeline.times
    assert first.waits == {PLAN: 0.0, TOKENS: 1.75, UPSTREAM: 0.0}
    assert first.busy_s == 3.0 and last.busy_s == 4.5 and pipeline.head_s == 1.5
    for times, end in zip(pipeline.times, pipeline._free_at, strict=True):
        assert times.busy_s + times.wait_s == pytest.approx(end)


def test_a_lone_request_takes_what_arithmetic_says() -> None:
    result = run_variant(SETUP, "auto", [TraceRequest(0.0, 2, 5)])
    [record] = result.records
    first = 8 * COSTS.stage_time(StepShape(1, 2, 4, True)) + COSTS.head_s
    assert record.token_times[0] == pytest.approx(first)
    decode = 8 * COSTS.stage_time(StepShape(1, 1, 2 * 2 + 1, True)) + COSTS.head_s
    assert np.diff(record.token_times) == pytest.approx(decode, rel=1e-3)


@pytest.mark.parametrize("num_stages", [1, 2, 64])
def test_every_request_gets_all_its_tokens_at_any_depth(num_stages: int) -> None:
    setup = replace(SETUP, config=replace(CONFIG, num_stages=num_stages, num_blocks=600, max_num_seqs=32))
    trace = Mix(prompt=(10, 2000), output=(1, 60)).draw(60, 20.0, 5)
    for variant in ("auto", "greedy", "1"):
        result = run_variant(setup, variant, trace)
        assert [len(record.token_times) for record in result.records] == [request.num_output for request in trace]
        assert all(record.token_times == sorted(record.token_times) for record in result.records)


def test_a_mix_is_drawn_the_same_for_a_seed_and_stays_in_its_bounds() -> None:
    trace = Mix().draw(2000, 4.0, 1)
    assert trace == Mix().draw(2000, 4.0, 1) != Mix().draw(2000, 4.0, 2)
    prompts = [request.num_prompt for request in trace]
    assert min(prompts) >= 100 and max(prompts) <= 4000
    assert sum(prompt <= 632 for prompt in prompts) / 2000 == pytest.approx(0.5, abs=0.05), "half are below the geometric mean"
    assert trace[-1].arrival == pytest.approx(500, rel=0.1)


def test_a_trace_is_replayed_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival,prompt,output\n1.5,10,20\n0,3,4\n")
    assert read_trace(str(path)) == [TraceRequest(0.0, 3, 4), TraceRequest(1.5, 10, 20)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: must be the header arrival,prompt,output"),
        ("arrival,prompt\n", "line 1: must be the header"),
        ("arrival,prompt,output\n", "has no requests"),
        ("arrival,prompt,output\n0,1,2\n0,1\n", "line 3: has 2 fields, needs 3"),
        ("arrival,prompt,output\n0,1,2\n0,1,2\n0,x,2\n", "line 4: '0,x,2' is not a number"),
        ("arrival,prompt,output\nnan,1,2\n", "line 2: arrival=nan must be a number of seconds"),
        ("arrival,prompt,output\n-1,1,2\n", "line 2: arrival=-1.0 must be"),
        ("arrival,prompt,output\n0,0,2\n", "line 2: prompt=0 and output=2 must be at least 1"),
        ("arrival,prompt,output\n0,1,2\n\n", "line 3: has 0 fields"),
        ("arrival,prompt,output\n" + 200_000 * "1" + ",1,2\n", "field larger than field limit"),
    ],
)
def test_a_broken_line_is_refused_with_its_number(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(str(path))


def test_the_command_prints_runs_side_by_side_and_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    runner = CliRunner()
    result = runner.invoke(command, ["--requests", "20", "--variant", "auto", "--variant", "greedy", "--variant", "2", "--details"])
    assert result.exit_code == 0, result.output
    assert "2 cohorts" in result.output and "unexplained" in result.output
    path = tmp_path / "t.csv"
    path.write_text("arrival,prompt,output\n0,5,x\n")
    for arguments, message in (
        (["--trace", str(path)], "line 2"),
        (["--variant", "clever"], "is not one of"),
        (["--variant", "10"], "num_cohorts: must be between 1 and 9"),
        (["--num-kv-blocks", "1"], "hold less than one request"),
        (["--max-num-batched-tokens", "8"], "below max_num_seqs"),
        (["--stages", "65"], "65 is not in the range"),
        (["--block-size", "0"], "0 is not in the range"),
        (["--prompt", "9:3"], "is not LOW:HIGH"),
    ):
        result = runner.invoke(command, ["--requests", "3", *arguments])
        assert result.exit_code == 2 and message in result.output, (arguments, result.output)


def test_exam_mixed_load() -> None:
    """Number 4 of the issue on one seed: throughput and TTFT against greedy and fixed cohorts, waiting below 5 %."""
    mix = Mix()
    trace = mix.draw(200, 0.9 * saturated_rate(SETUP, mix, 200, 0), 0)
    results = {variant: run_variant(SETUP, variant, trace) for variant in ("auto", "greedy", "1", "8", "9")}
    summaries = {variant: summarize(result) for variant, result in results.items()}
    auto, greedy = summaries["auto"], summaries["greedy"]
    assert auto.tokens_per_s >= greedy.tokens_per_s
    assert auto.tokens_per_s >= 0.98 * max(summaries[fixed].tokens_per_s for fixed in ("1", "8", "9"))
    assert auto.ttft[0] <= greedy.ttft[0]
    assert auto.unexplained_wait < 0.05


def test_exam_one_long_prompt_among_streams() -> None:
    """Number 5 of the issue."""
    streams = [TraceRequest(0.01 * i, 200, 1300) for i in range(64)]
    arrival = 6.0

    def p99(result: SimulationResult, begin: float, end: float) -> float:
        times = [[t for t in record.token_times if begin <= t <= end] for record in result.records[:64]]
        return float(np.percentile(np.concatenate([np.diff(part) for part in times]), 99))

    normal = p99(run_variant(SETUP, "auto", streams), arrival, math.inf)
    throttled, free = (
        run_variant(SETUP, variant, [*streams, TraceRequest(arrival, 100_000, 1)]) for variant in ("auto", "unthrottled")
    )
    ttft = throttled.records[64].token_times[0] - arrival
    assert p99(throttled, arrival, arrival + ttft) < 3 * normal
    assert ttft <= 1.7 * (free.records[64].token_times[0] - arrival)
    assert len(gaps_of(throttled.records)) == 64 * 1299
