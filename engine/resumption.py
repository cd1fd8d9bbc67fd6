"""How do a request's outputs go on when its core is gone? What both clients keep for that, beside the answers so far."""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from engine.outputs import Answers
from engine.prompts import TextSide
from ipc.conversation import Told
from ipc.errors import PeerLost
from ipc.messages import ModelInfo

MAX_LOSSES = 3
"""Cores that a request may lose before a token of it comes: it could be what ends them."""

LEAST_TIME_S = 1e-3
"""Of a request whose time is over: the core ends it as it ends every other, with what it has."""

T = TypeVar("T")
Resend = TypeVar("Resend")


class TimeLeft:
    """Seconds that a request still has, if it had ``timeout_s`` when this was made; None for one without a limit."""

    def __init__(self, timeout_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._since = clock()

    def __call__(self) -> float | None:
        if self._timeout_s is None:
            return None
        return max(LEAST_TIME_S, self._timeout_s - (self._clock() - self._since))


def told_to(answers: Answers, begun_at: TextSide, model: ModelInfo, address: str) -> Told:
    """What a request says to the core that it goes on at. Raises PeerLost when it can't go on there."""
    if not begun_at.is_of(model):
        raise PeerLost(f"the engine at {address} serves another model now: an answer that was begun can't go on")
    if (told := answers.told()) is None:
        raise PeerLost("the engine was lost before it told the seed of an answer that was begun: it can't go on")
    return told


class Losses(Generic[Resend]):
    """Of one request's streams: which error stands for a lost core, and is there a way on?"""

    def __init__(self, resend: Resend | None) -> None:
        """``resend`` None: the first loss is the end."""
        self._resend = resend
        self._num_losses = 0
        self._polled: PeerLost | None = None
        """A loss that ``poll`` met, for the next reader who may wait."""

    def read(self, take: Callable[[], T]) -> T:
        """What ``take`` returns. Raises PeerLost, also for a loss that ``poll`` met before."""
        self.raise_polled()
        message = take()
        self.note_message()
        return message

    def poll(self, take: Callable[[], T | None]) -> T | None:
        """The same without waiting: None for a loss that a reader who waits can mend."""
        if self._polled is not None:
            return None
        try:
            return self.read(take)
        except PeerLost as error:
            if self._resend is None:
                raise
            self._polled = error
            return None

    def raise_polled(self) -> None:
        polled, self._polled = self._polled, None
        if polled is not None:
            raise polled

    def note_message(self) -> None:
        """Something came: the cores were not lost for this request's sake."""
        self._num_losses = 0

    def way_on(self, error: PeerLost) -> Resend:
        """What sends the request again. Raises ``error`` when nothing may."""
        self._num_losses += 1
        if self._resend is None or self._num_losses > MAX_LOSSES:
            raise error
        return self._resend
