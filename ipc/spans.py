"""Where does a thread's time go? Spans that it records itself, and that other threads may read at any moment.

A span is four integers: kind, step, start and end, in nanoseconds of CLOCK_MONOTONIC, which all processes of a host
share. The spans of one recorder follow each other without a gap: every moment belongs to exactly one kind. On a GPU
they are the host's time: work that was only enqueued shows where the host waits for it.
"""

import struct
import time
from collections.abc import Callable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

MAX_SPANS = 1 << 15
"""Of one recorder: 1 MiB, and some 30 s of a stage that makes 100 steps a second."""

SPAN_FIELDS = 4

NO_STEP = -1

Spans = NDArray[np.int64]
"""[number of spans, 4]: kind, step, start (ns), end (ns), in order of time."""


class Kind(IntEnum):
    """What a span's time went into. Numbers travel and are never reused."""

    OTHER = 0
    """The loop itself, and starting."""

    WAIT_PLAN = 1
    """A stage waits for the core's next step."""
    WAIT_ACTIVATIONS = 2
    WAIT_TOKENS = 3
    WAIT_SEND = 4
    """A stage waits for room in its send buffers: the next stage is behind."""
    WAIT_MASKS = 5
    """The last stage waits for the masks of a step's grammars."""

    PREPARE = 8
    """Rows updated, inputs and metadata made."""
    ACCEPT = 9
    """Stage 0 takes the sampled tokens of the span's step, which is older than the one it works on."""
    FORWARD = 10
    SAMPLE = 11
    SEND = 12
    """Activations are copied and handed to the transport."""
    RETURN = 13
    """Sampled tokens and the step's output are packed and sent."""

    IDLE = 32
    """The core has nothing to do: it waits in its poller."""
    CLIENTS = 33
    """The core reads requests and questions."""
    RECEIVE = 34
    """The core reads what ranks sent."""
    APPLY = 35
    """A step's output changes the books."""
    ANSWER = 36
    """New tokens go to clients."""
    SCHEDULE = 37
    SEND_PLAN = 38
    """A step is encoded and sent to every rank."""
    MASKS = 39
    """Masks of grammars are collected and sent."""


NUM_KINDS = 64

WAITS = (Kind.WAIT_PLAN, Kind.WAIT_ACTIVATIONS, Kind.WAIT_TOKENS, Kind.WAIT_SEND, Kind.WAIT_MASKS)
"""Of a stage; all other kinds of a stage are work."""

_pack_into = struct.Struct(f"={SPAN_FIELDS}q").pack_into
_SPAN_BYTES = 8 * SPAN_FIELDS


class SpanRing:
    """The newest spans. One thread appends, any thread reads; nobody locks.

    Invariant: span number n is complete before ``_count`` becomes n + 1, and only span ``_count`` is ever being written,
    over span ``_count - capacity``. So what a reader copies is whole for every number below the count before the copy
    and above the count after it less the capacity; it keeps no other.
    """

    def __init__(self, capacity: int = MAX_SPANS) -> None:
        self._capacity = capacity
        self._spans: Spans = np.zeros((capacity, SPAN_FIELDS), np.int64)
        self._memory = self._spans.data.cast("B")
        self._count = 0

    def append(self, kind: int, step_id: int, start_ns: int, end_ns: int) -> None:
        count = self._count
        _pack_into(self._memory, count % self._capacity * _SPAN_BYTES, kind, step_id, start_ns, end_ns)
        self._count = count + 1

    def read(self) -> Spans:
        """A copy of the spans that are there, oldest first; the oldest of a full ring may be left out."""
        before = self._count
        copied = self._spans.copy()
        first = max(0, self._count - self._capacity + 1)
        if first >= before:
            return copied[:0]
        start, end = first % self._capacity, before % self._capacity
        return copied[start:end] if start < end else np.concatenate([copied[start:], copied[:end]])


class Recorder:
    """The clock of one thread: says what it does from now on, and everything since the last word is a span.

    Methods that record are for that thread alone; those that read are for any. A word costs less than a microsecond.
    """

    def __init__(
        self, kind: Kind = Kind.OTHER, *, clock: Callable[[], int] = time.monotonic_ns, capacity: int = MAX_SPANS
    ) -> None:
        self._clock = clock
        self._ring = SpanRing(capacity)
        self._totals = [0] * NUM_KINDS
        """Nanoseconds of the spans that are over, by kind."""
        self._open: tuple[int, int, int] | None = (kind, NO_STEP, clock())
        """Kind, step and start of what is going on; None while the writer changes from one to the next."""
        self._append = self._ring.append

    def doing(self, kind: int, step_id: int | None = None) -> tuple[int, int]:
        """From now on it is this ``Kind``, for this step; without one for the same as before.

        Returns kind and step that it was until now.
        """
        now = self._clock()
        opened = self._open
        assert opened is not None
        before, of_step, since = opened
        self._open = None
        self._append(before, of_step, since, now)
        self._totals[before] += now - since
        self._open = (kind, of_step if step_id is None else step_id, now)
        return before, of_step

    def during(self, kind: int, step_id: int | None = None) -> "_During":
        """The same for the inside of a ``with`` block; behind it, it is again what it was before."""
        return _During(self, kind, step_id)

    def totals_ns(self) -> list[int]:
        """Nanoseconds by kind since the start, what is going on included: their sum is the time since then."""
        (kind, _, since), totals, now = self._stable()
        totals[kind] += max(0, now - since)
        return totals

    def snapshot(self, seconds: float) -> Spans:
        """The spans of the last seconds, as far back as the ring has them; the last one is still going on."""
        opened, _, now = self._stable()
        spans = self._ring.read()
        # What was appended since then begins when the open span ended, or is that span itself.
        first, last = np.searchsorted(spans[:, 3], [now - int(seconds * 1e9), opened[2]], side="right")
        spans = spans[first:last]
        return np.concatenate([spans, np.array([[*opened, max(now, opened[2])]], np.int64)])

    def _stable(self) -> tuple[tuple[int, int, int], list[int], int]:
        """What is going on, the totals without it, and a time at which both were true.

        The writer leaves a new tuple behind each change and none during it: the same tuple before and after means that
        nothing changed in between.
        """
        while True:
            opened = self._open
            if opened is not None:
                totals, now = self._totals.copy(), self._clock()
                if self._open is opened:
                    return opened, totals, now
            time.sleep(0)


class _During:
    __slots__ = ("_before", "_kind", "_of_step", "_recorder", "_step_id")

    def __init__(self, recorder: Recorder, kind: int, step_id: int | None) -> None:
        self._recorder = recorder
        self._kind = kind
        self._step_id = step_id

    def __enter__(self) -> None:
        self._before, self._of_step = self._recorder.doing(self._kind, self._step_id)

    def __exit__(self, *exc_info: object) -> None:
        self._recorder.doing(self._before, self._of_step)
