"""Where does a stage's time go? Computing, or waiting, and for what."""

import time
from collections.abc import Callable

from ipc.spans import MAX_SPANS, WAITS, Kind, Recorder

PLAN, LINK, TOKENS, ROOM = Kind.WAIT_PLAN, Kind.WAIT_ACTIVATIONS, Kind.WAIT_TOKENS, Kind.WAIT_SEND
"""Waiting for the core's next step; for a neighbour's activations; for sampled tokens; for room to send."""

MASKS = Kind.WAIT_MASKS
"""Waiting for the masks of a step's grammars."""


class StageClock(Recorder):
    """A stage's main thread records; its control thread reads: every moment counts for exactly one kind.

    The counts are of steps computed since the start; each is written by the main thread alone.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns, *, capacity: int = MAX_SPANS) -> None:
        super().__init__(clock=clock, capacity=capacity)
        self.num_steps = 0
        self.num_full_graph_steps = 0
        self.num_piecewise_graph_steps = 0
        self.num_tokens = 0
        """Without padding."""
        self.num_padded_tokens = 0
        self.num_ahead = 0
        """Steps that were there when the newest one began."""

    waiting = Recorder.during
    """Count the time inside a ``with`` block for this cause; behind it the stage does again what it did before."""

    def busy_and_waits(self) -> tuple[float, dict[Kind, float]]:
        """Seconds of work and seconds of waiting by cause up to now, a wait in progress included."""
        totals = self.totals_ns()
        waits = {cause: totals[cause] / 1e9 for cause in WAITS}
        return (sum(totals) - sum(totals[cause] for cause in WAITS)) / 1e9, waits
