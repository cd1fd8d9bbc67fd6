"""Which steps were sent and not yet returned, and which rows must rest because of them?"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.cost_model import StepShape
from engine.request import Request
from ipc.errors import ProtocolError


@dataclass(slots=True)
class InFlightStep:
    """What a step was about, in the order of its batch: its output says rows, this says whose they were."""

    step_id: int
    requests: list[Request]
    rows: list[int]
    num_scheduled_tokens: list[int]
    """Without drafts."""
    samples: list[bool]
    """True where the step reaches the last token, known or promised by an earlier step, so that the row samples."""
    shape: StepShape
    constrained: list[tuple[Request, int, int]] = field(default_factory=list)
    """Of the rows that sample, those with a grammar: whose, which row, and how many tokens stand before the sampled one."""
    drafts: dict[int, list[int]] = field(default_factory=dict)
    """By row, behind its one token."""
    tag: tuple[int, int] | None = None
    """What pacing wants to hear again when the step returns."""


class StepsInFlight:
    """Steps in the order in which they were sent, which is the order in which they return. Ids count from 1."""

    def __init__(self) -> None:
        self._steps: deque[InFlightStep] = deque()
        self.last_sent_id = 0
        self.last_returned_id = 0
        self.num_sampling = 0
        """Of these steps, those in which a row samples."""

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[InFlightStep]:
        return iter(self._steps)

    @property
    def newest(self) -> InFlightStep:
        """The step that was sent last; there must be one in flight."""
        return self._steps[-1]

    def reaches(self) -> list[tuple[Request, int]]:
        """Whom these steps compute who isn't over, and the most tokens that he has, promised and guessed ones included."""
        reaches: dict[int, tuple[Request, int]] = {}
        for step in self._steps:
            for request, row in zip(step.requests, step.rows, strict=True):
                if not request.is_finished:
                    _, most = reaches.get(request.internal_id, (request, 0))
                    num_known = max(request.num_tokens, request.num_scheduled_tokens) + len(step.drafts.get(row, ()))
                    reaches[request.internal_id] = (request, max(most, num_known))
        return list(reaches.values())

    def send(self, step: InFlightStep) -> None:
        assert step.step_id == self.last_sent_id + 1
        self.last_sent_id = step.step_id
        self.num_sampling += step.shape.samples
        self._steps.append(step)

    def take_back(self, step_id: int) -> InFlightStep:
        """The step, which is now returned. Raises ProtocolError unless it is the oldest in flight."""
        if not self._steps or self._steps[0].step_id != step_id:
            expected = f"step {self._steps[0].step_id}" if self._steps else "no step"
            raise ProtocolError("ModelRunnerOutput.step_id", f"is {step_id}, {expected} is to return next")
        self.last_returned_id = step_id
        step = self._steps.popleft()
        self.num_sampling -= step.shape.samples
        return step


class RowPool:
    """Places in the workers' batch. A freed row rests until every step that named it has returned."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free: deque[int] = deque(range(num_rows))
        self._resting: dict[int, list[int]] = {}
        """By the step that ends the rest."""
        self._last_step = [0] * num_rows
        """Newest step that named the row for an earlier owner."""
        self._untold: list[int] = []

    @property
    def num_free(self) -> int:
        """Rows that may be taken now."""
        return len(self._free)

    def take(self) -> tuple[int, int]:
        """A row, and the newest step that named it for somebody else."""
        row = self._free.popleft()
        return row, self._last_step[row]

    def give_back(self, row: int, last_step_id: int, last_returned_id: int) -> None:
        """End a life; ``last_step_id`` is the newest step that names the row."""
        self._last_step[row] = last_step_id
        self._untold.append(row)
        if last_step_id > last_returned_id:
            self._resting.setdefault(last_step_id, []).append(row)
        else:
            self._free.append(row)

    def step_returned(self, step_id: int) -> None:
        """Steps return in order, so a row whose newest step is back is named by none."""
        self._free.extend(self._resting.pop(step_id, ()))

    def tell_freed(self) -> list[int]:
        """Rows that were freed since the last call: the next SchedulerOutput tells workers."""
        untold, self._untold = self._untold, []
        return untold

    def check_books(self, held: list[int]) -> None:
        """Assert that each row is held, free or resting, and only that."""
        resting = [row for rows in self._resting.values() for row in rows]
        assert sorted([*held, *self._free, *resting]) == list(range(self.num_rows)), "rows are lost or doubled"
