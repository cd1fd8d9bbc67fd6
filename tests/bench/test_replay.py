"""Planned steps: are they what the scheduler would send, do they survive a file, and can a stage alone run them?"""

from dataclasses import asdict
from pathlib import Path

import pytest

from engine.cost_model import Coefficients
from engine.scheduler import SchedulerConfig
from ipc.codec import encode
from ipc.errors import ConfigError, PeerLost
from scripts.bench.cases import Case, Figures
from scripts.bench.comparison import DECODE, PREFILL, WHOLE, Work, check_rate, coefficients_of, cores_per_stage
from scripts.bench.random_model import write_random_model
from scripts.bench.replay import StageJob, StageProcesses, plan_steps, read_steps, steady, time_of, write_steps

CASE = Case(6, 20, 30)
COSTS = Coefficients(row_s=1e-3, head_s=0.0)
"""Rows are dear enough that two cohorts pay."""

CONFIG = SchedulerConfig(
    num_stages=2, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, block_size=16, num_blocks=100,
    prefix_caching=False,
)  # fmt: skip


def test_plans_hold_every_token_once_in_cohorts() -> None:
    steps = plan_steps(CONFIG, COSTS, CASE)
    assert [step.plan.step_id for step in steps] == list(range(1, len(steps) + 1))
    assert sum(len(step.sampling) for step in steps) == 6 * 30
    # The last token that is sampled is the input of no step.
    assert sum(sum(step.plan.num_scheduled_tokens) for step in steps) == 6 * (20 + 29)
    assert all(sum(step.plan.num_scheduled_tokens) <= 64 for step in steps)
    assert all(len(step.output.rows) == len(step.sampling) for step in steps)
    span = steady(steps)
    assert {len(step.sampling) for step in steps[span.begin : span.end]} == {3}


def test_the_steady_span_is_while_all_decode() -> None:
    steps = plan_steps(CONFIG, COSTS, CASE)
    span = steady(steps)
    before = {number for step in steps[: span.begin] for number in step.sampling}
    after = {number for step in steps[span.end - 1 :] for number in step.sampling}
    assert before == after | before == set(range(6)) and 0 < span.begin < span.end < len(steps)
    assert span.num_tokens == sum(len(step.sampling) for step in steps[span.begin : span.end])
    assert set(steps[span.begin - 1].sampling) - {n for step in steps[: span.begin - 1] for n in step.sampling}
    ends = [float(index + 1) for index in range(len(steps))]
    assert time_of(span, ends) == span.end - span.begin


def test_spans_and_rates_by_kind_of_work() -> None:
    steps = plan_steps(CONFIG, COSTS, CASE)
    assert Work(PREFILL, CASE).span(steps).num_tokens == 120 and Work(WHOLE, CASE).span(steps).num_tokens == 180
    assert Work(DECODE, CASE).span(steps) == steady(steps)
    figures = Figures(seconds=2.0, output_tok_s=27.0, total_tok_s=147.0, steady_tok_s=30.0, client_cpu_share=0.0)
    assert [Work(kind, CASE).real_rate(figures) for kind in (DECODE, PREFILL, WHOLE)] == [30.0, 60.0, 90.0]


def test_without_a_time_in_which_all_decode_there_is_no_rate() -> None:
    steps = plan_steps(CONFIG, COSTS, Case(6, 40, 2))
    assert steady(steps).num_tokens == 0
    with pytest.raises(ConfigError, match="longer answers"):
        check_rate(Work(DECODE, Case(6, 40, 2)), 0.0)


def test_steps_survive_a_file(tmp_path: Path) -> None:
    steps = plan_steps(CONFIG, COSTS, CASE)
    write_steps(tmp_path / "steps", steps)
    read = read_steps(tmp_path / "steps")
    assert [[encode(one) for one in pair] for pair in read] == [[encode(s.plan), encode(s.output)] for s in steps]


def test_what_the_engine_has_fitted_is_read_from_its_stats() -> None:
    costs = Coefficients(step_s=1.0, head_s=2.0)
    assert coefficients_of({f"cost_{name}": value for name, value in asdict(costs).items()}) == costs


def test_each_stage_has_its_own_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {5, 3, 9, 7})
    assert cores_per_stage(1) == [[3, 5, 7, 9]]
    assert cores_per_stage(2) == [[3, 5], [7, 9]]
    assert cores_per_stage(5) == [[3], [5], [7], [9], [3]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(
        tmp_path_factory.mktemp("random") / "model", num_layers=3, hidden_size=32, intermediate_size=48, num_heads=4,
        num_kv_heads=2, vocab_size=64, max_position_embeddings=64,
    )  # fmt: skip


def job(model: Path, stage: int, num_stages: int, partition: str) -> StageJob:
    return StageJob(
        model=str(model), dtype="float32", partition=partition, stage=stage, num_stages=num_stages, num_threads=1,
        max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, block_size=16, num_blocks=100,
    )  # fmt: skip


def test_stages_alone_run_all_steps_again_and_again(model: Path, tmp_path: Path) -> None:
    steps = plan_steps(CONFIG, COSTS, CASE)
    write_steps(tmp_path / "steps", steps)
    with StageProcesses([job(model, stage, 2, "2,1") for stage in (0, 1)], cores_per_stage(2)) as stages:
        for _ in range(2):
            for ends in stages.run(tmp_path / "steps"):
                assert len(ends) == len(steps) and ends == sorted(ends) and ends[0] > 0
    single = plan_steps(SchedulerConfig(**{**as_dict(CONFIG), "num_stages": 1}), Coefficients(), CASE)
    write_steps(tmp_path / "single", single)
    with StageProcesses([job(model, 0, 1, "even")], cores_per_stage(1)) as stage:
        assert [len(ends) for ends in stage.run(tmp_path / "single")] == [len(single)]


def test_a_stage_that_can_not_load_is_told(model: Path) -> None:
    with pytest.raises(PeerLost, match="ended with code 1"), StageProcesses([job(model, 0, 2, "9,9")], [[0]]):
        pass


def as_dict(config: SchedulerConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in SchedulerConfig.__dataclass_fields__}
