"""The engine's own scheduler and ledger against a modelled pipeline, event by event."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.cost_model import Coefficients, CostModel, FittedCosts, FixedCosts
from engine.in_flight import InFlightStep
from engine.request import ClientId, Request
from engine.scheduler import RequestProgress, Scheduler, SchedulerConfig
from ipc.messages import ModelRunnerOutput, SchedulerOutput
from ipc.params import SamplingParams
from scripts.bench.pipeline import ModelledPipeline, StageTimes
from scripts.bench.traces import TraceRequest

CLIENT = ClientId(0, b"simulation")


@dataclass(slots=True)
class RequestRecord:
    """What one request saw."""

    arrival: float
    num_prompt: int
    token_times: list[float] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class SimulationResult:
    """One run over a trace."""

    records: list[RequestRecord]
    end: float
    """When the last request was over."""
    stage_times: list[StageTimes]
    """From the end of the warm-up to the last arrival, or to the end when all came at once."""
    window_s: float
    """The length of that time, without moments in which there was no request."""
    head_s: float
    num_steps: int
    preemptions: int
    num_cohorts: int
    samples: list[tuple[float, int, int, float]]
    """Now and then: time, running, waiting, share of KV blocks in use."""
    coefficients: Coefficients
    """What the scheduler believed at the end."""

    def unexplained_waits(self) -> list[float]:
        """Per stage, the share of the window that it waited longer than the last one's head explains."""
        last = len(self.stage_times) - 1
        return [
            max(0.0, times.wait_s - (self.head_s if index < last else 0.0)) / self.window_s if self.window_s else 0.0
            for index, times in enumerate(self.stage_times)
        ]


class Simulation:
    """One scheduler, one pipeline, one trace."""

    def __init__(
        self,
        config: SchedulerConfig,
        coefficients: Coefficients,
        trace: Sequence[TraceRequest],
        *,
        knows_costs: bool = False,
        core_s: float = 0.0,
        warm_up_s: float = 0.0,
        on_step: Callable[[SchedulerOutput, InFlightStep], None] | None = None,
    ) -> None:
        """
        Args:
            knows_costs: the scheduler is told the coefficients; else it fits them as it does in the engine.
            core_s: from an event until the steps that follow from it are sent.
            warm_up_s: waiting is counted from then on.
            on_step: sees every step as it is sent.
        """
        self.now = 0.0
        costs: CostModel = FixedCosts(coefficients) if knows_costs else FittedCosts(config.num_stages)
        self.scheduler = Scheduler(config, core_id=1, epoch=1, costs=costs, clock=lambda: self.now)
        self.pipeline = ModelledPipeline(config.num_stages, coefficients)
        self._trace = deque(trace)
        self._core_s = core_s
        self._on_step = on_step
        self._returns: deque[tuple[float, SchedulerOutput, list[bool]]] = deque()
        self._records: list[RequestRecord] = []
        self._idle_since: float | None = 0.0
        self._idle_s = 0.0
        """Since the last step was sent."""
        self._idle_in_window = 0.0
        self._num_steps = 0
        self._samples: list[tuple[float, int, int, float]] = []
        self._window_from = warm_up_s
        is_burst = not trace or trace[-1].arrival <= warm_up_s
        self._window_to = math.inf if is_burst else trace[-1].arrival
        self._is_counting = False
        self._zeros = np.zeros(max((request.num_prompt for request in trace), default=1), np.int32)
        self._result: SimulationResult | None = None

    def run(self) -> SimulationResult:
        """To the end of the last request. Raises RequestError for one that can't ever fit."""
        while self._trace or self._returns:
            self._next_event()
            self._count()
            self._send()
        assert not self.scheduler.has_unfinished(), "nothing in flight, nothing to come, and requests left"
        self._close_window()
        assert self._result is not None
        self._result.end = self.now
        return self._result

    def _next_event(self) -> None:
        if self._trace and (not self._returns or self._trace[0].arrival <= self._returns[0][0]):
            self.now = max(self.now, self._trace[0].arrival)
            self._arrive(self._trace.popleft())
            return
        self.now, plan, samples = self._returns.popleft()
        rows = [row for row, does in zip(plan.rows, samples, strict=True) if does]
        output = ModelRunnerOutput(
            core_id=1, epoch=1, step_id=plan.step_id, rows=rows, token_ids=[0] * len(rows), counts=[1] * len(rows)
        )
        for progress in self.scheduler.update(output):
            self._note(progress)
        if self._idle_since is None and not self.scheduler.has_unfinished():
            self._idle_since = self.now

    def _arrive(self, arriving: TraceRequest) -> None:
        if self._idle_since is not None:
            self._idle_s += self.now - self._idle_since
            self._idle_in_window += max(0.0, self.now - max(self._idle_since, self._window_from))
            self._idle_since = None
        number = len(self._records)
        self._records.append(RequestRecord(arriving.arrival, arriving.num_prompt))
        self.scheduler.add(Request(
            request_id=str(number),
            internal_id=number,
            client=CLIENT,
            prompt_token_ids=self._zeros[: arriving.num_prompt],
            params=SamplingParams(temperature=0.0, seed=0, max_tokens=arriving.num_output, ignore_eos=True),
            arrival_time=arriving.arrival,
        ))

    def _note(self, progress: RequestProgress) -> None:
        assert progress.error is None, progress.error
        self._records[progress.request.internal_id].token_times.extend([self.now] * len(progress.new_token_ids))

    def _send(self) -> None:
        event = self.now
        self.now += self._core_s
        while (plan := self.scheduler.schedule()) is not None:
            step = self.scheduler.newest_step
            if self._on_step is not None:
                self._on_step(plan, step)
            back = self.pipeline.send(step.step_id, step.shape, self.now, plan.needs_tokens_of_step, self._idle_s)
            self._idle_s = 0.0
            self._returns.append((back, plan, step.samples))
            self._num_steps += 1
            if self._num_steps % 16 == 1:
                stats = self.scheduler.stats()
                used = 1 - stats.free_blocks / stats.total_blocks
                self._samples.append((self.now, stats.running, stats.waiting, used))
        self.now = event

    def _count(self) -> None:
        if not self._is_counting and self.now >= self._window_from:
            self._is_counting = True
            self._window_from = self.now
            self.pipeline.restart_counting()
        if self._result is None and self.now >= self._window_to:
            self._close_window()

    def _close_window(self) -> None:
        if self._result is not None:
            self._result.preemptions = self.scheduler.stats().preemptions
            self._result.num_steps = self._num_steps
            self._result.coefficients = self.scheduler.costs.coefficients
            return
        stats = self.scheduler.stats()
        self._result = SimulationResult(
            records=self._records,
            end=self.now,
            stage_times=self.pipeline.times,
            window_s=max(0.0, self.now - self._window_from - self._idle_in_window),
            head_s=self.pipeline.head_s,
            num_steps=self._num_steps,
            preemptions=stats.preemptions,
            num_cohorts=stats.num_cohorts,
            samples=self._samples,
            coefficients=self.scheduler.costs.coefficients,
        )
        self.pipeline.restart_counting()
