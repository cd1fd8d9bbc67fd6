"""What the core counts, on a clock of the test's own, and how Prometheus reads it."""

import math
from collections.abc import Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.metrics import FINISH_REASONS, TOKEN_BOUNDS_S, Histogram, Metrics
from engine.metrics_text import HISTOGRAMS, render_metrics
from engine.request import ClientId, Request
from engine.scheduler import RequestProgress
from engine.scheduler_config import SchedulerStats
from ipc.messages import Scalars, StageReport
from ipc.params import SamplingParams
from tests.prometheus import Samples, parse


def request(arrival_time: float, started_at: float = 0.0) -> Request:
    made = Request(
        request_id="r", internal_id=1, client=ClientId(0, b"c"), prompt_token_ids=[1], params=SamplingParams(seed=1),
        arrival_time=arrival_time,
    )
    made.started_at = started_at
    return made


def came(*tokens: tuple[Request, int]) -> list[RequestProgress]:
    return [RequestProgress(request=one, new_token_ids=[7] * count) for one, count in tokens]


def scheduler_stats(**changes: int) -> SchedulerStats:
    values = dict.fromkeys(SchedulerStats.__slots__, 0) | changes
    return SchedulerStats(**values)


def report(**fields: float) -> StageReport:
    zeros = dict.fromkeys(("num_steps", "busy_s", "plan_wait_s", "receive_wait_s", "token_wait_s", "queue_depth", "resident_bytes"), 0)
    return StageReport(core_id=1, epoch=1, rank=0, **zeros | fields)


def rendered(metrics: Metrics, **more: float | str) -> Samples:
    values: Scalars = {**metrics.values(None, {}, num_outside=0), **more}
    return parse(render_metrics(values))


# ------------------------------------------------------------------------------------------------ histograms


def test_a_histogram_counts_up_to_and_including_its_bounds() -> None:
    histogram = Histogram((0.1, 0.5, 2.0))
    for seconds in (0.05, 0.1, 0.1001, 2.0, 2.5):
        histogram.observe(seconds)
    histogram.observe(0.5, 4)
    assert histogram.values("x") == {
        "x_le_0.1": 2, "x_le_0.5": 7, "x_le_2": 8, "x_count": 9, "x_sum": pytest.approx(6.7501),
    }


def test_the_first_token_waits_in_the_queue_and_then_is_computed_and_others_follow() -> None:
    metrics = Metrics()
    one, other = request(100.0, started_at=100.3), request(101.0, started_at=101.0)
    metrics.tokens_came(came((one, 1)), 101.0)
    metrics.tokens_came(came((one, 1), (other, 1)), 101.04)
    metrics.tokens_came(came((one, 1), (other, 1)), 101.08)
    metrics.tokens_came(came((other, 3), (one, 0)), 101.38)
    metrics.ended(one, "length", 102.0)
    metrics.ended(other, "abort", 104.0)
    samples = rendered(metrics)
    assert samples["brigade_time_to_first_token_seconds_count"] == 2
    assert samples["brigade_time_to_first_token_seconds_sum"] == pytest.approx(1.04)
    assert samples["brigade_time_to_first_token_seconds_bucket", "le=0.05"] == 1
    assert samples["brigade_time_to_first_token_seconds_bucket", "le=1"] == 2
    assert samples["brigade_queue_seconds_sum"] == pytest.approx(0.3)
    assert samples["brigade_inter_token_seconds_count"] == 2 + 1 + 3, "all tokens but each answer's first"
    assert samples["brigade_inter_token_seconds_sum"] == pytest.approx(0.04 * 2 + 0.04 + 0.3)
    assert samples["brigade_inter_token_seconds_bucket", "le=0.05"] == 3
    assert samples["brigade_inter_token_seconds_bucket", "le=0.1"] == 3 + 3, "three tokens at once: 0.1 s for each"
    assert samples["brigade_end_to_end_seconds_count"] == 1, "what was aborted came to no end of its own"
    assert samples["brigade_end_to_end_seconds_sum"] == pytest.approx(2.0)
    assert samples["brigade_requests_finished_total", "reason=length"] == 1
    assert samples["brigade_requests_finished_total", "reason=abort"] == 1
    assert samples["brigade_requests_finished_total", "reason=stop"] == 0


def test_several_tokens_at_first_are_one_first_token_and_others_without_a_wait() -> None:
    metrics = Metrics()
    metrics.tokens_came(came((request(5.0, 5.0), 3)), 6.0)
    samples = rendered(metrics)
    assert samples["brigade_time_to_first_token_seconds_count"] == 1
    assert samples["brigade_inter_token_seconds_bucket", "le=0.001"] == samples["brigade_inter_token_seconds_count"] == 2


def test_every_histogram_is_cumulative_and_ends_at_its_count() -> None:
    metrics = Metrics()
    one = request(1.0, 1.0)
    for step in range(200):
        metrics.tokens_came(came((one, 1)), 2.0 + step**2 / 1000)
    for name in HISTOGRAMS:
        buckets = [
            (math.inf if sample.labels["le"] == "+Inf" else float(sample.labels["le"]), sample.value)
            for family in text_string_to_metric_families(render_metrics(metrics.values(None, {}, num_outside=0)).decode())
            for sample in family.samples if sample.name == f"brigade_{name}_bucket"
        ]  # fmt: skip
        assert len(buckets) > 10 and buckets == sorted(buckets)
        assert [count for _, count in buckets] == sorted(count for _, count in buckets)
        assert buckets[-1] == (math.inf, rendered(metrics)[f"brigade_{name}_count"])
    assert rendered(metrics)["brigade_inter_token_seconds_bucket", "le=0.1"] == 50, "gaps of (2n - 1) ms, n = 1 … 199"


def test_bounds_are_told_apart_by_their_names() -> None:
    assert len({f"{bound:g}" for bound in TOKEN_BOUNDS_S}) == len(TOKEN_BOUNDS_S)
    assert all(float(f"{bound:g}") == bound for bound in TOKEN_BOUNDS_S)


# ------------------------------------------------------------------------------------------------ epochs


def test_sums_go_on_through_the_end_of_an_epoch() -> None:
    metrics = Metrics()
    first = scheduler_stats(preemptions=2, num_generated_tokens=50, prefix_hit_tokens=8)
    before = metrics.values(first, {0: (report(num_steps=10, busy_s=4.0, plan_wait_s=1.5), None)}, num_outside=0)
    metrics.epoch_ended(first, {0: report(num_steps=12, busy_s=5.0, plan_wait_s=1.75)})
    between = metrics.values(None, {}, num_outside=3)
    second = scheduler_stats(num_generated_tokens=7, running=1, waiting=2, total_blocks=9, free_blocks=4)
    after = metrics.values(second, {0: (report(num_steps=1, busy_s=0.5), report())}, num_outside=0)
    assert [v["generation_tokens_total"] for v in (before, between, after)] == [50, 50, 57]
    assert [v["preemptions_total"] for v in (before, between, after)] == [2, 2, 2]
    assert [v["worker_restarts_total"] for v in (before, between, after)] == [0, 1, 1]
    assert [v["stage_0_steps_total"] for v in (before, between, after)] == [10, 12, 13]
    assert [v["stage_0_busy_seconds_total"] for v in (before, between, after)] == [4.0, 5.0, 5.5]
    assert [v["stage_0_plan_wait_seconds_total"] for v in (before, between, after)] == [1.5, 1.75, 1.75]
    assert [v["requests_waiting"] for v in (before, between, after)] == [0, 3, 2]
    assert (between["kv_blocks_total"], after["kv_blocks_total"], after["kv_blocks_free"]) == (0, 9, 4)


def test_an_epoch_that_ended_before_it_was_ready_leaves_nothing_but_a_restart() -> None:
    metrics = Metrics()
    before = metrics.values(None, {}, num_outside=0)
    metrics.epoch_ended(None, {})
    assert metrics.values(None, {}, num_outside=0) == before | {"worker_restarts_total": 1}


# ------------------------------------------------------------------------------------------------ the text


def test_stages_and_causes_are_labels() -> None:
    samples = rendered(
        Metrics(), stage_0_busy_share=0.75, stage_0_plan_wait_share=0.25, stage_11_receive_wait_share=0.5,
        stage_0_token_wait_seconds_total=3.5, stage_0_resident_bytes=10.0, stage_0_full_graph_share=0.5,
        stage_1_steps_total=4, core_busy_s=2.5,
    )  # fmt: skip
    assert samples["brigade_stage_busy_share", "stage=0"] == 0.75
    assert samples["brigade_stage_waiting_share", "cause=plan", "stage=0"] == 0.25
    assert samples["brigade_stage_waiting_share", "cause=receive", "stage=11"] == 0.5
    assert samples["brigade_stage_waiting_seconds_total", "cause=token", "stage=0"] == 3.5
    assert samples["brigade_stage_resident_bytes", "stage=0"] == 10
    assert samples["brigade_stage_full_graph_share", "stage=0"] == 0.5
    assert samples["brigade_stage_steps_total", "stage=1"] == 4
    assert samples["brigade_core_busy_seconds_total"] == 2.5


@pytest.mark.parametrize("stats", [{}, {"model": "text", "unknown_total": 3, "stage_x_busy_share": 1, "stage_0_surprise": 2}])
def test_what_is_missing_is_left_out_and_what_is_unknown_passed_over(stats: Mapping[str, int | str]) -> None:
    assert render_metrics(stats) == b""


def test_every_family_has_a_help_and_a_type() -> None:
    text = render_metrics({**Metrics().values(None, {}, num_outside=0), "ready": True}).decode()
    families = list(text_string_to_metric_families(text))
    assert {family.type for family in families} == {"gauge", "counter", "histogram"}
    assert all(family.documentation for family in families)
    assert "# TYPE brigade_kv_blocks_total gauge\n" in text and "\nbrigade_ready 1.0\n" in text
    assert all(f'brigade_requests_finished_total{{reason="{reason}"}} 0.0\n' in text for reason in FINISH_REASONS)
