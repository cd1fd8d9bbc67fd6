"""Do real stages record where their time goes, and does `brigade timeline` show it?"""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ipc.spans import Kind
from scripts import cli
from scripts.exits import EXIT_BAD_USAGE
from tests.conftest import Checkpoints
from tests.e2e.harness import Engine, EnginePool
from tests.e2e.test_parity import FLAGS

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

NUM_REQUESTS = 6
NUM_TOKENS = 60
NUM_ATTEMPTS = 3
"""Of what depends on when other processes let ours run, the best attempt counts."""

FIRST_KINDS = {
    Kind.WAIT_PLAN, Kind.PREPARE, Kind.WAIT_TOKENS, Kind.ACCEPT, Kind.FORWARD, Kind.WAIT_SEND, Kind.SEND,
}  # fmt: skip
LAST_KINDS = {Kind.WAIT_PLAN, Kind.PREPARE, Kind.WAIT_ACTIVATIONS, Kind.FORWARD, Kind.SAMPLE, Kind.RETURN}
CORE_KINDS = {Kind.IDLE, Kind.CLIENTS, Kind.RECEIVE, Kind.APPLY, Kind.ANSWER, Kind.SCHEDULE, Kind.SEND_PLAN, Kind.OTHER}


def timeline(*words: str) -> Result:
    return CliRunner().invoke(cli.main, ["timeline", *words])


def recorded(engine: Engine, path: Path, *words: str) -> tuple[str, dict[str, Any]]:
    """Text and JSON of a timeline that holds one burst of requests, from their beginning."""
    requests = [([5 + i, 6, 7], {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}) for i in range(NUM_REQUESTS)]
    engine.raw.run(requests, concurrency=NUM_REQUESTS, timeout_s=60)
    shown = timeline(engine.address, "--seconds", "60", "--json", str(path), *words)
    assert shown.exit_code == 0, shown.output
    return shown.output, json.loads(path.read_text())


def test_spans_of_a_running_engine(engines: EnginePool, checkpoints: Checkpoints, tmp_path: Path) -> None:
    engine = engines.get(checkpoints.fx_r, flags=FLAGS)
    text, content = recorded(engine, tmp_path / "j", "--trace", str(tmp_path / "t"))
    core, first, last = (np.array(lane["spans"], np.int64) for lane in content["lanes"])
    for spans, kinds in ((core, CORE_KINDS), (first, FIRST_KINDS), (last, LAST_KINDS)):
        assert (spans[0, 2], spans[-1, 3]) == (content["begin_ns"], content["end_ns"])
        assert (spans[1:, 2] == spans[:-1, 3]).all() and (spans[:, 2] <= spans[:, 3]).all()
        assert kinds <= set(spans[:, 0].tolist())
    steps = [set(spans[spans[:, 0] == Kind.FORWARD, 1].tolist()) for spans in (first, last)]
    assert len(steps[0]) >= NUM_TOKENS and len(steps[0] ^ steps[1]) <= 2
    summary = content["summary"]
    assert summary["problems"] == [] and summary["clock_error_s"] == 0
    for stage in summary["stages"]:
        assert stage["busy_s"] + stage["wait_s"] == pytest.approx(summary["active_s"], abs=1e-6)
    assert summary["core"]["per_step"]["count"] >= NUM_TOKENS
    assert "core's own work per step: p50" in text
    events = json.loads((tmp_path / "t").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "s", "f"}


def test_tokens_come_back_without_a_round_trip_through_the_core(
    engines: EnginePool, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """When a token is sampled, the plan that needs it has left the core.

    Not for every step of a model whose steps are shorter than the core's turn on a busy machine; synchronous scheduling,
    below, never does it.
    """
    engine = engines.get(checkpoints.fx_r, flags=FLAGS)
    shares = []
    while len(shares) < NUM_ATTEMPTS and (not shares or shares[-1] <= 0.5):
        tokens = recorded(engine, tmp_path / "j")[1]["summary"]["tokens"]
        assert tokens["num_inputs"] >= NUM_TOKENS // 2 and tokens["to_first_stage"]["count"] >= NUM_TOKENS // 2
        shares.append(tokens["planned_ahead"])
    assert max(shares) > 0.5, shares


def test_one_stage_scheduled_synchronously_waits_for_the_core(
    engines: EnginePool, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    engine = engines.get(checkpoints.fx_r, pp=1, flags=(*FLAGS, "--no-async-scheduling"))
    summary = recorded(engine, tmp_path / "j")[1]["summary"]
    (stage,) = summary["stages"]
    assert stage["explained_s"] == 0 and stage["work"]["forward"] > 0 and stage["work"]["sample"] > 0
    assert summary["tokens"]["num_inputs"] >= NUM_TOKENS // 2 and summary["tokens"]["planned_ahead"] == 0
    assert stage["waits"]["wait plan"] > summary["core"]["busy_s"] / 2


def test_a_frozen_rank_is_named_and_the_others_are_shown(engines: EnginePool, checkpoints: Checkpoints) -> None:
    engine = engines.get(checkpoints.fx_r, flags=FLAGS)
    rank = engine.tree().ranks[0]
    rank.send_signal(signal.SIGSTOP)
    try:
        shown = timeline("--connect", engine.address)
    finally:
        rank.send_signal(signal.SIGCONT)
    assert shown.exit_code == 0
    assert "missing: rank 0 did not answer within 2 s" in shown.output
    with engine.client() as client:
        reply = client.timeline(60)
        assert [lane.error for lane in reply.lanes] == ["", "", ""]
    engine.settle()


def test_what_can_not_be_shown_is_said_in_one_line(
    engines: EnginePool, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    address = engines.get(checkpoints.fx_r, flags=FLAGS).address
    shown = timeline(address, "--seconds", "4000")
    assert (shown.exit_code, shown.stderr) == (EXIT_BAD_USAGE, "Error: seconds=4000 must be above 0 and at most 3600\n")
    shown = timeline("nowhere")
    assert (shown.exit_code, len(shown.stderr.splitlines())) == (EXIT_BAD_USAGE, 1)
    shown = timeline(address, "--json", str(tmp_path / "no" / "folder"))
    assert shown.exit_code == EXIT_BAD_USAGE and "No such file or directory" in shown.stderr
