"""What becomes of requests when the worker group is lost, and when is another restart not worth trying?

They go back to the queue with the tokens they have, and are computed again by the next group. One of them may be what kills
the workers. So a request that was in a step which never returned is suspected, until all of its tokens of then have been
computed; if that fails a second time it gets a trial: it alone is computed, up to there.
"""

from dataclasses import dataclass

from engine.request import Request
from engine.scheduler import Scheduler

TRIAL_AT = 2
"""Epochs that ended under a suspect, after which it is computed alone."""

MAX_LOST_EPOCHS = 3
"""The same, after which it ends."""

MAX_FRUITLESS_EPOCHS = 5
"""In a row, of one kind: that failed before they were ready, or ended with requests and without a new token."""


@dataclass(slots=True)
class _Suspect:
    request: Request
    num_epochs: int = 0
    num_tokens: int = 0
    """Of the request, known or guessed, that have never been computed without loss."""

    @property
    def is_cleared(self) -> bool:
        request = self.request
        return request.is_closed or request.is_finished or request.num_computed_tokens >= self.num_tokens


class Recovery:
    """Holds the requests that wait outside of a scheduler: for an epoch, or for the end of a trial.

    What it holds is open and not finished.
    """

    def __init__(self) -> None:
        self._held: dict[int, Request] = {}
        """By internal id."""
        self._suspects: dict[int, _Suspect] = {}
        """The same."""
        self._trial: _Suspect | None = None
        self._num_failed_starts = 0
        self._num_fruitless = 0
        self.num_resumed = 0
        """Requests that had begun when their epoch ended, counted at each such end."""

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_held_tokens(self) -> int:
        return sum(request.num_tokens for request in self._held.values())

    @property
    def holds_all(self) -> bool:
        """Whether whoever comes now has to wait here although there is an epoch."""
        return bool(self._held) or self._trial is not None

    @property
    def is_hopeless(self) -> bool:
        """No further restart is worth trying."""
        return max(self._num_failed_starts, self._num_fruitless) >= MAX_FRUITLESS_EPOCHS

    def hold(self, request: Request) -> None:
        """Until ``release`` gives it to a scheduler."""
        self._held[request.internal_id] = request

    def discard(self, request: Request) -> None:
        """Hold it no longer; nothing happens if it isn't held."""
        self._held.pop(request.internal_id, None)

    def release(self, scheduler: Scheduler) -> list[Request]:
        """Those that the scheduler gets now; empty when nobody else does until a step returns or a request ends."""
        if not (self._suspects or self._held):
            return []
        self._suspects = {key: suspect for key, suspect in self._suspects.items() if not suspect.is_cleared}
        if self._trial is not None:
            if not self._trial.is_cleared:
                return []
            self._end_trial(self._trial.request, scheduler)
        suspect = self._next_trial()
        # What a trial left in flight would be suspected in the next one.
        if not scheduler.is_idle and (suspect is not None or self._is_any_in_flight()):
            return []
        if suspect is None:
            held, self._held = self._held, {}
            return list(held.values())
        self._trial = suspect
        return [self._held.pop(suspect.request.internal_id)]

    def epoch_ended(self, scheduler: Scheduler | None) -> list[Request]:
        """Take back what the epoch's scheduler has, if the epoch was ready; returns those that have killed too many.

        These are held no longer. All others wait with the tokens they have, as if they came now.
        """
        self._trial = None
        if scheduler is None:
            self._num_failed_starts += 1
            return []
        self._num_failed_starts = 0
        if scheduler.stats().num_generated_tokens:
            self._num_fruitless = 0
        elif scheduler.has_unfinished():
            self._num_fruitless += 1
        self._suspect(scheduler)
        for request in scheduler.unfinished():
            self.num_resumed += request.has_started
            self.hold(request)
        for request in self._held.values():
            request.requeue()
        guilty = [suspect.request for suspect in self._suspects.values() if suspect.num_epochs >= MAX_LOST_EPOCHS]
        for request in guilty:
            del self._suspects[request.internal_id]
            self.discard(request)
        return guilty

    def _suspect(self, scheduler: Scheduler) -> None:
        for request, num_tokens in scheduler.unreturned():
            suspect = self._suspects.setdefault(request.internal_id, _Suspect(request))
            suspect.num_epochs += 1
            suspect.num_tokens = max(suspect.num_tokens, num_tokens)

    def _next_trial(self) -> _Suspect | None:
        return next((suspect for suspect in self._suspects.values() if suspect.num_epochs >= TRIAL_AT), None)

    def _end_trial(self, request: Request, scheduler: Scheduler) -> None:
        """It goes on, unless others are to be alone now."""
        self._trial = None
        if not request.is_finished and self._next_trial() is not None:
            scheduler.set_aside(request)
            self.hold(request)

    def _is_any_in_flight(self) -> bool:
        return any(request.num_steps_in_flight for request in self._held.values())
