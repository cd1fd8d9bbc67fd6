"""When does each stage work on a step, and what does it wait for meanwhile? A pipeline made of numbers."""

from collections import deque
from dataclasses import dataclass, field

from engine.cost_model import Coefficients, StepShape

PLAN, TOKENS, UPSTREAM = "plan", "tokens", "upstream"
"""Causes of waiting: no step was sent, the first stage lacks a sampled token, the stage in front is not done yet."""


@dataclass(slots=True)
class StageTimes:
    """Where one stage's time went since counting began, in seconds. Time without any request counts nowhere."""

    busy_s: float = 0.0
    waits: dict[str, float] = field(default_factory=lambda: {PLAN: 0.0, TOKENS: 0.0, UPSTREAM: 0.0})

    @property
    def wait_s(self) -> float:
        return sum(self.waits.values())


class ModelledPipeline:
    """Stages in a line; each takes steps in order. The last one's head and the return of tokens come on top."""

    def __init__(self, num_stages: int, coefficients: Coefficients) -> None:
        self.num_stages = num_stages
        self.costs = coefficients
        self.times = [StageTimes() for _ in range(num_stages)]
        self.head_s = 0.0
        """Time that the last stage spent in its head."""
        self._free_at = [0.0] * num_stages
        self._tokens_at: deque[tuple[int, float]] = deque()
        """Steps, and when their tokens reach the first stage."""

    def send(self, step_id: int, shape: StepShape, now: float, needs_step: int, idle_s: float) -> float:
        """Run a step that is sent now; returns when its output is back.

        Args:
            needs_step: the step whose tokens the first stage must have.
            idle_s: how long, since the last step was sent, there was no request at all.
        """
        stage_s = self.costs.stage_time(shape)
        ready, wait_tokens = now, self._tokens_ready(needs_step)
        last = self.num_stages - 1
        for index, (free_at, times) in enumerate(zip(self._free_at, self.times, strict=True)):
            if index == 0:
                begin = max(free_at, now, wait_tokens)
                times.waits[PLAN] += max(0.0, now - free_at - idle_s)
                times.waits[TOKENS] += begin - max(free_at, now)
            else:
                begin = max(free_at, ready)
                times.waits[UPSTREAM] += max(0.0, begin - free_at - idle_s)
            head_s = self.costs.head_s if index == last and shape.samples else 0.0
            self.head_s += head_s
            ready = begin + stage_s + head_s
            self._free_at[index] = ready
            times.busy_s += stage_s + head_s
        back = ready + self.costs.return_s
        self._tokens_at.append((step_id, back))
        return back

    def _tokens_ready(self, step_id: int) -> float:
        """Steps are needed in order, so older ones can be forgotten."""
        tokens_at = self._tokens_at
        while tokens_at and tokens_at[0][0] < step_id:
            tokens_at.popleft()
        return tokens_at[0][1] if tokens_at and tokens_at[0][0] == step_id else 0.0

    def restart_counting(self) -> None:
        """Forget the times so far."""
        self.times = [StageTimes() for _ in range(self.num_stages)]
        self.head_s = 0.0
