"""Does a stage take all cores when no other computes, and only then?"""

from collections.abc import Sequence

import pytest

from ipc.messages import CachedRequestData, SchedulerOutput
from worker.threads import StepThreads, computes_alone
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


def test_threads_are_set_on_changes_only() -> None:
    seen: list[int] = []
    threads = StepThreads(shared=2, alone=8, set_num_threads=seen.append)
    for is_alone in (False, False, True, True, True, False, True):
        threads.use(is_alone=is_alone)
    assert seen == [2, 8, 2, 8]


def test_a_fixed_number_is_set_once() -> None:
    seen: list[int] = []
    threads = StepThreads(shared=3, alone=3, set_num_threads=seen.append)
    for is_alone in (True, False, True):
        threads.use(is_alone=is_alone)
    assert seen == [3]
