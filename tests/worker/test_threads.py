"""Does a stage take all cores when no other computes, and only then?"""

import os
from collections.abc import Sequence

import pytest
import torch

from ipc.messages import CachedRequestData, SchedulerOutput
from worker.threads import StepThreads, computes_alone, let_threads_go
from worker.topology import Topology


def plan(step_id: int, needs: int) -> SchedulerOutput:
    return SchedulerOutput(
        core_id=1, epoch=1, step_id=step_id, freed_rows=[], new_requests=(), cached_requests=CachedRequestData(),
        rows=[0], num_scheduled_tokens=[1], needs_tokens_of_step=needs,
    )  # fmt: skip


def answers(needs: Sequence[int], num_stages: int, *, knows_next: bool = True) -> list[list[bool]]:
    """Per stage and step, when stages work in lockstep on steps of equal length: as early as the plans allow.

    ``needs``: of step 1 and on; step 0 is over.
    """
    plans = [plan(step_id, need) for step_id, need in enumerate(needs, start=1)]
    starts: list[int] = []
    for each in plans:
        over = starts[each.needs_tokens_of_step - 1] + num_stages if each.needs_tokens_of_step else 0
        starts.append(max(over, starts[-1] + 1 if starts else 0))
    return [
        [
            computes_alone(
                Topology(rank=stage, num_stages=num_stages),
                each,
                plans[i + 1] if knows_next and i + 1 < len(plans) else None,
                sum(start + num_stages <= starts[i] for start in starts) if stage == 0 and num_stages > 1 else None,
            )
            for i, each in enumerate(plans)
        ]
        for stage in range(num_stages)
    ]


@pytest.mark.parametrize("knows_next", [False, True])
@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_a_lone_request_has_all_cores_on_every_stage(num_stages: int, knows_next: bool) -> None:
    assert answers(range(8), num_stages, knows_next=knows_next) == [[True] * 8] * num_stages


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_as_many_cohorts_as_stages_share_the_cores(num_stages: int) -> None:
    needs = [max(0, step_id - num_stages) for step_id in range(1, 20)]
    steady = [of_stage[num_stages:-1] for of_stage in answers(needs, num_stages)]
    assert steady == [[False] * len(steady[0])] * num_stages


def test_chunks_of_one_prompt_fill_the_pipeline() -> None:
    first, last = answers([0, 0, 0, 0, 4, 5], 2)
    assert first == [True, False, False, False, True, True], "the first chunk finds the pipeline empty"
    assert last == [False, False, False, True, True, True], "behind the last chunk comes nothing"


def test_a_lone_prompt_in_one_chunk() -> None:
    first, last = answers([0, 1, 2], 2)
    assert first == [True] * 3
    assert last == [True] * 3


def test_a_second_request_joins() -> None:
    """Its prompt is step 4, while the first request's step 3 is under way; then both decode in turn."""
    first, last = answers([0, 1, 2, 0, 3, 4, 5, 6], 2)
    assert first == [True, True, True, False, False, False, False, False]
    assert last[:3] == [True, True, False]
    assert not any(last[3:-1])


def test_the_middle_can_only_know_by_the_plans() -> None:
    middle = Topology(rank=1, num_stages=3)
    assert computes_alone(middle, plan(5, 4), plan(6, 5), None)
    assert not computes_alone(middle, plan(5, 3), plan(6, 5), None), "step 4 may be on the last stage"
    assert not computes_alone(middle, plan(5, 4), plan(6, 4), None), "step 6 may be on the first stage"


def test_the_first_step_of_all_is_alone() -> None:
    """So that warming up uses the most threads that there will be."""
    for stage in range(3):
        last_sampled_step = -1 if stage == 0 else None
        assert computes_alone(Topology(rank=stage, num_stages=3), plan(0, 0), None, last_sampled_step)


class Machine:
    """Steps take the time that is set for their number of threads."""

    def __init__(self, shared: int = 2, alone: int = 8) -> None:
        self.now_s = 0.0
        self.seen: list[int] = []
        self.num_released = 0
        self.seconds = {shared: 1.0, alone: 0.5}
        self.threads = StepThreads(
            shared=shared, alone=alone, set_num_threads=self.seen.append, let_go=self._let_go, now_s=lambda: self.now_s
        )

    def _let_go(self) -> None:
        self.num_released += 1

    def step(self, *, is_alone: bool, num_tokens: int = 1) -> int:
        self.threads.begin(num_tokens, is_alone=is_alone)
        self.now_s += self.seconds[self.seen[-1]]
        self.threads.end()
        return self.seen[-1]


def test_all_cores_only_while_alone_and_set_on_changes_only() -> None:
    machine = Machine()
    assert {machine.step(is_alone=False) for _ in range(100)} == {2}
    assert machine.seen == [2]
    assert not machine.num_released
    alone = [machine.step(is_alone=True) for _ in range(300)]
    assert alone[:2] == [8, 2], "both are tried"
    assert alone.count(8) >= 0.97 * 300 - 1
    assert machine.num_released == alone.count(8), "the cores are free when another stage gets its turn"
    assert machine.step(is_alone=False) == 2


def test_cores_that_others_keep_busy_are_left_to_them() -> None:
    machine = Machine()
    machine.seconds[8] = 10.0
    alone = [machine.step(is_alone=True) for _ in range(1000)]
    assert alone.count(8) == 1 + 1000 // 322, "tried again after 320 steps: it was ten times slower"
    machine.seconds[8] = 0.5
    later = [machine.step(is_alone=True) for _ in range(500)]
    assert later[-100:].count(8) >= 95, "and taken when they are idle"


def test_one_disturbance_decides_nothing_and_lasting_ones_do() -> None:
    machine = Machine()
    for _ in range(20):
        machine.step(is_alone=True)
    machine.seconds[8] = 1000.0
    machine.step(is_alone=True)
    machine.seconds[8] = 0.5
    assert machine.step(is_alone=True) == 8
    machine.seconds[8] = 5.0
    assert [machine.step(is_alone=True) for _ in range(12)][-1] == 2


def test_sizes_of_steps_are_judged_apart() -> None:
    machine = Machine()
    machine.seconds[8] = 2.0
    for _ in range(20):
        machine.step(is_alone=True, num_tokens=1)
    machine.seconds[8] = 0.1
    assert [machine.step(is_alone=True, num_tokens=512) for _ in range(4)] == [8, 2, 8, 8]
    assert machine.step(is_alone=True, num_tokens=1) == 2


def test_a_fixed_number_is_set_once() -> None:
    machine = Machine(shared=3, alone=3)
    for is_alone in (True, False, True):
        machine.step(is_alone=is_alone)
    assert machine.seen == [3]
    assert not machine.num_released


def test_workers_end_and_come_again() -> None:
    before = torch.get_num_threads()
    x = torch.ones(512, 512)
    try:
        torch.set_num_threads(3)
        expected = (x @ x).sum()
        busy = len(os.listdir("/proc/self/task"))
        let_threads_go()
        assert len(os.listdir("/proc/self/task")) < busy
        assert (x @ x).sum() == expected
    finally:
        torch.set_num_threads(before)
        let_threads_go()
