"""What clients have not taken yet: how many bytes wait for each, and the last words for those whose queue was full.

ZeroMQ counts the messages that wait for a peer, not their bytes: log probabilities of a vocabulary would fill the memory long
before the limit. So big messages are followed until they have left.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import zmq

from engine.request import ClientId
from ipc.codec import Frame

FOLLOWED_BYTES = 4096
"""Frames from here on are followed; of smaller ones HIGH_WATER_MARK together is no more than MAX_UNSENT_BYTES."""

MAX_UNSENT_BYTES = 64 << 20
"""Of one client. A client that has so much to read is not sent more."""

MAX_OWED = 10_000
"""Last words for one client that are kept; a client that goes on without reading any learns no more."""

RETRY_S = 0.5


class Unsent:
    """Bytes of big frames that wait in a socket, by client."""

    def __init__(self) -> None:
        self._waiting: dict[ClientId, deque[tuple[int, zmq.MessageTracker]]] = {}

    def has_room(self, client: ClientId) -> bool:
        waiting = self._waiting.get(client)
        return waiting is None or _size(waiting) < MAX_UNSENT_BYTES

    def add(self, client: ClientId, frames: Sequence[Frame | zmq.Frame]) -> None:
        """What was queued for a client, made by ``traceable``."""
        new = [(len(frame), frame.tracker) for frame in frames if isinstance(frame, zmq.Frame) and frame.tracker is not None]
        if not new:
            return
        if client not in self._waiting:
            self._waiting = {other: waiting for other, waiting in self._waiting.items() if _size(waiting)}
        self._waiting.setdefault(client, deque()).extend(new)


def traceable(frames: Iterable[Frame]) -> list[Frame | zmq.Frame]:
    """The same frames, big ones such that it can be told whether they have left."""
    return [
        frame if len(frame) < FOLLOWED_BYTES else zmq.Frame(frame, track=True, copy=False, copy_threshold=0) for frame in frames
    ]


def _size(waiting: "deque[tuple[int, zmq.MessageTracker]]") -> int:
    while waiting and waiting[0][1].done:
        waiting.popleft()
    return sum(size for size, _ in waiting)


class LastWords:
    """Errors that end requests of clients that had no room for them, tried again until they have, or are gone."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._owed: dict[ClientId, dict[str, list[Frame]]] = {}
        self._retry_at: float | None = None

    def owe(self, client: ClientId, request_id: str, frames: list[Frame]) -> None:
        """One for each request: the first stays."""
        owed = self._owed.setdefault(client, {})
        if len(owed) < MAX_OWED:
            owed.setdefault(request_id, frames)
        if self._retry_at is None:
            self._retry_at = self._clock() + RETRY_S

    def deadline(self) -> float | None:
        """When to try again; None while nothing is owed."""
        return self._retry_at

    def retry(self, send: Callable[[ClientId, list[Frame]], int]) -> None:
        """If it is time; ``send`` returns 0 or the ZeroMQ error for which it could not."""
        if self._retry_at is None or self._clock() < self._retry_at:
            return
        left = {client: _unsent(client, owed, send) for client, owed in self._owed.items()}
        self._owed = {client: owed for client, owed in left.items() if owed}
        self._retry_at = self._clock() + RETRY_S if self._owed else None


def _unsent(
    client: ClientId, owed: dict[str, list[Frame]], send: Callable[[ClientId, list[Frame]], int]
) -> dict[str, list[Frame]]:
    for count, frames in enumerate(owed.values()):
        if error := send(client, frames):
            return dict(list(owed.items())[count:]) if error == zmq.EAGAIN else {}
    return {}
