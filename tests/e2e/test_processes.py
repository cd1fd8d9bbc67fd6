"""Who ends when whom dies, what a terminal's Ctrl-C does, who listens where, and restarts (P2 P3, number 9)."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import Checkpoints
from tests.e2e.compare import check_against
from tests.e2e.conftest import TinyOracle
from tests.e2e.harness import GONE_S, Engine, serve, start, wait_for_end
from tests.e2e.test_parity import FLAGS
from tests.oracle import Excused

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

RESTART_S = 60.0


# ---------------------------------------------------------------------------------------------- P2


def killed(engine: Engine, victim: str, *, is_torchrun: bool) -> None:
    """SIGKILL to one process of the chain that holds the engine up."""
    tree = engine.tree()
    assert len(tree.ranks) == 2 and tree.core is not None
    [process] = tree.agents if victim == "agent" else tree.launchers
    streams = [engine.raw.submit([5, 6, 7], max_tokens=900, ignore_eos=True) for _ in range(4)]
    engine.raw.pump_until(lambda: all(s.token_ids for s in streams), 20, lambda: "the requests did not start")
    process.kill()
    begin = time.monotonic()
    engine.wait_gone(GONE_S)
    assert engine.exit_codes(GONE_S) != [0]
    engine.check_nothing_left(sockets_only=is_torchrun)
    engine.raw.wait(streams, max(1.0, GONE_S - (time.monotonic() - begin)))
    assert all(s.failed is not None or s.finish_reason == "length" for s in streams)


@pytest.mark.parametrize(
    "launcher, victim",
    [("brigade", "agent"), ("brigade", "launcher"), pytest.param("torchrun", "agent", marks=pytest.mark.slow)],
)
def test_p2_nothing_outlives_its_parent(
    launcher: str, victim: str, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    engine = start(checkpoints.fx_r, launcher=launcher, flags=FLAGS)
    try:
        engine.wait_ready()
        address = engine.address
        killed(engine, victim, is_torchrun=launcher == "torchrun")
    finally:
        engine.kill()
    if victim == "agent" and launcher == "brigade":
        with serve(checkpoints.fx_r, launcher=launcher, flags=FLAGS, listen=address) as again:
            assert again.address == address
            excused += check_against(again.raw, tiny_oracle.expect(22, [9, 40], 8), concurrency=2)


# ---------------------------------------------------------------------------------------------- P3


def interrupt(engine: Engine, times: int = 1) -> None:
    """Ctrl-C as a terminal sends it: to the process group in the foreground."""
    for _ in range(times):
        os.killpg(engine.launchers[0].pid, signal.SIGINT)
        wait_for_end([engine.launchers[0].pid], 0.1)


def check_interrupted(engine: Engine) -> None:
    try:
        engine.exit_codes(GONE_S)
        engine.wait_gone(GONE_S)
        engine.check_nothing_left()
        assert "Traceback" not in engine.output.tail(10_000), engine.output.tail()
        assert len(engine.output.lines) < 40, engine.output.tail()
    finally:
        engine.kill()


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("after_s", [1.5, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.1, 0.5, 2.5, 3.5, 5.0))])
def test_p3_ctrl_c_while_starting(after_s: float, times: int, checkpoints: Checkpoints) -> None:
    """At imports, at the meeting of the ranks, while loading, while warming up: wherever that finds it."""
    engine = start(checkpoints.fx_r)
    wait_for_end([engine.launchers[0].pid], after_s)
    interrupt(engine, times)
    check_interrupted(engine)


@pytest.mark.slow
def test_p3_ctrl_c_while_loading_a_larger_model(demo_model: Path) -> None:
    for after_s in (3.0, 4.0, 5.0, 6.0):
        engine = start(demo_model)
        wait_for_end([engine.launchers[0].pid], after_s)
        interrupt(engine)
        check_interrupted(engine)


@pytest.mark.slow
def test_p3_ctrl_c_when_idle(checkpoints: Checkpoints) -> None:
    engine = start(checkpoints.fx_r)
    try:
        engine.wait_ready()
        interrupt(engine)
        assert engine.exit_codes(GONE_S) == [0]
    finally:
        check_interrupted(engine)


@pytest.mark.parametrize("times", [1, 2])
def test_p3_ctrl_c_under_load(times: int, checkpoints: Checkpoints) -> None:
    """Once: the drain time passes, then every stream has its one final message. Twice: at once."""
    engine = start(checkpoints.fx_r, flags=["--drain-timeout", "1", *FLAGS])
    try:
        engine.wait_ready()
        streams = [engine.raw.submit([5, 6, 7], max_tokens=1000, ignore_eos=True) for _ in range(8)]
        engine.raw.pump_until(lambda: all(s.token_ids for s in streams), 20, lambda: "the requests did not start")
        interrupt(engine, times)
        if times == 1:
            engine.raw.wait(streams, GONE_S)
            assert all(s.failed is None or s.failed.code == "unavailable" for s in streams)
    finally:
        check_interrupted(engine)


def test_p3_sigterm_lets_running_requests_finish(
    checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    [expected] = tiny_oracle.expect(35, [10], 300)
    with serve(checkpoints.fx_r, flags=FLAGS) as engine:
        stream = engine.raw.submit(expected.prompt, max_tokens=300, temperature=0, ignore_eos=True)
        engine.raw.pump_until(lambda: bool(stream.token_ids), 20, lambda: "the request did not start")
        engine.launchers[0].send_signal(signal.SIGTERM)
        engine.raw.wait([stream], 30)
        assert (stream.finish_reason, stream.token_ids) == ("length", expected.token_ids)
        assert engine.exit_codes(GONE_S) == [0]


# ---------------------------------------------------------------------------------------------- number 9


def restart(engine: Engine, victim: int) -> None:
    """Kill a rank under load: open requests go on in a new epoch."""
    client = engine.raw
    epoch = client.stats()["epoch"]
    streams = [client.submit([5, 6, 7], max_tokens=400, temperature=0, ignore_eos=True) for _ in range(3)]
    client.pump_until(lambda: all(s.token_ids for s in streams), 20, lambda: "the requests did not start")
    core = engine.tree().core
    engine.tree().ranks[victim].kill()
    client.wait(streams, RESTART_S)
    assert all(s.finish_reason == "length" and len(s.token_ids) == 400 for s in streams), streams
    assert client.stats()["epoch"] == epoch + 1
    assert engine.tree().core == core, "the core did not outlive the restart"


@pytest.mark.parametrize("rounds", [2, pytest.param(10, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_number_9_restarts_of_the_worker_group(
    rounds: int, checkpoints: Checkpoints, tiny_oracle: TinyOracle
) -> None:
    [expected] = tiny_oracle.expect(9, [12], 16)
    with serve(checkpoints.fx_r, flags=FLAGS) as engine:
        for round_ in range(rounds):
            restart(engine, victim=1 - round_ % 2)
            assert engine.raw.greedy(expected.prompt, 16) == expected.token_ids
            assert len(engine.tree().ranks) == 2
            engine.settle()
