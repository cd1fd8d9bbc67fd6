"""Which steps were sent with the promise that masks follow, and when can it be kept?

A step may be planned before the tokens are back that its grammars depend on, like any other step: the mask is needed only
when the step has been computed, and by then the token in front of it has long been seen by stage 0, so by the core too.
"""

from collections import deque

import numpy as np

from engine.in_flight import InFlightStep
from ipc.messages import GrammarOutput


class OwedMasks:
    """The masks that the last stage still waits for, or will."""

    def __init__(self, *, core_id: int, epoch: int) -> None:
        self._core_id = core_id
        self._epoch = epoch
        self._steps: deque[InFlightStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def promise(self, step: InFlightStep) -> None:
        """The step was sent with ``has_grammar``."""
        self._steps.append(step)

    def take_due(self) -> list[GrammarOutput]:
        """Those of all steps whose grammars know every token before the one that is to be masked.

        Rows of requests that are over are left out, also if none is left. A preempted request's row is not: what the row
        samples will be accepted.
        """
        due: list[GrammarOutput] = []
        while self._steps and _is_known(self._steps[0]):
            due.append(self._output(self._steps.popleft()))
        return due

    def _output(self, step: InFlightStep) -> GrammarOutput:
        rows: list[int] = []
        masks = []
        for request, row, _ in step.constrained:
            if not request.is_finished:
                assert request.grammar is not None
                rows.append(row)
                masks.append(request.grammar.mask)
        return GrammarOutput(
            core_id=self._core_id,
            epoch=self._epoch,
            step_id=step.step_id,
            rows=rows,
            masks=np.concatenate(masks) if masks else np.zeros(0, np.int32),
        )


def _is_known(step: InFlightStep) -> bool:
    return all(request.is_finished or request.num_tokens >= num_before for request, _, num_before in step.constrained)
