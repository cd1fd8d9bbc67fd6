"""Are the steps that a GPU's memory is measured with as large as the flags allow? The runs here are on the CPU."""

import pytest
import torch

from ipc.errors import ConfigError
from tests.families import random_family
from tests.native import INSTRUCTION_SETS
from tests.worker.pipeline import settings_for
from worker.model_runner import ModelRunner
from worker.startup import load_stage
from worker.step_memory import largest_plans, measure_step_bytes, run_largest_steps
from worker.topology import Topology


class FakeMeter:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def peak(self) -> int:
        self.calls.append("peak")
        return 123

    def free(self) -> int:
        raise AssertionError("nothing is captured")


class SeriesMeter(FakeMeter):
    """Between two questions about free memory a tenth is taken of what was taken between the two before."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.left, self.taken = 10**6, [0, first]

    def free(self) -> int:
        self.left -= self.taken[0]
        self.taken = [self.taken[1], self.taken[1] // 10]
        return self.left


@pytest.mark.parametrize("rank", [0, 1])
def test_the_largest_steps_run_on_any_stage(checkpoints, monkeypatch, rank):
    settings = settings_for(checkpoints.fx_r, rank=rank, world_size=2, max_num_batched_tokens=70)
    topology = Topology(rank=rank, num_stages=2)
    stage = load_stage(settings, topology)
    seen = []
    execute = ModelRunner.execute_model

    def record(self, batch, received):
        result = execute(self, batch, received)
        seen.append((batch.num_tokens, None if result.logits is None else len(result.logits)))
        return result

    monkeypatch.setattr(ModelRunner, "execute_model", record)
    meter = FakeMeter()
    assert run_largest_steps(settings, topology, stage, meter) == 123
    assert meter.calls == ["start", "peak"]
    assert seen == ([(70, None), (70, None), (8, None)] if rank == 0 else [(70, 8), (70, 1), (8, 8)])


def test_the_largest_steps_of_a_model_with_several_groups(tmp_path):
    path = random_family(tmp_path / "gemma", "gemma3")
    settings, topology = settings_for(path, rank=1, world_size=2, partition="3,2"), Topology(rank=1, num_stages=2)
    assert run_largest_steps(settings, topology, load_stage(settings, topology), FakeMeter()) == 123


@pytest.mark.parametrize(
    ("max_num_seqs", "max_tokens", "max_model_len", "sizes"),
    [
        (8, 70, 512, [[9] * 6 + [8] * 2, [70], [1] * 8]),
        (4, 3, 512, [[1, 1, 1], [3], [1, 1, 1]]),
        (2, 100, 16, [[16, 16], [16, 16], [1, 1]]),
        (1, 40, 32, [[32], [32], [1]]),
    ],
)
def test_steps_are_as_large_as_flags_allow(checkpoints, max_num_seqs, max_tokens, max_model_len, sizes):
    settings = settings_for(checkpoints.fx_r, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens)
    plans = list(largest_plans(settings, max_model_len))
    assert [plan.num_scheduled_tokens for plan in plans] == sizes
    assert [plan.step_id for plan in plans] == [0, 1, 2]
    ends = [len(request.token_ids) for request in plans[2].new_requests]
    assert ends == [max_model_len] * len(ends)


@pytest.mark.parametrize(
    ("mode", "sizes", "expected"),
    [
        # The largest, and as much as the second takes for each of the others.
        ("piecewise", (2, 4, 6, 8), 5000 + 3 * 500),
        ("piecewise", (8,), 5000),
        # Two kinds; what is taken between them is not theirs.
        ("full_and_piecewise", (4, 8), 5000 + 500 + 5),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_memory_of_all_graphs_is_told_by_the_largest(checkpoints, rank, mode, sizes, expected):
    if mode != "piecewise" and not INSTRUCTION_SETS:
        pytest.skip("no compiler when this was installed")
    settings = settings_for(
        checkpoints.fx_r, rank=rank, world_size=2, max_num_batched_tokens=70, cudagraph_mode=mode,
        cudagraph_capture_sizes=sizes,
    )  # fmt: skip
    topology, meter = Topology(rank=rank, num_stages=2), SeriesMeter(5000)
    assert run_largest_steps(settings, topology, load_stage(settings, topology), meter) == 123 + expected


def test_without_memory_for_a_step_the_option_is_named(checkpoints, monkeypatch):
    def fail(self, batch, received):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(ModelRunner, "execute_model", fail)
    settings, topology = settings_for(checkpoints.fx_r), Topology(rank=0, num_stages=1)
    with pytest.raises(ConfigError, match="^--max-num-batched-tokens: no memory for a step of 512 tokens"):
        run_largest_steps(settings, topology, load_stage(settings, topology), FakeMeter())


def test_nothing_is_measured_on_the_cpu(checkpoints):
    settings, topology = settings_for(checkpoints.fx_r), Topology(rank=0, num_stages=1)
    assert measure_step_bytes(settings, topology, load_stage(settings, topology)) == 0
