"""Metrics of a real engine: exact counts of a known run, and counters that only grow when a worker is lost."""

import pytest

from engine.metrics_text import render_metrics
from tests.conftest import Checkpoints
from tests.e2e.harness import Engine, serve
from tests.prometheus import Samples, counters, parse

pytestmark = pytest.mark.e2e

FLAGS = ("--num-kv-blocks", "64", "--block-size", "16", "--max-model-len", "256", "--dtype", "float32")
RESTART_S = 60.0


def scrape(engine: Engine) -> bytes:
    return render_metrics(engine.raw.stats())


def shrunk(earlier: Samples, later: Samples) -> dict[object, object]:
    return {key: (value, later.get(key)) for key, value in earlier.items() if later.get(key, -1.0) < value}


def test_a_known_run_and_a_lost_worker(checkpoints: Checkpoints) -> None:
    with serve(checkpoints.fx_r, flags=FLAGS) as engine:
        raw = engine.raw
        before = counters(scrape(engine))
        assert before["brigade_generation_tokens_total"] == before["brigade_end_to_end_seconds_count"] == 0
        prompt = list(range(5, 45))
        greedy = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
        raw.run([(prompt, greedy)], concurrency=1, timeout_s=60)
        raw.run([(prompt, greedy), ([7, 8, 9], greedy)], concurrency=1, timeout_s=60)
        aborted = raw.submit([5], **{**greedy, "max_tokens": 200})
        raw.pump_until(lambda: bool(aborted.token_ids), 30, lambda: "no token")
        raw.abort(aborted.request_id)
        raw.wait([aborted], 30)
        refused = raw.submit([])
        raw.wait([refused], 30)
        engine.settle()
        run = scrape(engine)
        samples = parse(run)
        generated = 3 * 6 + len(aborted.token_ids)
        assert samples["brigade_generation_tokens_total"] >= generated
        assert samples["brigade_prompt_tokens_total"] == 2 * 40 + 3 + 1
        assert samples["brigade_prefix_cache_hit_tokens_total"] == 32, "two full blocks of the second time"
        assert samples["brigade_requests_finished_total", "reason=length"] == 3
        assert samples["brigade_requests_finished_total", "reason=abort"] == 1
        assert samples["brigade_requests_refused_total", "code=bad_request"] == 1
        assert samples["brigade_time_to_first_token_seconds_count"] == samples["brigade_queue_seconds_count"] == 4
        assert samples["brigade_end_to_end_seconds_count"] == 3
        # All tokens but the first ones; those of the aborted answer that came later than the abort are nobody's.
        between = samples["brigade_inter_token_seconds_count"]
        assert between == samples["brigade_generation_tokens_total"] - 4
        assert 0 < samples["brigade_time_to_first_token_seconds_sum"] < samples["brigade_end_to_end_seconds_sum"] + 60
        assert samples["brigade_kv_blocks_total"] == samples["brigade_kv_blocks_free"] == 64
        assert shrunk(before, counters(run)) == {}

        lost = raw.submit([5], **{**greedy, "max_tokens": 200})
        raw.pump_until(lambda: bool(lost.token_ids), 30, lambda: "no token")
        engine.tree().ranks[1].kill()
        raw.wait([lost], RESTART_S)
        between_epochs = scrape(engine)
        raw.wait_for_stats(lambda stats: stats["epoch"] == 2 and stats["ready"] is True, RESTART_S)
        assert raw.run([([7, 8, 9], greedy)], concurrency=1, timeout_s=60)[0].finish_reason == "length"
        after = scrape(engine)
        assert shrunk(counters(run), counters(between_epochs)) == {}
        assert shrunk(counters(between_epochs), counters(after)) == {}
        samples = parse(after)
        assert samples["brigade_worker_restarts_total"] == 1 and samples["brigade_ready"] == 1
        assert samples["brigade_requests_resumed_total"] == 1
        assert samples["brigade_requests_finished_total", "reason=length"] == 5
        assert samples["brigade_time_to_first_token_seconds_count"] == 6
        # A stage tells of itself once a second: the first epoch's seconds must be there in any case.
        raw.wait_for_stats(lambda stats: {"stage_0_busy_share", "stage_1_busy_share"} <= stats.keys(), 30)
        samples = parse(scrape(engine))
        for stage in ("stage=0", "stage=1"):
            assert samples["brigade_stage_busy_seconds_total", stage] > 0
            shares = [value for key, value in samples.items() if key[0] == "brigade_stage_waiting_share" and key[-1] == stage]
            assert len(shares) == 5
            assert sum(shares) + samples["brigade_stage_busy_share", stage] == pytest.approx(1, abs=0.01)
