"""Real ranks under a core that is moved by hand: start, steps, and every way to end."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ipc.messages import ControlReply, Shutdown, WorkerFailed, WorkerHello, WorkerReady
from ipc.params import SamplingParams
from tests.oracle import Oracle
from tests.worker.fake_core import CORE_ID, EPOCH, FakeCore
from tests.worker.pipeline import Plans, tokens_of

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

IDLE_S = 4.0
PROMPT_S = 10.0
"""Half of what a lost link or a silent core may take, and more than a process takes to end on a busy machine."""

StartCore = Callable[..., FakeCore]


@pytest.fixture
def core_for(checkpoints) -> Iterator[StartCore]:
    made = []

    def make(num_ranks: int, model: Path | None = None, **settings) -> FakeCore:
        made.append(FakeCore(model or checkpoints.fx_r, num_ranks, **settings))
        return made[-1]

    yield make
    for core in made:
        core.close()


def prefill(plans: Plans, row: int, prompt: list[int]):
    plans.add(row, prompt, SamplingParams(temperature=0.0, seed=0))
    return plans.step({row: len(prompt)})


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_from_hello_to_shutdown(core_for, checkpoints, num_ranks):
    core, plans, prompt = core_for(num_ranks), Plans(), list(range(10, 47))
    core.begin()
    assert [core.hellos[rank].key for rank in range(num_ranks)] == ["k"] * num_ranks
    assert bool(core.hellos[0].token_address) == (num_ranks > 1)
    loaded = core.configure()
    for rank in range(num_ranks):
        ready = core.expect(WorkerReady, rank)
        assert ready.kv_bytes == 64 * loaded[rank].bytes_per_block
        assert (loaded[rank].num_threads, loaded[rank].device) == (1, "cpu")
        assert loaded[rank].free_bytes > 1 << 20
    assert sum(loaded[rank].bytes_per_block for rank in loaded) == 5 * 2 * 16 * 2 * 16 * 4
    assert sum((list(loaded[rank].groups[0].layers) for rank in loaded), []) == list(range(5))

    got = [tokens_of(core.run(prefill(plans, 2, prompt)))[2]]
    # A message of another life changes nothing.
    core.send(0, Shutdown(core_id=CORE_ID, epoch=EPOCH - 1, reason="old"))
    core.send(0, Shutdown(core_id=CORE_ID + 1, epoch=EPOCH, reason="foreign"))
    core.send(0, core.epoch_start(0))
    core.send(0, ControlReply(core_id=CORE_ID, control_id=0, error="", values={}))
    for _ in range(8):
        got.append(tokens_of(core.run(plans.step({2: 1})))[2])
    assert got == Oracle.of(checkpoints.fx_r).greedy(prompt, 9).token_ids
    core.serve_for(0.5)
    before = [cpu_seconds(process.pid) for process in core.ranks]
    core.serve_for(IDLE_S)
    shares = [(cpu_seconds(process.pid) - start) / IDLE_S for process, start in zip(core.ranks, before, strict=True)]
    assert max(shares) < 0.08, shares
    report = core.reports[num_ranks - 1]
    assert report.num_steps == 9
    assert 0 < report.busy_s < 60
    assert report.plan_wait_s > 0.5

    core.shut_down()
    for rank in range(num_ranks):
        code, stderr = core.wait(rank)
        assert code == 0, stderr
        lines = stderr.splitlines()
        assert all(f"brigade rank {rank}: " in line for line in lines), stderr
        assert len(lines) <= 6, stderr
        assert f"stage {rank} of {num_ranks}: layers" in stderr
    assert sorted(path.name for path in core.run_dir.glob("tokens*")) == []


def test_a_signal_ends_a_rank_at_once_whatever_it_waits_for(core_for):
    """Rank 0 is idle; rank 1 waits inside gloo for activations that never come."""
    core, plans = core_for(2), Plans()
    core.become_ready()
    core.send(1, prefill(plans, 0, list(range(5, 30))))
    core.serve_for(0.3)
    started = time.monotonic()
    for rank, number in ((1, signal.SIGTERM), (0, signal.SIGINT)):
        core.ranks[rank].send_signal(number)
        code, stderr = core.wait(rank)
        assert code == 128 + number
        assert "Traceback" not in stderr
    assert time.monotonic() - started < PROMPT_S
    assert list(core.run_dir.glob("tokens*")) == []


def test_a_rank_says_hello_until_it_is_answered_or_sent_home(core_for):
    core = core_for(1)
    core.start()
    first = core.expect(WorkerHello)
    assert core.expect(WorkerHello).nonce == first.nonce
    start = core.epoch_start(0)
    core.send(0, replace(start, nonce=start.nonce + 1))
    core.expect(WorkerHello)
    core.expect(WorkerHello)
    core.send(0, Shutdown(core_id=1, epoch=0, reason="no"))
    assert core.wait(0)[0] == 0


def test_the_death_of_the_core_ends_every_rank(core_for):
    core = core_for(2)
    with subprocess.Popen(["sleep", "60"]) as stand_in:
        core.become_ready(core_pid=stand_in.pid)
        stand_in.kill()
        for rank in range(2):
            code, stderr = core.wait(rank, timeout_s=PROMPT_S)
            assert code == 1
            assert "the core's process ended" in stderr


def test_another_epoch_or_a_silent_core_ends_the_rank(core_for):
    core = core_for(2, health_timeout_s=3.0)
    core.become_ready()
    core.serve_for(4.0)
    assert [process.poll() for process in core.ranks] == [None, None]
    core.send(0, core.epoch_start(0, epoch=EPOCH + 1))
    code, stderr = core.wait(0)
    assert code == 1
    assert "epoch 4 began without this rank" in stderr

    core.serve_for(0.1)
    core.answers_reports = False
    started = time.monotonic()
    code, stderr = core.wait(1)
    assert code == 1
    assert time.monotonic() - started > 1
    assert "the core said nothing for 3 s" in stderr


def test_a_lost_neighbour_is_reported_with_rank_step_and_peer(core_for):
    core, plans = core_for(2), Plans()
    core.become_ready()
    core.run(prefill(plans, 0, list(range(5, 30))))
    core.ranks[0].kill()
    core.send(1, plans.step({0: 1}))
    failed = core.expect(WorkerFailed, 1, timeout_s=PROMPT_S)
    assert (failed.fatal, failed.rank) == (False, 1)
    assert failed.cause.startswith("rank 1, step 2: nothing came from rank 0: ")
    code, stderr = core.wait(1)
    assert code == 1
    assert failed.cause in stderr
    assert "Traceback" not in stderr


def test_a_frozen_neighbour_is_lost_at_the_deadline_and_a_shutdown_does_not_wait_for_it(core_for):
    core, plans = core_for(2, link_timeout_s=30.0), Plans()
    core.become_ready()
    core.ranks[1].send_signal(signal.SIGSTOP)
    plan = prefill(plans, 0, list(range(5, 30)))
    core.send(0, plan)
    core.send(0, plans.step({0: 1}))
    core.serve_for(0.3)
    started = time.monotonic()
    core.send(0, Shutdown(core_id=CORE_ID, epoch=EPOCH, reason="test"))
    code, stderr = core.wait(0)
    assert code == 0, stderr
    assert 1.5 < time.monotonic() - started < PROMPT_S
    core.ranks[1].kill()


def test_a_frozen_last_stage_is_lost_at_the_deadline(core_for):
    core, plans = core_for(2, link_timeout_s=3.0), Plans()
    core.become_ready()
    core.run(prefill(plans, 0, list(range(5, 30))))
    core.ranks[1].send_signal(signal.SIGSTOP)
    core.send(0, plans.step({0: 1}))
    core.send(0, plans.step({0: 1}))
    failed = core.expect(WorkerFailed, 0)
    assert failed.cause.startswith("rank 0, step 2: rank 1 sent no sampled tokens within 3 s")
    assert core.wait(0)[0] == 1
    core.ranks[1].kill()


def test_what_no_restart_can_cure_is_fatal(core_for):
    core = core_for(1)
    core.begin()
    core.configure(num_blocks=1 << 31)
    failed = core.expect(WorkerFailed)
    assert failed.fatal
    assert failed.cause.startswith(f"--num-kv-blocks: no memory for {1 << 31} KV blocks")
    code, stderr = core.wait(0)
    assert code == 3
    assert "Traceback" not in stderr


def cpu_seconds(pid: int) -> float:
    """Of our own threads: gloo's wakes every 10 ms whatever we do (about 0.1 % of a core)."""
    tasks = [task for task in Path(f"/proc/{pid}/task").iterdir() if (task / "comm").read_text() != "gloo_tcp_loop\n"]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
