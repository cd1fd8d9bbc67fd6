"""Does `brigade bench` measure a real engine, and say clearly when it can't?"""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from scripts import cli
from tests.conftest import Checkpoints
from tests.e2e.harness import EnginePool
from tests.e2e.test_parity import FLAGS

pytestmark = pytest.mark.e2e


def bench(*words: str) -> Result:
    return CliRunner().invoke(cli.main, ["bench", *words])


def test_open_and_closed_loops_on_a_running_engine(engines: EnginePool, checkpoints: Checkpoints, tmp_path: Path) -> None:
    engine = engines.get(checkpoints.fx_r, flags=FLAGS)
    common = ("--connect", engine.address, "--num-requests", "12", "--prompt-tokens", "4:20", "--output-tokens", "log:2:8")
    for index, words in enumerate((("--concurrency", "3"), ("--rate", "200"), ("--rate", "inf"))):
        path = tmp_path / f"{index}.json"
        shown = bench(*common, *words, "--json", str(path))
        assert shown.exit_code == 0, shown.output
        assert "12 requests completed, 0 failed" in shown.output
        result = json.loads(path.read_text())
        assert result["requests"]["completed"] == 12 and result["engine"]["stages"] == 2
        assert result["settings"]["loop"] == ("closed" if index == 0 else "open")
        assert 24 <= result["output_tokens"] <= 96 and 48 <= result["prompt_tokens"] <= 240
        assert 0 < result["ttft_s"]["p50"] <= result["end_to_end_s"]["p50"] <= result["duration_s"]
        assert 0 < result["inter_token_s"]["p50"] <= result["inter_token_s"]["p99"]
    trace = tmp_path / "trace"
    trace.write_text('{"arrival": 0, "prompt": 5, "output": 3}\n{"arrival": 0.01, "prompt": 6, "output": 4}\n')
    result = json.loads(bench("--connect", engine.address, "--trace", str(trace), "--json", "-").stdout)
    assert (result["prompt_tokens"], result["output_tokens"]) == (11, 7)
    engine.settle()


def test_what_can_not_work_is_said_before_anything_is_sent(engines: EnginePool, checkpoints: Checkpoints) -> None:
    engine = engines.get(checkpoints.fx_r, flags=FLAGS)
    before = engine.raw.stats()["prompt_tokens_total"]
    with engine.client() as client:
        limit = client.model.max_model_len
    result = bench("--connect", engine.address, "--prompt-tokens", str(limit), "--output-tokens", "1")
    assert result.exit_code == 2 and f"max_model_len={limit}" in result.output
    result = bench("--connect", engine.address, "--rate", "1", "--concurrency", "1")
    assert result.exit_code == 2 and "--rate" in result.output
    result = bench("--connect", engine.address, "--rate", "nan", "--num-requests", "1")
    assert result.exit_code == 2 and "--rate" in result.output
    result = bench("--connect", engine.address, "--num-requests", "1", "--json", "/nonexistent/result.json")
    assert result.exit_code == 2 and "there is no folder /nonexistent" in result.output
    assert engine.raw.stats()["prompt_tokens_total"] == before
    result = bench("--serve", "/nonexistent --pp 1")
    assert result.exit_code == 3 and "/nonexistent" in result.output and "did not become ready" in result.output
