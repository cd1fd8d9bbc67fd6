"""Real ranks and their links: foreign or missing activations end the epoch with rank, step and peer named, whatever the
transport; which transport that is, all ranks agree on.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from ipc.messages import ModelRunnerOutput, SchedulerOutput, WorkerFailed, WorkerLoaded, WorkerReady
from tests.oracle import Oracle
from tests.worker.fake_core import EPOCH, FakeCore
from tests.worker.pipeline import Plans, tokens_of

pytestmark = pytest.mark.e2e

TRANSPORTS = ["gloo", pytest.param("staged", marks=pytest.mark.slow)]
"""Those that run without a GPU; the device that is staged from is then the CPU."""


@pytest.fixture
def core_for(checkpoints) -> Iterator[Any]:
    made = []

    def make(num_ranks: int, **settings) -> FakeCore:
        made.append(FakeCore(checkpoints.fx_r, num_ranks, **settings))
        return made[-1]

    yield make
    for core in made:
        core.close()


def plan_of(step_id: int, num_tokens: int) -> SchedulerOutput:
    """A new request of so many tokens in its first step; none for a step without rows."""
    plans = Plans()
    plans.step_id = step_id - 1
    if not num_tokens:
        return plans.step({})
    plans.add(0, list(range(5, 5 + num_tokens)))
    return plans.step({0: num_tokens}, needs=0)


@pytest.mark.parametrize(("num_ranks", "transport"), [(3, "staged"), pytest.param(5, "gloo", marks=pytest.mark.slow)])
def test_any_number_of_stages_gives_the_same_tokens(core_for, checkpoints, num_ranks, transport):
    core, plans, prompt = core_for(num_ranks, transport=transport), Plans(), list(range(10, 47))
    core.become_ready()
    plans.add(2, prompt)
    got = [tokens_of(core.run(plans.step({2: len(prompt)})))[2]]
    for _ in range(5):
        got.append(tokens_of(core.run(plans.step({2: 1})))[2])
    assert got == Oracle.of(checkpoints.fx_r).greedy(prompt, 6).token_ids
    core.shut_down()
    ended = [core.wait(rank) for rank in range(num_ranks)]
    assert [code for code, _ in ended] == [0] * num_ranks
    assert f"hops go by {transport}: as --transport says" in ended[0][1]
    assert not any("hops go by" in stderr for _, stderr in ended[1:])


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_sent", [2, 5])
def test_another_number_of_tokens_ends_the_epoch(core_for, transport, num_sent):
    """Fewer, or more, than the plan of the receiving rank says."""
    core = core_for(2, transport=transport)
    core.become_ready()
    core.send(0, plan_of(1, num_sent))
    core.send(1, plan_of(1, 3))
    assert_lost(core, "rank 1, step 1: rank 0 sent something else than 3 tokens of epoch 3 (trailer: ")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_another_step_ends_the_epoch(core_for, transport):
    core = core_for(2, transport=transport)
    core.become_ready()
    core.send(0, plan_of(1, 0))
    core.send(0, plan_of(2, 3))
    core.send(1, plan_of(1, 3))
    assert_lost(
        core, "rank 1, step 1: rank 0 sent something else than 3 tokens of epoch 3 (trailer: epoch 3, step 2, 3 tokens)"
    )


def test_another_epoch_ends_the_start(core_for):
    """Two ranks that meet in one store although they are of two lives."""
    core = core_for(2)
    core.start()
    while len(core.hellos) < 2:
        core.serve_for(0.1)
    core.send(0, core.epoch_start(0))
    core.send(1, replace(core.epoch_start(1, epoch=EPOCH + 1), store=core.epoch_start(0).store))
    for rank, epoch in ((0, EPOCH), (1, EPOCH + 1)):
        core.expect_loaded_and_configure(rank, epoch)
    failed = core.expect(WorkerFailed, 1)
    assert failed.cause.startswith("rank 1, step 0: rank 0 sent something else than 512 tokens of epoch 4 (trailer: epoch 3,")
    assert core.wait(1)[0] == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_activations_that_do_not_come_end_the_epoch_at_the_deadline(core_for, transport):
    core = core_for(2, transport=transport, link_timeout_s=2.0)
    core.become_ready()
    core.send(1, plan_of(1, 3))
    assert_lost(core, "rank 1, step 1: nothing came from rank 0: Timed out waiting 2000ms")


def assert_lost(core: FakeCore, cause: str) -> None:
    failed = core.expect(WorkerFailed, 1, timeout_s=10)
    assert failed.cause.startswith(cause)
    assert not failed.fatal
    code, stderr = core.wait(1)
    assert code == 1
    assert failed.cause in stderr
    assert "Traceback" not in stderr
    assert not any(isinstance(message, ModelRunnerOutput) for _, message in core._seen), "computed on foreign data"


def test_hops_are_used_before_ready(core_for):
    """A rank whose neighbour takes no part never becomes ready."""
    core = core_for(2, link_timeout_s=2.0)
    core.begin()
    core.expect_loaded_and_configure(1, EPOCH)
    failed = core.expect(WorkerFailed, 1, timeout_s=20)
    assert failed.cause.startswith("rank 1: could not connect to the other 1 ranks: ")
    assert not any(isinstance(message, WorkerReady) for _, message in core._seen)


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (("nccl", "nccl"), "--transport: nccl needs one GPU for each rank, and NCCL: rank 0 computes on the CPU; use staged or auto"),
        (("gloo", "staged"), "--transport: must be the same on every rank, it is gloo on rank 0, staged on rank 1"),
    ],
)
def test_a_wish_that_can_not_be_met_is_refused_by_every_rank(core_for, wishes, words):
    core = core_for(2)
    core.settings_of_rank = {rank: {"transport": wish} for rank, wish in enumerate(wishes)}
    core.begin()
    for rank in range(2):
        failed = core.expect(WorkerFailed, rank)
        assert (failed.fatal, failed.cause) == (True, words)
        assert core.wait(rank)[0] == 3
    assert not any(isinstance(message, WorkerLoaded) for _, message in core._seen), "weights were read for nothing"
