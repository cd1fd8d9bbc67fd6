"""With how many threads does a stage compute a step?

Stages on one host share its cores, because they compute side by side. While there is a single request they can't: a step
of it needs the token of the step before. Then the stage whose turn it is takes all cores.
"""

from collections.abc import Callable

import torch

from ipc.messages import SchedulerOutput
from worker.topology import Topology


class StepThreads:
    """Sets the number of threads when it changes. All computing is done by the thread that calls this."""

    def __init__(self, *, shared: int, alone: int, set_num_threads: Callable[[int], None] = torch.set_num_threads) -> None:
        """``shared``: threads while others compute on this host too; ``alone``: while none does."""
        self._shared = shared
        self._alone = alone
        self._set_num_threads = set_num_threads
        self._current: int | None = None

    def use(self, *, is_alone: bool) -> None:
        """For what this thread computes from now on."""
        wanted = self._alone if is_alone else self._shared
        if wanted != self._current:
            self._set_num_threads(wanted)
            self._current = wanted


def computes_alone(
    topology: Topology, plan: SchedulerOutput, next_plan: SchedulerOutput | None, last_sampled_step: int | None
) -> bool:
    """Whether every other stage has nothing to compute while this one computes its part of ``plan``.

    Known without a message. Stages behind are idle when the step before is over: on the first stage when its tokens have
    come, elsewhere when this step could not have begun without them. Stages before are idle when the next step needs this
    one's tokens. A next plan that isn't there yet is taken to be like this one. A wrong answer costs time only.

    ``last_sampled_step``: newest step whose tokens have come; None where they don't come.
    """
    if last_sampled_step is not None:
        is_step_before_over = last_sampled_step >= plan.step_id - 1
    else:
        is_step_before_over = topology.is_last or _waits_for_all_before(plan)
    if topology.is_first or not is_step_before_over:
        return is_step_before_over
    return _waits_for_all_before(plan if next_plan is None else next_plan)


def _waits_for_all_before(plan: SchedulerOutput) -> bool:
    return plan.step_id == 0 or plan.needs_tokens_of_step == plan.step_id - 1
