"""Where does a stage's time go? Computing, or waiting, and for what."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BUSY, PLAN, LINK, TOKENS = "busy", "plan", "link", "tokens"
"""Computing; waiting for the core's next step; for a neighbour's activations; for sampled tokens."""


class StageClock:
    """Written by the main thread, read by the control thread: every moment counts for exactly one cause."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._totals = dict.fromkeys((BUSY, PLAN, LINK, TOKENS), 0.0)
        self._now = (PLAN, clock())
        """Current cause, and since when; one object, so that a reader never sees half of it."""
        self.num_steps = 0

    @contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        """Count the time inside for this cause, and what follows as busy."""
        self._switch(cause)
        try:
            yield
        finally:
            self._switch(BUSY)

    def totals(self) -> dict[str, float]:
        """Seconds by cause up to now, a wait in progress included."""
        totals = dict(self._totals)
        cause, since = self._now
        totals[cause] += max(0.0, self._clock() - since)
        return totals

    def _switch(self, cause: str) -> None:
        now = self._clock()
        previous, since = self._now
        self._now = (cause, now)
        self._totals[previous] += now - since
