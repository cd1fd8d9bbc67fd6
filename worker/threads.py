"""With how many threads does a stage compute a step?

Stages on one host share its cores, because they compute side by side. While there is a single request they can't: a step
of it needs the token of the step before. Then the stage whose turn it is may take all cores. Whether that helps is
measured: it does on idle cores, and does great harm where others keep them busy, since OpenMP's threads spin at the end of
every product until the last of them is there.
"""

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ipc.messages import SchedulerOutput
from worker.topology import Topology

NEWEST_WEIGHT = 0.1
"""Of the newest time in the mean."""

MOST_OF_MEAN = 2.0
"""What a time counts at most, so that one disturbance decides nothing; lasting ones soon do."""

_OMP_PAUSE_SOFT = 1  # the OpenMP standard's

RETRY_STEPS = 32
"""Steps of one kind after which the slower way is tried again, times how much slower it was: so trying costs 3 %."""


def let_threads_go() -> None:
    """End this thread's OpenMP workers: after a product they spin for a while, on cores that another stage wants now.

    New ones start with the next product that wants them, in about 0.1 ms. Does nothing where OpenMP can't.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "omp_pause_resource") and hasattr(library, "omp_get_initial_device"):
        library.omp_pause_resource(_OMP_PAUSE_SOFT, library.omp_get_initial_device())


@dataclass(slots=True)
class _Way:
    """How long steps of one kind take with one number of threads."""

    mean_s: float | None = None
    num_skipped: int = 0
    """Steps of the kind that went the other way since this one was tried."""

    def add(self, seconds: float) -> None:
        if self.mean_s is None or self.num_skipped >= RETRY_STEPS:
            self.mean_s = seconds  # what was known is out of date
        else:
            self.mean_s += NEWEST_WEIGHT * (min(seconds, MOST_OF_MEAN * self.mean_s) - self.mean_s)
        self.num_skipped = 0


class StepThreads:
    """Sets the number of threads when it changes. All computing is done by the thread that calls this."""

    def __init__(
        self,
        *,
        shared: int,
        alone: int,
        set_num_threads: Callable[[int], None] = torch.set_num_threads,
        let_go: Callable[[], None] = let_threads_go,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``shared``: threads while others compute on this host too; ``alone``: at most, while none does."""
        self._shared = shared
        self._alone = alone
        self._set_num_threads = set_num_threads
        self._let_go = let_go
        self._now_s = now_s
        self._current: int | None = None
        self._ways: dict[int, dict[int, _Way]] = {}
        self._measured: _Way | None = None
        self._started_s = 0.0

    def begin(self, num_tokens: int, *, is_alone: bool) -> None:
        """Before a step of so many tokens is computed."""
        self._measured = None
        if self._shared == self._alone or not is_alone or not num_tokens:
            self._use(self._shared)
            return
        # Steps of alike sizes are of one kind.
        ways = self._ways.setdefault(num_tokens.bit_length(), {self._alone: _Way(), self._shared: _Way()})
        chosen = _choose(ways)
        for number, way in ways.items():
            way.num_skipped += number != chosen
        self._use(chosen)
        self._measured = ways[chosen]
        self._started_s = self._now_s()

    def end(self) -> None:
        """The step is computed; another stage may want the cores now."""
        if self._current != self._shared:
            self._let_go()
        if self._measured is not None:
            self._measured.add(self._now_s() - self._started_s)
            self._measured = None

    def _use(self, number: int) -> None:
        if number != self._current:
            self._set_num_threads(number)
            self._current = number


def _choose(ways: dict[int, _Way]) -> int:
    """The number of threads that is faster, or one to be tried."""
    best = min(ways, key=lambda number: ways[number].mean_s or 0.0)
    best_s = ways[best].mean_s
    if best_s is None:
        return best
    for number, way in ways.items():
        if way.mean_s is not None and way.num_skipped >= RETRY_STEPS * way.mean_s / best_s:
            return number
    return best


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
